"""What a step counts, returns or leaves behind may depend on the ways that earlier steps took at a condition on data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import trainverify.torch as tvt  # noqa: E402

BATCH = {"x": tvt.Reals((6, 3), "(dp b) k")}
Ending = Callable[[Any, Any, list[bool]], dict[str, Any]]  # given the model, its optimizer, and which steps were skipped


class Counting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("skips", torch.zeros((), dtype=torch.int64))


def built(ending: Ending, world: int) -> Any:
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    skipped: list[bool] = []

    def step(batch: Any) -> Any:
        optimizer.zero_grad()
        loss = model(batch["x"]).square().mean()
        loss.backward()
        for p in model.parameters() if world > 1 else ():
            dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
        skipped.append(bool(torch.stack([p.grad.square().sum() for p in model.parameters()]).sum() > 1.0))
        if not skipped[-1]:
            optimizer.step()
        return {"loss": loss, **ending(model, optimizer, skipped)}

    return step


def verify(ranks: Ending, reference: Ending) -> Any:
    one, many = lambda: built(reference, 1), lambda r, w: built(ranks, w)
    return tvt.verify(one, many, 2, BATCH, {"dp": 2}, loss={"dp": "avg"}, points=1)


def reports_all(model: Any, optimizer: Any, skipped: list[bool]) -> dict[str, Any]:
    return {"skips": sum(skipped)}


def reports_those_in_a_row(model: Any, optimizer: Any, skipped: list[bool]) -> dict[str, Any]:
    return {"skips": next((i for i, s in enumerate(reversed(skipped)) if not s), len(skipped))}


def counts(model: Any, optimizer: Any, skipped: list[bool]) -> dict[str, Any]:
    model.skips += int(skipped[-1])
    return {}


def counts_the_one_before(model: Any, optimizer: Any, skipped: list[bool]) -> dict[str, Any]:
    model.skips += int(skipped[-2:][0])
    return {}


def slows_after_two_of_three(model: Any, optimizer: Any, skipped: list[bool]) -> dict[str, Any]:
    if len(skipped) == 3 and sum(skipped) >= 2:
        optimizer.param_groups[0]["lr"] = 0.01
    return {}


def slows_after_two_in_a_row(model: Any, optimizer: Any, skipped: list[bool]) -> dict[str, Any]:
    if len(skipped) == 3 and skipped[1] and any(skipped[::2]):
        optimizer.param_groups[0]["lr"] = 0.01
    return {}


@pytest.mark.parametrize(
    ("ranks", "reference", "verdict"),
    [
        pytest.param(reports_all, reports_all, "PROVED", id="number_returned"),
        pytest.param(reports_those_in_a_row, reports_all, "UNKNOWN", id="another_number_returned"),
        pytest.param(counts, counts, "PROVED", id="number_in_a_buffer"),
        pytest.param(counts_the_one_before, counts, "UNKNOWN", id="another_number_in_a_buffer"),
        pytest.param(slows_after_two_in_a_row, slows_after_two_of_three, "UNKNOWN", id="another_rate_in_the_end"),
    ],
)
def test_ways_one_after_the_other(ranks: Ending, reference: Ending, verdict: str) -> None:
    report = verify(ranks, reference)
    assert report.verdict == verdict, report.reason
    assert verdict == "PROVED" or "depends on the way that the step before it took" in report.reason


def exchanging(later: bool, world: int, rank: int) -> Any:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = 0

    def step(batch: Any) -> Any:
        nonlocal steps
        steps += 1
        optimizer.zero_grad()
        loss = model(batch["x"]).square().mean()
        loss.backward()
        if world > 1:
            said: list[Any] = [None, None]
            dist.all_gather_object(said, rank if later and steps == 2 else 0)
            for p in model.parameters():
                dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
                p.grad.mul_(1.0 if said[0] == said[1] else 0.5)
        optimizer.step()
        return loss

    return step


@pytest.mark.parametrize(("later", "verdict"), [(False, "PROVED"), (True, "REFUTED")], ids=["equal_objects", "others_in_step_2"])
def test_objects_of_a_later_step(later: bool, verdict: str) -> None:
    """Ranks exchange other objects in a step whose program is that of the first one."""
    one, many = lambda: exchanging(later, 1, 0), lambda r, w: exchanging(later, w, r)
    report = tvt.verify(one, many, 2, BATCH, {"dp": 2}, loss={"dp": "avg"}, points=1)
    assert report.verdict == verdict, report.reason
    assert verdict == "PROVED" or "it is step 2" in report.reason


def test_objects_that_follow_from_those_of_others() -> None:
    """PROVED: each rank gives its number, and what it gives next follows from the numbers of both. A real run gets "same" twice; where
    ranks had what they gave in a capture before, the loss would be halved."""

    def many(rank: int, world: int) -> Any:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        got: list[Any] = [None, None]
        dist.all_gather_object(got, rank)
        said: list[Any] = [None, None]
        dist.all_gather_object(said, "same" if got[0] != got[1] else rank)

        def step(batch: Any) -> Any:
            optimizer.zero_grad()
            loss = model(batch["x"]).square().mean()
            (loss * (1.0 if said[0] == said[1] == "same" else 0.5)).backward()
            for p in model.parameters():
                dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
            optimizer.step()
            return loss

        return step

    report = tvt.verify(lambda: exchanging(False, 1, 0), many, 2, BATCH, {"dp": 2}, loss={"dp": "avg"}, points=1)
    assert report.verdict == "PROVED", report.reason
