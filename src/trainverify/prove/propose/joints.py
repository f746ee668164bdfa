"""Where both programs may be cut: weights that FSDP gathers, and gradients before it scatters them.

A few elements are traced back through ops that only move them. That is no proof: claims about joints are shown with everything else.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from trainverify.axes.system import System
from trainverify.graph.lineage import Layout, Partial, Pattern, Placements, Reduction, Shard, pattern_dims
from trainverify.graph.program import Op
from trainverify.ops.table import Lowered
from trainverify.primitives.node import Node
from trainverify.prove.joints import Joint

LATER: Final = frozenset({"optimizer", "metric"})  # phases in which a parameter is used where it lives
FAR: Final = 10_000  # ops that an element is traced through
Index = tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """An element of a tensor of a rank."""

    rank: int
    tensor: str
    index: Index


def joints(system: System) -> list[Joint]:
    """Parameters whose axes are cut in ways that do not align, each with its gradient, where both are found."""
    back, found = _Back(system), []
    axes = system.inference.axes
    batch = _batch(system)
    for lay in system.plan.lineage:
        whole = system.scope.dims.get(lay.logical, [])
        if lay.logical in system.logical.parameters and any(a.frozen for a in axes.leaves(whole)):
            weight, gradient = _weight(system, back, lay), _gradient(system, back, lay, batch)
            if weight is not None and gradient is not None:
                found += [weight, gradient]
    return found


def _batch(system: System) -> set[str]:
    """Mesh axes along which ranks have different rows of the batch."""
    names: set[str] = set()
    for lay in system.plan.lineage:
        if lay.logical in system.logical.inputs:
            if isinstance(lay.form, Placements):
                names |= {a for a, p in lay.form.axes if isinstance(p, Shard)}
            elif isinstance(lay.form, Pattern):
                names |= {n for group in pattern_dims(lay.form.text) for n in group} & set(system.plan.mesh.names)
    return names


def _unit(system: System, lay: Layout) -> int | None:
    """The program of the ranks that hold something, if it is one."""
    units = list(system.rows.by_unit(lay.holders(system.plan.mesh)))
    return units[0] if len(units) == 1 else None


def placed(lay: Layout, names: Sequence[str]) -> Placements | None:
    """A layout as placements, if every dimension is cut by mesh axes from the outside in."""
    if isinstance(lay.form, Placements):
        return lay.form
    if not isinstance(lay.form, Pattern) or lay.form.fixed or lay.form.partial:
        return None
    found = []
    for d, group in enumerate(pattern_dims(lay.form.text)):
        outer = list(itertools.takewhile(lambda n: n in names, group))
        if any(n in names for n in group[len(outer) :]):
            return None
        found += [(n, Shard(d)) for n in outer]
    return Placements(tuple(found))


def _without(form: Placements, axes: set[str]) -> Placements:
    return Placements(tuple((a, p) for a, p in form.axes if a not in axes))


def _shape(system: System, lay: Layout, rank: int) -> Index:
    (part,) = lay.parts(system.plan.mesh, rank, system.logical.tensors[lay.logical].shape)
    return tuple(run.size for run in part.logical)


# -- weights -------------------------------------------------------------------------------------------------------------


def _weight(system: System, back: _Back, lay: Layout) -> Joint | None:
    """The tensors that are a parameter gathered along some mesh axes."""
    unit = _unit(system, lay)
    form = placed(lay, system.plan.mesh.names)
    if unit is None or form is None:
        return None
    program, ranks = system.unit_programs[unit], lay.holders(system.plan.mesh)
    some = [ranks[0], ranks[len(ranks) // 2], ranks[-1]]
    shards = [a for a, p in form.axes if isinstance(p, Shard)]
    wanted: dict[Index, list[Layout]] = {}
    for n in range(1, len(shards) + 1):
        for gone in itertools.combinations(shards, n):
            other = replace(lay, form=_without(form, set(gone)))
            wanted.setdefault(_shape(system, other, ranks[0]), []).append(other)
    found: list[Layout] = []
    for t in [t for shape in wanted for t in back.shaped(unit, shape) if back.way(ranks[0], t)[:1] == [lay.local]]:
        if {lay.local for lay in found}.isdisjoint(back.way(ranks[0], t)):
            here = [replace(other, local=t) for other in wanted[program.tensors[t].shape]]
            found += [other for other in here if _is(system, back, other, lay, some)][:1]
    uses = frozenset(n for n, op in enumerate(system.logical.ops) if lay.logical in op.inputs and op.phase not in LATER)
    return Joint(lay.logical, tuple(found), uses) if found and uses else None


def _is(system: System, back: _Back, lay: Layout, source: Layout, ranks: Sequence[int]) -> bool:
    """Whether elements of a local tensor come from where a parameter has them."""
    mesh, shape = system.plan.mesh, system.logical.tensors[lay.logical].shape
    for rank in ranks:
        (here,) = lay.parts(mesh, rank, shape)
        for index in _corners(_shape(system, lay, rank)):
            origin = back.moved(Place(rank, lay.local, index))
            if origin is None or origin.tensor != source.local:
                return False
            (there,) = source.parts(mesh, origin.rank, shape)
            if [r.start + i for r, i in zip(here.logical, index, strict=True)] != [
                r.start + i for r, i in zip(there.logical, origin.index, strict=True)
            ]:
                return False
    return True


def _corners(shape: Index) -> Iterator[Index]:
    """The first and the last position along every dimension, and one between."""
    yield from itertools.product(*[sorted({0, n // 2 + n // 3, n - 1}) for n in shape])


# -- gradients -----------------------------------------------------------------------------------------------------------


def _gradient(system: System, back: _Back, lay: Layout, batch: set[str]) -> Joint | None:
    """The summands that ranks scatter, and the logical gradient that they add up to."""
    unit = _unit(system, lay)
    form = placed(lay, system.plan.mesh.names)
    if unit is None or form is None:
        return None
    reported = system.unit_programs[unit].output("gradient", lay.local)
    name = _logical_gradient(system, lay.logical)
    if reported is None or name is None:
        return None
    rank, start = lay.holders(system.plan.mesh)[0], (0,) * len(system.unit_programs[unit].tensors[reported].shape)
    for place, axes, how in back.summands(Place(rank, reported, start)):
        kept = _without(form, axes)
        held = replace(lay, logical=name, local=place.tensor, form=kept)
        shape = system.unit_programs[unit].tensors[place.tensor].shape
        if axes and shape == _shape(system, replace(held, logical=lay.logical), rank):
            shards = {a for a, _ in kept.axes}
            summed = [a for a in system.plan.mesh.names if a in (axes | batch) - shards and a not in dict(lay.where)]
            if any(n > 1 and a not in (*shards, *summed, *dict(lay.where)) for a, n in system.plan.mesh.axes):
                return None  # copies of a summand
            form = Placements((*kept.axes, *((a, Partial(how)) for a in summed)))
            uses = frozenset(n for n, op in enumerate(system.logical.ops) if name in op.inputs)
            return Joint(name, (replace(held, form=form),), uses)
    return None


def _logical_gradient(system: System, parameter: str) -> str | None:
    """The gradient of a parameter before anything is done to it element by element."""
    program = system.logical
    tensor = program.output("gradient", parameter)
    makers = {o: n for n, op in enumerate(program.ops) for o in op.outputs}
    while tensor is not None and tensor in makers:
        op = program.ops[makers[tensor]]
        node = system.logical_ops[makers[tensor]][0].lowered.outputs[op.outputs.index(tensor)]
        before = _elementwise(node)
        if before is None or op.inputs[before.attrs[0]] in program.sources:
            return tensor
        tensor = op.inputs[before.attrs[0]]
    return None


def _elementwise(node: Node) -> Node | None:
    """The one input of this shape that a function of elements has."""
    found: set[Node] = set()
    todo = [node]
    while todo:
        n = todo.pop()
        if n.prim == "map":
            todo += [a for a in n.args if a.prim not in ("broadcast", "const")]
        else:
            found.add(n)
    one = found.pop() if len(found) == 1 else None
    return one if one is not None and one.prim == "input" and one.shape == node.shape else None


# -- tracing -------------------------------------------------------------------------------------------------------------


class _Back:
    """Where an element of a rank's tensor comes from."""

    def __init__(self, system: System):
        self.system = system
        self.makers = [{o: n for n, op in enumerate(p.ops) for o in op.outputs} for p in system.unit_programs]
        self.rows = [{r: row for row, r in enumerate(u.ranks)} for u in system.talk.units]
        self._shaped: dict[int, dict[Index, list[str]]] = {}
        self._ways: dict[tuple[int, str], list[str]] = {}
        classes = system.schedule.classes
        self.meetings = {(classes[c].unit, system.talking[classes[c].unit][e]): m for m in system.meetings for c, e in m.step}

    def shaped(self, unit: int, shape: Index) -> list[str]:
        """The tensors that a unit makes in a shape, in order."""
        if unit not in self._shaped:
            found = self._shaped[unit] = {}
            for t in self.makers[unit]:
                found.setdefault(self.system.unit_programs[unit].tensors[t].shape, []).append(t)
        return self._shaped[unit].get(shape, [])

    def way(self, rank: int, tensor: str) -> list[str]:
        """The tensors that the first element of a tensor is moved through, beginning with a source; nothing if it is computed."""
        key = (rank, tensor)
        if key not in self._ways:
            shape = self.system.unit_programs[self.system.talk.unit_of[rank]].tensors[tensor].shape
            self._ways[key] = [p.tensor for p in reversed(self._moves(Place(rank, tensor, (0,) * len(shape))))]
        return self._ways[key]

    def moved(self, place: Place) -> Place | None:
        """The element of a source that this one is; None if something is computed on the way."""
        return next(reversed(self._moves(place)), None)

    def _moves(self, place: Place) -> list[Place]:
        """The elements that this one is, back to one of a source; none if something is computed on the way."""
        found = [place]
        for _ in range(FAR):
            if found[-1].tensor not in self.makers[self.system.talk.unit_of[found[-1].rank]]:
                return found
            before = self._before(found[-1], sums=False)
            if before is None:
                break
            found.append(before[0])
        return []

    def summands(self, place: Place) -> Iterator[tuple[Place, set[str], Reduction]]:
        """Elements that this one is a sum over ranks of, times something; the mesh axes that it runs along; whether it is an average."""
        axes: set[str] = set()
        how: Reduction = "sum"
        for _ in range(FAR):
            before = self._before(place, sums=True) if place.tensor in self.makers[self.system.talk.unit_of[place.rank]] else None
            if before is None:
                return
            unit = self.system.talk.unit_of[place.rank]
            if before[1] and self.system.unit_programs[unit].ops[self.makers[unit][place.tensor]].get("op") == "avg":
                how = "avg"
            place, more = before
            axes |= set(more)
            yield place, set(axes), how

    def _before(self, place: Place, sums: bool) -> tuple[Place, tuple[str, ...]] | None:
        system = self.system
        unit = system.talk.unit_of[place.rank]
        n = self.makers[unit][place.tensor]
        op: Op = system.unit_programs[unit].ops[n]
        meeting = self.meetings.get((unit, n))
        if meeting is not None:
            return self._met(place, op, meeting.lowered, sums)
        variants = system.unit_ops[unit][n]
        lowered = next(x for x in variants if self.rows[unit][place.rank] in x.rows).lowered
        found = _traced(lowered.outputs[op.outputs.index(place.tensor)], place.index, sums)
        if found is None or found[2]:
            return None
        which, index, _ = found
        source = op.inputs[which]
        return None if source is None else (Place(place.rank, source, index), ())

    def _met(self, place: Place, op: Op, lowered: Lowered | None, sums: bool) -> tuple[Place, tuple[str, ...]] | None:
        if lowered is None:
            return None
        members = self.system.talk.groups[str(self.system.talk.value(place.rank, op.get("group")))]
        found = _traced(lowered.outputs[0], (members.index(place.rank), *place.index), sums)
        if found is None or op.inputs[0] is None:
            return None
        _, (who, *index), added = found
        along = self.system.rows.along(members) or ()
        rank = place.rank if added else members[who]
        if self.system.talk.unit_of[rank] != self.system.talk.unit_of[place.rank]:
            return None
        return Place(rank, op.inputs[0], tuple(index)), along if added else ()


