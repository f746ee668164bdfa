"""What differs between the right and the wrong plan of a case."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from trainverify.graph.plan import Plan, Template
from trainverify.graph.program import Op, Ref


def _resolved(plan: Plan, template: Template, op: Op) -> str:
    """An op with everything that it refers to: values of all ranks, members of groups."""

    def value(name: str, given: object) -> object:
        column = list(template.bindings[given.name]) if isinstance(given, Ref) else [given]
        return [plan.groups.get(str(v), v) for v in column] if name == "group" else column

    return f"{op.name}{op.inputs}{op.outputs}{[(k, value(k, v)) for k, v in op.attrs]}"


def _ops(plan: Plan) -> Iterator[tuple[str, Op]]:
    for t in plan.templates:
        for op in t.program.ops:
            yield f"{t.program.name}: {_resolved(plan, t, op)}", op


def changed(right: Plan, wrong: Plan) -> list[Op]:
    """Ops of the wrong plan that the right one does not have."""
    left = Counter(text for text, _ in _ops(right))
    found = []
    for text, op in _ops(wrong):
        if left[text]:
            left[text] -= 1
        else:
            found.append(op)
    return found
