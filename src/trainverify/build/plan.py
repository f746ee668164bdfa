"""Building plans: one block of code per group of ranks that run the same program.

```python
p = tv.plan("mlp", tv.Mesh(dp=2, tp=2))
with p.ranks() as r:
    x = r.input("x", (4, 8), "(dp b) k")
    w = r.parameter("w", (3, 8), "(tp o) k")
    y = r.all_gather(r.linear(x, w), group="tp", dim=1, backward="slice")
```
`group` is a mesh axis (or several), `peer` a change of coordinates. Every collective whose result is
differentiated names its backward; nothing is inserted for it. docs/building-plans.md shows all of it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

from trainverify.build.program import Declaring, domain_of
from trainverify.build.tape import BuildError, Conjugate, Tape, Tensor, caller
from trainverify.graph.gradients import GRADIENT
from trainverify.graph.lineage import Form, Layout, Placement, Reduction, layout
from trainverify.graph.mesh import Mesh
from trainverify.graph.plan import Plan, Template
from trainverify.graph.program import Op, Ref, Role, Value, attributes, resolve
from trainverify.graph.types import DTYPES, TensorType
from trainverify.ops import OPS
from trainverify.ops.table import OpTable

Spelling = str | Mapping[str, Placement] | Form


def _same(tape: Tape, op: Op, given: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    return given


def _conjugate(name: str, **attrs: Any) -> Conjugate:
    """A collective of the gradient, over the group of the op itself unless `attrs` has another."""

    def apply(tape: Tape, op: Op, given: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        (g,) = given
        assert g is not None
        own = {} if "group" in attrs else {"group": op.get("group")}
        return tape.emit(name, (g,), {**own, **attrs}, [f"{op.inputs[0]}.grad"], op.source, op.outputs[0])

    return apply


def _slice(tape: Tape, op: Op, given: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Own block of the gradient of an all_gather: position in the group, times the block."""
    (g,) = given
    assert g is not None
    assert isinstance(tape, RankBuilder)
    dim = op.get("dim", 0)
    block = tape.block(op.get("group"), dim, tape.tensors[str(op.inputs[0])].shape[dim])
    return tape.emit("slice", (g,), block, [f"{op.inputs[0]}.grad"], op.source, op.outputs[0])


def conjugate(op: str, backward: str | None, attrs: Mapping[str, Any]) -> Conjugate | None:
    """What a collective does backward, by the name the user gave."""
    if backward in (None, "none"):
        return None
    dim = attrs.get("dim", 0)
    table: dict[str, Conjugate] = {
        "identity": _same,
        "all_reduce": _conjugate("all_reduce"),
        "all_reduce avg": _conjugate("all_reduce", op="avg"),
        "all_gather": _conjugate("all_gather", dim=dim),
        "reduce_scatter": _conjugate("reduce_scatter", dim=dim),
        "reduce_scatter avg": _conjugate("reduce_scatter", dim=dim, op="avg"),
        "slice": _slice,
        "all_to_all": _conjugate("all_to_all", split_dim=attrs.get("concat_dim"), concat_dim=attrs.get("split_dim")),
    }
    if backward not in table:
        raise BuildError(f"{op}: no backward {backward!r}; choose one of {', '.join(table)} or none")
    return table[backward]


