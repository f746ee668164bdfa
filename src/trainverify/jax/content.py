"""A difference for arbitrary content of arrays need not be one for the content that they have: closed-over arrays and random numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from trainverify.axes.views import NotABoundary
from trainverify.check.findings import names
from trainverify.domains.arrays import Array
from trainverify.domains.numeric import NUMERIC
from trainverify.evaluate.compare import DIFFERENT, suspects
from trainverify.evaluate.run import NotComputed, random_inputs, run_logical, run_plan
from trainverify.evaluate.small import TooMuch, shrink_system
from trainverify.graph.obligations import obligations
from trainverify.graph.plan import Plan, units
from trainverify.graph.program import Program
from trainverify.jax.pair import Translated
from trainverify.jax.randomness import Stream
from trainverify.jax.real_draws import NotDrawn, doubts, really_drawn
from trainverify.ops.table import OpTable
from trainverify.report import Report
from trainverify.verdicts import FULL, MAX_ELEMENTS, related

SEEDS: Final = 3  # random points at which programs are compared with the content that arrays have
OF_DRAWS: Final = 1e-4  # relative: what random numbers of float32 do not explain by rounding

Content = Callable[[Mapping[str, Array], int], Mapping[str, Array]]


def with_content(report: Report, logical: Program, plan: Plan, parts: Sequence[Translated], ops: OpTable) -> Report:
    """The report, without a verdict where the difference is none for real content."""
    return _of_draws(_of_constants(report, logical, plan, parts, ops), logical, plan, parts, ops)


def _of_constants(report: Report, logical: Program, plan: Plan, parts: Sequence[Translated], ops: OpTable) -> Report:
    """A difference for arbitrary content of arrays that the code closes over."""
    known = _constants(parts)
    if report.verdict != "REFUTED" or not known or _differs(logical, plan, lambda given, seed: known, DIFFERENT, ops):
        return report
    return _unknown(report, f"that is so for some content of {names(sorted(known))}")


def _of_draws(report: Report, logical: Program, plan: Plan, parts: Sequence[Translated], ops: OpTable) -> Report:
    """A difference of programs that draw otherwise by the same keys: it has to be one for what JAX draws."""
    one, *ranks = [p.draws for p in parts]
    streams: dict[str, Stream] = {n: s for p in parts for n, s in p.draws.items()}
    doubted = doubts(one, {n: s for p in ranks for n, s in p.items()}) if report.verdict == "REFUTED" else []
    known = _constants(parts)

    def content(given: Mapping[str, Array], seed: int) -> Mapping[str, Array]:
        return {**known, **really_drawn(streams.items(), given, seed)}

    if not doubted or _differs(logical, plan, content, OF_DRAWS, ops):
        return report
    return _unknown(report, f"that rests on random numbers: {doubted[0]}")


def _constants(parts: Sequence[Translated]) -> dict[str, Array]:
    return {n: c.data for p in parts for n, c in p.constants.items()}


def _unknown(report: Report, why: str) -> Report:
    return replace(report, verdict="UNKNOWN", reason=f"{report.reason}; {why}")


def _differs(logical: Program, plan: Plan, content: Content, least: float, ops: OpTable) -> bool:
    """Whether both programs differ at full size for the content that arrays really have."""
    parts = units(plan)
    wanted, _ = obligations(logical, plan, parts)
    try:
        small = shrink_system(related(logical, plan, ops, parts, wanted), base=FULL, most=MAX_ELEMENTS)
        for seed in range(SEEDS):
            inputs = random_inputs(small, seed)
            real = content(inputs, seed)
            given = {n: np.asarray(real[n], v.dtype) if n in real else v for n, v in inputs.items()}
            if any(given[n].shape != v.shape for n, v in inputs.items()):
                return False
            with np.errstate(all="ignore"):
                one, ranks = run_logical(small, given, NUMERIC), run_plan(small, plan.lineage, given, NUMERIC)
            if any(s.distance > least for s in suspects(small, wanted, one, ranks)[0]):
                return True
    except (NotComputed, NotDrawn, TooMuch, NotABoundary, ArithmeticError, ValueError):
        return False
    return False


__all__ = ["with_content"]
