"""Futures of communication that are waited for together, and code that asks whether communication has ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import torch.distributed as dist  # noqa: E402

import trainverify.torch as tvt  # noqa: E402
from capture.stepping import BATCH, report  # noqa: E402

Ending = Callable[[Any], None]


def started(model: Any) -> list[Any]:
    return [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]


def averaged(model: Any) -> None:
    for p in model.parameters():
        p.grad /= 2


def waits_for_all(model: Any) -> None:
    torch.futures.wait_all([w.get_future() for w in started(model)])
    averaged(model)


def collects_all(model: Any) -> None:
    torch.futures.collect_all([w.get_future() for w in started(model)]).then(lambda f: averaged(model)).wait()


def collects_and_waits_for_none(model: Any) -> None:
    torch.futures.collect_all([w.get_future() for w in started(model)])
    averaged(model)


def has_callbacks(model: Any) -> None:
    for p in model.parameters():
        dist.all_reduce(p.grad, async_op=True).get_future().then(lambda f, p=p: p.grad.mul_(0.5)).wait()


def waits_for_no_callback(model: Any) -> None:
    for p in model.parameters():
        work = dist.all_reduce(p.grad, async_op=True)
        work.get_future().then(lambda f, p=p: p.grad.mul_(0.5))
        work.wait()
    averaged(model)


def asks_until_it_has_ended(model: Any) -> None:
    work = started(model)
    while not all(w.is_completed() for w in work):
        pass
    averaged(model)


def asks_futures(model: Any) -> None:
    futures = [w.get_future() for w in started(model)]
    while not all(f.done() for f in futures):
        pass
    averaged(model)


UNDER_WAY: list[Any] = []


def waits_in_the_next_step(model: Any) -> None:
    """What is sent is for a log."""
    while UNDER_WAY:
        UNDER_WAY.pop().wait()
    UNDER_WAY.append(dist.all_reduce(model.bias.grad.sum(), async_op=True))


def waits_never(model: Any) -> None:
    dist.all_reduce(model.bias.grad.sum(), async_op=True)


def asks_after_waiting(model: Any) -> None:
    for w in started(model):
        w.wait()
        assert w.is_completed()
    averaged(model)


@pytest.mark.parametrize(
    ("ending", "verdict"),
    [
        (waits_for_all, "PROVED"),
        (collects_all, "PROVED"),
        (collects_and_waits_for_none, "INVALID"),
        (has_callbacks, "PROVED"),
        (waits_for_no_callback, "UNKNOWN"),
        (asks_until_it_has_ended, "UNKNOWN"),
        (asks_futures, "UNKNOWN"),
        (asks_after_waiting, "PROVED"),
        (waits_in_the_next_step, "UNKNOWN"),
        (waits_never, "INVALID"),
    ],
    ids=lambda v: getattr(v, "__name__", v),
)
def test_futures(ending: Ending, verdict: str) -> None:
    """Gradients are averaged already: what is added up is equal on all ranks."""
    made = report(ending)
    assert made.verdict == verdict, made.reason
    others = {waits_for_no_callback: "when it runs", waits_in_the_next_step: "never waited for"}
    assert verdict != "UNKNOWN" or others.get(ending, "asked before it is waited for") in made.reason


def prefetched(world: int, early: bool) -> Any:
    """Parameters are sent at the end of a step, and are there when the next one needs them, or `early`."""
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    under_way: list[Any] = []

    def step(batch: Any) -> Any:
        while under_way:
            under_way.pop().wait()
        optimizer.zero_grad()
        loss = model(batch["x"]).square().mean()
        loss.backward()
        for p in model.parameters() if world > 1 else ():
            dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
        optimizer.step()
        for p in model.parameters() if world > 1 else ():
            under_way.append(dist.broadcast(p.data, src=0, async_op=True))
        while early and under_way:
            under_way.pop().wait()
        return loss

    return step


@pytest.mark.parametrize(("early", "verdict"), [(True, "PROVED"), (False, "UNKNOWN")])
def test_parameters_that_arrive_in_the_next_step(early: bool, verdict: str) -> None:
    one, many = lambda: prefetched(1, early), lambda r, w: prefetched(w, early)
    made = tvt.verify(one, many, 2, BATCH, {"dp": 2}, loss={"dp": "avg"}, points=1)
    assert made.verdict == verdict, made.reason
