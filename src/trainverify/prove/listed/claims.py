"""Claims about blocks of tensors, as records, and whoever proposes them: an equation counts once it is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

from trainverify.axes.system import System
from trainverify.graph.program import Op
from trainverify.primitives.node import Node
from trainverify.prove.algebra.grids import Grid, Key
from trainverify.prove.algebra.places import Dims


@dataclass(frozen=True)
class BlockClaim:
    """A block of a tensor of the plan is a factor times a block of a logical tensor, with its dimensions in this order."""

    block: Key
    tensor: int  # by the number that `add` gave it
    other: Key
    factor: Fraction
    order: tuple[int, ...]


class Proposer(Protocol):
    """No answer is believed: a wrong one costs time, or a proof."""

    def add(self, name: str, dims: Dims, values: Any = None) -> int | None:
        """The number of a logical tensor, or of a step within a logical op with these values; None if nothing is said of it."""

    def steps(self, op: Op, nodes: Sequence[Node]) -> Sequence[Any]:
        """Values of steps within a logical op."""

    def of(self, rank: int, tensor: str, dims: Dims, blocks: Sequence[Key]) -> Iterable[BlockClaim]:
        """Claims about some blocks of a tensor on a rank."""


Propose = Callable[[System, Callable[[Dims], Grid]], Proposer | None]  # None: the plan is too large
