"""Collectives over named axes, permutations, and where a rank is."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainverify.graph.mesh import Mesh
from trainverify.graph.types import TensorType
from trainverify.jax.emit import RankEmitter
from trainverify.jax.mappings.table import Arguments, rows
from trainverify.jax.values import Divergent, Grid, Number, Value, times
from trainverify.translate.emit import Unmapped
from trainverify.translate.groups import bind, by_members

ROWS, row = rows()


def axes_of(value: Any) -> tuple[str, ...]:
    names = value if isinstance(value, tuple | list) else (value,)
    if not all(isinstance(n, str) for n in names):
        raise Unmapped(f"axes {names}")
    return tuple(n for n in names if isinstance(n, str))


def position(mesh: Mesh, rank: int, axes: Sequence[str]) -> int:
    """Where a rank is along axes, the first of them slowest."""
    here, at = mesh.coordinates(rank), 0
    for a in axes:
        at = at * mesh.length(a) + here[a]
    return at


def count(mesh: Mesh, axes: Sequence[str]) -> int:
    total = 1
    for a in axes:
        total *= mesh.length(a)
    return total


def line(mesh: Mesh, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
    """The ranks along axes through a rank, the first axis slowest."""
    here = mesh.coordinates(rank)
    places = itertools.product(*(range(mesh.length(a)) for a in axes))
    return tuple(mesh.rank({**here, **dict(zip(axes, at, strict=True))}) for at in places)


def groups(e: RankEmitter, axes: Sequence[str], parts: Any = None) -> tuple[list[str], int]:
    """The group of every rank, and its size. `parts` lists positions along the axes that form groups of their own."""
    key = ("groups", tuple(axes), repr(parts))
    if key in e.kept:
        return e.kept[key]  # type: ignore[no-any-return]
    names, size = [], count(e.mesh, axes)
    label = ".".join(axes) if not any("." in a for a in axes) else repr(tuple(axes))
    for rank in e.ranks:
        members = line(e.mesh, rank, axes)
        if parts is not None:
            mine = next((p for p in parts if members.index(rank) in p), None)
            if mine is None or len({len(p) for p in parts}) > 1:
                raise Unmapped("axis_index_groups of different sizes, or without a rank")
            members, size = tuple(members[i] for i in mine), len(mine)
        name = f"{label}.{members[0]}" if parts is None else by_members(f"{label}.part", members)
        names.append(bind(e.groups, name, members))
    e.kept[key] = names, size
    return names, size


def together(e: RankEmitter, names: list[str]) -> bool:
    """Whether all members of the groups run this program: what it knows, all of them know."""
    key = ("together", *names)
    if key not in e.kept:
        own = set(e.ranks)
        e.kept[key] = len(own) == e.mesh.size or all(own.issuperset(e.groups[n]) for n in dict.fromkeys(names))
    return bool(e.kept[key])


def _reduced(a: Arguments, op: str) -> tuple[Value, ...]:
    axes, parts = axes_of(a.param("axes")), a.param("axis_index_groups")
    found: list[Value] = []
    for i, x in enumerate(a.operands):
        names, size = groups(a.e, axes, parts)
        if size == 1:
            found.append(x)
        elif not together(a.e, names):  # other members may have something else
            found.append(_all_reduced(a, a.tensor(i), names, op))
        elif isinstance(x, Number) and op == "sum":
            found.append(Number(times(x.value, size), x.shape, x.dtype))
        elif isinstance(x, Grid) and x.literal is not None and op == "sum" and x.dtype != "bool":
            found.append(Grid(x.start * size, x.strides, x.shape, x.dtype))
        elif (isinstance(x, Number) or (isinstance(x, Grid) and x.literal is not None)) and op != "sum":
            found.append(x)
        else:
            found.append(_all_reduced(a, a.tensor(i), names, op))
    return tuple(found)


def _all_reduced(a: Arguments, name: str, names: list[str], op: str) -> str:
    attrs: dict[str, Any] = {"group": names} | ({} if op == "sum" else {"op": op})
    made = a.e.communicate("all_reduce", (name,), attrs, a.e.tensors[name])
    assert made is not None
    return made


@row("psum", "psum_invariant")
def psum(a: Arguments) -> tuple[Value, ...]:
    return _reduced(a, "sum")


@row("pmax")
def pmax(a: Arguments) -> tuple[Value, ...]:
    return _reduced(a, "max")


@row("pmin")
def pmin(a: Arguments) -> tuple[Value, ...]:
    return _reduced(a, "min")


@row("axis_index")
def axis_index(a: Arguments) -> Value:
    axes = axes_of(a.param("axis_name"))
    found = np.array([position(a.e.mesh, r, axes) for r in a.e.ranks], np.int64)
    return Grid(found[:1] if (found == found[0]).all() else found, (), (), a.dtype)


@row("all_gather", "all_gather_invariant")
def all_gather(a: Arguments) -> Value:
    dim, tiled = a.param("all_gather_dimension"), a.param("tiled")
    a.param("axis_size")
    names, size = groups(a.e, axes_of(a.param("axis_name")), a.param("axis_index_groups"))
    x = a.operand(0)
    if isinstance(x, Number) and together(a.e, names):
        return Number(x.value, a.shape, a.dtype)
    name, shape = a.tensor(0), list(a.types[0].shape)
    if not tiled:
        shape.insert(dim, 1)
        name = a.e.reshape(name, tuple(shape))
    if size == 1:
        return name
    return gathered(a.e, name, names, size, dim)


def gathered(e: RankEmitter, name: str, names: list[str], size: int, dim: int) -> str:
    shape = list(e.shape(name))
    shape[dim] *= size
    made = e.communicate("all_gather", (name,), {"group": names, "dim": dim}, TensorType(tuple(shape), e.tensors[name].dtype))
    assert made is not None
    return made


@row("reduce_scatter")
def reduce_scatter(a: Arguments) -> Value:
    dim, tiled = a.param("scatter_dimension"), a.param("tiled")
    a.param("axis_size")
    names, size = groups(a.e, axes_of(a.param("axis_name")), a.param("axis_index_groups"))
    name, shape = a.tensor(0), list(a.types[0].shape)
    if size > 1:
        shape[dim] //= size
        kind = TensorType(tuple(shape), a.dtype)
        name = a.e.communicate("reduce_scatter", (name,), {"group": names, "dim": dim}, kind) or name
    return name if tiled else a.e.reshape(name, a.shape)


@row("all_to_all")
def all_to_all(a: Arguments) -> Value:
    """The primitive is always tiled: `lax.all_to_all` adds and drops dimensions around it."""
    cut, join = a.param("split_axis"), a.param("concat_axis")
    a.ignore("tiled")
    names, size = groups(a.e, axes_of(a.param("axis_name")), a.param("axis_index_groups"))
    if size == 1:
        return a.operand(0)
    attrs = {"group": names, "split_dim": cut, "concat_dim": join}
    made = a.e.communicate("all_to_all", (a.tensor(0),), attrs, TensorType(a.shape, a.dtype))
    assert made is not None
    return made


@row("ppermute")
def ppermute(a: Arguments) -> Value:
    """Every rank sends to at most one and receives from at most one; who receives from nobody has zeros.

    JAX counts positions along several axes as the mesh has them, in whichever order they are named."""
    named, perm = axes_of(a.param("axis_name")), [(int(s), int(t)) for s, t in a.param("perm")]
    axes = tuple(n for n in a.e.mesh.names if n in named)
    sends, receives = dict(perm), {t: s for s, t in perm}
    if len(sends) != len(perm) or len(receives) != len(perm):
        raise Unmapped("a permutation that sends or receives twice")
    e = a.e
    at = [position(e.mesh, r, axes) for r in e.ranks]
    kinds = [(2 if receives.get(p) == p else 0) + (4 if sends.get(p, p) != p else 0) + (8 if receives.get(p, p) != p else 0) for p in at]
    if len(set(kinds)) > 1:
        raise Divergent(np.array(kinds))
    x = a.operand(0)
    if kinds[0] == 2:
        return x
    lines = [line(e.mesh, r, axes) for r in e.ranks]
    batch = f"ppermute.{e.numbered('ppermute')}"
    if kinds[0] & 4:
        peers = [li[sends[p]] for li, p in zip(lines, at, strict=True)]
        e.communicate("send", (a.tensor(0),), {"peer": peers, "batch": batch}, None)
        e.kept["sent", batch] = a.tensor(0)
    if not kinds[0] & 8:
        return (
            Number(0, a.shape, a.dtype) if a.out[0].kind == "real" else Grid(np.zeros(1, np.int64), (0,) * len(a.shape), a.shape, a.dtype)
        )
    peers = [li[receives[p]] for li, p in zip(lines, at, strict=True)]
    kind = TensorType(a.shape, a.dtype)
    made = e.communicate("recv", (), {"peer": peers, "shape": a.shape, "dtype": a.dtype, "batch": batch}, kind)
    assert made is not None
    return made