class Optimizer(Protocol):
    """A rule that updates parameters: `tv.SGD`, `tv.AdamW`."""

    @property
    def op(self) -> str: ...

    def state(self) -> tuple[tuple[str, str | None], ...]: ...

    def attrs(self, parameter: str) -> dict[str, object]: ...


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
        self._homes: dict[str, tuple[str, Spelling]] = {}  # parameter → the logical one, and how it lives here

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

    def block(self, group: Value, dim: int, width: int) -> dict[str, Value]:
        """A slice of so many elements at each rank's position in its group."""
        start, stop = (self.each_rank(lambda rank, end=end: (self.position(rank, group) + end) * width) for end in (0, 1))  # type: ignore[misc]
        return {"dim": dim, "start": start, "stop": stop}

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
        if isinstance(form, str) and form in DTYPES:
            raise BuildError(f"{tensor.name}: {form!r} is no layout; a plan's tensors have name, shape, layout, and dtype={form!r} by name")
        made = layout(logical, form, tensor.name, None, fixed, partial)
        self._plan.lineage += [replace(made, where=tuple(where.items())) for where in self._where]

    def output(self, tensor: Tensor, role: Role, of: str | None = None, form: Spelling | None = None) -> None:
        """Report a result. A gradient lives as its parameter does, or as `form` says: a part of it, or flat."""
        super().output(tensor, role, of)
        if form is not None:
            if role != "gradient" or of is None:
                raise BuildError(f"output: only a gradient has a layout of its own, not a {role}")
            self.lives(tensor, GRADIENT + self._homes.get(of, (of,))[0], form)

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
        self._homes[name] = (logical or name, form)
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

    def optimizer(
        self,
        how: Optimizer,
        weight: Tensor,
        grad: Tensor,
        *,
        shard: Tensor | None = None,
        form: Spelling | None = None,
        master: bool = False,
    ) -> Tensor:
        """A parameter's step by `tv.SGD(…)` or `tv.AdamW(…)`; its state is declared and updated, under the names of `tv.complete`.

        State lives as the parameter does. A rank that updates a part only (ZeRO) gives that part, `shard`, and how it lives,
        `form`; it gets the part's new value, and updates the parameter itself once it has the whole. `master` keeps an
        f32 copy that is updated in place of the parameter.
        """
        logical, home = self._homes.get(weight.name, (weight.name, None))
        lives = home if form is None else form
        if lives is None:
            raise BuildError(f"optimizer: {weight.name!r} is no parameter of these ranks")
        if (shard is None) != (form is None) and not master:
            raise BuildError(f"optimizer: of a part of {weight.name!r} say both what it is (shard=…) and how it lives (form=…)")
        before, self.phase = self.phase, "optimizer"
        old = weight if shard is None else shard
        if grad.shape != old.shape and not (master and form is not None):
            raise BuildError(f"optimizer: gradient {grad} of {old}")
        if master:
            old = self.state(f"{weight.name}.master", grad.shape, lives, f"{logical}.master")
            grad = grad if grad.type.dtype == "f32" else self.emit("to", (grad,), {"dtype": "f32"}, [f"{weight.name}.grad32"])[0]
        kind = old.type.dtype
        slots = [self.state(f"{weight.name}.{s}", grad.shape, lives, f"{logical}.{s}", kind, domain=d) for s, d in how.state()]
        new = self.emit(how.op, (old, grad, *slots), how.attrs(logical), [f"{t.name}.new" for t in (old, *slots)])
        for state, value in zip([*([old] if master else []), *slots], new[0 if master else 1 :], strict=True):
            self.update(state, value)
        made = new[0]
        if master and made.type.dtype != weight.type.dtype:
            (made,) = self.emit("to", (made,), {"dtype": weight.type.dtype}, [f"{weight.name}.working"])
        if form is None:
            self.update(weight, made)
        self.phase = before
        return made

    # -- communication ------------------------------------------------------------------------------------------------

    def __getattr__(self, op: str) -> Callable[..., Any]:
        apply = super().__getattr__(op)
        if not self.table[op.removesuffix("_")].collective:
            return apply

        def communicate(*inputs: Tensor | None, group: Any = None, backward: str | None = "undeclared", **attrs: Any) -> Any:
            if group is None:
                raise BuildError(f"{op} needs group=…: a mesh axis ({', '.join(self._plan.mesh.names)}), several, or a group of the plan")
            made = apply(*inputs, group=self.group_of(group), **attrs)
            if backward != "undeclared":
                self._conjugates[len(self.ops) - 1] = conjugate(op, backward, attrs)
            return made

        return communicate

    def copy(self, x: Tensor, group: str | Sequence[str], name: str | None = None, op: str = "sum") -> Tensor:
        """The tensor itself; backward all-reduces its gradient over the group (Megatron's f), or averages it (`op="avg"`)."""
        (made,) = self.emit("identity", (x,), {}, [name or x.name + ".copy"])
        how = {} if op == "sum" else {"op": op}
        self._conjugates[len(self.ops) - 1] = _conjugate("all_reduce", group=self.group_of(group), **how)
        return made

    def own_block(
        self, x: Tensor, *, group: str | Sequence[str], dim: int = 0, backward: str | None = "all_gather", name: str | None = None
    ) -> Tensor:
        """This rank's block of a tensor that all ranks of the group have.

        Backward gathers the blocks' gradients (Megatron's scatter), or is that of the slice alone: `backward="slice.grad"`.
        """
        reference = self.group_of(group)
        count = self.members(resolve(reference, self.bindings()))
        if not -len(x.shape) <= dim < len(x.shape) or x.shape[dim] % count:
            raise BuildError(f"own_block: dimension {dim} of {x} does not divide among {count} ranks")
        (made,) = self.emit("slice", (x,), self.block(reference, dim, x.shape[dim] // count), [name or x.name + ".block"])
        if backward not in ("all_gather", "slice.grad", "none", None):
            raise BuildError(f"own_block: no backward {backward!r}; choose one of all_gather, slice.grad or none")
        if backward != "slice.grad":
            gather = _conjugate("all_gather", group=reference, dim=dim)
            self._conjugates[len(self.ops) - 1] = gather if backward == "all_gather" else None
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
        self._allowed: list[str] = []
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

    def allow(self, approximation: str) -> None:
        """The plan deviates here on purpose: `local-batch-norm`, `node-limited-routing:groups=8,top=4`. Every report says so."""
        self._allowed.append(approximation)

    def build(self) -> Plan:
        return Plan(self.name, self.mesh, tuple(self._templates), dict(self.groups), tuple(self.lineage), allow=tuple(self._allowed))


def plan(name: str, mesh: Mesh, ops: OpTable = OPS) -> PlanBuilder:
    """Start a plan."""
    return PlanBuilder(name, mesh, ops)
