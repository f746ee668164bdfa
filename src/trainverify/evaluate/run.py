"""Running both programs at small sizes in any array domain, ranks stacked in front."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final

import numpy as np

from trainverify.domains.arrays import Array, ArrayDomain
from trainverify.domains.ball import Ball, balls
from trainverify.domains.numeric import EXTENDED, NUMERIC, SHAKEN, Extended
from trainverify.evaluate.flow import Flow, Tensor, logical_tasks, tasks_of
from trainverify.evaluate.moved import Moved, PointName, changed
from trainverify.evaluate.small import NotJoined, Small
from trainverify.graph.lineage import Layout, region
from trainverify.graph.program import Domain
from trainverify.primitives.node import Node, ordered

MAGNITUDES: Final = (1.0, 0.125, 0.015625)
UNSEEN: Final = (0.125, 0.015625, 1.0)  # where noise is not looked for: at real widths 1.0 is noisy
NOISE: Final = 1e-11  # relative, of a value that float64 computes well enough
REMEMBERED: Final = 1000  # programs on points
_NOISY: Final[dict[bytes, int]] = {}  # how many outputs of programs with these inputs and results lose digits
LOOKED_AT: Final = 20_000_000  # elements up to which it is looked for
IN_DIGITS: Final = 1_000_000  # up to which that is done with more digits, in which many machines are slow
_FILL: Any = {"real": 0.0, "int": 0, "bool": False}


class NotComputed(Exception):
    """A tensor that no op ever computed (a plan that never gets there)."""


def random_inputs(small: Small, seed: PointName) -> dict[str, Array]:
    """Values for everything the logical program starts from: small numbers, repeated ids, uneven masks."""
    if seed not in small.points:
        if isinstance(seed, Moved):
            small.points[seed] = _moved(small, seed)
        else:
            random_points(small, [seed])
    return small.points[seed]


def _moved(small: Small, point: Moved) -> dict[str, Array]:
    """The random point of its seed, changed."""
    values = dict(random_inputs(small, point.seed))
    places = {n: i for i, n in enumerate(small.logical.sources)}
    for name, change in ((n, c) for n, c in point.changes if n in values):  # an evaluation of one output need not have all sources
        kind, domain, place = small.logical.tensors[name].kind, small.domains.get(name), places[name]
        if change.seed is not None:
            largest = float(np.abs(values[name]).max(initial=0.0)) if kind == "real" else 0.0
            rng = np.random.default_rng((change.seed, point.seed, place))
            values[name] = sample(rng, kind, small.shapes[name], domain, largest or MAGNITUDES[0])
        values[name] = changed(values[name], change, kind, domain, np.random.default_rng((point.seed, place)))
    return values


def random_points(small: Small, seeds: Sequence[PointName], keep: Collection[str] | None = None) -> list[dict[str, Array]]:
    """Random inputs for several points, and the values of the logical program there (of what is in `keep`).

    A mean over 4096 still divides by 4096 at size 2, so that norms make large numbers of small ones: the logical program may
    overflow, or a softmax saturate. Of some magnitudes the first is taken at which float64 keeps its digits.
    """
    for s in seeds:
        if isinstance(s, Moved):
            random_inputs(small, s)
    best: tuple[int, list[dict[str, Array]], list[dict[str, Array]]] | None = None
    for magnitude in MAGNITUDES if _looked_at(small, len(seeds)) else UNSEEN:
        points = [small.points[s] if s in small.points else _random_inputs(small, s, magnitude) for s in seeds]
        with np.errstate(all="ignore"):
            values = run_logicals(small, points, NUMERIC, keep)
        if all(s in small.points for s in seeds):
            return values
        count = noisy(small, points, values)
        if best is None or count < best[0]:
            best = count, points, values
        if not count:
            break
    assert best is not None
    small.points.update(zip(seeds, best[1], strict=True))
    return best[2]


def _elements(small: Small, points: int) -> int:
    return points * sum(math.prod(s) for s in small.shapes.values())


def _looked_at(small: Small, points: int) -> bool:
    return _elements(small, points) <= LOOKED_AT


def noisy(small: Small, points: Sequence[Mapping[str, Array]], values: Sequence[Mapping[str, Array]]) -> int:
    """How many outputs have no value, or lose digits to rounding."""
    made = [o.tensor for o in small.logical.outputs if o.tensor in values[0] and values[0][o.tensor].dtype.kind == "f"]
    infinite = sum(not np.isfinite(v[n]).all() for v in values for n in made)
    if infinite or not _looked_at(small, len(points)):
        return infinite * len(made)
    key = _digest([a for p in points for _, a in sorted(p.items())], [v[n] for v in values for n in made])
    if key not in _NOISY:
        if len(_NOISY) >= REMEMBERED:
            _NOISY.clear()
        with np.errstate(all="ignore"):
            other = run_logicals(small, points, EXTENDED if _elements(small, len(points)) <= IN_DIGITS else SHAKEN, made)
            _NOISY[key] = sum(
                bool(np.abs(v[n] - b[n]).max(initial=0) > NOISE * np.abs(v[n]).max(initial=0))
                for v, b in zip(values, other, strict=True)
                for n in made
            )
    return _NOISY[key]


def _digest(*arrays: Sequence[Array]) -> bytes:
    """Equal for equal inputs and results: many plans of one model are looked at in one process."""
    made = blake2b(digest_size=16)
    for group in arrays:
        for a in group:
            made.update(repr((a.dtype.str, a.shape)).encode())
            made.update(np.ascontiguousarray(a).tobytes())
    return made.digest()


def _random_inputs(small: Small, seed: PointName, magnitude: float) -> dict[str, Array]:
    assert isinstance(seed, int)
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
            return np.minimum(np.abs(values) + 0.05 * magnitude, domain.most if domain is not None else np.inf)
        case "indicator":
            return (values > -0.3 * magnitude).astype(np.float64)
    return values


def run_logical(small: Small, inputs: Mapping[str, Array], domain: ArrayDomain) -> dict[str, Array]:
    return run_logicals(small, [inputs], domain)[0]


def run_logicals(
    small: Small, points: Sequence[Mapping[str, Array]], domain: ArrayDomain, keep: Collection[str] | None = None
) -> list[dict[str, Array]]:
    """The logical program on several points at once; with `keep`, other tensors are dropped once they are used."""
    key = ("logical", len(points), None if keep is None else frozenset(keep))
    if key not in small.flows:
        small.flows[key] = Flow(logical_tasks(small), [1], len(points), None if keep is None else {(0, n) for n in keep})
    values = {n: _in_domain(np.stack([p[n] for p in points]), domain) for n in points[0]}
    small.flows[key].run([values], domain)
    return [{n: v[i, ...] for n, v in values.items()} for i in range(len(points))]


def _in_domain(value: Array, domain: ArrayDomain) -> Array:
    if isinstance(domain, Extended) and value.dtype.kind == "f":
        return value.astype(np.longdouble)
    return balls(value) if isinstance(domain, Ball) else value


@dataclass
class PlanValues:
    """values[class][tensor] has one row per rank of the class; rows that are there are in `done`."""

    values: list[dict[str, Array]] = field(default_factory=list)
    done: list[dict[str, Collection[int]]] = field(default_factory=list)

    def get(self, c: int, row: int, tensor: str) -> Array | None:
        return self.values[c][tensor][row, ...] if row in self.done[c].get(tensor, ()) else None


def run_plan(small: Small, lineage: tuple[Layout, ...], inputs: Mapping[str, Array], domain: ArrayDomain) -> PlanValues:
    """All ranks of the plan from the same inputs as the logical program, cut by lineage."""
    return run_plans(small, lineage, [inputs], domain)[0]


def run_plans(
    small: Small,
    lineage: tuple[Layout, ...],
    points: Sequence[Mapping[str, Array]],
    domain: ArrayDomain,
    keep: Collection[Tensor] | None = None,
) -> list[PlanValues]:
    """The plan on several points at once; with `keep`, other tensors are dropped once they are used."""
    ranks = [len(k.ranks) for k in small.classes]
    key = ("plan", len(points), None if keep is None else frozenset(keep))
    if key not in small.flows:
        small.flows[key] = Flow(tasks_of(small), ranks, len(points), keep)
    if small.joined and not small.flows[key].complete:
        raise NotJoined("ranks of one program wait for each other")
    values = local_sources(small, lineage, points, domain, None if keep is None else small.flows[key].reads | frozenset(keep))
    partly = small.flows[key].run(values, domain)
    everybody = [range(n) for n in ranks]
    done = [{n: partly[c].get(n, everybody[c]) for n in tensors} for c, tensors in enumerate(values)]
    cut = []
    for i in range(len(points)):
        own = [{n: v[i * ranks[c] : (i + 1) * ranks[c]] for n, v in tensors.items()} for c, tensors in enumerate(values)]
        cut.append(PlanValues(own, done))
    return cut


def local_sources(
    small: Small,
    lineage: tuple[Layout, ...],
    points: Sequence[Mapping[str, Array]],
    domain: ArrayDomain,
    needed: Collection[Tensor] | None,
) -> list[dict[str, Array]]:
    """What every rank starts from, by class; points one after the other."""
    known = set(lineage)
    holders: dict[tuple[int, str], list[Layout]] = {}
    for lay, rank in small.parts:
        if lay in known:
            holders.setdefault((rank, lay.local), []).append(lay)
    values: list[dict[str, Array]] = []
    for c, k in enumerate(small.classes):
        values.append({})
        for n in [n for n in k.program.sources if needed is None or (c, n) in needed]:
            one = holders.get((k.ranks[0], n), []) if k.ranks else []
            if len(one) == 1 and all(holders.get((r, n)) == one for r in k.ranks):
                index = small.index(c, one[0], k.ranks)
                if index is not None:
                    flat = np.stack([p[one[0].logical].reshape(-1) for p in points])
                    values[c][n] = _in_domain(flat[:, index].reshape(len(points) * len(index), *index.shape[1:]), domain)
                    continue
            shape, kind = small.local_shapes[c][n], k.program.tensors[n].kind
            rows = [local_value(small, holders.get((r, n), []), r, shape, p, kind) for p in points for r in k.ranks]
            values[c][n] = _in_domain(np.stack(rows), domain)
    return values


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


def products(small: Small) -> int:
    """Numbers that its contractions multiply and add up."""
    return sum(added * rows for _, added, rows in costs(small))


def costs(small: Small) -> Iterator[tuple[int, int, int]]:
    """Of every op the elements that it makes, on its way too, the products that its contractions add up, and for how many ranks."""
    for s in (*small.logical_steps, *(s for k in small.classes for s in k.order)):
        yield *_cost(s.nodes), len(s.rows)
    for m in small.meetings:
        if m.nodes is not None:
            yield *_cost(m.nodes), len(m.wiring.senders)


@lru_cache(maxsize=1 << 13)
def _cost(nodes: tuple[Node, ...]) -> tuple[int, int]:
    every = ordered(nodes)
    return sum(math.prod(n.shape) for n in every), sum(math.prod(_labels(n).values()) for n in every if n.prim == "contract")


def _labels(node: Node) -> Mapping[int, int]:
    return {label: n for term, a in zip(node.attrs[0], node.args, strict=True) for label, n in zip(term, a.shape, strict=True)}
