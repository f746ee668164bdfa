"""Building plans: one block of code per group of ranks that run the same program.

```python
p = tv.plan("mlp", tv.Mesh(dp=2, tp=2))
with p.ranks() as r:
    x = r.input("x", (4, 8), "(dp b) k")
    w = r.parameter("w", (3, 8), "(tp o) k")
    y = r.all_gather(r.linear(x, w), group="tp", dim=1, backward="slice")
```
`group` is a mesh axis (or several), `peer` a change of coordinates. Every collective whose result is
differentiated names its backward; nothing is inserted for it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from trainverify.build.program import Declaring, domain_of
from trainverify.build.tape import BuildError, Conjugate, Tape, Tensor, caller
from trainverify.graph.lineage import Form, Layout, Placement, Reduction, layout
from trainverify.graph.mesh import Mesh
from trainverify.graph.plan import Plan, Template
from trainverify.graph.program import Op, Ref, Value, attributes, resolve
from trainverify.graph.types import TensorType
from trainverify.ops import OPS
from trainverify.ops.table import OpTable

Spelling = str | Mapping[str, Placement] | Form


def _same(tape: Tape, op: Op, given: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    return given


def _conjugate(name: str, **attrs: Any) -> Conjugate:
    def apply(tape: Tape, op: Op, given: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        (g,) = given
        assert g is not None
        return tape.emit(name, (g,), {"group": op.get("group"), **attrs}, [f"{op.inputs[0]}.grad"], op.source, op.outputs[0])

    return apply


def _slice(tape: Tape, op: Op, given: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Own block of the gradient of an all_gather: position in the group, times the block."""
    (g,) = given
    assert g is not None
    assert isinstance(tape, RankBuilder)
    dim, width = op.get("dim", 0), tape.tensors[str(op.inputs[0])].shape[op.get("dim", 0)]
    group = op.get("group")
    start = tape.each_rank(lambda rank: tape.position(rank, group) * width)
    stop = tape.each_rank(lambda rank: (tape.position(rank, group) + 1) * width)
    return tape.emit("slice", (g,), {"dim": dim, "start": start, "stop": stop}, [f"{op.inputs[0]}.grad"], op.source, op.outputs[0])


def conjugate(op: str, backward: str | None, attrs: Mapping[str, Any]) -> Conjugate | None:
    """What a collective does backward, by the name the user gave."""
    if backward in (None, "none"):
        return None
    dim = attrs.get("dim", 0)
    table: dict[str, Conjugate] = {
        "identity": _same,
        "all_reduce": _conjugate("all_reduce"),
        "all_gather": _conjugate("all_gather", dim=dim),
        "reduce_scatter": _conjugate("reduce_scatter", dim=dim),
        "slice": _slice,
        "all_to_all": _conjugate("all_to_all", split_dim=attrs.get("concat_dim"), concat_dim=attrs.get("split_dim")),
    }
    if backward not in table:
        raise BuildError(f"{op}: no backward {backward!r}; choose one of {', '.join(table)} or none")
    return table[backward]


