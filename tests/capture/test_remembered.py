"""What Python objects hold from step to step: the second step is captured too where the first leaves something there."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import trainverify.torch as tvt  # noqa: E402
from trainverify.torch.remembered import CUT, DEPTH, snapshot  # noqa: E402

BATCH = {"x": tvt.Reals((6, 4), "(dp b) k")}
Ending = Callable[[Any, Any, Any], None]  # (model, optimizer, loss), after the gradients are averaged


def stepped(rank: int, world: int, built: Callable[[int], Ending], cleared: str = "start") -> Any:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ending = built(world)

    def step(batch: Any) -> Any:
        if cleared == "start":
            optimizer.zero_grad()
        loss = model(batch["x"]).square().mean()
        loss.backward()
        if world > 1:
            for p in model.parameters():
                dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
        ending(model, optimizer, loss.detach())
        optimizer.step()
        return loss

    return step


def report(built: Callable[[int], Ending], cleared: str = "start", reference: str = "start") -> Any:
    one = lambda: stepped(0, 1, built, reference)  # noqa: E731
    return tvt.verify(one, lambda r, w: stepped(r, w, built, cleared), 2, BATCH, {"dp": 2}, loss={"dp": "avg"}, points=1)


def nothing(world: int) -> Ending:
    return lambda model, optimizer, loss: None


def momentum(used: bool) -> Callable[[int], Ending]:
    """A running loss, which every step puts in the place of the last one; ranks do not average it."""

    def built(world: int) -> Ending:
        state = {"running": torch.zeros(())}

        def ending(model: Any, optimizer: Any, loss: Any) -> None:
            if used:
                model.bias.grad += state["running"]
            state["running"] = 0.9 * state["running"] + loss

        return ending

    return built


def counter(wrong: bool) -> Callable[[int], Ending]:
    """The first step is right on all ranks."""

    def built(world: int) -> Ending:
        count = 0

        def ending(model: Any, optimizer: Any, loss: Any) -> None:
            nonlocal count
            if wrong and world > 1 and count:
                model.bias.grad *= 2
            count += 1

        return ending

    return built


def schedule(wrong: bool) -> Callable[[int], Ending]:
    def built(world: int) -> Ending:
        factor = 0.5 if world == 1 or not wrong else 0.25
        made: list[Any] = []

        def ending(model: Any, optimizer: Any, loss: Any) -> None:
            if made:
                optimizer.param_groups[0]["lr"] *= factor
            made.append(1)

        return ending

    return built


def number(world: int) -> Ending:
    """A float that is read from a tensor, and that the next step uses."""
    running = 0.0

    def ending(model: Any, optimizer: Any, loss: Any) -> None:
        nonlocal running
        model.bias.grad *= 1 + running
        running = loss.item()

    return ending


def table(world: int) -> Ending:
    """Computed from constants by the first step, and used by all: no value is carried."""
    kept: dict[str, Any] = {}

    def ending(model: Any, optimizer: Any, loss: Any) -> None:
        if "scale" not in kept:
            kept["scale"] = torch.arange(3.0) + 1
        model.bias.grad *= kept["scale"]

    return ending


@pytest.mark.parametrize(
    ("built", "verdict", "said"),
    [
        (momentum(True), "UNKNOWN", "state['running'] is what the step before left there"),
        (number, "UNKNOWN", "running is what the step before left there"),
        (counter(False), "PROVED", ""),
        (counter(True), "REFUTED", "it is the second step"),
        (schedule(False), "PROVED", ""),
        (schedule(True), "REFUTED", "it is the second step"),
        (table, "PROVED", ""),
    ],
)
def test_left_in_python(built: Callable[[int], Ending], verdict: str, said: str) -> None:
    found = report(built)
    assert found.verdict == verdict, found.reason
    assert said in found.reason


def test_the_third_step_is_assumed_to_be_like_the_second() -> None:
    found = report(counter(False))
    assert any(a.startswith("steps after the second do what that does") and "count" in a for a in found.assumptions), found.assumptions
    assert not any("steps after" in a for a in report(nothing).assumptions)


def test_carried_and_used_by_nothing() -> None:
    """PROVED: what is compared does not depend on it. The report says that it is carried."""
    found = report(momentum(False))
    assert found.verdict == "PROVED", found.reason
    assert any(f.code == "TV505" and "state['running']" in f.message for f in found.findings)


@pytest.mark.parametrize(("reference", "ranks", "warned"), [("start", "never", True), ("start", "start", False), ("never", "never", False)])
def test_gradients_of_the_step_before(reference: str, ranks: str, warned: bool) -> None:
    """PROVED, on the assumption that they are cleared in between."""
    found = report(nothing, ranks, reference)
    assert found.verdict == "PROVED", found.reason
    assert any(f.code == "TV505" for f in found.findings) == warned


@pytest.mark.parametrize("drawn", [lambda: random.random(), lambda: float(np.random.rand())], ids=["random", "numpy.random"])
def test_numbers_that_python_draws_are_no_constants(drawn: Callable[[], float]) -> None:
    """Expected: UNKNOWN: ranks of one machine draw the same by chance of how they are started; PROVED with a number that is written."""

    def scaled(number: Callable[[], float]) -> Callable[[int], Ending]:
        def built(world: int) -> Ending:
            def ending(model: Any, optimizer: Any, loss: Any) -> None:
                model.bias.grad *= number()

            return ending

        return built

    found = report(scaled(drawn))
    assert found.verdict == "UNKNOWN", found.reason
    assert "draws random numbers" in found.reason
    assert report(scaled(lambda: 0.5)).verdict == "PROVED"


def test_a_second_step_that_fails_has_no_verdict() -> None:
    """Expected: UNKNOWN, though the first step is right: nobody knows what the second one does."""

    def built(world: int) -> Ending:
        seen: list[int] = []

        def ending(model: Any, optimizer: Any, loss: Any) -> None:
            if seen and world > 1:
                raise ValueError("only once")
            seen.append(1)

        return ending

    found = report(built)
    assert found.verdict == "UNKNOWN", found.reason
    assert "the second step cannot be captured" in found.reason
    assert "only once" in found.reason


def test_what_lies_too_deep_is_said_to_be_unwatched() -> None:
    inside: list[Any] = [1]
    for _ in range(DEPTH):
        assert CUT not in snapshot(inside)
        inside = [inside]
    assert CUT in snapshot(inside)
