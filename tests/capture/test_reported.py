"""What a step reports is compared, as a tensor or as a number that was read of one; text of such a number has no value."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import trainverify.torch as tvt  # noqa: E402
from trainverify.graph.mesh import Mesh  # noqa: E402
from trainverify.torch.replay import replay  # noqa: E402

BATCH = {"x": tvt.Reals((6, 4), "(dp b) k")}
Report = Callable[[Any, int], Any]  # of the loss of a rank's rows, and how many ranks there are


def stepped(world: int, told: Report) -> Any:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Any) -> Any:
        optimizer.zero_grad()
        loss = model(batch["x"]).square().mean()
        loss.backward()
        loss = loss.detach()
        if world > 1:
            for t in (*(p.grad for p in model.parameters()), loss):
                dist.all_reduce(t, op=dist.ReduceOp.AVG)
        optimizer.step()
        return told(loss, world)

    return step


def doubled(loss: Any, world: int) -> Any:
    return loss.item() * world


@pytest.mark.parametrize(
    ("told", "verdict"),
    [
        (lambda loss, world: loss.item(), "PROVED"),
        (doubled, "REFUTED"),
        (lambda loss, world: {"loss": loss, "half": loss.item() / 2}, "PROVED"),
        (lambda loss, world: {"loss": loss, "half": doubled(loss, world) / 2}, "REFUTED"),
        (lambda loss, world: {"loss": loss, "parts": 3}, "PROVED"),
        (lambda loss, world: float(f"{loss.item():.4f}"), "UNKNOWN"),
    ],
)
def test_numbers(told: Report, verdict: str) -> None:
    report = tvt.verify(lambda: stepped(1, told), lambda r, w: stepped(w, told), 2, BATCH, {"dp": 2}, points=1)
    assert report.verdict == verdict, report.reason
    assert verdict != "UNKNOWN" or "text of a computed number" in report.reason


def test_replay() -> None:
    """Numbers agree with those of a real run."""
    told: Report = lambda loss, world: {"loss": loss.item(), "half": loss.item() / 2}  # noqa: E731
    one, ranks = (lambda: stepped(1, told)), (lambda r, w: stepped(w, told))
    mesh = Mesh({"dp": 2})
    first, *_ = tvt.captures(one, ranks, 2, BATCH, mesh)
    found = replay(one, ranks, 2, BATCH, tvt.pair(*first, mesh, BATCH))
    assert found.agrees, str(found)


PLAIN: dict[str, tuple[str, Report]] = {
    "rows of all ranks": ("PROVED", lambda loss, world: {"loss": loss, "rows": 6 // world * world, "rate": 0.1 * 3 if world > 1 else 0.3}),
    "rows of one rank": ("UNKNOWN", lambda loss, world: {"loss": loss, "rows": 6 // world}),
    "a number that only ranks return": ("UNKNOWN", lambda loss, world: {"loss": loss} | ({"ranks": world} if world > 1 else {})),
    "a number that only the reference returns": ("UNKNOWN", lambda loss, world: {"loss": loss} | ({"ranks": 1} if world == 1 else {})),
    "a number of NumPy": ("UNKNOWN", lambda loss, world: {"loss": loss, "rows": np.float32(6 / world)}),
    "whether a step is skipped": ("UNKNOWN", lambda loss, world: {"loss": loss, "skipped": world > 1}),
}


@pytest.mark.parametrize(("expected", "told"), PLAIN.values(), ids=PLAIN)
def test_plain_numbers(expected: str, told: Report) -> None:
    """PROVED where they are the reference's; else UNKNOWN, by name."""
    report = tvt.verify(lambda: stepped(1, told), lambda r, w: stepped(w, told), 2, BATCH, {"dp": 2}, points=1)
    assert report.verdict == expected, report.reason
    assert expected == "PROVED" or "returns" in report.reason


def test_a_plain_number_of_a_later_step() -> None:
    """UNKNOWN: ranks count their steps from another number on."""

    def counted(world: int, start: int) -> Any:
        count = itertools.count()
        return stepped(world, lambda loss, world: {"loss": loss, "step": max(start, next(count))})

    def report(start: int) -> Any:
        return tvt.verify(lambda: counted(1, 0), lambda r, w: counted(w, start), 2, BATCH, {"dp": 2}, points=1)

    assert report(0).verdict == "PROVED"
    assert report(2).verdict == "UNKNOWN"
