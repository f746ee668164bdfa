"""How parameters and buffers are made before the first step: on ranks as in the reference, or there is no verdict."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import trainverify.torch as tvt  # noqa: E402
from trainverify.report import Report  # noqa: E402


class Model(nn.Module):
    """Two layers of one size, an anchor and a fixed gain."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("anchor", torch.zeros(4, 4))
        self.register_buffer("gain", torch.tensor([1.0, 0.5, 2.0, 3.0]))

    def forward(self, x: Any) -> Any:
        return (self.second(self.first(x)) * self.gain).square().mean() + (self.second.weight - self.anchor).square().sum() / 8


Building = Callable[[Any, int, int], Any]  # of the model on a rank of so many


def stepped(build: Building, rank: int, world: int) -> Any:
    model = Model()
    called = build(model, rank, world) or model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)

    def step(batch: Any) -> Any:
        optimizer.zero_grad()
        loss = called(batch["x"])
        loss.backward()
        if world > 1 and called is model:
            for p in model.parameters():
                dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
        optimizer.step()
        return loss

    return step


def judged(ranks: Building, reference: Building) -> Report:
    batch = {"x": tvt.Reals((6, 4), "(dp b) k")}
    return tvt.verify(lambda: stepped(reference, 0, 1), lambda r, w: stepped(ranks, r, w), 2, batch, loss={"dp": "avg"}, points=1)


def drawn(model: Any, rank: int = 0, world: int = 1) -> None:
    pass


def zeros(model: Any, rank: int, world: int) -> None:
    nn.init.zeros_(model.second.weight)


def copied(model: Any, rank: int, world: int) -> None:
    model.second.load_state_dict(copy.deepcopy(model.first.state_dict()))


def anchored(model: Any, rank: int, world: int) -> None:
    model.anchor.copy_(model.second.weight.detach())


def scaled(factor: float) -> Building:
    def build(model: Any, rank: int, world: int) -> None:
        with torch.no_grad():
            model.first.weight.mul_(factor)

    return build


def by_rank(model: Any, rank: int, world: int) -> None:
    model.first.weight.data.mul_(1.0 + rank)


def seeded(model: Any, rank: int, world: int) -> None:
    torch.manual_seed(rank)
    model.first.reset_parameters()


def normal(model: Any, rank: int, world: int) -> None:
    nn.init.normal_(model.first.weight, std=0.02)


def gained(model: Any, rank: int, world: int) -> None:
    model.gain[1] = 0.5 * (1 + 5e-7)


@pytest.mark.parametrize(
    ("ranks", "reference", "said"),
    [
        (drawn, zeros, "second.weight is drawn when it is built, and 0 everywhere on one device"),
        (zeros, drawn, "second.weight is 0 everywhere when it is built, and drawn on one device"),
        (drawn, copied, "first.weight and second.weight are made of the same random numbers on one device"),
        (copied, drawn, "first.weight and second.weight are made of the same random numbers on this rank"),
        (drawn, anchored, "anchor is 0 everywhere when it is built, and drawn on one device"),
        (scaled(0.25), scaled(0.5), "first.weight is made of random numbers in another way"),
        (by_rank, drawn, "first.weight is made of random numbers in another way"),
        (normal, drawn, "first.weight is made of random numbers in another way"),
        (seeded, drawn, "first.weight is drawn with seed 1 here and 0 on rank 0"),
    ],
)
def test_other_starts(ranks: Building, reference: Building, said: str) -> None:
    """UNKNOWN, by name."""
    report = judged(ranks, reference)
    assert report.verdict == "UNKNOWN", report.reason
    assert report.reason.startswith(said)


def test_a_constant_that_is_nearly_the_same() -> None:
    """Not PROVED: one of 4 numbers differs by 4 units in the last place of float32."""
    assert judged(gained, drawn).verdict in ("UNKNOWN", "REFUTED")


def wrapped(before: Building) -> Building:
    def build(model: Any, rank: int, world: int) -> Any:
        before(model, rank, world)
        return DistributedDataParallel(model)

    return build


def of_rank_0(model: Any, rank: int, world: int) -> None:
    if rank == 0:
        normal(model, rank, world)


def broadcast(model: Any, rank: int, world: int) -> None:
    seeded(model, rank, world)
    for p in model.parameters():
        dist.broadcast(p.data, 0)


def emptied(model: Any, rank: int, world: int) -> None:
    model.first.to_empty(device="cpu")
    model.first.reset_parameters()


def copies(model: Any, rank: int, world: int) -> None:
    for change in (scaled(0.5), copied, anchored):
        change(model, rank, world)
    nn.init.zeros_(model.first.bias)


RIGHT: dict[str, tuple[Building, Building]] = {
    "copied by DDP, each rank with its seed": (wrapped(seeded), drawn),
    "copied by DDP from the rank that draws": (wrapped(of_rank_0), normal),
    "broadcast by hand": (broadcast, drawn),
    "made anew": (emptied, drawn),
    "copies": (wrapped(copies), copies),
}


@pytest.mark.parametrize(("ranks", "reference"), RIGHT.values(), ids=RIGHT)
def test_equal_starts(ranks: Building, reference: Building) -> None:
    """PROVED."""
    report = judged(ranks, reference)
    assert report.verdict == "PROVED", report.reason


def cut(start: int | None, made: Callable[[], Any], rank: int) -> Any:
    """A step of a product with a weight of which every rank has two of six rows, or the reference all."""
    weight = made() if start is None else made()[start : start + 2].clone()
    model = nn.Module()
    model.weight = nn.Parameter(weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        (batch["x"] * model.weight[:, None]).square().sum().backward()
        optimizer.step()

    return step


@pytest.mark.parametrize(
    ("verdict", "made", "start"),
    [
        ("PROVED", lambda: torch.arange(6.0), lambda rank: 2 * rank),
        ("UNKNOWN", lambda: torch.arange(6.0), lambda rank: 0),
        ("PROVED", lambda: torch.full((6,), 0.5), lambda rank: 0),
        ("PROVED", lambda: torch.randn(6), lambda rank: 2 * rank),
    ],
)
def test_parts_of_constants(verdict: str, made: Callable[[], Any], start: Callable[[int], int]) -> None:
    """UNKNOWN where a rank has the reference's numbers at another place."""
    batch = {"x": tvt.Reals((6, 5), "(tp o) k")}
    report = tvt.verify(
        lambda: cut(None, made, 0), lambda r, w: cut(start(r), made, r), 3, batch, {"tp": 3}, cuts={"weight": "(tp o)"}, points=1
    )
    assert report.verdict == verdict, report.reason
    assert verdict == "PROVED" or "when it is built" in report.reason
