"""Digits listed at random."""

from __future__ import annotations

import random
from collections.abc import Callable

from trainverify.axes.system import System


def some(seed: int, share: float) -> Callable[[System], None]:
    """Lists digits at random."""

    def freeze(system: System) -> None:
        rng = random.Random(seed)
        axes = system.inference.axes
        for a in {id(leaf): leaf for x in system.inference.all for leaf in axes.leaves([x])}.values():
            if rng.random() < share:
                axes.freeze(a)

    return freeze
