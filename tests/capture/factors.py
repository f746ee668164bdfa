"""Steps that multiply their gradients by a factor, and the verdict on two of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import trainverify.torch as tvt
from capture.stepping import stepped

BATCH = {"x": tvt.Reals((6, 4), "(dp b) k"), "n": tvt.Ids((1,), "k", below=4)}
Factor = Callable[[Any, Any], Any]  # of the gradients, by the model and the batch


def one(model: Any, batch: Any) -> Any:
    return 1.0


def verdict(ranks: Factor, reference: Factor = one) -> Any:
    """Of ranks and a reference that multiply their gradients by factors."""

    def made(world: int, factor: Factor) -> Any:
        seen: list[Any] = []

        def ending(model: Any) -> None:
            k = factor(model, seen[-1])
            for p in model.parameters():
                p.grad.mul_(k)

        step = stepped(world, ending)

        def watched(batch: Any) -> Any:
            seen.append(batch)
            return step(batch)

        return watched

    return tvt.verify(lambda: made(1, reference), lambda r, w: made(w, ranks), 2, BATCH, {"dp": 2}, loss={"dp": "avg"}, points=1)
