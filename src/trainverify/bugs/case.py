"""What a case of the bug corpus is: where the bug was, what it does, and what an explanation should say.

Cause, tensors and lines are expectations. They follow from the bug, never from what the verifier prints.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from trainverify.graph.plan import Plan
from trainverify.graph.program import Program

Pair = tuple[Program, Plan]
MARK = "# bug"  # a trailing comment: the line whose op is wrong


class Cause(Enum):
    """Why a plan is wrong: a closed list, one sentence each."""

    MISSING_REDUCTION = "A rank uses its own share where the sum over ranks is needed."
    EXTRA_REDUCTION = "A value that is whole on every rank is summed over ranks once more."
    EARLY_REDUCTION = "Ranks are summed before the last contribution, or before an op that must come first."
    WRONG_REDUCTION = "A reduction combines its operands in another way: the average in place of the sum."
    WRONG_GROUP = "A collective runs over other ranks than it should."
    WRONG_DIMENSION = "A tensor is cut or joined along another dimension."
    WRONG_ORDER = "A tensor has the right elements in another order."
    WRONG_BLOCK = "A rank takes another part of a tensor than its own."
    WRONG_INPUT = "An op reads another tensor than the one that is meant."
    STALE_INPUT = "An op reads a tensor from before a step whose result nothing uses."
    COUNTED_TWICE = "A contribution is added more than once."
    LOST_CONTRIBUTION = "A contribution is not added."
    WRONG_FACTOR = "A value has a factor too much or too little."
    UNEQUAL_WEIGHTS = "Parts of different sizes are weighted as if they had one size."
    RESCALED_SUM = "A factor is applied to the whole accumulated value each time, not to each contribution."
    OPTIMIZER_SETTING = "The optimizer runs with another rule, step number or weight decay."
    MISSING_UPDATE = "A parameter or state keeps its old value."


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
