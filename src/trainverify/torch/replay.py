"""Replay: the *translated* programs, run in our numeric domain on all ranks, against the user's code run for real.

A translation that loses or invents something shows here as a number. Every output of every rank is compared, element by element.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.domains.numeric import NUMERIC
from trainverify.evaluate.run import PlanValues, random_points, run_logicals, run_plans
from trainverify.evaluate.small import Small, shrink_system
from trainverify.graph.obligations import obligations
from trainverify.graph.plan import units
from trainverify.graph.program import Program
from trainverify.ops import OPS
from trainverify.ops.table import OpTable
from trainverify.torch.captured import is_condition
from trainverify.torch.eager import Outputs, run_eagerly
from trainverify.torch.inputs import Batch
from trainverify.torch.judge import Pair
from trainverify.torch.launch import Failed, run
from trainverify.torch.reading import MOST_BRANCHES
from trainverify.translate.targets import CaptureError, Target, resolve
from trainverify.verdicts import FULL, related

MOST: Final = 4_000_000_000  # elements of all tensors of all ranks, most of which are dropped once they are used
TOLERANCE: Final = 2e-4  # of the largest element of a tensor: float32 against float64


@dataclass(frozen=True)
class Mismatch:
    rank: int | None  # None: the reference
    output: str
    error: float

    def __str__(self) -> str:
        return f"{_who(self.rank)}: {self.output} differs by {self.error:.2g} of its largest element"


@dataclass(frozen=True)
class Replay:
    compared: int
    worst: float
    mismatches: tuple[Mismatch, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        return not self.mismatches and not self.missing and self.compared > 0

    def __str__(self) -> str:
        if self.agrees:
            return f"replay: {self.compared} outputs of the translated programs agree with real runs (worst difference {self.worst:.1g})"
        return "; ".join(["replay does not agree", *map(str, self.mismatches[:5]), *self.missing[:5]])


@dataclass(frozen=True)
class Evaluated:
    """Both programs in our numeric domain, at the sizes they were captured at."""

    made: Pair
    small: Small
    inputs: Mapping[str, Array]
    logical: Mapping[str, Array]
    plan: PlanValues

    @cached_property
    def rows(self) -> dict[int, tuple[int, int]]:
        """Class and row of a rank."""
        return {rank: (c, row) for c, k in enumerate(self.small.classes) for row, rank in enumerate(k.ranks)}

    def program(self, rank: int | None) -> Program:
        return self.made.logical if rank is None else self.small.classes[self.rows[rank][0]].program

    def value(self, rank: int | None, tensor: str) -> Array | None:
        return self.logical.get(tensor) if rank is None else self.plan.get(*self.rows[rank], tensor)

    def sources(self, rank: int | None) -> dict[str, Array]:
        """What a rank starts from."""
        if rank is None:
            return dict(self.inputs)
        return {n: v for n in self.program(rank).sources if (v := self.value(rank, n)) is not None}

    def at(self, inputs: Mapping[str, Array]) -> Evaluated:
        """The same programs at other values."""
        ours = _ends(self.made.logical)
        theirs = [(c, n) for c, k in enumerate(self.small.classes) for n in _ends(k.program)]
        with np.errstate(all="ignore"):
            (logical,) = run_logicals(self.small, [inputs], NUMERIC, ours)
            (plan,) = run_plans(self.small, self.made.plan.lineage, [inputs], NUMERIC, theirs)
        return Evaluated(self.made, self.small, inputs, logical, plan)


def evaluated(made: Pair, ops: OpTable = OPS, seed: int = 0) -> Evaluated:
    """Both programs at random values."""
    parts = units(made.plan)
    wanted, _ = obligations(made.logical, made.plan, parts)
    system = related(made.logical, made.plan, ops, parts, wanted)
    small = shrink_system(system, base=FULL, most=MOST)
    random_points(small, [seed], _ends(made.logical))
    return Evaluated(made, small, {}, {}, PlanValues()).at(small.points[seed])


def _ends(program: Program) -> list[str]:
    """What is looked at: sources and outputs. Other tensors are dropped once they are used."""
    return [*program.sources, *(o.tensor for o in program.outputs)]


def replay(
    reference: Target,
    distributed: Target,
    world_size: int,
    batch: Batch,
    made: Pair,
    ops: OpTable = OPS,
    seed: int = 0,
    seconds: float = 300.0,
) -> Replay:
    """Both programs at the sizes they were captured at, and the code they come from, on the same random values."""
    ours = evaluated(made, ops, seed)
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")

        def one(target: Target, rank: int | None) -> Callable[[], Outputs]:
            values, names = ours.sources(rank), ours.program(rank).sources
            return lambda: run_eagerly(resolve(target), batch, values, rank, world_size, store, names)

        works = [one(reference, None), *(one(distributed, r) for r in range(world_size))]
        real = run(works, together=True, seconds=seconds)
    good: dict[int | None, Outputs] = {}
    for i, result in enumerate(real):
        rank = None if i == 0 else i - 1
        if isinstance(result, Failed):
            raise CaptureError(f"{_who(rank)}, run for real: {result.kind}: {result.message}")
        good[rank] = result
    return compared(ours, good)


def compared(ours: Evaluated, real: Mapping[int | None, Outputs], tolerance: float = TOLERANCE) -> Replay:
    """Every output of every process that ran, element by element."""
    found: list[Mismatch] = []
    missing: list[str] = []
    compared, worst = 0, 0.0
    for rank, result in real.items():
        for o in ours.program(rank).outputs:
            if o.role == "metric" and is_condition(o.of, MOST_BRANCHES):
                continue
            value, theirs = ours.value(rank, o.tensor), result.get((o.role, o.of))
            combined = o.role == "loss" and o.tensor.startswith("loss.")  # for the report only
            if theirs is None and combined:
                continue
            if value is None or theirs is None:
                missing.append(f"{_who(rank)}: {o} is not there to compare")
                continue
            if combined and rank is not None:
                continue
            error = _difference(np.asarray(value), theirs)
            compared, worst = compared + 1, max(worst, error)
            if not error <= tolerance:
                found.append(Mismatch(rank, str(o), error))
    return Replay(compared, worst, tuple(found), tuple(missing))


def _who(rank: int | None) -> str:
    return "the reference" if rank is None else f"rank {rank}"


def _difference(ours: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any]) -> float:
    """The largest difference, relative to the largest element; infinite for another shape."""
    if ours.shape != theirs.shape:
        return float("inf")
    if not ours.size:
        return 0.0
    scale = max(float(np.abs(theirs).max()), 1e-6)
    return float(np.abs(ours - theirs).max()) / scale


__all__ = ["Evaluated", "Mismatch", "Replay", "compared", "evaluated", "replay"]
