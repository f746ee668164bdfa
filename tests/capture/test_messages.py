"""Messages that are waited for late: sends go on while others are received, so no order of them is a deadlock by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import trainverify.torch as tvt  # noqa: E402
from capture.stepping import BATCH, report  # noqa: E402

Exchange = Callable[[list[Any], int], list[Any]]  # tensors of a rank and the other rank → what it has


def sent_first(tensors: list[Any], other: int) -> list[Any]:
    """All are sent, then all received, then the sends waited for."""
    works = [dist.isend(t, other) for t in tensors]
    made = [torch.empty_like(t) for t in tensors]
    for t in made:
        dist.recv(t, other)
    for w in works:
        w.wait()
    return made


def one_by_one(tensors: list[Any], other: int) -> list[Any]:
    return [sent_first([t], other)[0] for t in tensors]


def all_wait(tensors: list[Any], other: int) -> list[Any]:
    """Both ranks send before they receive."""
    made = [torch.empty_like(t) for t in tensors]
    for t, m in zip(tensors, made, strict=True):
        dist.send(t, other)
        dist.recv(m, other)
    return made


@pytest.mark.parametrize(
    ("exchange", "verdict", "said"),
    [(one_by_one, "PROVED", ""), (sent_first, "UNKNOWN", "is not decided"), (all_wait, "INVALID", "TV205")],
)
def test_exchange(exchange: Exchange, verdict: str, said: str) -> None:
    """PROVED one by one; INVALID where both ranks wait for each other; UNKNOWN where sends are under way while others are received."""

    def ending(model: Any) -> None:
        tensors = [p.grad for p in model.parameters()]
        for t, other in zip(tensors, exchange(tensors, 1 - dist.get_rank()), strict=True):
            t.copy_((t + other) / 2)

    found = report(ending)
    assert found.verdict == verdict, found.reason
    assert said in f"{found.reason} {[f.code for f in found.findings]}"


def grouped(order: Callable[[int], list[int]], swapped: bool, blocking: bool) -> Any:
    """Two gradients of one shape, each in a group of the same ranks, which ranks may take in another order, or for the other gradient."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])] if dist.is_initialized() else []

    def step(batch: Any) -> Any:
        optimizer.zero_grad()
        loss = model(batch["x"]).square().mean()
        loss.backward()
        if groups:
            rank = dist.get_rank()
            works = []
            for i in order(rank):
                group = groups[1 - i if swapped and rank == 1 else i]
                works.append(dist.all_reduce(model[i].weight.grad, group=group, async_op=True))
                if blocking:
                    works[-1].wait()
            for w in works:
                w.wait()
            for p in model.parameters():
                p.grad.div_(2)
        optimizer.step()
        return loss

    return step


@pytest.mark.parametrize(
    ("order", "swapped", "blocking", "verdict"),
    [
        pytest.param(lambda rank: [0, 1], False, True, "PROVED", id="one order"),
        pytest.param(lambda rank: [0, 1], True, False, "UNKNOWN", id="each the other's group"),
        pytest.param(lambda rank: [0, 1], True, True, "INVALID", id="each the other's group, and waits"),
        pytest.param(lambda rank: [rank, 1 - rank], True, True, "REFUTED", id="the group of the other gradient"),
        pytest.param(lambda rank: [rank, 1 - rank], False, False, "UNKNOWN", id="each its own order"),
        pytest.param(lambda rank: [rank, 1 - rank], False, True, "INVALID", id="each its own order, and waits"),
    ],
)
def test_groups_of_the_same_ranks(order: Any, swapped: bool, blocking: bool, verdict: str) -> None:
    """A group is the one that was made as such, not the one that a rank uses first. Real runs: the fifth is right, the fourth adds
    gradients of two layers to each other, as the second does, and those that wait hang."""
    one = lambda: grouped(order, False, False)  # noqa: E731
    found = tvt.verify(one, lambda r, w: grouped(order, swapped, blocking), 2, BATCH, {"dp": 2}, loss={"dp": "avg"}, points=1)
    assert found.verdict == verdict, found.reason


def by_roots(model: Any) -> None:
    rank, grad = dist.get_rank(), model.weight.grad  # of which both ranks add up a half on rank 0, which then gives it to rank 1
    mine = (grad / 2).reshape((3, 4) if rank == 0 else (12,))
    dist.all_reduce(torch.empty(0))
    dist.reduce(mine, 0)
    dist.broadcast(mine, 0)
    grad.copy_(mine.view(3, 4))


def test_a_message_has_a_size_and_no_shape() -> None:
    """PROVED: what is sent as a matrix is received as a vector."""

    def ending(model: Any) -> None:
        rank, grad = dist.get_rank(), model.weight.grad  # the average of both ranks
        other = torch.empty(12)
        for sender in (0, 1):
            if rank == sender:
                dist.send(grad, 1 - rank)
            else:
                dist.recv(other, 1 - rank)
        grad.copy_((grad + other.view(3, 4)) / 2)

    assert report(ending).verdict == "PROVED"
    assert report(by_roots).verdict == "PROVED"
