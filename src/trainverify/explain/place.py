"""Where a plan goes wrong: the answer of every way to look for it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from trainverify.explain.cause import Cause
from trainverify.graph.program import Op, Source


@dataclass(frozen=True)
class Place:
    """The first wrong tensor: the logical tensor that is missing, and the plan's op that stands where it should be."""

    logical: str
    logical_op: Op | None
    rank: int
    tensor: str
    op: Op | None
    cause: str  # one line: what the values show
    category: Cause | None = None
    repair: str | None = None  # what to change, and at which line
    others: tuple[str, ...] = ()  # tensors that have the same wrong with them
    used: Source | None = None  # of a gradient that is a share only: where the user's code takes it for the whole one
    given: Source | None = None  # of an op whose inputs are others than it needs: where the user's code hands them over

    @property
    def named(self) -> str:
        """The tensor; of one of several gradients of a tensor also which one it is: `w.grad.2 (the gradient of w by y)`."""
        numbered = re.fullmatch(r"(.+)\.grad\.\d+", self.tensor)
        if numbered is None or self.op is None or self.op.phase != "backward":
            return self.tensor
        which = ", summed up" if self.op.name == "add" else "" if self.op.forward is None else f" by {self.op.forward}"
        return f"{self.tensor} (the gradient of {numbered[1]}{which})"

    @property
    def line(self) -> Source | None:
        """The user's line to look at."""
        return self.used or self.given or (None if self.op is None else self.op.source)


@dataclass(frozen=True)
class Known:
    """What a proof attempt found out: which logical tensor a rank's tensor is, and which are there completely."""

    held: Mapping[tuple[int, str], str] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()
