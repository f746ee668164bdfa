"""A change that could put a plan right: which tensors get other values, and how these are made."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.domains.numeric import NUMERIC
from trainverify.evaluate.small import Meeting
from trainverify.explain.cause import Cause
from trainverify.explain.replay import Edits, Node
from trainverify.graph.mesh import Mesh
from trainverify.graph.program import Op
from trainverify.primitives.node import Node as Primitive

Site = tuple[Node, ...]
Read = Callable[[Node], Array]
Sender = tuple[int, int, str]  # class, row, tensor


@dataclass(frozen=True)
class Repair:
    text: str  # the mistake that it would undo
    edits: Edits
    cause: Cause | None = None
    over: str | None = None  # the mesh axes of a sum that is missing
    named: Node | None = None  # the tensor to name, if it is not one that gets other values


def running(nodes: list[tuple[Primitive, ...]], slot: int, c: int, inputs: Sequence[str | None]) -> Callable[[Read], Array]:
    """A local op, row by row; equal rows together."""

    def make(read: Read) -> Array:
        args = [None if i is None else read((c, i)) for i in inputs]
        groups: dict[int, list[int]] = {}
        for row, n in enumerate(nodes):
            groups.setdefault(id(n), []).append(row)
        result: list[Array] = [None] * len(nodes)
        for rows in groups.values():
            part = [None if a is None else a[rows] for a in args]
            made = NUMERIC.run(nodes[rows[0]], part, (len(rows),))[slot]
            for row, value in zip(rows, made, strict=True):
                result[row] = value
        return np.stack(result)

    return make


@dataclass(frozen=True, eq=False)
class Arrival:
    """What one rank gets in a rendezvous: its place among those that take, and who gives."""

    meeting: Meeting
    senders: tuple[Sender, ...]
    place: int

    def same(self, other: Arrival) -> bool:
        mine, theirs = self.meeting.nodes, other.meeting.nodes
        return (self.senders, self.place) == (other.senders, other.place) and (mine is theirs or mine == theirs)


def arriving(rows: Sequence[Arrival]) -> Callable[[Read], Array]:
    """What ranks get, row by row; one rendezvous is run once."""

    def make(read: Read) -> Array:
        done: dict[tuple[int, tuple[Sender, ...]], Array] = {}
        result = []
        for a in rows:
            key = (id(a.meeting), a.senders)
            if key not in done:
                stack = np.stack([np.asarray(read((c, t)))[row, ...] for c, row, t in a.senders])[None]
                done[key] = stack if a.meeting.nodes is None else NUMERIC.run(a.meeting.nodes, [stack], (1,))[0]
            result.append(done[key][0, a.place, ...])
        return np.stack(result)

    return make


def axes_of(mesh: Mesh) -> list[tuple[str, ...]]:
    """Mesh axes along which ranks could talk: one, or two."""
    real = [n for n, s in mesh.axes if s > 1]
    return [combo for n in (1, 2) for combo in itertools.combinations(real, n)]


def short(op: Op) -> str:
    shown = ", ".join(f"{k}={v}" for k, v in op.attrs if k not in ("tag", "batch", "wrt", "given"))
    return f"{op.name}({shown})" if shown else op.name
