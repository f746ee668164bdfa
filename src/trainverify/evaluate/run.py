"""Running both programs at small sizes in any array domain, ranks stacked in front."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from trainverify.domains.arrays import Array, ArrayDomain
from trainverify.domains.ball import Ball, balls
from trainverify.domains.numeric import NUMERIC
from trainverify.evaluate.small import Small
from trainverify.graph.lineage import Layout, region
from trainverify.graph.program import Domain

MAGNITUDES: Final = (1.0, 0.125, 0.015625)
_FILL: Any = {"real": 0.0, "int": 0, "bool": False}


_NONE: Final[frozenset[int]] = frozenset()


class NotComputed(Exception):
    """A tensor that no op ever computed (a plan that never gets there)."""


def random_inputs(small: Small, seed: int) -> dict[str, Array]:
    """Values for everything the logical program starts from: small numbers, repeated ids, uneven masks.

    A mean over 4096 still divides by 4096 at size 2, so that norms make large numbers of small ones: where the logical
    program overflows, inputs are smaller.
    """
    if seed not in small.points:
        for magnitude in MAGNITUDES:
            small.points[seed] = inputs = _random_inputs(small, seed, magnitude)
            with np.errstate(all="ignore"):
                values = run_logical(small, inputs, NUMERIC)
            made = [values[o.tensor] for o in small.logical.outputs]
            if all(v.dtype.kind != "f" or bool(np.isfinite(v).all()) for v in made):
                break
    return small.points[seed]


def _random_inputs(small: Small, seed: int, magnitude: float) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    program = small.logical
    values: dict[str, Array] = {}
    for n in program.sources:
        values[n] = sample(rng, program.tensors[n].kind, small.shapes[n], small.domains.get(n), magnitude)
    return values


def sample(rng: np.random.Generator, kind: str, shape: tuple[int, ...], domain: Domain | None, magnitude: float = MAGNITUDES[0]) -> Array:
    if kind == "bool":
        return rng.random(shape) < 0.6
    if kind == "int":
        ids = rng.integers(0, max(1, 4 if domain is None or domain.size is None else domain.size), shape)
        if domain is not None and domain.ignore is not None and ids.size > 1:
            flat = ids.reshape(-1)
            flat[rng.random(ids.size) < 0.3] = domain.ignore
            flat[rng.integers(0, ids.size)] = 0  # never all ignored
        return ids
    values = rng.uniform(-0.9, 0.9, shape) * magnitude
    match domain.kind if domain is not None else None:
        case "nonnegative" | "positive":
            return np.abs(values) + 0.05 * magnitude
        case "indicator":
            return (values > -0.3 * magnitude).astype(np.float64)
    return values


def run_logical(small: Small, inputs: Mapping[str, Array], domain: ArrayDomain) -> dict[str, Array]:
    values = {n: _in_domain(v, domain) for n, v in inputs.items()}
    for step in small.logical_steps:
        args = [None if i is None else values[i] for i in step.inputs]
        values.update(zip(step.outputs, domain.run(step.nodes, args), strict=True))
    return values


def _in_domain(value: Array, domain: ArrayDomain) -> Array:
    return balls(value) if isinstance(domain, Ball) else value


@dataclass
class PlanValues:
    """values[class][tensor] has one row per rank of the class; rows not computed are marked in `done`."""

    values: list[dict[str, Array]] = field(default_factory=list)
    done: list[dict[str, set[int]]] = field(default_factory=list)

    def get(self, c: int, row: int, tensor: str) -> Array | None:
        return self.values[c][tensor][row, ...] if row in self.done[c].get(tensor, ()) else None

    def put(self, c: int, rows: tuple[int, ...], tensor: str, value: Array, ranks: int) -> None:
        store = self.values[c]
        if len(rows) == ranks and tensor not in store:
            store[tensor] = value
        else:
            if tensor not in store:
                store[tensor] = np.empty((ranks, *value.shape[1:]), dtype=value.dtype)
            elif not store[tensor].flags.writeable:
                store[tensor] = store[tensor].copy()
            store[tensor][list(rows)] = value
        self.done[c].setdefault(tensor, set()).update(rows)


def run_plan(small: Small, lineage: tuple[Layout, ...], inputs: Mapping[str, Array], domain: ArrayDomain) -> PlanValues:
    """All ranks of the plan from the same inputs as the logical program, cut by lineage."""
    out = PlanValues([{} for _ in small.classes], [{} for _ in small.classes])
    known = set(lineage)
    holders: dict[tuple[int, str], list[Layout]] = {}
    for lay, rank in small.parts:
        if lay in known:
            holders.setdefault((rank, lay.local), []).append(lay)
    for c, k in enumerate(small.classes):
        for n in k.program.sources:
            shape, kind = small.local_shapes[c][n], k.program.tensors[n].kind
            rows = [local_value(small, holders.get((r, n), []), r, shape, inputs, kind) for r in k.ranks]
            out.put(c, tuple(range(len(rows))), n, _in_domain(np.stack(rows), domain), len(rows))
    users: list[dict[str, list[int]]] = [{} for _ in small.classes]
    ready: list[list[int]] = [list(range(len(k.order))) for k in small.classes]  # to look at, the first in the program first
    started: list[set[int]] = [set() for _ in small.classes]
    for c, k in enumerate(small.classes):
        for at, step in enumerate(k.order):
            for i in step.inputs:
                if i is not None:
                    users[c].setdefault(i, []).append(at)

    def arrived(c: int, tensor: str) -> None:
        for n in users[c].get(tensor, ()):
            if n not in started[c]:
                heapq.heappush(ready[c], n)

    def advance(c: int) -> None:
        """Run every local step whose inputs are there."""
        k = small.classes[c]
        while ready[c]:
            n = heapq.heappop(ready[c])
            step = k.order[n]
            if n in started[c] or not all(i is None or out.done[c].get(i, _NONE).issuperset(step.rows) for i in step.inputs):
                continue
            started[c].add(n)
            full = len(step.rows) == len(k.ranks)
            args = [None if i is None else out.values[c][i] if full else out.values[c][i][list(step.rows)] for i in step.inputs]
            for name, value in zip(step.outputs, domain.run(step.nodes, args, (len(step.rows),)), strict=True):
                out.put(c, step.rows, name, np.asarray(value), len(k.ranks))
                arrived(c, name)

    for c in range(len(small.classes)):
        advance(c)
    for meeting in small.meetings:
        _meet(small, meeting, out, domain)
        got = {(c, tensor) for group in meeting.receivers for c, _, tensor in group}
        for c, tensor in got:
            arrived(c, tensor)
        for c in {c for c, _ in got}:
            advance(c)
    return out


def _meet(small: Small, meeting: Any, out: PlanValues, domain: ArrayDomain) -> None:
    stacks = []
    for group in meeting.senders:
        members = []
        for c, row, tensor in group:
            value = out.get(c, row, tensor)
            if value is None:
                raise NotComputed(f"{tensor} on rank {small.classes[c].ranks[row]}")
            members.append(np.asarray(value))
        stacks.append(np.stack(members))
    given = np.stack(stacks)
    result = given if meeting.nodes is None else domain.run(meeting.nodes, [given], (len(stacks),))[0]
    for g, group in enumerate(meeting.receivers):
        for i, (c, row, tensor) in enumerate(group):
            out.put(c, (row,), tensor, result[g, i, ...][None], len(small.classes[c].ranks))


def local_value(small: Small, layouts: list[Layout], rank: int, shape: tuple[int, ...], inputs: Mapping[str, Array], kind: str) -> Array:
    """What a rank's source holds, cut out of the logical inputs."""
    first = next((inputs[lay.logical] for lay in layouts), None)
    local = np.full(shape, _FILL[kind], dtype=np.float64 if first is None else first.dtype)
    for lay in layouts:
        whole = inputs[lay.logical].reshape(-1)
        for part in small.parts[lay, rank]:
            if not part.padding:
                target = region(part, local)
                target[...] = whole[small.positions(part, lay.logical)].reshape(target.shape)
    return local


def elements(small: Small) -> int:
    """A measure of the work: elements of all tensors of all ranks."""
    logical = sum(math.prod(s) for s in small.shapes.values())
    local = [sum(math.prod(s) for s in shapes.values()) for shapes in small.local_shapes]
    return logical + sum(len(k.ranks) * n for k, n in zip(small.classes, local, strict=True))
