"""What ranks say to each other when they build their models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import trainverify.torch as tvt  # noqa: E402

BATCH = {"x": tvt.Reals((6, 3), "(dp b) k")}
Building = Callable[[Any, int], None]  # given the model and the rank


def built(world: int, rank: int, building: Building) -> Any:
    model = nn.Linear(3, 2)
    if world > 1:
        building(model, rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Any) -> Any:
        optimizer.zero_grad()
        loss = model(batch["x"]).square().mean()
        loss.backward()
        for p in model.parameters() if world > 1 else ():
            dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
        optimizer.step()
        return loss

    return step


def says_nothing(model: Any, rank: int) -> None:
    pass


def receives(model: Any, rank: int) -> None:
    for p in model.parameters():
        dist.broadcast(p.data, src=0)


def adds_up(model: Any, rank: int) -> None:
    for p in model.parameters():
        dist.all_reduce(p.data)


def adds_up_another_tensor(model: Any, rank: int) -> None:
    dist.all_reduce(torch.ones(2))


def leaves_in_the_store(model: Any, rank: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    store.set(f"rank {rank}", "there")


@pytest.mark.parametrize(
    ("building", "verdict", "said"),
    [
        (says_nothing, "PROVED", ""),
        (receives, "PROVED", ""),
        (adds_up, "UNKNOWN", "reduced to before the step"),
        (adds_up_another_tensor, "PROVED", ""),
    ],
)
def test_communication_before_the_step(building: Building, verdict: str, said: str) -> None:
    one, many = lambda: built(1, 0, building), lambda r, w: built(w, r, building)
    report = tvt.verify(one, many, 2, BATCH, {"dp": 2}, loss={"dp": "avg"}, points=1)
    assert report.verdict == verdict, report.reason
    assert said in report.reason


def test_values_in_a_store() -> None:
    """UNKNOWN, or an error that names the line: what ranks leave for each other in the group's store."""
    one, many = lambda: built(1, 0, leaves_in_the_store), lambda r, w: built(w, r, leaves_in_the_store)
    with pytest.raises(Exception, match=r"test_building.py:\d+.*set of the store"):
        tvt.verify(one, many, 2, BATCH, {"dp": 2}, loss={"dp": "avg"}, points=1)


def counted(mine: Callable[[int], int], whole: Callable[[Any], float]) -> Building:
    """A factor that follows from what ranks count together before the step."""

    def building(model: Any, rank: int) -> None:
        total = torch.tensor([mine(rank)])
        dist.all_reduce(total)
        parts = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
        dist.all_gather(parts, torch.tensor([mine(rank)]))
        if total == 0 or sum(int(p) for p in parts) != whole(total):
            raise RuntimeError("nothing to train on")
        factor = 2 * mine(rank) / total.item()
        model.weight.register_hook(lambda g: g * factor)

    return building


@pytest.mark.parametrize(
    ("mine", "whole", "verdict", "said"),
    [
        pytest.param(lambda rank: 3, lambda total: total.item(), "PROVED", "", id="the same on all ranks"),
        pytest.param(
            lambda rank: 3 + rank, lambda total: total.item(), "UNKNOWN", "all_reduce before the step of [[4]]", id="each its own"
        ),
    ],
)
def test_numbers_that_ranks_count_together(mine: Any, whole: Any, verdict: str, said: str) -> None:
    """A real run of each does this, and of the second is wrong: ranks weigh their gradients by 6/7 and 8/7."""
    one, many = lambda: built(1, 0, says_nothing), lambda r, w: built(w, r, counted(mine, whole))
    report = tvt.verify(one, many, 2, BATCH, {"dp": 2}, loss={"dp": "avg"}, points=1)
    assert report.verdict == verdict, report.reason
    assert said in report.reason


def test_a_sum_that_is_not_theirs() -> None:
    """The code stops itself, as in a real run."""
    many = lambda r, w: built(w, r, counted(lambda rank: 3, lambda total: 3))  # noqa: E731
    with pytest.raises(tvt.CaptureError, match="nothing to train on"):
        tvt.verify(lambda: built(1, 0, says_nothing), many, 2, BATCH, {"dp": 2}, loss={"dp": "avg"}, points=1)


def test_a_number_that_a_step_changes() -> None:
    """No verdict: what ranks counted before the step is 6 there, and 7 when the first step reads it; the loss is halved then."""

    def many(rank: int, world: int) -> Any:
        total = torch.tensor([3])
        dist.all_reduce(total)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(batch: Any) -> Any:
            total.add_(1)
            optimizer.zero_grad()
            loss = model(batch["x"]).square().mean()
            (loss if int(total) == 6 else loss * 0.5).backward()
            for p in model.parameters():
                dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
            optimizer.step()
            return loss

        return step

    report = tvt.verify(lambda: built(1, 0, says_nothing), many, 2, BATCH, {"dp": 2}, loss={"dp": "avg"}, points=1)
    assert report.verdict == "UNKNOWN", report.reason
