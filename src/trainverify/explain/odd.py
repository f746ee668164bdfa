"""The odd one out: an op that one rank runs differently from the ranks that are otherwise like it, and the plan without that.

A rank differs by an edit, by a program of its own, or by a value that does not follow from its coordinates as those of the others do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from trainverify.check.validate import validate
from trainverify.evaluate.sample import predicted
from trainverify.evaluate.small import Small, Step
from trainverify.explain.cause import Cause, of_changes
from trainverify.explain.place import Place
from trainverify.graph.plan import Edit, Groups, Plan, Template
from trainverify.graph.program import CALL, Op, Program, Ref, Value, bind
from trainverify.ops.table import OpTable

MOST = 4  # odd ones that are looked at
LIKE = 2  # one of so many ranks is not odd: it may be the other
FEW = 3  # ops in which a program may differ from that of others and still be the same but for a mistake


@dataclass(frozen=True)
class Odd:
    rank: int
    others: int  # ranks that do as they do
    mine: tuple[Op, ...]
    theirs: tuple[Op, ...]
    plan: Plan  # in which the rank does as the others do

    @property
    def tensor(self) -> str:
        """What the changed op makes, or what it sends."""
        outputs = [o for op in (*self.mine, *self.theirs) for o in op.outputs]
        return outputs[0] if outputs else str((*self.theirs, *self.mine)[0].inputs[0])

    @property
    def op(self) -> Op:
        return (*self.mine, *self.theirs)[0]

    @property
    def cause(self) -> str:
        mine, theirs = ("; ".join(map(str, ops)) or "nothing" for ops in (self.mine, self.theirs))
        return f"{mine}, where {self.others} other ranks have {theirs}"

    @property
    def category(self) -> Cause | None:
        return of_changes(self.mine, self.theirs)

    def place(self, after: str) -> Place:
        """`after` says what holds when the rank does as the others do."""
        return Place(self.tensor, None, self.rank, self.tensor, self.op, f"{self.cause} (with this changed {after})", self.category)


def ill_formed(logical: Program, plan: Plan, table: OpTable) -> Place | None:
    """The op of an ill-formed plan in which a rank differs from its like, if the plan is well-formed without that."""
    try:
        for found in odd(plan):
            if all(f.severity == "warning" for f in validate(logical, found.plan, table)):
                return found.place("the plan is well-formed")
    except (AttributeError, LookupError, TypeError, ValueError):  # so ill-formed that ranks cannot be compared
        pass
    return None


def odd(plan: Plan) -> Iterator[Odd]:
    """The first few, those that are told apart most easily before the others."""
    return islice((o for kind in (_edited, _alone, _out_of_line) for o in kind(plan)), MOST)


def mended(small: Small, found: Odd) -> Small | None:
    """An evaluation in which the rank runs the ops of the others; None where that is not just another local op."""
    if found.rank not in small.places:
        return None
    c, _ = small.places[found.rank]
    own, classes = small.classes[c], list(small.classes)
    if len(own.ranks) > 1:
        return None
    new: list[Step] = []
    for op in found.theirs:
        steps = next(
            (
                some
                for d, k in enumerate(small.classes)
                if d != c and (some := [s for s in k.order if s.outputs == op.outputs and s.inputs == op.inputs])
                if op.outputs and all(small.local_shapes[d].get(n) == small.local_shapes[c].get(n) for n in (*op.inputs, *op.outputs) if n)
            ),
            [],
        )
        if len(steps) != 1:  # communication, or an op that depends on the rank
            return None
        new.append(replace(steps[0], rows=(0,)))
    old = [s for s in own.order if any(s.inputs == op.inputs and s.outputs == op.outputs and s.op.name == op.name for op in found.mine)]
    if len(old) != len(found.mine):
        return None
    classes[c] = replace(own, order=[*(s for s in own.order if not any(s is o for o in old)), *new])
    return replace(small, classes=classes)


# -- edits ------------------------------------------------------------------------------------------------------------


def _edited(plan: Plan) -> Iterator[Odd]:
    """For every rank with edits, the plan without them; if there are several, also without each of them."""
    by_rank: dict[int, list[Edit]] = {}
    for edit in plan.edits:
        by_rank.setdefault(edit.rank, []).append(edit)
    for rank, edits in by_rank.items():
        home = next((t for t in plan.templates if rank in t.ranks), None)
        if home is None or len(home.ranks) <= LIKE:
            continue
        values = home.bound(rank)
        for some in (edits, *([e] for e in edits if len(edits) > 1)):
            theirs = [_op(plan, home.program.ops, e) for e in some]
            if None not in theirs:
                without = replace(plan, edits=tuple(e for e in plan.edits if not any(e is x for x in some)))
                before = tuple(bind(o, values) for o in theirs if o is not None)
                yield Odd(rank, len(home.ranks) - 1, tuple(o for e in some for o in e.ops), before, without)


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


# -- programs of their own --------------------------------------------------------------------------------------------


def _alone(plan: Plan) -> Iterator[Odd]:
    """Ranks whose program is that of many others but for a few ops in one place; the plan in which they run that one."""
    for t in plan.templates:
        if len(t.ranks) > 1:
            continue
        homes = [(ends, h) for h in plan.templates if len(h.ranks) > LIKE and (ends := _common(t.program, h.program, plan.groups))]
        if not homes:
            continue
        (start, end), home = max(homes, key=lambda x: sum(x[0]))
        values = _values(t, home, start, end)
        if values is None:
            continue
        mine = t.program.ops[start : len(t.program.ops) - end]
        theirs = home.program.ops[start : len(home.program.ops) - end]
        joined = replace(home, ranks=(*home.ranks, t.ranks[0]), bindings={n: (*column, values[n]) for n, column in home.bindings.items()})
        templates = tuple(joined if x is home else x for x in plan.templates if x is not t)
        bound = t.bound(t.ranks[0])
        yield Odd(
            t.ranks[0],
            len(home.ranks),
            tuple(bind(o, bound) for o in mine),
            tuple(bind(o, values) for o in theirs),
            replace(plan, templates=templates),
        )


def _common(mine: Program, theirs: Program, groups: Groups) -> tuple[int, int] | None:
    """How many ops at the start and at the end are the same but for integers and groups; None if too many differ."""
    a, b = mine.ops, theirs.ops
    if abs(len(a) - len(b)) > FEW or (mine.inputs, mine.parameters, mine.state) != (theirs.inputs, theirs.parameters, theirs.state):
        return None
    least = min(len(a), len(b))
    start = next((i for i in range(least) if not _alike(a[i], b[i], groups)), least)
    end = next((i for i in range(least - start) if not _alike(a[-1 - i], b[-1 - i], groups)), least - start)
    return (start, end) if max(len(a), len(b)) - start - end <= FEW else None


def _alike(mine: Op, theirs: Op, groups: Groups) -> bool:
    if (mine.name, mine.inputs, mine.outputs, mine.phase) != (theirs.name, theirs.inputs, theirs.outputs, theirs.phase):
        return False
    if mine.attrs == theirs.attrs:
        return True
    return [k for k, _ in mine.attrs] == [k for k, _ in theirs.attrs] and all(
        _fits(a, b, groups) for (_, a), (_, b) in zip(mine.attrs, theirs.attrs, strict=True)
    )


def _fits(mine: Value, theirs: Value, groups: Groups) -> bool:
    if isinstance(theirs, Ref):
        return isinstance(mine, Ref) or (isinstance(mine, int) and not isinstance(mine, bool)) or (isinstance(mine, str) and mine in groups)
    if isinstance(mine, tuple) and isinstance(theirs, tuple):
        return len(mine) == len(theirs) and all(_fits(a, b, groups) for a, b in zip(mine, theirs, strict=True))
    return type(mine) is type(theirs) and mine == theirs


def _values(t: Template, home: Template, start: int, end: int) -> dict[str, Value] | None:
    """What the references of the others' program are on this rank, as its own ops have it; None if that is not one value each."""
    found: dict[str, Value] = {}
    bound = t.bound(t.ranks[0])
    pairs = [*zip(t.program.ops[:start], home.program.ops[:start], strict=True)]
    pairs += zip(t.program.ops[len(t.program.ops) - end :], home.program.ops[len(home.program.ops) - end :], strict=True)

    def match(mine: Value, theirs: Value) -> bool:
        if isinstance(theirs, Ref):
            value = bound.get(mine.name) if isinstance(mine, Ref) else mine
            return found.setdefault(theirs.name, value) == value
        if isinstance(mine, tuple) and isinstance(theirs, tuple):
            return all(match(a, b) for a, b in zip(mine, theirs, strict=True))
        return True

    for a, b in pairs:
        if not all(match(v, w) for (_, v), (_, w) in zip(a.attrs, b.attrs, strict=True)):
            return None
    found = {**{n: v for n, v in bound.items() if n in home.bindings}, **found}
    return found if found.keys() == home.bindings.keys() else None


