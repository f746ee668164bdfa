"""The first wrong tensor of a refuted plan: by the change that repairs it, else by the first logical tensor that is missing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.domains.numeric import NUMERIC
from trainverify.evaluate.compare import DIFFERENT, Suspect, distance
from trainverify.evaluate.moved import PointName, following
from trainverify.evaluate.run import NotComputed, random_inputs, run_logical, run_plan
from trainverify.evaluate.small import Small
from trainverify.explain.arrangement import arranged
from trainverify.explain.cause import Cause, of_change
from trainverify.explain.missing import NO_MATCH, Locator
from trainverify.explain.place import Known, Place
from trainverify.explain.repair import Repair
from trainverify.explain.replay import Graph
from trainverify.explain.search import Found, Point, Search
from trainverify.explain.watch import STOPPED, Stopped, Watch
from trainverify.graph.lineage import Layout
from trainverify.graph.obligations import Obligation
from trainverify.graph.plan import Plan
from trainverify.graph.program import Op, Source, Value, bind, has_ref
from trainverify.ops.table import OpTable

FRESH, MOST_POINTS = 3, 9  # points at which a repair is confirmed, and that are tried
NUDGE = 1e-13  # by how much inputs change without a point's outputs changing
SHOWN = 2  # of several tensors that are changed alike
SHARES = ("a share only", "a partial sum")  # how causes begin that name a missing sum over ranks
ADDING = frozenset({"identity", "to", "add", "reshape", "permute", "transpose", "concat", "slice", "stack"})


def locate(
    small: Small,
    plan: Plan,
    wanted: Sequence[Obligation],
    wrong: Sequence[Suspect],
    seed: PointName,
    table: OpTable,
    known: Known,
    inputs: Mapping[str, Array] | None = None,
    watch: Watch | None = None,
) -> Place:
    """The first wrong tensor behind the outputs that differ, as far as there is time."""
    watch = watch or Watch.started()
    points = [at(small, plan, random_inputs(small, seed) if inputs is None else inputs)]
    try:
        locator = Locator(small, plan.mesh, wrong, points[0].logical, points[0].plan, known, watch)
        place = locator.place()
    except Stopped:
        return unexplained(wrong[0].obligation, wrong[0].layout, wrong[0].rank)
    if all(s.distance <= DIFFERENT for s in wrong):  # too close for what floats can tell
        return compared(place)
    try:
        points.append(at(small, plan, random_inputs(small, following(seed))))
    except NotComputed:
        return compared(place)
    try:
        search = Search(small, plan.mesh, wanted, wrong, points, table, watch, lambda: fresh(small, plan, seed))
        found = search.find() or (search.find_view() if place.cause == NO_MATCH else None)
    except Stopped:
        stopped = compared(place)
        return replace(stopped, cause=f"{stopped.cause}; {STOPPED}")
    except (ArithmeticError, LookupError, TypeError, ValueError):  # a change that cannot be run: the verdict stands without it
        found = None
    if found is not None:
        return repaired(small, plan, found, place, len(search.fresh()))
    return rearranged(small, locator, wrong) or compared(place)


def used(small: Small, place: Place) -> Place:
    """Of a gradient that lacks a sum over ranks, also where the code after the backward pass uses it: there the sum is missing."""
    lacks = place.cause.startswith(SHARES) and place.rank in small.places
    if not lacks or place.op is None or place.op.phase != "backward":
        return place
    program = small.classes[small.places[place.rank][0]].program
    forward = {(op.source, op.source.callers) for op in program.ops if op.phase == "forward" and op.source is not None}
    reached = {place.tensor}
    for op in program.ops:
        if not reached.isdisjoint(op.inputs) and op.source is not None:
            if op.phase != "backward":
                return replace(place, used=_apart(op, place.op))  # the line of the step itself
            if (op.source, op.source.callers) not in forward:
                return replace(place, used=_in_backward(op.source))  # the user's own backward function
            if op.name not in ADDING:
                return place  # it is no gradient of a parameter: backward goes on with it
            reached.update(op.outputs)
    return place


def handed(small: Small, place: Place) -> Place:
    """Of an op that does what it should to something else, also the line of the function that has its inputs."""
    op, logical = place.op, place.logical_op
    same = op is not None and logical is not None and (op.name, op.attrs, op.source) == (logical.name, logical.attrs, logical.source)
    if not same or place.category is not Cause.WRONG_INPUT or place.repair is not None or place.rank not in small.places:
        return place
    assert op is not None
    makers = {o: made for made in small.classes[small.places[place.rank][0]].program.ops for o in made.outputs}
    mine = _calls(op)
    for name in op.inputs:
        theirs = _calls(makers[name]) if name in makers else []
        last = len(theirs) - 1
        if theirs and len(theirs) < len(mine) and theirs[:last] == mine[:last] and theirs[last].file == mine[last].file:
            return replace(place, given=mine[last])
    return place


def _calls(op: Op) -> list[Source]:
    """The lines that lead to an op, from the step on, and its own."""
    return [] if op.source is None else [*reversed(op.source.callers), op.source]


def _apart(op: Op, other: Op) -> Source | None:
    """Of the lines that lead to an op, the first that does not lead to another one too."""
    calls, others = _calls(op), [(s.file, s.line) for s in _calls(other)]
    return next((s for i, s in enumerate(calls) if (s.file, s.line) not in others[i : i + 1]), op.source)


def _in_backward(source: Source) -> Source:
    """Of a function that backward calls, the line of backward: the last one before that of the step."""
    return source.callers[-2] if len(source.callers) > 1 else source


def unexplained(obligation: Obligation, layout: Layout, rank: int) -> Place:
    """An output that differs, without what it is wrong by."""
    return Place(obligation.output.tensor, None, rank, layout.local, None, STOPPED)


def fresh(small: Small, plan: Plan, seed: PointName) -> list[Point]:
    """Points that no repair was chosen by, and at which rounding does not decide."""
    found: list[Point] = []
    seed = following(seed)
    for _ in range(MOST_POINTS):
        seed = following(seed)
        inputs = random_inputs(small, seed)
        try:
            point = at(small, plan, inputs)
            nudged = run_logical(small, {n: _nudged(v) for n, v in inputs.items()}, NUMERIC)
        except NotComputed:
            continue
        outputs = [o.tensor for o in small.logical.outputs]
        if all(distance(np.asarray(nudged[t]), np.asarray(point.logical[t])) <= DIFFERENT for t in outputs):
            found.append(point)
        if len(found) == FRESH:
            break
    return found


def _nudged(value: Array) -> Array:
    """An input of real numbers with some of them a little larger and others a little smaller."""
    return value * (1 + NUDGE * np.resize([1, -1, 1, 1, -1], value.shape)) if value.dtype.kind == "f" else value


def at(small: Small, plan: Plan, inputs: Mapping[str, Array]) -> Point:
    return Point(run_logical(small, inputs, NUMERIC), run_plan(small, plan.lineage, inputs, NUMERIC))


def repaired(small: Small, plan: Plan, found: Found, place: Place, confirmed: int) -> Place:
    c, tensor = found.node
    rank = small.classes[c].ranks[found.row]
    op = next((o for o in small.classes[c].program.ops if tensor in o.outputs), None)
    values = bindings(plan, rank)
    others = list(dict.fromkeys(t for _, t in found.repair.edits if t != tensor))
    more = f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
    also = f"; the same for {', '.join(others[:SHOWN])}{more}" if others and found.repair.named is None else ""
    element = f"; one element: got {found.got:.12g}, want {found.want:.12g}" if found.got == found.got else ""
    points = f" on {confirmed} fresh points" if confirmed else ""
    cause = f"{bound_text(found.repair.text, values)}{also} (with this changed the whole plan agrees{points}{element})"
    made = None if op is None else bind(op, values)
    advice = advised(found.repair, bound_text(found.repair.text, values), made)
    return Place(place.logical, place.logical_op, rank, tensor, made, cause, found.repair.cause, advice, tuple(others))


def advised(repair: Repair, text: str, op: Op | None) -> str:
    """What to change, and where."""
    line = f"{op.source}" if op is not None and op.source is not None else ""
    if repair.cause is Cause.MISSING_REDUCTION and repair.over is not None:
        way = next((w for w in ("avg", "max") if f"its {w} over" in text), None)
        return f"insert all_reduce{f' with {way}' if way else ''} over {repair.over}" + (f" after {line}" if line else "")
    if repair.cause is Cause.EXTRA_REDUCTION and op is not None:
        return f"remove {op.name}" + (f" at {line}" if line else "")
    return f"at {line}: {text}" if line else text


def bindings(plan: Plan, rank: int) -> dict[str, Value]:
    """What references are on a rank."""
    return next((t.bound(rank) for t in plan.templates if rank in t.ranks), {})


def bound_text(text: str, values: Mapping[str, Value]) -> str:
    """A sentence with the numbers of a rank in the place of references; groups by their axes."""

    def value(found: re.Match[str]) -> str:
        name = found[1].rstrip(".")
        if name.startswith("group."):
            return name.removeprefix("group.")
        return str(values[name]) if name in values else found[0]

    return re.sub(r"\$([\w.+]+)", value, text)


def rearranged(small: Small, locator: Locator, wrong: Sequence[Suspect]) -> Place | None:
    """What is wrong without a repair, behind all outputs that differ."""
    graph = Graph(small, locator.watch)
    reached = graph.marks({(small.places[s.rank][0], s.layout.local): 1 for s in wrong if s.distance > DIFFERENT})
    try:
        return arranged(locator, graph, reached)
    except Stopped:
        return None


def compared(place: Place) -> Place:
    """The same, and where the op and its logical one differ in what they are given."""
    op, logical = place.op, place.logical_op
    if op is None or logical is None or op.name != logical.name or place.cause != NO_MATCH:
        return place
    theirs = dict(logical.attrs)
    other = [f"{k}={v} (logical: {theirs[k]})" for k, v in op.attrs if k in theirs and v != theirs[k] and not has_ref(v)]
    if not other:
        return place
    return replace(place, cause=f"{place.cause}; {op.name} has {', '.join(other)}", category=of_change(op, logical))
