"""A counterexample to be shown to people: both programs at small sizes, inputs of few digits, and the outputs that differ there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.domains.numeric import EXTENDED, NUMERIC
from trainverify.evaluate.compare import DIFFERENT, needed_for, suspects
from trainverify.evaluate.run import NotComputed, run_logicals, run_plans
from trainverify.evaluate.small import Small
from trainverify.graph.lineage import Layout
from trainverify.graph.obligations import Obligation
from trainverify.graph.program import Domain

DIGITS = (1, 2, 3)  # of the largest inputs, tried before all digits


@dataclass(frozen=True)
class Example:
    """Both programs as far as `wanted` needs them, and inputs."""

    small: Small
    lineage: tuple[Layout, ...]
    wanted: tuple[Obligation, ...]
    inputs: Mapping[str, Array]


def differing(small: Small, lineage: tuple[Layout, ...], wanted: Sequence[Obligation], inputs: Mapping[str, Array]) -> list[Obligation]:
    """Obligations that clearly differ on some inputs, in float64 and with more digits."""
    found: list[list[Obligation]] = []
    names = {o.output.tensor for o in wanted}
    for domain in (NUMERIC, EXTENDED):
        with np.errstate(all="ignore"):
            (logical,) = run_logicals(small, [inputs], domain, names)
            (plan,) = run_plans(small, lineage, [inputs], domain)
        try:
            wrong, _ = suspects(small, wanted, logical, plan)
        except NotComputed:
            return []
        found.append([s.obligation for s in wrong if s.distance > DIFFERENT])
    return [o for o in dict.fromkeys(found[0]) if o in found[1]]


def simplest(
    small: Small, lineage: tuple[Layout, ...], wanted: Sequence[Obligation], target: Obligation | None, inputs: Mapping[str, Array]
) -> Example | None:
    """The example with the fewest digits in which `target` differs (or anything); None if there is none."""
    for values in _simpler(small, inputs):
        found = differing(small, lineage, wanted, values)
        if found and (target is None or target in found):
            kept = needed_for(small, found)
            return Example(kept, lineage, tuple(found), values)
    return None


def _simpler(small: Small, inputs: Mapping[str, Array]) -> Iterator[dict[str, Array]]:
    for digits in DIGITS:
        yield {n: _rounded(v, digits, small.domains.get(n)) for n, v in inputs.items()}
    yield dict(inputs)


def _rounded(value: Array, digits: int, domain: Domain | None) -> Array:
    """Decimal numbers, the largest with so many digits; integers, truth values and indicators stay."""
    largest = float(np.abs(value).max(initial=0.0)) if value.dtype.kind == "f" else 0.0
    if not 0 < largest < np.inf or (domain is not None and domain.kind == "indicator"):
        return value
    places = digits - math.ceil(math.log10(largest))
    least = 10.0**-places if domain is not None and domain.kind == "positive" else -np.inf
    most = np.inf if domain is None else domain.most
    short = [min(float(f"{max(x, least):.{max(places, 0)}f}") + 0.0, most) for x in value.reshape(-1)]
    return np.array(short, dtype=value.dtype).reshape(value.shape)