class RankBuilder(Declaring):
    """The program of a set of ranks; references stand for what differs between them."""

    def __init__(self, plan: PlanBuilder, name: str, ranks: tuple[int, ...], where: Sequence[Mapping[str, int]], ops: OpTable):
        """`where` are mesh coordinates that together have exactly these ranks."""
        super().__init__(name, ops)
        self._plan = plan
        self.ranks = ranks
        self._where = tuple(dict(w) for w in where)
        self._columns: dict[str, tuple[Value, ...]] = {}
        self._asked: dict[object, Value] = {}  # groups and peers that were asked for before

    # -- what differs between ranks -----------------------------------------------------------------------------------

    def each_rank(self, value: Callable[[int], Value], name: str | None = None) -> Value:
        """A value computed from the rank number; a plain one where all ranks agree."""
        column = tuple(value(r) for r in self.ranks)
        if name is None and all(v == column[0] for v in column):
            return column[0]
        for known, values in self._columns.items():
            if values == column:
                return Ref(known)
        key = name or f"each.{len(self._columns)}"
        if key in self._columns:
            key = f"{key}.{len(self._columns)}"
        self._columns[key] = column
        return Ref(key)

    def each(self, value: Callable[[dict[str, int]], Value]) -> Value:
        """A value computed from the mesh coordinates: `r.each(lambda at: at["tp"] * 512)`."""
        return self.each_rank(lambda rank: value(self._plan.mesh.coordinates(rank)))

    def peer(self, **change: int) -> Value:
        """The rank at the same coordinates but for those given."""
        mesh = self._plan.mesh
        name = "peer." + ",".join(f"{a}{i}" for a, i in change.items())
        if name not in self._asked:
            self._asked[name] = self.each_rank(lambda rank: mesh.rank({**mesh.coordinates(rank), **change}), name)
        return self._asked[name]

    def group_of(self, group: str | Sequence[str] | Ref) -> Value:
        """A reference to each rank's own group along mesh axes; a group of the plan by its name."""
        if isinstance(group, Ref) or (isinstance(group, str) and group in self._plan.groups):
            return group
        axes = (group,) if isinstance(group, str) else tuple(group)
        if axes not in self._asked:
            self._asked[axes] = self.each_rank(lambda rank: self._plan.mesh_group(rank, axes), "group." + "+".join(axes))
        return self._asked[axes]

    def position(self, rank: int, group: Value) -> int:
        name = self._columns[group.name][self.ranks.index(rank)] if isinstance(group, Ref) else group
        return self._plan.groups[str(name)].index(rank)

    def bindings(self) -> Mapping[str, Any]:
        return {name: column[0] for name, column in self._columns.items()}

    def members(self, group: Any) -> int:
        return len(self._plan.groups[group])

    # -- tensors ------------------------------------------------------------------------------------------------------

    def lives(
        self,
        tensor: Tensor,
        logical: str,
        form: Spelling,
        fixed: Mapping[str, tuple[int, int]] | None = None,
        partial: Mapping[str, Reduction] | None = None,
    ) -> None:
        """Declare how a logical tensor lives in this one, on these ranks; checked, never believed."""
        made = layout(logical, form, tensor.name, None, fixed, partial)
        self._plan.lineage += [replace(made, where=tuple(where.items())) for where in self._where]

    def input(
        self,
        name: str,
        shape: tuple[int, ...],
        form: Spelling,
        logical: str | None = None,
        dtype: str = "f32",
        ids: int | None = None,
        ignore: int | None = None,
        domain: str | None = None,
        fixed: Mapping[str, tuple[int, int]] | None = None,
    ) -> Tensor:
        made = self._source(self._inputs, name, shape, dtype, domain_of(dtype, ids, ignore, domain))
        self.lives(made, logical or name, form, fixed)
        return made

    def parameter(self, name: str, shape: tuple[int, ...], form: Spelling, logical: str | None = None, dtype: str | None = None) -> Tensor:
        self._trainable.add(name)
        made = self._source(self._parameters, name, shape, dtype or self.dtype, None)
        self.lives(made, logical or name, form)
        return made

    def state(
        self,
        name: str,
        shape: tuple[int, ...],
        form: Spelling,
        logical: str | None = None,
        dtype: str = "f32",
        domain: str | None = None,
    ) -> Tensor:
        made = self._source(self._state, name, shape, dtype, domain_of(dtype, None, None, domain))
        self.lives(made, logical or name, form)
        return made

    # -- communication ------------------------------------------------------------------------------------------------

    def __getattr__(self, op: str) -> Callable[..., Any]:
        apply = super().__getattr__(op)
        if not self.table[op.removesuffix("_")].collective:
            return apply

        def communicate(*inputs: Tensor | None, group: Any, backward: str | None = "undeclared", **attrs: Any) -> Any:
            made = apply(*inputs, group=self.group_of(group), **attrs)
            if backward != "undeclared":
                self._conjugates[len(self.ops) - 1] = conjugate(op, backward, attrs)
            return made

        return communicate

    def copy(self, x: Tensor, group: str | Sequence[str], name: str | None = None) -> Tensor:
        """The tensor itself; backward all-reduces its gradient over the group (Megatron's f)."""
        (made,) = self.emit("identity", (x,), {}, [name or x.name + ".copy"])
        reference = self.group_of(group)

        def summed(tape: Tape, op: Op, given: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
            (g,) = given
            return tape.emit("all_reduce", (g,), {"group": reference}, [f"{op.inputs[0]}.grad"], op.source, op.outputs[0])

        self._conjugates[len(self.ops) - 1] = summed
        return made

    def broadcast(
        self,
        x: Tensor | None,
        *,
        group: Any,
        root: Value,
        shape: tuple[int, ...] | None = None,
        dtype: str = "f32",
        name: str = "broadcast",
    ) -> Tensor:
        """The root's tensor on every rank of the group; ranks that are not the root pass None and the shape they get."""
        roots = {resolve(root, {n: c[i] for n, c in self._columns.items()}) == rank for i, rank in enumerate(self.ranks)}
        if len(roots) > 1:
            raise BuildError("broadcast: some of these ranks are the root and some are not; give them programs of their own")
        if (x is not None) != roots.pop():
            raise BuildError("broadcast: the root passes a tensor, the other ranks pass None and a shape")
        attrs = {"group": self.group_of(group), "root": root}
        if x is not None:
            return self.emit("broadcast", (x,), attrs, [name])[0]
        if shape is None:
            raise BuildError("broadcast: a rank that is not the root says what shape it gets")
        made = self.declare(self.fresh(name), TensorType(tuple(shape), dtype))
        self.ops.append(Op("broadcast", (), (made.name,), attributes(attrs), self.phase, None, caller()))
        return made

    def send(self, x: Tensor, peer: Value, tag: int = 0, batch: str | None = None) -> None:
        attrs: dict[str, Any] = {"peer": peer} | ({"tag": tag} if tag else {}) | ({"batch": batch} if batch else {})
        self.emit("send", (x,), attrs)

    def recv(
        self, shape: tuple[int, ...], peer: Value, dtype: str = "f32", tag: int = 0, batch: str | None = None, name: str = "recv"
    ) -> Tensor:
        attrs: dict[str, Any] = {"peer": peer, "shape": shape, "dtype": dtype}
        attrs |= ({"tag": tag} if tag else {}) | ({"batch": batch} if batch else {})
        return self.emit("recv", (), attrs, [name])[0]


def boxes(mesh: Mesh, ranks: frozenset[int], within: Mapping[str, int] | None = None) -> Iterator[dict[str, int]]:
    """Coordinates whose ranks are together exactly these, each once: an axis is fixed only where the ranks are not alike along it."""
    fixed = dict(within or {})
    if len(ranks) == mesh.size // math.prod(mesh.length(a) for a in fixed):
        yield fixed
        return
    for axis in (a for a in mesh.names if a not in fixed):
        cuts: dict[int, set[int]] = {}  # coordinate → its ranks
        for r in ranks:
            cuts.setdefault(mesh.coordinates(r)[axis], set()).add(r)
        first = {mesh.moved(r, axis, 0) for r in next(iter(cuts.values()))}
        if len(cuts) < mesh.length(axis) or any({mesh.moved(r, axis, 0) for r in found} != first for found in cuts.values()):
            for i, found in sorted(cuts.items()):
                yield from boxes(mesh, frozenset(found), {**fixed, axis: i})
            return


class PlanBuilder:
    def __init__(self, name: str, mesh: Mesh, ops: OpTable = OPS):
        self.name = name
        self.mesh = mesh
        self.table = ops
        self.groups: dict[str, tuple[int, ...]] = {}
        self.lineage: list[Layout] = []
        self._templates: list[Template] = []
        self._mesh_groups: dict[tuple[str, ...], list[str]] = {}  # axes → each rank's group

    def group(self, name: str, ranks: Sequence[int]) -> str:
        """A group by an explicit, ordered list of ranks."""
        self.groups[name] = tuple(ranks)
        return name

    def mesh_group(self, rank: int, axes: tuple[str, ...]) -> str:
        """The name of a rank's group along mesh axes."""
        if axes not in self._mesh_groups:
            for axis in axes:
                if axis not in self.mesh.names:
                    raise BuildError(f"{self.mesh} has no axis {axis!r} and the plan no such group")
            found: dict[tuple[int, ...], list[int]] = {}
            keys = []
            for r in range(self.mesh.size):
                keys.append(tuple(c for a, c in self.mesh.coordinates(r).items() if a not in axes))
                found.setdefault(keys[-1], []).append(r)
            names = {key: f"{'+'.join(axes)}.{i}" for i, key in enumerate(found)}
            self.groups.update({names[key]: tuple(ranks) for key, ranks in found.items()})
            self._mesh_groups[axes] = [names[key] for key in keys]
        return self._mesh_groups[axes][rank]

    @contextmanager
    def ranks(self, *numbers: int, name: str | None = None, **where: int) -> Iterator[RankBuilder]:
        """The ranks at these mesh coordinates (or these numbers); lineage declared inside holds on them, and on no others."""
        if numbers and where:
            raise BuildError("ranks by their numbers, or by their coordinates, not both")
        twice = next((n for n, times in Counter(numbers).items() if times > 1), None)
        if twice is not None:
            raise BuildError(f"rank {twice} is given twice")
        try:
            chosen = tuple(numbers) or self.mesh.ranks(**where)
        except ValueError as error:
            raise BuildError(str(error)) from error
        outside = next((n for n in chosen if not 0 <= n < self.mesh.size), None)
        if outside is not None:
            raise BuildError(f"{self.mesh} has no rank {outside}")
        shown = ["rank", ",".join(map(str, numbers[:8]))] if numbers else [f"{a}{i}" for a, i in where.items()] or ["all"]
        label = name or "".join(shown)
        r = RankBuilder(self, label, chosen, list(boxes(self.mesh, frozenset(numbers))) if numbers else [where], self.table)
        yield r
        self._templates.append(Template(r.program(), chosen, dict(r._columns)))

    def build(self) -> Plan:
        return Plan(self.name, self.mesh, tuple(self._templates), dict(self.groups), tuple(self.lineage))


def plan(name: str, mesh: Mesh, ops: OpTable = OPS) -> PlanBuilder:
    """Start a plan."""
    return PlanBuilder(name, mesh, ops)
