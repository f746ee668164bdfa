"""DDP with `find_unused_parameters`: all ranks use the same parameters, or there is no verdict."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import trainverify.torch as tvt  # noqa: E402


class Two(nn.Module):
    def __init__(self, both: bool):
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(3, 5)
        self.both = both

    def forward(self, x):
        return self.first(x) + self.second(x) if self.both else self.first(x)


def stepped(model: nn.Module, called: nn.Module):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        loss = called(batch["x"]).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def verdict(both: tuple[bool, bool], alone: bool):
    def ranks(rank: int, world: int):
        model = Two(both[rank])
        return stepped(model, DistributedDataParallel(model, find_unused_parameters=True))

    def reference():
        model = Two(alone)
        return stepped(model, model)

    batch = {"x": tvt.Reals((6, 3), "(dp b) k")}
    return tvt.verify(reference, ranks, 2, batch, {"dp": 2}, loss={"dp": "avg"}, points=1)


def test_nobody_uses_the_second() -> None:
    """PROVED: it keeps its value."""
    report = verdict((False, False), False)
    assert report.verdict == "PROVED", report.reason


def test_all_use_both() -> None:
    """PROVED."""
    report = verdict((True, True), True)
    assert report.verdict == "PROVED", report.reason


def test_one_uses_the_second() -> None:
    """UNKNOWN: what the other rank does depends on the first."""
    report = verdict((True, False), True)
    assert report.verdict == "UNKNOWN"
    assert "ranks use different parameters" in report.reason


def test_nobody_uses_what_the_reference_uses() -> None:
    """Not proved: gradients are missing, and the loss differs."""
    assert verdict((False, False), True).verdict in ("REFUTED", "INVALID")


def test_counts_of_the_users_own_are_not_guessed() -> None:
    """UNKNOWN: a sum over ranks that the step reads in Python is a condition on data, not what one rank gave to it."""

    def ranks(rank: int, world: int):
        model = Two(False)
        inner = stepped(model, model)

        def step(batch):
            seen = torch.ones(1, 2, dtype=torch.int32)
            torch.distributed.all_reduce(seen)
            if seen[0, 0].item() == 2:
                return inner(batch)
            return None

        return step

    def reference():
        model = Two(False)
        return stepped(model, model)

    report = tvt.verify(reference, ranks, 2, {"x": tvt.Reals((6, 3))}, {"dp": 2}, points=1)
    assert report.verdict == "UNKNOWN"
    assert "conditions on data" in report.reason
