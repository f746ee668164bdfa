"""Three steps are captured, one after the other: what one leaves is what the next one finds."""

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
        (momentum(True), "UNKNOWN", "state.running, which the step keeps by hand, is not shown to be the same"),
        (number, "UNKNOWN", "running, which the step keeps by hand, is not shown to be the same"),
        (counter(False), "PROVED", ""),
        (counter(True), "REFUTED", "it is step 2"),
        (schedule(False), "PROVED", ""),
        (schedule(True), "REFUTED", "it is step 2"),
        (table, "PROVED", ""),
    ],
)
def test_left_in_python(built: Callable[[int], Ending], verdict: str, said: str) -> None:
    found = report(built)
    assert found.verdict == verdict, found.reason
    assert said in found.reason


@pytest.mark.parametrize("built", [counter(False), nothing])
def test_later_steps_are_assumed_to_be_like_the_third(built: Callable[[int], Ending]) -> None:
    """A line of every verdict."""
    assert "later steps do what the third one does" in report(built).assumptions


def test_carried_and_used_by_nothing() -> None:
    """PROVED: what is compared does not depend on it. The report says that it is carried."""
    found = report(momentum(False))
    assert found.verdict == "PROVED", found.reason
    assert any(f.code == "TV505" and "a number that a step leaves" in f.message for f in found.findings)


@pytest.mark.parametrize("where", ["closure", "object"])
def test_written_and_used_by_nothing(where: str) -> None:
    """PROVED, with a warning: a snapshot of the weights that every step makes, and that nothing reads, is compared with nothing."""

    class Hidden:
        __slots__ = ("tensor",)

    def built(world: int) -> Ending:
        kept, hidden = torch.zeros(3, 4), Hidden()
        hidden.tensor = torch.zeros(3, 4)

        def ending(model: Any, optimizer: Any, loss: Any) -> None:
            kept.copy_(model.weight.detach() * (world + 1))

        def other(model: Any, optimizer: Any, loss: Any) -> None:
            hidden.tensor.copy_(model.weight.detach() * (world + 1))

        return ending if where == "closure" else other

    found = report(built)
    assert found.verdict == "PROVED", found.reason
    assert any(f.code == "TV505" and "is compared with nothing" in f.message for f in found.findings)


@pytest.mark.parametrize(
    ("reference", "ranks", "verdict"), [("start", "never", "UNKNOWN"), ("start", "start", "PROVED"), ("never", "never", "PROVED")]
)
def test_gradients_of_the_step_before(reference: str, ranks: str, verdict: str) -> None:
    """PROVED where both sides add to them or both clear them; else there is no verdict."""
    found = report(nothing, ranks, reference)
    assert found.verdict == verdict, found.reason
    assert ("is zero_grad called in every step?" in found.reason) == (verdict == "UNKNOWN")


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
    assert "step 2 cannot be captured" in found.reason
    assert "only once" in found.reason


def accumulating(rank: int, world: int, reduced: bool) -> Any:
    """Gradients of two steps are added up; ranks reduce them in the second one."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    number = 0

    def step(batch: Any) -> Any:
        nonlocal number
        number += 1
        loss = model(batch["x"]).square().mean()
        loss.backward()
        if number % 2 == 0:
            for p in model.parameters() if world > 1 and reduced else ():
                dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return step


@pytest.mark.parametrize("reduced", [True, False])
def test_gradients_of_several_steps(reduced: bool) -> None:
    """UNKNOWN: what a step leaves may be a rank's own part, which is right if it is reduced later; so right code is not refuted."""
    one = lambda: accumulating(0, 1, True)  # noqa: E731
    found = tvt.verify(one, lambda r, w: accumulating(r, w, reduced), 2, BATCH, {"dp": 2}, loss={"dp": "avg"}, points=1)
    assert found.verdict == "UNKNOWN"
    assert "gradients that this step leaves for a later one" in found.reason
