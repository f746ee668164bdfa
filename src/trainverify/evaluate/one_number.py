"""Both programs at reduced sizes where every input is one number: what differs there differs by what was reduced, or at any size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainverify.domains.numeric import NUMERIC
from trainverify.evaluate.compare import DIFFERENT, suspects
from trainverify.evaluate.moved import PointName
from trainverify.evaluate.run import NotComputed, random_inputs, run_logical, run_plan
from trainverify.evaluate.small import Small
from trainverify.graph.lineage import Layout
from trainverify.graph.obligations import Obligation


def differing(small: Small, lineage: tuple[Layout, ...], several: Sequence[Obligation], point: PointName) -> set[Obligation]:
    """Obligations that clearly differ there; none where nothing can be computed."""
    inputs = {n: np.full_like(v, v.reshape(-1)[0]) if v.size else v for n, v in random_inputs(small, point).items()}
    found: set[Obligation] = set()
    try:
        logical, local = run_logical(small, inputs, NUMERIC), run_plan(small, lineage, inputs, NUMERIC)
        for o in several:
            if any(s.distance > DIFFERENT for s in suspects(small, [o], logical, local)[0]):
                found.add(o)
    except NotComputed:
        return found
    return found
