"""The odd one out: an op that one rank runs differently from the other ranks of its program, and the plan without that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from trainverify.graph.plan import Edit, Plan
from trainverify.graph.program import CALL, Op

MOST = 4  # ranks with edits that are looked at


@dataclass(frozen=True)
class Odd:
    rank: int
    others: int  # ranks that run the program without the edit
    mine: tuple[Op, ...]
    theirs: Op
    plan: Plan  # in which the rank does as the others do

    @property
    def tensor(self) -> str:
        """What the changed op makes, or what it sends."""
        outputs = [o for op in (*self.mine, self.theirs) for o in op.outputs]
        return outputs[0] if outputs else str(self.theirs.inputs[0])

    @property
    def cause(self) -> str:
        mine = "; ".join(map(str, self.mine)) or "nothing"
        return f"{mine}, where {self.others} other ranks have {self.theirs}"


def odd(plan: Plan) -> Iterator[Odd]:
    """For every rank with edits of its own, the plan without one of them."""
    for edit in plan.edits[:MOST]:
        home = next((t for t in plan.templates if edit.rank in t.ranks), None)
        theirs = None if home is None else _op(plan, home.program.ops, edit)
        if home is not None and theirs is not None and len(home.ranks) > 1:
            without = replace(plan, edits=tuple(e for e in plan.edits if e is not edit))
            yield Odd(edit.rank, len(home.ranks) - 1, edit.ops, theirs, without)


def _op(plan: Plan, ops: tuple[Op, ...], edit: Edit) -> Op | None:
    """The op that an edit replaces."""
    for n, i in enumerate(edit.path):
        if not 0 <= i < len(ops):
            return None
        if n == len(edit.path) - 1:
            return ops[i]
        body = plan.functions.get(str(ops[i].get("function"))) if ops[i].name == CALL else None
        if body is None:
            return None
        ops = body.ops
    return None
