"""Ranks exchange memory: a tensor whose dimensions lie in another order than its elements is sent as it lies."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import trainverify.torch as tvt  # noqa: E402

ROWS, INNER, OUTER = 6, 3, 5


def stepped(model: nn.Module, combine):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        loss = model(batch["x"]).square().mean()
        loss.backward()
        combine(model.weight)
        optimizer.step()
        return loss

    return step


def verdict(combine):
    def ranks(rank: int, world: int):
        return stepped(nn.Linear(INNER, OUTER, bias=False), lambda p: combine(p, rank))

    batch = {"x": tvt.Reals((ROWS, INNER), "(dp b) k")}

    def alone():
        return stepped(nn.Linear(INNER, OUTER, bias=False), lambda p: None)

    return tvt.verify(alone, ranks, 2, batch, {"dp": 2}, loss={"dp": "avg"}, points=1)


def transposed(x):
    """The same elements, columns one after the other in memory."""
    return x.t().contiguous().t()


def test_all_ranks_transposed() -> None:
    """PROVED: the same order on both ranks."""

    def combine(p, rank: int) -> None:
        p.grad = transposed(p.grad)
        dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)

    report = verdict(combine)
    assert report.verdict == "PROVED", report.reason


def test_one_rank_transposed() -> None:
    """UNKNOWN: shapes are equal, memory is not, and ranks may well pass one memory by different views."""

    def combine(p, rank: int) -> None:
        if rank == 1:
            p.grad = transposed(p.grad)
        dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)

    assert verdict(combine).verdict == "UNKNOWN"


def test_a_gather_of_a_transposed_tensor_is_refused() -> None:
    """UNKNOWN: NCCL refuses such tensors, other backends bring elements into another order."""

    def combine(p, rank: int) -> None:
        whole = torch.empty(2 * OUTER, INNER)
        dist.all_gather_into_tensor(whole, transposed(p.grad))
        p.grad = whole.view(2, OUTER, INNER).mean(0)

    report = verdict(combine)
    assert report.verdict == "UNKNOWN"
    assert "not contiguous" in report.reason


def test_a_gather_of_a_contiguous_tensor() -> None:
    """PROVED: its right twin."""

    def combine(p, rank: int) -> None:
        whole = torch.empty(2 * OUTER, INNER)
        dist.all_gather_into_tensor(whole, p.grad.contiguous())
        p.grad = whole.view(2, OUTER, INNER).mean(0)

    report = verdict(combine)
    assert report.verdict == "PROVED", report.reason
