"""State that a step keeps by hand: in closures, containers, attributes and numbers. Right programs and wrong twins of each."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import trainverify.torch as tvt  # noqa: E402

BATCH = {"x": tvt.Reals((6, 4), "(dp b) k")}
Part = Callable[..., Any]  # (model, wrong, rank, world) → what a step does after its gradients are averaged, given its number and loss


def stepped(part: Part, wrong: bool, rank: int, world: int) -> Any:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    ending = part(model, wrong, rank, world)
    number = 0

    def step(batch: Any) -> Any:
        nonlocal number
        number += 1
        model.zero_grad()
        loss = model(batch["x"]).square().mean()
        loss.backward()
        if world > 1:
            for p in model.parameters():
                dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
        ending(number, loss.detach())
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
        return loss

    return step


def report(part: Part, wrong: bool) -> Any:
    one = lambda: stepped(part, False, 0, 1)  # noqa: E731
    return tvt.verify(one, lambda r, w: stepped(part, wrong, r, w), 2, BATCH, {"dp": 2}, loss={"dp": "avg"}, points=1)


def averaged(model: Any, wrong: bool, rank: int, world: int) -> Any:
    """An average of the parameters in a list; rank 1 has another factor."""
    average = [p.detach().clone() for p in model.parameters()]

    def ending(n: int, loss: Any) -> None:
        for a, p in zip(average, model.parameters(), strict=True):
            a.mul_(0.9).add_(p.detach(), alpha=0.2 if wrong and rank else 0.1)

    return ending


def started(model: Any, wrong: bool, rank: int, world: int) -> Any:
    """The same; it starts with twice the parameters on ranks."""
    average = {n: p.detach().clone() * (2 if wrong and world > 1 else 1) for n, p in model.named_parameters()}

    def ending(n: int, loss: Any) -> None:
        for name, p in model.named_parameters():
            average[name] = 0.9 * average[name] + 0.1 * p.detach()

    return ending


def momentum(model: Any, wrong: bool, rank: int, world: int) -> Any:
    """A velocity that is made by the first step; dropped on rank 1 in the second."""
    velocity: dict[int, Any] = {}

    def ending(n: int, loss: Any) -> None:
        if wrong and rank and n == 2:
            velocity.clear()
        for i, p in enumerate(model.parameters()):
            velocity[i] = p.grad.clone() if i not in velocity else 0.5 * velocity[i] + p.grad
            p.grad.copy_(velocity[i])

    return ending


class Kept:
    """An object that keeps things."""


def remembered(model: Any, wrong: bool, rank: int, world: int) -> Any:
    """The last gradient, in an object's queue."""
    kept = Kept()
    kept.queue = collections.deque(maxlen=1)  # type: ignore[attr-defined]

    def ending(n: int, loss: Any) -> None:
        new = model[0].weight.grad.clone()
        if kept.queue:  # type: ignore[attr-defined]
            model[0].weight.grad += 0.5 * kept.queue[0]  # type: ignore[attr-defined]
        kept.queue.append(3 * new if wrong and rank else new)  # type: ignore[attr-defined]

    return ending


def number(model: Any, wrong: bool, rank: int, world: int) -> Any:
    """A running mean of the loss as a Python number, which scales gradients."""
    running = 1.0

    def ending(n: int, loss: Any) -> None:
        nonlocal running
        if world > 1:
            loss = loss.clone()
            dist.all_reduce(loss)
            loss /= 2
        model[0].bias.grad *= running
        running = 0.9 * running + (0.2 if wrong and rank else 0.1) * loss.item()

    return ending


def attribute(model: Any, wrong: bool, rank: int, world: int) -> Any:
    """A tensor that is an attribute of a module of the user's, no buffer."""
    model[0].__class__ = Own
    model[0].before = torch.zeros(5)

    def ending(n: int, loss: Any) -> None:
        model[0].bias.grad += model[0].before
        model[0].before = model[0].bias.grad * (0.25 if wrong and n == 2 and rank else 0.5)

    return ending


class Own(nn.Linear):
    """A class of the user's."""


def stale(model: Any, wrong: bool, rank: int, world: int) -> Any:
    """A copy of a weight, which ranks do not make anew."""
    copy = [model[2].bias.detach().clone()]

    def ending(n: int, loss: Any) -> None:
        if not wrong or world == 1 or n == 1:
            copy[0] = model[2].bias.detach().clone()
        model[2].bias.grad += copy[0]

    return ending


@pytest.mark.parametrize("part", [averaged, started, momentum, remembered, number, attribute, stale])
def test_kept_by_hand(part: Part) -> None:
    """PROVED; the wrong twin is not, and is REFUTED where more than the kept tensors differs."""
    right = report(part, False)
    assert right.verdict == "PROVED", right.reason
    wrong = report(part, True)
    assert wrong.verdict in ("REFUTED", "UNKNOWN"), wrong.reason
    assert wrong.verdict == "REFUTED" or "keeps by hand" in wrong.reason or "did there" in wrong.reason, wrong.reason


