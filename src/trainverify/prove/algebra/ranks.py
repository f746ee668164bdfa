"""Where the folded ranks of a plan stand: their coordinates, their ops, and offsets as formulas over the mesh."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from trainverify.axes.structure import Axis
from trainverify.axes.system import LoweredOp, Scope, System
from trainverify.graph.linear import Rational, exact
from trainverify.ops.table import Lowered
from trainverify.primitives.node import Node, topological
from trainverify.prove.algebra.folding import Instance
from trainverify.prove.algebra.grids import Offset, mixed_radix
from trainverify.prove.algebra.terms import Index, Unsupported

MESH = -(10**6)  # mesh variables count down from here

Wires = list[tuple[object, ...]]


class _Places:
    """Coordinates of some ranks on the folded axes of their instance."""

    def __init__(self, axes: tuple[str, ...], found: list[tuple[int, ...]]):
        self.axes = axes
        self.found = frozenset(found)
        self._seen: dict[tuple[int, ...], frozenset[tuple[int, ...]]] = {}

    def has(self, axis: str) -> bool:
        """Whether the rank one step along an axis from the origin is among them."""
        return tuple(int(a == axis) for a in self.axes) in self.found

    def offsets(self, steps: Mapping[str, Rational]) -> set[Rational]:
        """Σ step · coordinate on every one of the ranks."""
        used = tuple(n for n, a in enumerate(self.axes) if steps[a])
        if used not in self._seen:
            self._seen[used] = frozenset(tuple(at[n] for n in used) for at in self.found)
        weights = [steps[self.axes[n]] for n in used]
        return {sum(w * c for w, c in zip(weights, at, strict=True)) for at in self._seen[used]}


class Ranks:
    def __init__(self, system: System, instances: Sequence[Instance]):
        self.system = system
        self.instances = instances
        self.mesh_vars: dict[str, list[tuple[Index, Axis]]] = {}
        for name in system.plan.mesh.names:
            leaves = system.inference.axes.leaves([system.inference.mesh_axis(system.plan.mesh, name)])
            first = MESH - sum(map(len, self.mesh_vars.values()))
            self.mesh_vars[name] = [(first - n, a) for n, a in enumerate(leaves)]
        self._rows: dict[int, dict[int, int]] = {}
        self._wire_table: dict[int, tuple[Lowered, list[Node], Wires]] = {}
        self._place_table: dict[tuple[Instance, int, int], _Places] = {}

    def own(self, unit: int, n: int, rank: int) -> LoweredOp:
        """A local op as a rank has it."""
        variants = self.system.unit_ops[unit][n]
        if len(variants) == 1:
            return variants[0]
        if unit not in self._rows:
            self._rows[unit] = {r: row for row, r in enumerate(self.system.talk.units[unit].ranks)}
        row = self._rows[unit][rank]
        return next(x for x in variants if row in x.rows)

    def offsets(self, instance: Instance, unit: int, n: int, x: LoweredOp) -> dict[int, Offset]:
        """Offsets of nodes that differ between the ranks of an instance, as formulas over the mesh; checked for every rank."""
        variants = self.system.unit_ops[unit][n]
        if len(variants) < 2 or not instance.folded:
            return {}
        nodes, wires = self._wired(x.lowered)
        table: list[tuple[_Places, list[Node]]] = []
        for v in variants:
            places = self._places(instance, unit, v.rows)
            if places.found:
                others, other_wires = self._wired(v.lowered)
                table.append((places, others))
                if other_wires != wires:
                    raise Unsupported("ranks that compute different things")
        result: dict[int, Offset] = {}
        for position, node in enumerate(nodes):
            if all(others[position].attrs == node.attrs for _, others in table):
                continue
            place = {"slice": 1, "iota": 0, "one_hot": 0, "pad": 1}.get(node.prim)
            if node.prim == "const" and node.kind != "bool":
                place = 0
            if place is None:
                raise Unsupported(f"{node.prim} with different attributes on different ranks")
            base = _number(node, place)
            steps: dict[str, Rational] = {}
            for axis in instance.folded:
                one = [_number(o[position], place) - base for places, o in table if places.has(axis)]
                steps[axis] = one[0] if one else 0
            for places, o in table:
                if places.offsets(steps) != {_number(o[position], place) - base}:
                    raise Unsupported("an offset that is not linear in the mesh coordinates")
                here, there = _others(node.attrs, place), _others(o[position].attrs, place)
                if node.prim == "pad":  # what comes after follows from the sizes
                    here, there = (here[0], here[2]), (there[0], there[2])
                if here != there:
                    raise Unsupported("different attributes on different ranks")
            if any(steps.values()):
                over = math.lcm(base.denominator, *(step.denominator for step in steps.values()))
                whole = {axis: int(step * over) for axis, step in steps.items()}
                result[id(node)] = Offset(int(base * over), tuple(self._strides(whole)), over)
        return result

    def _wired(self, lowered: Lowered) -> tuple[list[Node], Wires]:
        """The nodes of an op and how they are wired, without what may differ between ranks."""
        known = self._wire_table.get(id(lowered))
        if known is None or known[0] is not lowered:
            nodes = topological(lowered.outputs)
            at = {id(n): i for i, n in enumerate(nodes)}
            known = lowered, nodes, [(n.prim, n.shape, n.kind, *(at[id(x)] for x in n.args)) for n in nodes]
            self._wire_table[id(lowered)] = known
        return known[1], known[2]

    def _places(self, instance: Instance, unit: int, rows: tuple[int, ...]) -> _Places:
        """Where the ranks of an instance among some rows stand."""
        key = (instance, unit, id(rows))  # the system keeps the rows
        if key not in self._place_table:
            mesh, ranks, fixed = self.system.plan.mesh, self.system.talk.units[unit].ranks, instance.fixed
            at = [mesh.coordinates(ranks[row]) for row in rows]
            found = [tuple(x[a] for a in instance.folded) for x in at if all(x[a] == c for a, c in fixed)]
            self._place_table[key] = _Places(instance.folded, found)
        return self._place_table[key]

    def _strides(self, steps: Mapping[str, int]) -> Iterator[tuple[Index, int]]:
        for axis, step in steps.items():
            if step:
                leaves = self.mesh_vars[axis]
                for i, (v, _) in enumerate(leaves):
                    yield v, step * math.prod(a.size for _, a in leaves[i + 1 :])

    def digits(self, axis: str, instance: Instance) -> list[tuple[int, list[Index] | None]]:
        """A mesh coordinate with sizes: leaf by leaf, or the number that it is."""
        if axis not in instance.folded:
            return [(self.system.plan.mesh.length(axis), [instance.at()[axis]])]
        return [(a.size, [v]) for v, a in self.mesh_vars[axis]]

    def coordinate(self, axis: str, instance: Instance) -> list[Index]:
        """A mesh coordinate as digits over the leaves of its axis."""
        leaves = self.mesh_vars[axis]
        if axis in instance.folded:
            return [v for v, _ in leaves]
        return list(mixed_radix(instance.at()[axis], [a.size for _, a in leaves]))

    def count(self, instance: Instance) -> int:
        return math.prod(self.system.plan.mesh.length(a) for a in instance.folded)

    def unit(self, i: int) -> int:
        return self.system.schedule.classes[self.instances[i].class_index].unit

    def scope(self, i: int) -> Scope:
        return self.system.unit_scopes[self.system.schedule.classes[self.instances[i].class_index].unit]


def _number(node: Node, place: int) -> Rational:
    found = exact(node.attrs[place])
    if found is None:
        raise Unsupported(f"{node.prim} with different attributes on different ranks")
    return found


def _others(attrs: tuple[object, ...], place: int) -> tuple[object, ...]:
    return attrs[:place] + attrs[place + 1 :]
