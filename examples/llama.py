"""Llama-3-8B on 8 devices with one collective forgotten: under sequence parallelism every rank sees a part of the sequence, so
the gradient of a norm's weight is a sum over the tensor-parallel ranks. In the last layer nobody adds it up.

python examples/llama.py OUT [LAYERS]     writes OUT/llama.logical.json.gz and OUT/llama.buggy.json.gz
"""

import sys
from dataclasses import replace
from pathlib import Path

from trainverify import files
from trainverify.graph.plan import Plan
from trainverify.zoo.parallel import Degrees
from trainverify.zoo.recipes import Wish

HOW = Degrees(dp=2, tp=2, pp=2, sp=True, microbatches=2)


def forgotten(plan: Plan, stage: int, tensor: str) -> Plan:
    """The op that makes this tensor passes its input on."""
    template = plan.templates[stage]
    assert any(tensor in op.outputs for op in template.program.ops), tensor
    ops = [replace(op, name="identity", attrs=()) if tensor in op.outputs else op for op in template.program.ops]
    changed = replace(template, program=replace(template.program, ops=tuple(ops)))
    return replace(plan, templates=tuple(changed if t is template else t for t in plan.templates))


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    folder.mkdir(parents=True, exist_ok=True)
    layers = int(sys.argv[2]) if len(sys.argv) > 2 else 32
    logical, plan = Wish("llama3-8b", HOW, layers=layers).build()
    files.write(folder / "llama.logical.json.gz", logical)
    files.write(folder / "llama.buggy.json.gz", forgotten(plan, 1, f"layers.{layers - 1}.ffn_norm.grad.tp"))
