"""The graph around one tensor: what it is made from, the op that makes it, and what uses it."""

from __future__ import annotations

from collections.abc import Sequence

from trainverify.graph.plan import Plan, PlanError, expand
from trainverify.graph.program import CallError, Op, Program, inline
from trainverify.report.html.markup import Raw, joined, tag

FEW = 8  # ops on each side


def logical_side(program: Program, tensor: str) -> Raw | None:
    try:
        return around(inline(program), tensor, "meant")
    except CallError:
        return None


def plan_side(plan: Plan, rank: int, tensor: str) -> Raw | None:
    try:
        return around(inline(expand(plan, rank)), tensor, "wrong")
    except (CallError, PlanError):
        return None


def around(program: Program, tensor: str, mark: str) -> Raw | None:
    """Three columns: before, here (marked), after. None if the program has no such tensor."""
    if tensor not in program.tensors:
        return None
    makers = {o: op for op in program.ops for o in op.outputs}
    here = makers.get(tensor)
    before = [i for i in dict.fromkeys(here.inputs if here is not None else ()) if i is not None]
    after = [op for op in program.ops if tensor in op.inputs]
    made_from = [_card(makers.get(i), i, program, source=_source(program, i)) for i in before[:FEW]]
    middle = [_card(here, tensor, program, source=_source(program, tensor), mark=mark)]
    used = [_card(op, op.outputs[0] if op.outputs else "", program) for op in after[:FEW]]
    ends = [o for o in program.outputs if o.tensor == tensor]
    used += [tag("li", tag("code", f"output: {o}"), class_="op") for o in ends]
    columns = (("made from", made_from, len(before)), ("here", middle, 1), ("used by", used, len(after) + len(ends)))
    return tag("div", joined(_column(*c) for c in columns), class_="around")


def _column(title: str, cards: Sequence[Raw], count: int) -> Raw:
    more = [tag("li", f"and {count - len(cards)} more", class_="more")] if count > len(cards) else []
    shown = [*cards, *more] or [tag("li", "nothing", class_="more")]
    return tag("div", tag("h4", title), tag("ul", joined(shown)))


def _source(program: Program, name: str) -> str | None:
    for kind, names in (("input", program.inputs), ("parameter", program.parameters), ("state", program.state)):
        if name in names:
            return kind
    return None


def _card(op: Op | None, name: str, program: Program, source: str | None = None, mark: str = "") -> Raw:
    kind = f"{program.tensors[name]}" if name in program.tensors else ""
    line = "" if op is None or op.source is None else f"{op.source}"
    head = f"{op}" if op is not None else f"{source or ''} {name}".strip()
    small = tag("small", f"{kind}  ", tag("span", line, class_="line"))
    return tag("li", tag("code", head), small, class_=f"op {mark}".strip())
