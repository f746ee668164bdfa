"""All cases, in the order of their numbers."""

from __future__ import annotations

from trainverify.bugs.case import Case
from trainverify.bugs.cases import (
    biases,
    case_study,
    data_parallel,
    groups,
    layouts,
    losses,
    norms,
    parameters,
    pipelines,
    positions,
    routers,
    tensor_parallel,
)

MODULES = (tensor_parallel, routers, biases, data_parallel, groups, positions, layouts, losses, norms, pipelines, parameters, case_study)
CASES: tuple[Case, ...] = tuple(
    sorted((c for module in MODULES for c in vars(module).values() if isinstance(c, Case)), key=lambda c: int(c.id[1:]))
)

# Cases whose verdicts are not as they should be, and why. Expectations stay as they are.
KNOWN_OPEN: dict[str, str] = {}
