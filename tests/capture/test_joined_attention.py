"""Softmax over keys block by block, as PyTorch code writes it, with gradients: a maximum is subtracted, and its gradient cancels."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

import trainverify.torch as tvt

ROWS, LENGTH, HEADS, WIDTH, FEATURES, BLOCKS = 4, 12, 2, 3, 5, 3
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return q @ k.transpose(-1, -2) * WIDTH**-0.5


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(scores(q, k), -1) @ v


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    s = scores(q, k)
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return (e / e.sum(-1, keepdim=True)) @ v


def blocks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for keys, values in zip(k.chunk(BLOCKS, 2), v.chunk(BLOCKS, 2), strict=True):
        yield scores(q, keys), values


def running(wrong: str = "") -> Attention:
    """A running maximum, from −∞ on."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        top = q.new_full((*q.shape[:-1], 1), float("-inf"))
        total, out = torch.zeros_like(top), torch.zeros_like(q)
        for n, (s, values) in enumerate(blocks(q, k, v)):
            new = torch.maximum(top, s.amax(-1, keepdim=True))
            for _ in range({"skipped": n != 1, "twice": 1 + (n == 1)}.get(wrong, 1)):
                e = torch.exp(s - new)
                less = torch.exp(new - top if wrong == "sign" and n else top - new)
                total = total * less + e.sum(-1, keepdim=True)
                out, top = out * less + e @ values, new
        return out / total

    return attend


def two_passes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    both = list(blocks(q, k, v))
    top = torch.stack([s.amax(-1) for s, _ in both]).amax(0)[..., None]
    total = sum(torch.exp(s - top).sum(-1, keepdim=True) for s, _ in both)
    return sum(torch.exp(s - top) @ values for s, values in both) / total


def other_maximum(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Every block's exponentials are less than its own maximum, not one of all: that does not cancel."""
    es = [(torch.exp(s - s.amax(-1, keepdim=True)), values) for s, values in blocks(q, k, v)]
    return sum(e @ values for e, values in es) / sum(e.sum(-1, keepdim=True) for e, _ in es)


def weights_joined(wrong: str = "") -> Attention:
    """Results of blocks joined by the log of their sums: log(eᵃ + eᵇ). Gradients stop there."""

    @torch.no_grad()
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        parts = [(torch.softmax(s, -1) @ values, torch.logsumexp(s, -1, keepdim=True)) for s, values in blocks(q, k, v)]
        out, whole = parts[0]
        for n, (result, weight) in enumerate(parts[1:], 1):
            more = torch.logaddexp(whole, parts[0][1] if wrong and n == 2 else weight)
            out, whole = out * torch.exp(whole - more) + result * torch.exp(weight - more), more
        return out

    return attend


def verified(reference: Attention, attend: Attention, trained: bool = True) -> str:
    class Net(nn.Module):
        def __init__(self, attend: Attention) -> None:
            super().__init__()
            self.attend = attend
            self.qkv = nn.ModuleList(nn.Linear(FEATURES, HEADS * WIDTH, bias=False) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.attend(*(f(x).view(len(x), LENGTH, HEADS, WIDTH).transpose(1, 2) for f in self.qkv))
            return y.transpose(1, 2).reshape(len(x), LENGTH, HEADS * WIDTH)

    def step_of(attend: Attention) -> Callable[[dict[str, torch.Tensor]], torch.Tensor]:
        net = Net(attend)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
            loss = ((net(batch["x"]) - batch["t"]) ** 2).mean()
            if not trained:
                return loss.detach()
            optimizer.zero_grad()
            loss.backward()
            for p in net.parameters():
                if dist.is_initialized() and dist.get_world_size() > 1:
                    dist.all_reduce(p.grad)
                    p.grad /= dist.get_world_size()
            optimizer.step()
            return loss

        return step

    batch = {
        "x": tvt.Reals((ROWS, LENGTH, FEATURES), "(dp b) s k"),
        "t": tvt.Reals((ROWS, LENGTH, HEADS * WIDTH), "(dp b) s k"),
    }
    how = {"world_size": 2, "batch": batch, "mesh": {"dp": 2}, "loss": {"dp": "avg"}, "points": 1}
    return tvt.verify(lambda: step_of(reference), lambda rank, world: step_of(attend), **how).verdict


@pytest.mark.parametrize("attend", [by_hand, running(), two_passes], ids=["by hand", "running", "two passes"])
def test_the_shift_cancels_in_gradients(attend: Attention) -> None:
    assert verified(plain, attend) == "PROVED"


def test_a_reference_written_by_hand() -> None:
    assert verified(by_hand, plain) == "PROVED"


@pytest.mark.parametrize("wrong", ["skipped", "twice", "sign"])
def test_wrong_joins_are_refuted(wrong: str) -> None:
    assert verified(plain, running(wrong)) == "REFUTED"


def test_a_maximum_that_does_not_cancel_is_refuted() -> None:
    assert verified(plain, other_maximum) == "REFUTED"


def test_results_joined_by_the_log_of_their_sums() -> None:
    """Expected: PROVED; REFUTED with the weight of another block."""
    assert verified(plain, weights_joined(), trained=False) == "PROVED"
    assert verified(plain, weights_joined("of another block"), trained=False) == "REFUTED"
