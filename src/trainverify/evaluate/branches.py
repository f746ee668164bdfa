"""Conditions that fall one way at all evaluated points, and points on their other side.

A gradient clip that is computed and never applied cannot be seen where the norm is below its bound. So both programs are
watched while they are evaluated (`Watch`), and for every condition of an op that fell one way only `search` looks for a point on
the other side: magnitudes of all inputs first, then of what the condition depends on, then a climb towards it. A point at which an
output of the logical program is not finite, or at which real numbers are equal that a program orders, is not used.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.domains.numeric import NUMERIC
from trainverify.evaluate.conditions import Side, Sides, Watching, conditions, orders
from trainverify.evaluate.flow import Tensor, logical_tasks, needed, sliced, tasks_of
from trainverify.evaluate.moved import Change, Moved
from trainverify.evaluate.run import PlanValues, elements, noisy, random_inputs, run_logicals, run_plans
from trainverify.evaluate.small import Small, Step
from trainverify.graph.lineage import Layout
from trainverify.graph.program import Op
from trainverify.primitives.node import ordered

WATCHED: Final = 20_000_000  # elements of both programs up to which conditions are watched
AT_ONCE: Final = 8  # points of a search that are run together
TRIED: Final = 96  # points of one search
WORK: Final = 60_000_000  # elements of all points of a search together
CLIMBED: Final = 3  # conditions that are climbed to one by one
CLIMBS: Final = 4  # rounds of each
ALONE: Final = 12  # sources that are changed one by one
CHECKED: Final = 3  # points on the other side whose rounding is looked at, of each condition
LOGICAL: Final = -1
_Check = Literal["clean", "noisy", "unusable"]

Key = tuple[int, int]  # watched step, place of a node in it


@dataclass(frozen=True)
class Condition:
    """A condition with a side that was never reached."""

    op: Op
    logical: bool  # whether it is the logical program's
    kind: str  # the scalar function
    never: Side

    def like(self, other: Condition) -> bool:
        return (self.op.name, self.kind, self.never) == (other.op.name, other.kind, other.never)

    def __str__(self) -> str:
        where = f" ({self.op.source})" if self.op.source else ""
        whose = "" if self.logical else " of the plan"
        text = f"`{self.op}`{whose}{where}"
        if self.kind in ("max", "min"):
            return f"never taken at the evaluated points: the {'first' if self.never else 'second'} number of {self.kind} in {text}"
        if self.kind in ("abs", "sign"):
            return f"never {'positive' if self.never else 'negative'} at the evaluated points: the argument of {self.kind} in {text}"
        return f"never {'true' if self.never else 'false'} at the evaluated points: {text}"


@dataclass
class _Fell:
    """Sides that a condition fell to so far."""

    yes: bool = False
    no: bool = False
    tied: bool = False

    @property
    def never(self) -> Side | None:
        """The side that it never fell to, if there is one."""
        return None if self.yes == self.no else not self.yes


@dataclass
class Watch:
    """Steps of both programs that have conditions, and which way those fell at the points added."""

    small: Small
    steps: list[tuple[int, Step]] = field(init=False)  # with their class of ranks
    fell: dict[Key, _Fell] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        every = [(LOGICAL, s) for s in self.small.logical_steps] + [(c, s) for c, k in enumerate(self.small.classes) for s in k.order]
        self.steps = [(c, s) for c, s in every if conditions(s.nodes) or orders(s.nodes)]

    @property
    def logical(self) -> frozenset[str]:
        """Logical tensors that watched steps read."""
        return frozenset(i for c, s in self.steps if c == LOGICAL for i in s.inputs if i is not None)

    @property
    def local(self) -> frozenset[Tensor]:
        return frozenset((c, i) for c, s in self.steps if c != LOGICAL for i in s.inputs if i is not None)

    def add(self, logical: Sequence[Mapping[str, Array]], plan: Sequence[PlanValues], random: bool = True) -> None:
        """`random`: these are not moved points, and what is equal there is made so by the program itself."""
        for key, sides in self.sides(logical, plan).items():
            seen = self.fell.setdefault(key, _Fell())
            seen.yes |= bool(sides.yes.any())
            seen.no |= bool(sides.no.any())
            seen.tied |= random and bool(sides.tied.any())

    def tied(self, logical: Mapping[str, Array], plan: Sequence[PlanValues]) -> bool:
        """Whether real numbers are equal at a point that a program orders, and that are not equal at random points."""
        new = [key for key, sides in self.sides([logical], plan).items() if sides.tied.any()]
        return any(key not in self.fell or not self.fell[key].tied for key in new)

    def sides(self, logical: Sequence[Mapping[str, Array]], plan: Sequence[PlanValues]) -> dict[Key, Sides]:
        """Which way conditions fall at some points, point by point; those of the plan are left out if it was not run."""
        alike: dict[int, list[int]] = {}
        for i, (c, step) in enumerate(self.steps):
            there = logical[0] if c == LOGICAL else plan[0].values[c] if plan else {}
            if all(n is None or n in there for n in step.inputs):
                alike.setdefault(id(step.nodes), []).append(i)
        found: dict[Key, Sides] = {}
        for several in alike.values():
            blocks = [self._inputs(i, logical, plan) for i in several]
            nodes = self.steps[several[0]][1].nodes
            used = {n.attrs[0] for n in ordered(nodes) if n.prim == "input"}  # others may differ from step to step
            args = [np.concatenate([b[k] for b in blocks]) if k in used else np.zeros(0) for k in range(len(blocks[0]))]
            counts = [len(self.steps[i][1].rows) for i in several]
            points = len(logical)
            domain = Watching(nodes)
            domain.run(nodes, args, (sum(counts) * points,))
            for k, sides in domain.sides.items():
                at = 0
                for i, n in zip(several, counts, strict=True):
                    found[i, k] = _by_point(sides, slice(at, at + n * points), points)
                    at += n * points
        return found

    def _inputs(self, i: int, logical: Sequence[Mapping[str, Array]], plan: Sequence[PlanValues]) -> list[Array]:
        """What a step reads, points one after the other."""
        c, step = self.steps[i]
        rows = list(step.rows)
        found = []
        for name in step.inputs:
            if name is None:
                found.append(np.zeros(0))
            elif c == LOGICAL:
                found.append(np.stack([p[name] for p in logical]))
            else:
                found.append(np.concatenate([p.values[c][name][rows] for p in plan]))
        return found

    def stuck(self) -> dict[Key, Side]:
        """Conditions that fell one way only, and the other side."""
        return {key: seen.never for key, seen in self.fell.items() if seen.never is not None}

    def condition(self, key: Key, never: Side) -> Condition:
        c, step = self.steps[key[0]]
        node = ordered(step.nodes)[key[1]]
        return Condition(step.op, c == LOGICAL, str(node.attrs[0]) if node.prim == "map" else node.prim, never)


def _by_point(sides: Sides, rows: slice, points: int) -> Sides:
    def cut(x: Array) -> Array:
        return x[rows].reshape(points, -1)

    yes, no, tied = cut(sides.yes).any(1), cut(sides.no).any(1), cut(sides.tied).any(1)
    return Sides(yes, no, cut(sides.to_yes).min(1, initial=np.inf), cut(sides.to_no).min(1, initial=np.inf), tied)


def watch(small: Small) -> Watch | None:
    """None where it would be a lot."""
    return Watch(small) if elements(small) <= WATCHED else None


def search(small: Small, lineage: tuple[Layout, ...], seen: Watch, seed: int, logical: bool, seeds: int = 1) -> list[Moved]:
    """Points on the other sides of conditions that fell one way only: of the logical program, which is run alone; or of the plan.

    Every change that reaches one is made to the random points of `seeds` seeds. What the plan shares with the logical program is not
    looked for twice.
    """
    left = {key: side for key, side in seen.stuck().items() if (seen.steps[key[0]][0] == LOGICAL) == logical}
    if not logical:
        known = [c for k, v in seen.stuck().items() if (c := seen.condition(k, v)).logical]
        left = {k: v for k, v in left.items() if not any(c.like(seen.condition(k, v)) for c in known)}
    found = _Search(small, lineage, seen, seed, left).run() if left else []
    return [replace(p, seed=p.seed + i) for i in range(seeds) for p in found]


def unreached(seen: Watch) -> list[Condition]:
    """Sides that no point reached; those of the logical program first, and not once more for the plan."""
    shown: dict[object, Condition] = {}
    for key, side in seen.stuck().items():
        c = seen.condition(key, side)
        if c.logical or not any(o.like(c) for o in shown.values() if o.logical):
            shown.setdefault((c.op.source or str(c.op), c.op.name, c.kind, c.never, c.logical), c)
    return list(shown.values())


def tied(small: Small, lineage: tuple[Layout, ...], seen: Watch, point: Moved) -> bool:
    """Whether a point makes numbers equal that a program orders."""
    inputs = [random_inputs(small, point)]
    (logical,) = run_logicals(small, inputs, NUMERIC, seen.logical)
    return seen.tied(logical, run_plans(small, lineage, inputs, NUMERIC, seen.local))


@dataclass(frozen=True)
class _Tried:
    point: Moved
    sides: Mapping[Key, Sides]
    place: int  # among the points that were run together

    def reaches(self, key: Key, side: Side) -> bool:
        found = self.sides.get(key)
        return found is not None and bool((found.yes if side else found.no)[self.place])

    def distance(self, key: Key, side: Side) -> float:
        found = self.sides.get(key)
        return float("inf") if found is None else float((found.to_yes if side else found.to_no)[self.place])


class _Search:
    """Candidates run what the conditions need, and nothing else; those that reach another side run the whole logical program."""

    def __init__(self, small: Small, lineage: tuple[Layout, ...], seen: Watch, seed: int, left: dict[Key, Side]):
        self.small, self.lineage, self.watch, self.seed, self.left = small, lineage, seen, seed, left
        some = [seen.steps[i] for i in dict.fromkeys(i for i, _ in left)]
        self.logical = frozenset(n for c, s in some if c == LOGICAL for n in s.inputs if n is not None)
        self.local = frozenset((c, n) for c, s in some if c != LOGICAL for n in s.inputs if n is not None)
        self.part = sliced(small, self.logical, self.local)
        self.size = _elements(self.part)
        self.at_once = AT_ONCE if AT_ONCE * self.size <= WATCHED else 1
        self.outputs = {o.tensor for o in small.logical.outputs}
        self.sources = {key: _sources_of(self.part, lineage, *seen.steps[key[0]]) for key in left}
        self.chosen: list[Moved] = []
        self.tried: list[_Tried] = []
        self.checked: dict[Moved, _Check] = {}
        self.count = 0
        self.work = 0

    def run(self) -> list[Moved]:
        for batch in self._rounds():
            self._try(batch, TRIED)
        for n, (key, side) in enumerate(list(self.left.items())[:CLIMBED]):
            self._climb(key, side, TRIED + (n + 1) * CLIMBS * AT_ONCE)
        return self.chosen

    # -- trying ------------------------------------------------------------------------------------------------------

    def _try(self, batch: Sequence[Moved], most: int) -> None:
        """Run points, up to so many in all; keep those that reach another side."""
        for i in range(0, len(batch), self.at_once):
            if not self.left or self.count >= most or self.work >= WORK:
                return
            some = list(batch[i : i + self.at_once])
            self.count += len(some)
            some += [some[-1]] * (self.at_once - len(some))  # always as many: how they run is worked out once
            self._choose(self._run(some))

    def _run(self, points: list[Moved]) -> list[_Tried]:
        """The sides that conditions fall to at some points."""
        inputs = [random_inputs(self.small, p) for p in points]
        self.work += len(points) * self.size
        with np.errstate(all="ignore"):
            logical = run_logicals(self.part, inputs, NUMERIC, self.logical)
            plan = run_plans(self.part, self.lineage, inputs, NUMERIC, self.local) if self.local else ()
            sides = self.watch.sides(logical, plan)
        made = {p: _Tried(p, sides, i) for i, p in enumerate(points)}
        self.tried += made.values()
        return list(made.values())

    def _choose(self, tried: Sequence[_Tried]) -> None:
        """As few points as reach what some of these reach; those without rounding noise first."""
        while True:
            reach = {t.point: [k for k, side in self.left.items() if t.reaches(k, side)] for t in tried}
            best = sorted((p for p, keys in reach.items() if keys), key=lambda p: -len(reach[p]))
            usable = self._usable(best)
            if usable is None:
                break
            self.chosen.append(usable)
            self.left = {k: side for k, side in self.left.items() if k not in reach[usable]}
        for t in tried:
            if t.point not in self.chosen:
                self.small.points.pop(t.point, None)

    def _usable(self, points: Sequence[Moved]) -> Moved | None:
        """The first point without rounding noise; of some with noise, the first that can be used."""
        noisy_ones: list[Moved] = []
        for p in points:
            check = self._check(p)
            if check == "clean" or len(noisy_ones) == CHECKED:
                return p if check == "clean" else noisy_ones[0]
            noisy_ones += [p] if check == "noisy" else []
        return next(iter(noisy_ones), None)

    def _check(self, point: Moved) -> _Check:
        """Whether a point can be used, and what rounding does there."""
        if point not in self.checked:
            inputs = [random_inputs(self.small, point)]
            self.work += sum(math.prod(s) for s in self.small.shapes.values())
            with np.errstate(all="ignore"):
                (logical,) = run_logicals(self.small, inputs, NUMERIC, self.outputs | self.watch.logical)
                finite = all(logical[n].dtype.kind != "f" or bool(np.isfinite(logical[n]).all()) for n in self.outputs)
                if not finite or self.watch.tied(logical, ()):
                    self.checked[point] = "unusable"
                else:
                    self.checked[point] = "noisy" if noisy(self.small, inputs, [logical]) else "clean"
        return self.checked[point]

    # -- which points ------------------------------------------------------------------------------------------------

    def _rounds(self) -> Iterator[list[Moved]]:
        """Points by and by: all that some condition depends on, then parameters, inputs or state of that, then one source alone."""
        program = self.small.logical
        behind = list(dict.fromkeys(n for key in self.left for n in self.sources[key]))
        movable = self._movable(behind)
        text = "all" if len(behind) == len(program.sources) else "all that a condition depends on"
        yield [self._scaled(text, movable, f) for f in (2.0, 4.0, 8.0, 16.0, 64.0, 1 / 4, 1 / 16, 1 / 64)]
        drawn = [self._moved(f"{text} drawn again ({k})", behind, Change(seed=k)) for k in range(1, 5)]
        yield [*drawn, *(self._scaled(text, movable, f, True) for f in (1.0, 8.0, -1.0, -8.0))]
        ids = [n for n in behind if n not in movable]
        if ids:
            yield [self._moved("ids at the ends of their ranges", ids, Change(ends=True))]
        roles = {"parameters": program.parameters, "inputs": program.inputs, "state": program.state}
        parts = {role: [n for n in movable if n in names] for role, names in roles.items()}
        yield [self._scaled(role, names, f) for f in (4.0, 64.0) for role, names in parts.items() if names]
        yield [self._scaled(text, movable, f) for f in (2.0**9, 2.0**14, 2.0**20, 2.0**30, 2.0**-10, 2.0**-20)]
        alone = list(dict.fromkeys(n for pair in zip(movable, reversed(movable), strict=True) for n in pair))[:ALONE]  # first and last ones
        for factor in (16.0, 1 / 64):
            yield [self._scaled(n, [n], factor) for n in alone]
        for factor in (64.0, -64.0):
            yield [self._scaled(n, [n], factor, True) for n in alone]
        for v in self._equal_to():
            yield [self._moved(f"half of {n} set to {v:g}", [n], Change(value=v)) for n in alone]

    def _movable(self, names: Collection[str]) -> list[str]:
        """Sources whose domain allows other magnitudes."""
        fixed = {n for n, d in self.small.domains.items() if d.kind in ("ids", "indicator")}
        return [n for n in names if n not in fixed and self.small.logical.tensors[n].kind != "bool"]

    def _scaled(self, text: str, names: Collection[str], factor: float, magnitude: bool = False) -> Moved:
        what = f"|{text}|" if magnitude else text
        return self._moved(f"{what} × {factor:g}", names, Change(factor, magnitude))

    def _moved(self, text: str, names: Collection[str], change: Change) -> Moved:
        return Moved(self.seed, text, tuple((n, change) for n in names))

    def _equal_to(self) -> list[float]:
        """Literals that real numbers are compared with for equality, where a condition is left that asks for it."""
        found: dict[float, None] = {}
        for (i, k), side in self.left.items():
            node = ordered(self.watch.steps[i][1].nodes)[k]
            if node.prim == "map" and node.args[0].kind == "real" and (node.attrs[0], side) in (("eq", True), ("as_bool", False)):
                found[0.0] = None
                for n in ordered(node.args):
                    if n.prim == "const" and isinstance(n.attrs[0], int | float):
                        found[float(n.attrs[0])] = None
        return list(found)

    def _climb(self, key: Key, side: Side, most: int) -> None:
        """Towards the other side of one condition: of some changes to what it depends on, the one that comes nearest is changed again."""
        names = self.sources[key]
        rng = np.random.default_rng(self.seed)
        for _ in range(CLIMBS):
            near = [t for t in self.tried if np.isfinite(t.distance(key, side))]
            if key not in self.left or not near or not names:
                return
            best = min(near, key=lambda t: t.distance(key, side)).point
            self._try([self._near(best, names, rng) for _ in range(AT_ONCE)], most)

    @staticmethod
    def _near(point: Moved, names: Sequence[str], rng: np.random.Generator) -> Moved:
        """A point with a few more changes."""
        changes = dict(point.changes)
        picked = rng.choice(len(names), size=min(len(names), int(rng.integers(1, 4))), replace=False)
        for n in (names[int(i)] for i in picked):
            old = changes.get(n, Change())
            match int(rng.integers(0, 4)):
                case 0:
                    changes[n] = replace(old, seed=int(rng.integers(1, 1 << 30)))
                case 1:
                    changes[n] = replace(old, magnitude=True, factor=old.factor * float(rng.choice([-1.0, 1.0])))
                case _:
                    changes[n] = replace(old, factor=old.factor * float(rng.choice([0.125, 0.5, 2.0, 8.0])))
        text = "changed by search: " + ", ".join(f"{n} {_shown(c)}" for n, c in itertools.islice(changes.items(), 4))
        return Moved(point.seed, text + (" and more" if len(changes) > 4 else ""), tuple(changes.items()))


def _shown(change: Change) -> str:
    drawn = "" if change.seed is None else f" drawn again ({change.seed})"
    return f"{'as |x|' if change.magnitude else ''}× {change.factor:g}{drawn}"


def _elements(part: Small) -> int:
    """Elements of what the steps of a slice make."""
    found = sum(math.prod(part.shapes[o]) for s in part.logical_steps for o in s.outputs)
    for c, k in enumerate(part.classes):
        found += sum(len(s.rows) * math.prod(part.local_shapes[c][o]) for s in k.order for o in s.outputs)
    return found


def _sources_of(small: Small, lineage: tuple[Layout, ...], c: int, step: Step) -> tuple[str, ...]:
    """Logical sources that a step depends on, the nearest last."""
    tasks = list(logical_tasks(small) if c == LOGICAL else tasks_of(small))
    at = 0 if c == LOGICAL else c
    wanted = [(at, i) for i in step.inputs if i is not None]
    reads = {t for n in needed(tasks, wanted) for t in tasks[n].reads} | set(wanted)
    if c == LOGICAL:
        return tuple(n for n in small.logical.sources if (0, n) in reads)
    local = {n for _, n in reads}
    held = {lay.logical for lay in lineage if lay.local in local}
    return tuple(n for n in small.logical.sources if n in held)
