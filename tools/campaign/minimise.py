"""A smaller case with the same failure: fewer outputs, and only the ops that they need."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from trainverify.graph.plan import Plan
from trainverify.graph.program import Op, Output, Program, Role

Check = Callable[[Program, Plan], bool]


def _needed(ops: Iterable[Op], wanted: Iterable[str], always: Callable[[Op], bool]) -> tuple[Op, ...]:
    need = set(wanted)
    kept = []
    for op in reversed(list(ops)):
        if always(op) or any(o in need for o in op.outputs):
            kept.append(op)
            need.update(i for i in op.inputs if i is not None)
    return tuple(reversed(kept))


def _shorter(program: Program, outputs: tuple[Output, ...], always: Callable[[Op], bool]) -> Program:
    ops = _needed(program.ops, (o.tensor for o in outputs), always)
    used = {i for op in ops for i in op.inputs} | {o.tensor for o in outputs} | {str(o.of) for o in outputs}
    inputs = tuple(n for n in program.inputs if n in used)
    parameters = tuple(n for n in program.parameters if n in used)
    state = tuple(n for n in program.state if n in used)
    alive = {*inputs, *parameters, *state, *(o for op in ops for o in op.outputs)}
    return replace(
        program,
        tensors={n: t for n, t in program.tensors.items() if n in alive},
        inputs=inputs,
        parameters=parameters,
        state=state,
        ops=tuple(op if op.forward in alive else replace(op, forward=None) for op in ops),
        outputs=outputs,
        domains={n: d for n, d in program.domains.items() if n in alive},
    )


def restricted(logical: Program, plan: Plan, keep: set[tuple[Role, str | None]]) -> tuple[Program, Plan]:
    """Both programs with these outputs only. Communication stays where ranks run several programs."""
    several = len(plan.templates) > 1

    def always(op: Op) -> bool:
        return several and (op.get("group") is not None or op.name in ("send", "recv"))

    small = _shorter(logical, tuple(o for o in logical.outputs if (o.role, o.of) in keep), lambda op: False)
    templates = []
    for t in plan.templates:
        own = tuple(o for o in t.program.outputs if (o.role, o.of) in keep)
        templates.append(replace(t, program=_shorter(t.program, own, always)))
    alive = {n for t in templates for n in t.program.tensors}
    lineage = tuple(lay for lay in plan.lineage if lay.local in alive and lay.logical in small.tensors)
    return small, replace(plan, templates=tuple(templates), lineage=lineage)


def minimised(logical: Program, plan: Plan, fails: Check) -> tuple[Program, Plan]:
    """Outputs and declarations are dropped one after the other as long as the failure stays."""
    keep = {(o.role, o.of) for o in logical.outputs}
    for key in sorted(keep, key=str, reverse=True):
        fewer = keep - {key}
        if fewer:
            small, part = restricted(logical, plan, fewer)
            if fails(small, part):
                keep, logical, plan = fewer, small, part
    sources = set(logical.sources)
    for lay in plan.lineage:
        if lay.logical not in sources:
            part = replace(plan, lineage=tuple(x for x in plan.lineage if x is not lay))
            if fails(logical, part):
                plan = part
    return logical, plan
