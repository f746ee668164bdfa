"""Numbers that are not those of mathematics: small integers wrap around, random ones differ, counters are broadcast by DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import trainverify.torch as tvt  # noqa: E402
from capture.tracing import agree, traced  # noqa: E402

IDS = torch.tensor([3, 0, 7, 5])
SMALL = IDS.to(torch.uint8)
WRAPS: dict[str, tuple[Callable[..., Any], torch.Tensor]] = {
    "sub": (lambda i: i - 5, SMALL),
    "mul": (lambda i: i * 100, SMALL),
    "to": (lambda i: i.to(torch.uint8), IDS * 100),
    "real to": (lambda i: (i * 0.5).to(torch.int8), IDS),
    "sum": (lambda i: i.sum(dtype=torch.int8), IDS * 30),
    "cumsum": (lambda i: i.cumsum(0, dtype=torch.int16), IDS * 9000),
}
FITS: dict[str, tuple[Callable[..., Any], torch.Tensor]] = {
    "rows": (lambda i: i[1:].flip(0), SMALL),
    "choice": (lambda i: torch.where(i > 3, i, 255), SMALL),
    "mask": (lambda i: (i > 3).to(torch.uint8), IDS),
    "wider": (lambda i: i.to(torch.int16), SMALL),
    "bounded": (lambda i: i.clamp(0, 200).to(torch.uint8), IDS * 100),
    "widened first": (lambda i: i.long() * 100, SMALL),
}


@pytest.mark.parametrize("name", WRAPS)
def test_what_may_wrap_around_is_refused(name: str) -> None:
    fn, given = WRAPS[name]
    (missing,) = traced(fn, [given])[0].missing.values()
    assert "wrap" in missing.reason


@pytest.mark.parametrize("name", FITS)
def test_what_fits(name: str) -> None:
    fn, given = FITS[name]
    agree(fn, given)


@pytest.mark.parametrize("draw", [lambda: torch.poisson(torch.full((1,), 3.0)), lambda: torch.zeros(1).geometric_(0.3)])
def test_a_random_number_is_no_constant(draw: Callable[[], Any]) -> None:
    translator, _ = traced(lambda a: a * draw(), [torch.ones(2)])
    assert len(translator.missing) == 1


class Counting(nn.Module):
    """Two counters, which DDP broadcasts together before every forward pass."""

    def __init__(self, by: int = 1):
        super().__init__()
        self.inner, self.by = nn.Linear(4, 3), by
        for name in ("calls", "twice"):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64))

    def forward(self, x: Any) -> Any:
        self.calls += self.by
        self.twice += 2
        return self.inner(x)


def stepped(model: Any, called: Any, metric: Callable[[Any], Any] | None = None) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Any) -> Any:
        y = called(batch["x"])
        loss = y.square().mean()
        loss.backward()
        optimizer.step()
        return {"loss": loss, **({} if metric is None else {"metric": metric(y.detach())})}

    return step


def report(reference: Callable[[], Any], ranks: Callable[[], Any]) -> Any:
    batch = {"x": tvt.Reals((6, 4), "(dp b) k")}
    return tvt.verify(reference, lambda rank, world: ranks(), 2, batch, {"dp": 2}, loss={"dp": "avg"}, points=1)


@pytest.mark.parametrize(("by", "verdict"), [(1, "PROVED"), (2, "INVALID")])
def test_counters_that_ddp_broadcasts(by: int, verdict: str) -> None:
    def ranks() -> Any:
        model = Counting(by)
        return stepped(model, DistributedDataParallel(model))

    def reference() -> Any:
        model = Counting()
        return stepped(model, model)

    assert report(reference, ranks).verdict == verdict


@pytest.mark.parametrize(("op", "verdict"), [("SUM", "PROVED"), ("AVG", "UNKNOWN")])
def test_counts_over_ranks(op: str, verdict: str) -> None:
    """Backends round the average of integers."""

    def ranks() -> Any:
        def positive(y: Any) -> Any:
            count = (y > 0).sum()
            dist.all_reduce(count, op=getattr(dist.ReduceOp, op))
            return count if op == "SUM" else count * 2

        model = nn.Linear(4, 3)
        return stepped(model, DistributedDataParallel(model), positive)

    def reference() -> Any:
        model = nn.Linear(4, 3)
        return stepped(model, model, lambda y: (y > 0).sum())

    assert report(reference, ranks).verdict == verdict