def _traced(node: Node, index: Index, sums: bool) -> tuple[int, Index, bool] | None:
    """(input, its element, whether it is one of several that are added) that an element of a node is made of."""
    added = False
    while node.prim != "input":
        args = node.args
        if node.prim == "reshape":
            index = tuple(map(int, np.unravel_index(int(np.ravel_multi_index(index, node.shape)) if node.shape else 0, args[0].shape)))
            node = args[0]
        elif node.prim == "transpose":
            (order,) = node.attrs
            back = [0] * len(order)
            for to, d in enumerate(order):
                back[d] = index[to]
            node, index = args[0], tuple(back)
        elif node.prim == "slice":
            d, start, step = node.attrs
            node, index = args[0], (*index[:d], start + step * index[d], *index[d + 1 :])
        elif node.prim == "broadcast":
            (dims,) = node.attrs
            node, index = args[0], tuple(index[d] for d in dims)
        elif node.prim == "concat":
            (d,) = node.attrs
            at = index[d]
            for a in args:
                if at < a.shape[d]:
                    node, index = a, (*index[:d], at, *index[d + 1 :])
                    break
                at -= a.shape[d]
        elif node.prim == "contract" and len(args) == 1 and sums:
            (term,), target = node.attrs
            node, index, added = args[0], tuple(index[target.index(i)] if i in target else 0 for i in term), True
        elif node.prim == "map" and sums:
            left = [a for a in args if a.prim not in ("broadcast", "const")]
            if len(left) != 1:
                return None
            node = left[0]
        else:
            return None
    return node.attrs[0], index, added
