"""Messages that are waited for late: sends go on while others are received, so no order of them is a deadlock by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import torch.distributed as dist  # noqa: E402

from capture.stepping import report  # noqa: E402

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
