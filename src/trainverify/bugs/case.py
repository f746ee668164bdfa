"""What a case of the bug corpus is: where the bug was, what it does, and what an explanation should say.

Cause, tensors and lines are expectations. They follow from the bug, never from what the verifier prints.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainverify.explain.cause import Cause
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program

Pair = tuple[Program, Plan]
MARK = "# bug"  # a trailing comment: the line whose op is wrong


@dataclass(frozen=True)
class Case:
    """A right plan and a wrong one of the same training step."""

    id: str
    title: str
    reference: str  # where the bug was reported or fixed
    mechanism: str  # what goes wrong, in one sentence
    cause: Cause
    tensors: tuple[str, ...]  # of the plan: those that the wrong op makes; an explanation may name any of them
    build: Callable[[bool], Pair]  # right → (logical, plan)

    def lines(self) -> frozenset[tuple[str, int]]:
        """File name and number of the lines whose op is wrong: those marked in the source of the case."""
        source, first = inspect.getsourcelines(self.build)
        name = Path(inspect.getsourcefile(self.build) or "").name
        return frozenset((name, first + i) for i, line in enumerate(source) if line.rstrip().endswith(MARK))


def case(
    id: str, title: str, *, reference: str, mechanism: str, cause: Cause, tensors: tuple[str, ...]
) -> Callable[[Callable[[bool], Pair]], Case]:
    """The case that a function builds, which returns the right plan or the wrong one."""
    return lambda build: Case(id, title, reference, mechanism, cause, tensors, build)
