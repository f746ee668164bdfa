"""Futures of communication that are waited for together, and code that asks whether communication has ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import torch.distributed as dist  # noqa: E402

from tests.capture.stepping import report  # noqa: E402

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
    ],
    ids=lambda v: getattr(v, "__name__", v),
)
def test_futures(ending: Ending, verdict: str) -> None:
    """Gradients are averaged already: what is added up is equal on all ranks."""
    made = report(ending)
    assert made.verdict == verdict, made.reason
    said = "when it runs" if ending is waits_for_no_callback else "asked before it is waited for"
    assert verdict != "UNKNOWN" or said in made.reason