# -- values -----------------------------------------------------------------------------------------------------------


def _out_of_line(plan: Plan) -> Iterator[Odd]:
    """A rank with an integer or a group that is not what its coordinates say on the other ranks; the plan in which it is."""
    for t in plan.templates:
        if len(t.ranks) <= LIKE:
            continue
        for name, column in t.bindings.items():
            should = _should(plan, t.ranks, column)
            wrong = [i for i, v in enumerate(column) if should is not None and v != should[i]]
            if should is None or not 0 < len(wrong) <= MOST:
                continue
            op = next((o for o in t.program.ops if any(v == Ref(name) for _, v in o.attrs)), None)
            for i in wrong if op is not None else ():
                assert op is not None
                values = {n: c[i] for n, c in t.bindings.items()}
                new = replace(t, bindings={**t.bindings, name: (*column[:i], should[i], *column[i + 1 :])})
                without = replace(plan, templates=tuple(new if x is t else x for x in plan.templates))
                yield Odd(t.ranks[i], len(t.ranks) - len(wrong), (bind(op, values),), (bind(op, {**values, name: should[i]}),), without)


def _should(plan: Plan, ranks: Sequence[int], column: Sequence[Value]) -> list[Value] | None:
    """What most values say that all of them are; None if they say nothing."""
    if all(type(v) is int for v in column):
        at = np.asarray([tuple(plan.mesh.coordinates(r).values()) for r in ranks])
        return [int(v) for v in predicted(at, np.asarray(column))]
    if not all(isinstance(v, str) and v in plan.groups for v in column):
        ((usual, count),) = Counter(column).most_common(1)
        return [usual] * len(column) if count >= len(column) - MOST else None
    known = {v: _span(plan, plan.groups[v]) for v in {str(v) for v in column}}
    spans = [known[str(v)] if r in plan.groups[str(v)] else None for r, v in zip(ranks, column, strict=True)]
    ((most, count),) = Counter(spans).most_common(1)
    if most is None or count < len(ranks) - MOST:
        return None
    names = {plan.groups[name]: name for name in reversed(list(plan.groups))}
    proper = [v if s == most else names.get(plan.mesh.group(r, most)) for r, v, s in zip(ranks, column, spans, strict=True)]
    return None if None in proper else proper


def _span(plan: Plan, members: tuple[int, ...]) -> tuple[str, ...] | None:
    """The mesh axes along which a group lies, if it is just that."""
    at = [plan.mesh.coordinates(m) for m in members]
    axes = tuple(a for a in plan.mesh.names if len({x[a] for x in at}) > 1)
    return axes if plan.mesh.group(members[0], axes) == members else None
