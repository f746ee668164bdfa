"""Where a plan goes wrong: the answer of every way to look for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trainverify.graph.program import Op


@dataclass(frozen=True)
class Place:
    """The first wrong tensor: the logical tensor that is missing, and the plan's op that stands where it should be."""

    logical: str
    logical_op: Op | None
    rank: int
    tensor: str
    op: Op | None
    cause: str  # one line: what the values show


@dataclass(frozen=True)
class Known:
    """What a proof attempt found out: which logical tensor a rank's tensor is, and which are there completely."""

    held: Mapping[tuple[int, str], str] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()
