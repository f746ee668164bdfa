"""What Python shows of tensors, numbers and objects is what a real run shows, or there is no verdict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import torch.distributed as dist  # noqa: E402

import trainverify.torch as tvt  # noqa: E402
from capture.stepping import stepped  # noqa: E402

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

    report = tvt.verify(lambda: made(1, reference), lambda r, w: made(w, ranks), 2, BATCH, {"dp": 2}, loss={"dp": "avg"}, points=1)
    return report


# -- objects that ranks exchange ----------------------------------------------------------------------------------------


def gathered(early: float, late: float) -> Factor:
    def factor(model: Any, batch: Any) -> Any:
        mine, got = {"k": early}, [None, None]
        dist.all_gather_object(got, mine)
        mine["k"] = late
        return got[1]["k"]  # type: ignore[index]

    return factor


def received(change: int) -> Factor:
    def factor(model: Any, batch: Any) -> Any:
        got: list[Any] = [None, None]
        dist.all_gather_object(object_list=got, obj={"k": 1.0})
        got[change]["k"] = 0.5
        return got[1]["k"]

    return factor


def broadcast(late: float) -> Factor:
    """The ranks that receive have a copy; the one that sends keeps its own."""

    def factor(model: Any, batch: Any) -> Any:
        mine = {"k": 1.0}
        got = [mine]
        dist.broadcast_object_list(got, src=0)
        mine["k"] = late
        return got[0]["k"]

    return factor


@pytest.mark.parametrize(
    ("ranks", "wanted"),
    [
        (gathered(1.0, 0.5), "PROVED"),
        (gathered(0.5, 1.0), "REFUTED"),
        (received(0), "PROVED"),
        (received(1), "REFUTED"),
        (broadcast(1.0), "PROVED"),
        (broadcast(0.5), "REFUTED"),
    ],
)
def test_exchanged_objects_are_copies(ranks: Factor, wanted: str) -> None:
    found = verdict(ranks)
    assert found.verdict == wanted, found.reason
