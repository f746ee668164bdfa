"""Collectives: ordinary tensor operations on the axis of group members (dimension 0 of every argument here).

Position on that axis is position in the group's list. `members` is the size of the group.
The attribute `group` names a group of the plan; `root` and `peer` are global ranks; neither changes the formula.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

from trainverify.ops.table import collective, op
from trainverify.primitives import node as F
from trainverify.primitives.node import Node

Reduction = Literal["sum", "avg", "max", "min", "prod"]


def combine(x: Node, op: str) -> Node:
    """One value from all members'."""
    if op in ("max", "min", "prod"):
        return F.reduce(op, x, [0])
    result = F.total(x, [0])
    return result * Fraction(1, x.shape[0]) if op == "avg" else result


def everywhere(x: Node, members: int) -> Node:
    """The same value on every member."""
    return F.broadcast(x, (members, *x.shape), tuple(range(1, x.ndim + 1)))


def joined(x: Node, dim: int) -> Node:
    """Members' blocks one after the other along a dimension of the block."""
    d = F.axis(dim, x.ndim - 1)
    moved = F.move(x, 0, d)
    return F.reshape(moved, (*moved.shape[:d], moved.shape[d] * moved.shape[d + 1], *moved.shape[d + 2 :]))


def divided_among(x: Node, dim: int, members: int) -> Node:
    """A value cut into `members` equal blocks along a dimension; a new dimension 0 runs over the blocks."""
    d = F.axis(dim, x.ndim)
    if x.shape[d] % members:
        raise F.ShapeError(f"dimension {d} of size {x.shape[d]} does not divide among {members} members")
    cut = F.reshape(x, (*x.shape[:d], members, x.shape[d] // members, *x.shape[d + 1 :]))
    return F.move(cut, d, 0)


@collective("all_reduce", example="x[a,b]; group='g'")
def all_reduce(x: Node, *, members: int, group: str, op: Reduction = "sum") -> Node:
    """Sum (or avg, max, min, prod) over the members, on every member."""
    return everywhere(combine(x, op), members)


@collective("all_gather", example="x[a,b]; group='g'")
def all_gather(x: Node, *, members: int, group: str, dim: int = 0) -> Node:
    """The members' blocks joined along `dim` in group order, on every member."""
    return everywhere(joined(x, dim), members)


@collective("reduce_scatter", example="x[a=6,b]; group='g'")
def reduce_scatter(x: Node, *, members: int, group: str, dim: int = 0, op: Reduction = "sum") -> Node:
    """Sum (or avg, max, min, prod) over the members; each keeps the block at its own position."""
    return divided_among(combine(x, op), dim, members)


@collective("all_to_all", example="x[a=6,b]; group='g', split_dim=0, concat_dim=1")
def all_to_all(x: Node, *, members: int, group: str, split_dim: int, concat_dim: int) -> Node:
    """Each member cuts its tensor along `split_dim`, sends block j to member j, joins what it gets along `concat_dim`."""
    d = F.axis(split_dim, x.ndim - 1) + 1
    if x.shape[d] % members:
        raise F.ShapeError(f"dimension {d - 1} of size {x.shape[d]} does not divide among {members} members")
    cut = F.reshape(x, (*x.shape[:d], members, x.shape[d] // members, *x.shape[d + 1 :]))
    swapped = F.move(cut, d, 0)  # [receiver, sender, …]
    c = F.axis(concat_dim, x.ndim - 1) + 1
    moved = F.move(swapped, 1, c)
    return F.reshape(moved, (*moved.shape[:c], moved.shape[c] * moved.shape[c + 1], *moved.shape[c + 2 :]))


@collective("broadcast", senders="root", example="x[a,b]; group='g', root=0")
def broadcast(x: Node, *, members: int, group: str, root: int) -> Node:
    """The root's tensor on every member."""
    return everywhere(F.reshape(x, x.shape[1:]), members)


@collective("reduce", receivers="root", example="x[a,b]; group='g', root=0")
def reduce(x: Node, *, members: int, group: str, root: int, op: Reduction = "sum") -> Node:
    """Sum (or avg, max, min, prod) over the members, on the root only."""
    return everywhere(combine(x, op), 1)


@collective("scatter", senders="root", example="x[a=6,b]; group='g', root=0")
def scatter(x: Node, *, members: int, group: str, root: int, dim: int = 0) -> Node:
    """The root's tensor cut into equal blocks along `dim`, one for each member."""
    return divided_among(F.reshape(x, x.shape[1:]), dim, members)


@collective("gather", receivers="root", example="x[a,b]; group='g', root=0")
def gather(x: Node, *, members: int, group: str, root: int, dim: int = 0) -> Node:
    """The members' blocks joined along `dim` in group order, on the root only."""
    return everywhere(joined(x, dim), 1)


@op("send", "communication", point_to_point=True)
def send(x: Node, *, peer: int, tag: int = 0, batch: str | None = None) -> tuple[Node, ...]:
    """Hands a tensor to rank `peer`, whose matching `recv` returns it. A `batch` starts together, up to where a result of it is used."""
    return ()


@op("recv", "communication", point_to_point=True)
def recv(*, peer: int, shape: tuple[int, ...], dtype: str = "f32", tag: int = 0, batch: str | None = None) -> tuple[Node, ...]:
    """The tensor that rank `peer` sends: the n-th recv from a peer with a tag gets its n-th send."""
    return ()