def clipped(model: Any, wrong: bool, rank: int, world: int) -> Any:
    """A moment that starts with zeros, of a gradient that rank 1 scales by its own factor."""
    moment = torch.zeros(3, 5)

    def ending(n: int, loss: Any) -> None:
        moment.mul_(0.5).add_(model[2].weight.grad * (0.5 if wrong and rank else 1))
        model[2].weight.grad.copy_(moment)

    return ending


def test_wrong_from_the_start() -> None:
    """A moment may be a rank's part; what is wrong in the first step, from zeros, is wrong however ranks keep it: REFUTED."""
    assert report(clipped, False).verdict == "PROVED"
    assert report(clipped, True).verdict == "REFUTED"


def logged(model: Any, wrong: bool, rank: int, world: int) -> Any:
    """Local losses: a list of them, their sum, the last one."""
    losses: list[Any] = []
    total = torch.zeros(())
    last: dict[str, Any] = {}

    def ending(n: int, loss: Any) -> None:
        losses.append(loss)
        total.add_(loss)
        last["loss"] = loss

    return ending


def parts(model: Any, wrong: bool, rank: int, world: int) -> Any:
    """Every rank keeps its part of a sum; ranks add their parts up when they use it."""
    kept = torch.zeros(())

    def ending(n: int, loss: Any) -> None:
        kept.add_(loss / world)
        whole = kept.clone()
        if world > 1:
            dist.all_reduce(whole)
        model[0].bias.grad *= whole

    return ending


def own_noise(model: Any, wrong: bool, rank: int, world: int) -> Any:
    """Random numbers that every rank draws for itself."""
    noise = torch.randn(5)

    def ending(n: int, loss: Any) -> None:
        model[0].bias.grad += noise

    return ending


def cleared(model: Any, wrong: bool, rank: int, world: int) -> Any:
    """Scratch memory that only ranks have, and that is written before it is read."""
    scratch = torch.zeros(5)

    def ending(n: int, loss: Any) -> None:
        if world > 1:
            scratch.copy_(model[0].bias.grad)
            if wrong and n > 1:
                scratch.add_(scratch)
            model[0].bias.grad.copy_(scratch)

    return ending


def on_ranks_only(model: Any, wrong: bool, rank: int, world: int) -> Any:
    """Values that only ranks carry, and use."""
    kept = [torch.zeros(5)]

    def ending(n: int, loss: Any) -> None:
        if world > 1:
            model[0].bias.grad.add_(kept[0])
            kept[0] = model[0].bias.grad - model[0].bias.grad

    return ending


@pytest.mark.parametrize(
    ("part", "wrong", "verdict", "said"),
    [
        (logged, False, "PROVED", ""),
        (parts, False, "UNKNOWN", "keeps by hand"),
        (own_noise, False, "UNKNOWN", "random number"),
        (cleared, False, "PROVED", ""),
        (cleared, True, "REFUTED", ""),
        (on_ranks_only, False, "UNKNOWN", "on ranks only"),
    ],
)
def test_other_uses(part: Part, wrong: bool, verdict: str, said: str) -> None:
    found = report(part, wrong)
    assert found.verdict == verdict, found.reason
    assert said in found.reason


def by_hand(model: Any) -> Any:
    """Parameters that are kept in a list."""
    return [torch.randn(5, 4, requires_grad=True), torch.zeros(5, requires_grad=True)]


@pytest.mark.parametrize(("wrong", "verdict"), [(False, "PROVED"), (True, "REFUTED")])
def test_parameters_by_hand(wrong: bool, verdict: str) -> None:
    """A rank that does not update one of them is refuted: they are parameters like others."""

    def build(rank: int, world: int) -> Any:
        params = by_hand(None)

        def step(batch: Any) -> Any:
            weight, bias = params
            loss = torch.tanh(batch["x"] @ weight.T + bias).square().mean()
            grads = torch.autograd.grad(loss, params)
            with torch.no_grad():
                for i, (p, g) in enumerate(zip(params, grads, strict=True)):
                    if world > 1:
                        dist.all_reduce(g, op=dist.ReduceOp.AVG)
                    if not (wrong and rank and i):
                        p -= 0.1 * g
            return loss

        return step

    found = tvt.verify(lambda: build(0, 1), build, 2, BATCH, {"dp": 2}, loss={"dp": "avg"}, points=1)
    assert found.verdict == verdict, found.reason


@pytest.mark.parametrize(("wrong", "verdict"), [(False, "PROVED"), (True, "REFUTED")])
def test_a_group_in_a_closure_holds_nothing_of_the_user(wrong: bool, verdict: str) -> None:
    """What the capture keeps behind a group, such as AdamW's counters, is no state of the step."""

    def build(rank: int, world: int) -> Any:
        model = nn.Linear(4, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        group = dist.new_group([0, 1]) if world > 1 else None

        def step(batch: Any) -> Any:
            optimizer.zero_grad()
            loss = model(batch["x"]).square().mean()
            loss.backward()
            for p in model.parameters():
                if group is not None and not (wrong and p.ndim == 1):
                    dist.all_reduce(p.grad, op=dist.ReduceOp.AVG, group=group)
            optimizer.step()
            return loss

        return step

    found = tvt.verify(lambda: build(0, 1), build, 2, BATCH, {"dp": 2}, loss={"dp": "avg"}, points=1)
    assert found.verdict == verdict, found.reason
