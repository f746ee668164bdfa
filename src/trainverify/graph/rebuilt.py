"""Both programs at other sizes: a plan without a verdict may be refuted there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainverify.graph.plan import Plan
from trainverify.graph.program import Program


@dataclass(frozen=True)
class Rebuilt:
    """Both programs built anew by the code that builds them, so that every number in them is what it is at these sizes."""

    sizes: str  # as a report names them: "batch=2"
    build: Callable[[], tuple[Program, Plan | Program]]
