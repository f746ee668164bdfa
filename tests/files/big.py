"""A plan of the size of a real one: templates × ops, thousands of ranks, columns of bindings."""

from __future__ import annotations

from trainverify.graph.lineage import Shard, layout
from trainverify.graph.mesh import Mesh
from trainverify.graph.plan import Plan, Template
from trainverify.graph.program import Op, Output, Program, Ref, Source, attributes
from trainverify.graph.types import TensorType


def big_plan(templates: int = 16, ops: int = 5000, ranks: int = 8192, columns: int = 20) -> Plan:
    tp = 8
    mesh = Mesh(pp=templates, dp=ranks // templates // tp, tp=tp)
    per = ranks // templates
    groups = {f"tp.{g}": tuple(range(g * tp, g * tp + tp)) for g in range(ranks // tp)}
    groups |= {f"dp.{s}.{t}": tuple(range(s * per + t, (s + 1) * per, tp)) for s in range(templates) for t in range(tp)}
    kinds = [TensorType((2, 4096, 128 * (i % 7 + 1)), "bf16") for i in range(7)]
    result = []
    for s in range(templates):
        names = [f"stage{s}.layers.{i // 50}.block.{i % 50}.activation" for i in range(ops)]
        tensors = {"x": kinds[0], **{n: kinds[i % 7] for i, n in enumerate(names)}}
        body = []
        for i, name in enumerate(names):
            attrs = attributes({"dim": i % 3, "group": Ref(f"rank.{i % columns}"), "scale": 0.125 + i} if i % 3 else {})
            phase, forward = ("forward", None) if i < ops // 3 else ("backward", names[i - ops // 3])
            inputs = (names[i - 1] if i else "x", names[max(0, i - 7)] if i else "x")
            body.append(Op("all_reduce" if i % 3 else "add", inputs, (name,), attrs, phase, forward, Source("model.py", i % 500 + 1)))
        program = Program(f"stage{s}", tensors, ("x",), ops=tuple(body), outputs=(Output(names[-1], "loss"),))
        mine = tuple(range(s * per, (s + 1) * per))
        choices = [tuple(f"tp.{r // tp}" for r in mine), tuple(f"dp.{s}.{r % tp}" for r in mine), tuple(r * 37 % 101 for r in mine), mine]
        result.append(Template(program, mine, {f"rank.{c}": choices[c % 4] for c in range(columns)}))
    lineage = tuple(layout(f"w{i}", {"tp": Shard(i % 2)}, "x", {"pp": i % templates}) for i in range(2000))
    return Plan("big", mesh, tuple(result), groups, lineage)
