"""The passes of a pipeline stage, read off its program."""

from __future__ import annotations

from trainverify.graph.plan import Plan


def passes(plan: Plan, stage: int) -> str:
    """`F0 F1 B0 …`: when a stage works on which micro-batch."""
    found: list[str] = []
    for op in plan.templates[stage].program.ops:
        if op.outputs and op.outputs[0].startswith("mb") and op.phase in ("forward", "backward") and op.name != "recv":
            step = op.phase[0].upper() + op.outputs[0][2]
            if found[-1:] != [step]:
                found.append(step)
    return " ".join(found)
