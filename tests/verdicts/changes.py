"""Planting bugs: small changes to a plan, op by op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from trainverify.graph.lineage import Layout
from trainverify.graph.plan import Edit, Plan
from trainverify.graph.program import Op, Program

Change = Callable[[Plan], Plan]


def in_program(name: str, change: Callable[[Program], Program]) -> Change:
    """Change the program of one template."""

    def apply(plan: Plan) -> Plan:
        assert any(t.program.name == name for t in plan.templates)
        changed = [replace(t, program=change(t.program)) if t.program.name == name else t for t in plan.templates]
        return replace(plan, templates=tuple(changed))

    return apply


def op_of(program: Program, output: str) -> int:
    return next(i for i, op in enumerate(program.ops) if output in op.outputs)


def replaced(name: str, output: str, change: Callable[[Op], Op | None]) -> Change:
    """Change (or with None delete) the op that makes a tensor."""

    def apply(program: Program) -> Program:
        i = op_of(program, output)
        new = change(program.ops[i])
        ops = (*program.ops[:i], *(() if new is None else (new,)), *program.ops[i + 1 :])
        return replace(program, ops=ops)

    return in_program(name, apply)


def attrs(name: str, output: str, **values: object) -> Change:
    return replaced(name, output, lambda op: op.with_attrs(**values))


def inputs(name: str, output: str, *names: str) -> Change:
    return replaced(name, output, lambda op: replace(op, inputs=names))


def becomes(name: str, output: str, kind: str, **values: object) -> Change:
    """Another operator on the same tensors."""
    return replaced(name, output, lambda op: replace(op, name=kind, attrs=tuple(sorted(values.items()))))


def lineage(local: str, change: Callable[[Layout], Layout | None]) -> Change:
    def apply(plan: Plan) -> Plan:
        assert any(lay.local == local for lay in plan.lineage)
        return replace(plan, lineage=tuple(new for lay in plan.lineage if (new := change(lay) if lay.local == local else lay) is not None))

    return apply


def on_rank(rank: int, output: str, change: Callable[[Op], Op | None]) -> Change:
    """The same, but on one rank only."""

    def apply(plan: Plan) -> Plan:
        program = next(t.program for t in plan.templates if rank in t.ranks)
        i = op_of(program, output)
        new = change(program.ops[i])
        return replace(plan, edits=(*plan.edits, Edit(rank, (i,), () if new is None else (new,))))

    return apply


def without_output(name: str, tensor: str) -> Change:
    return in_program(name, lambda p: replace(p, outputs=tuple(o for o in p.outputs if o.tensor != tensor)))


def swapped(name: str, first: Callable[[Op], bool], second: Callable[[Op], bool]) -> Change:
    """Two ops change places in the order."""

    def apply(program: Program) -> Program:
        ops = list(program.ops)
        i, j = (next(k for k, op in enumerate(ops) if test(op)) for test in (first, second))
        ops[i], ops[j] = ops[j], ops[i]
        return replace(program, ops=tuple(ops))

    return in_program(name, apply)


def edited(before: Plan, after: Plan) -> set[str]:
    """Tensors that a change makes otherwise: of ops that are new or different, of edits, of lineage; of sends, whatever is received."""
    old = {t.program.name: t.program.ops for t in before.templates}
    found = {o for e in after.edits if e not in before.edits for op in e.ops for o in op.outputs}
    found |= {lay.local for lay in after.lineage if lay not in before.lineage}
    for t in after.templates:
        known = set(map(str, old[t.program.name]))
        found |= {o for op in t.program.ops if str(op) not in known for o in op.outputs}
        if sends(t.program.ops) != sends(old[t.program.name]):
            found |= {o for x in after.templates for op in x.program.ops if op.name == "recv" for o in op.outputs}
    return found


def sends(ops: Sequence[Op]) -> list[str]:
    return [str(op) for op in ops if op.name == "send"]
