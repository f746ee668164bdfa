"""Random numbers that a script draws from a generator of its own are data: they are drawn for real, as long as all of them are.

So is a number of 63 bits that it reads of PyTorch's own generator outside a step, which is a seed for another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from trainverify.torch.private import _disable_current_modes

SEEDS: Final = "seeds that the code draws from PyTorch's generator decide which rows come and what parameters start with, and nothing else"
UNSEEDED: Final = 67280421310721  # the seed of a new process
MOST: Final = 1 << 24  # elements of one tensor that are drawn for real


class Draws:
    """Generators by their number, and whether all that was drawn from them is known."""

    def __init__(self) -> None:
        self._left: dict[int, torch.Generator] = {}  # those that did not draw something here which they draw in a real run

    def data(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], stepping: bool) -> torch.Tensor | None:
        """What a call draws, if it makes a tensor on the CPU from such a generator outside a step."""
        generator = kwargs.get("generator")
        if not isinstance(generator, torch.Generator):
            return None
        if generator is torch.default_generator or stepping or id(generator) in self._left or not _plain(args, kwargs):
            self._left[id(generator)] = generator
            return None
        with _disable_current_modes():
            made: torch.Tensor = func(*args, **kwargs)
        return made


def _plain(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call makes a tensor of moderate size on the CPU, and reads none."""
    size = next((a for a in (*args, *kwargs.values()) if isinstance(a, list | tuple)), [a for a in args if isinstance(a, int)][-1:])
    count = 1
    for n in size:
        count *= n if isinstance(n, int) else MOST + 1
    device = kwargs.get("device")
    here = device is None or torch.device(device).type == "cpu"
    return here and count <= MOST and not any(isinstance(a, torch.Tensor) for a in (*args, *kwargs.values()))


def seed_read(t: Any, asked: torch.Tensor, held: Callable[[], object]) -> torch.Tensor | None:
    """The number that a script reads, if it is one of 63 bits that a generator has just drawn that the script has seeded."""
    if asked.numel() != 1 or asked.dtype != torch.int64 or t.step is not None or torch.initial_seed() == UNSEEDED:
        return None
    if getattr(held(), "drawn", None) != ("random()", torch.initial_seed()):
        return None
    t.boundary.assume(SEEDS)
    with _disable_current_modes():
        return torch.empty((), dtype=torch.int64).random_()


__all__ = ["UNSEEDED", "Draws", "seed_read"]
