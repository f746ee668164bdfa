"""Replay: the *translated* programs, run in our numeric domain on all ranks, against the user's code run for real.

A translation that loses or invents something shows here as a number. Every output of every rank is compared, element by element.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from trainverify.domains.numeric import NUMERIC
from trainverify.evaluate.run import PlanValues, random_inputs, run_logical, run_plan
from trainverify.evaluate.small import Small, shrink_system
from trainverify.graph.obligations import obligations
from trainverify.graph.plan import units
from trainverify.graph.program import Program
from trainverify.ops import OPS
from trainverify.ops.table import OpTable
from trainverify.torch.eager import Arrays, Outputs, run_eagerly
from trainverify.torch.inputs import Batch
from trainverify.torch.judge import Pair
from trainverify.torch.launch import Failed, run
from trainverify.translate.targets import CaptureError, Target, resolve
from trainverify.verdicts import FULL, MAX_ELEMENTS, related

TOLERANCE: Final = 2e-4  # of the largest element of a tensor: float32 against float64


@dataclass(frozen=True)
class Mismatch:
    rank: int | None  # None: the reference
    output: str
    error: float

    def __str__(self) -> str:
        who = "the reference" if self.rank is None else f"rank {self.rank}"
        return f"{who}: {self.output} differs by {self.error:.2g} of its largest element"


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
    parts = units(made.plan)
    wanted, _ = obligations(made.logical, made.plan, parts)
    system = related(made.logical, made.plan, ops, parts, wanted)
    small = shrink_system(system, base=FULL, most=MAX_ELEMENTS)
    inputs = random_inputs(small, seed)
    with np.errstate(all="ignore"):
        logical = run_logical(small, inputs, NUMERIC)
        plan = run_plan(small, made.plan.lineage, inputs, NUMERIC)
    rows = {rank: (c, row) for c, k in enumerate(small.classes) for row, rank in enumerate(k.ranks)}
    sources = {r: _sources(small, plan, *rows[r]) for r in range(world_size)}
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")

        def one(target: Target, rank: int | None, values: Arrays, names: tuple[str, ...]) -> Callable[[], Outputs]:
            return lambda: run_eagerly(resolve(target), batch, values, rank, world_size, store, names)

        works = [one(distributed, r, sources[r], _program(small, rows[r][0]).sources) for r in range(world_size)]
        real = run([one(reference, None, inputs, made.logical.sources), *works], together=True, seconds=seconds)
    found: list[Mismatch] = []
    missing: list[str] = []
    compared, worst = 0, 0.0
    for i, result in enumerate(real):
        rank = None if i == 0 else i - 1
        if isinstance(result, Failed):
            raise CaptureError(f"{'the reference' if rank is None else f'rank {rank}'}, run for real: {result.kind}: {result.message}")
        program = made.logical if rank is None else _program(small, rows[rank][0])
        for o in program.outputs:
            ours = logical.get(o.tensor) if rank is None else plan.get(*rows[rank], o.tensor)
            theirs = result.get((o.role, o.of))
            if theirs is None and o.role == "loss" and o.tensor.startswith("loss."):
                continue
            if ours is None or theirs is None:
                missing.append(f"{'the reference' if rank is None else f'rank {rank}'}: {o} is not there to compare")
                continue
            if o.role == "loss" and rank is not None and o.tensor.startswith("loss."):
                continue  # combined for the report only
            error = _difference(np.asarray(ours), theirs)
            compared, worst = compared + 1, max(worst, error)
            if not error <= TOLERANCE:
                found.append(Mismatch(rank, str(o), error))
    return Replay(compared, worst, tuple(found), tuple(missing))


def _program(small: Small, c: int) -> Program:
    return small.classes[c].program


def _sources(small: Small, plan: PlanValues, c: int, row: int) -> dict[str, np.ndarray[Any, Any]]:
    return {n: v for n in _program(small, c).sources if (v := plan.get(c, row, n)) is not None}


def _difference(ours: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any]) -> float:
    """The largest difference, relative to the largest element; infinite for another shape."""
    if ours.shape != theirs.shape:
        return float("inf")
    if not ours.size:
        return 0.0
    scale = max(float(np.abs(theirs).max()), 1e-6)
    return float(np.abs(ours - theirs).max()) / scale


__all__ = ["Mismatch", "Replay", "replay"]
