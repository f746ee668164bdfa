"""The slots of a generated file, and a piece of a program: its lines for each of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from tools.steps.code import Code

SLOTS: Final = (
    "top",  # classes, functions and globals of the file
    "init",  # in the model's __init__
    "inner",  # in the model's forward, where h is the hidden activation
    "setup",  # after model and optimizer are built
    "begin",  # at the start of a step
    "losses",  # after the loss, before the backward pass
    "local",  # after the backward pass, before gradients are reduced
    "reduce",
    "reduced",  # after gradients are reduced
    "update",
    "after",  # after the update
    "extra",  # entries of the dictionary of what else is compared
    "metrics",  # entries of the dictionary that the step returns besides the loss
)


@dataclass(frozen=True)
class Piece:
    name: str
    slots: Mapping[str, Code] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if unknown := set(self.slots) - set(SLOTS):
            raise KeyError(f"{self.name}: no slots {sorted(unknown)}")


@dataclass(frozen=True)
class Setting:
    """What a piece has to know of the program it goes into."""

    cut: bool  # ranks have parts of the batch: means over it are reduced
    whole: bool  # every rank holds whole parameters
    accumulates: bool  # several backward passes in a step
    hidden: int  # features of h
    stateless: bool  # the optimizer keeps nothing and is linear in the gradients


def slot(pieces: Iterable[Piece], name: str) -> Code:
    return tuple(piece.slots[name] for piece in pieces if name in piece.slots)
