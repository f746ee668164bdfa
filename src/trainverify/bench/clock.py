"""Processor seconds and peak memory by phase, the least of runs that take turns, and how fast a series grows."""

from __future__ import annotations

import math
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

from trainverify.prove.algebra.engine import Prover

C = TypeVar("C")
R = TypeVar("R")
_WALKS: Final = {"_run_logical": "logical", "_run_plan": "plan"}


class Clock:
    """Where the time goes: one phase at a time, the time of an inner one is not counted for the outer one."""

    def __init__(self, name: str = "build") -> None:
        self.seconds: dict[str, float] = {}
        self.peak: dict[str, int] = {}  # bytes, if memory is traced
        self.name = name
        self.began = time.process_time()

    def enter(self, name: str) -> str:
        """The phase that this one ends."""
        now, before = time.process_time(), self.name
        self.seconds[before] = self.seconds.get(before, 0.0) + now - self.began
        if tracemalloc.is_tracing():
            self.peak[before] = max(self.peak.get(before, 0), tracemalloc.get_traced_memory()[1])
            tracemalloc.reset_peak()
        self.name, self.began = name, now
        return before

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before = self.enter(name)
        try:
            yield
        finally:
            self.enter(before)


@contextmanager
def walks(clock: Clock) -> Iterator[None]:
    """The two walks of the prover as phases of their own."""
    kept = {name: getattr(Prover, name) for name in _WALKS}

    def timed(phase: str, walk: Callable[[Prover], None]) -> Callable[[Prover], None]:
        def walked(self: Prover) -> None:
            with clock.phase(phase):
                walk(self)

        return walked

    try:
        for name, walk in kept.items():
            setattr(Prover, name, timed(_WALKS[name], walk))
        yield
    finally:
        for name, walk in kept.items():
            setattr(Prover, name, walk)


def in_turns(cases: Sequence[C], repeat: int, run: Callable[[C, Sequence[R]], R | None]) -> list[list[R]]:
    """Every case several times. They take turns, so that a machine that becomes slower does so for all of them.

    `run` is given what the case gave so far, and may leave a turn out.
    """
    found: list[list[R]] = [[] for _ in cases]
    for _ in range(repeat):
        for mine, case in zip(found, cases, strict=True):
            made = run(case, mine)
            if made is not None:
                mine.append(made)
    return found


def least(runs: Sequence[dict[str, float]], phases: Sequence[str]) -> dict[str, float]:
    """The run that took least, by phase: what other processes add is not the program's."""
    full = max(sum(p in r for p in phases) for r in runs)
    best = min((r for r in runs if sum(p in r for p in phases) == full), key=lambda r: sum(r.get(p, 0.0) for p in phases))
    return {p: best[p] for p in phases if p in best}


def exponent(xs: Sequence[float], ys: Sequence[float]) -> float:
    """The e of y = c·xᵉ that fits best: least squares of the logarithms."""
    a, b = [math.log(x) for x in xs], [math.log(max(y, 1e-9)) for y in ys]
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    spread = sum((x - mean_a) ** 2 for x in a)
    return sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True)) / spread
