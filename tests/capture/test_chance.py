"""Numbers that another process or another step would have otherwise, and factors of 0 that hide what they multiply."""

from __future__ import annotations

import datetime
import os
import random
import socket
import time
import uuid
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import trainverify.torch as tvt  # noqa: E402

BATCH = {"x": tvt.Reals((6, 4), "(dp b) k")}
KEPT, WEIGHT = torch.zeros(2), nn.Parameter(torch.zeros(2))
WEAKLY: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
Factor = Callable[[], Any]  # of a gradient, in every step
Built = Callable[[], Factor]


def stepped(world: int, built: Built) -> Any:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    factor = built()

    def step(batch: Any) -> Any:
        optimizer.zero_grad()
        loss = model(batch["x"]).square().mean()
        loss.backward()
        if world > 1:
            for p in model.parameters():
                dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
        model.bias.grad.mul_(factor())
        optimizer.step()
        return loss

    return step


def report(built: Built) -> Any:
    one = lambda: stepped(1, built)  # noqa: E731
    return tvt.verify(one, lambda r, w: stepped(w, built), 2, BATCH, {"dp": 2}, loss={"dp": "avg"}, points=1)


def always(value: Callable[[], bool]) -> Built:
    """2 where a value holds that by chance is the same everywhere."""
    return lambda: lambda: 2 if value() else 1


def at_building(draw: Callable[[], float]) -> Built:
    def built() -> Factor:
        value = draw()
        return lambda: 2 if value < 2 else 1

    return built


class Named:
    """A key of dicts, with a hash of its own."""

    def __init__(self, name: str):
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Named) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


def seeded() -> Factor:
    random.seed(3)
    value, own, other = random.random(), random.Random(5), np.random.default_rng(7)
    return lambda: value + own.random() + other.random()


@pytest.mark.parametrize(
    ("built", "verdict", "said"),
    [
        (seeded, "PROVED", ""),
        (at_building(lambda: random.random()), "UNKNOWN", "no seed decides"),
        (at_building(lambda: float(np.random.rand())), "UNKNOWN", "no seed decides"),
        (always(lambda: random.Random().random() < 2), "UNKNOWN", "no seed decides"),
        (always(lambda: np.random.default_rng().random() < 2), "UNKNOWN", "no seed decides"),
        (always(lambda: len(str(uuid.uuid4())) > 2), "UNKNOWN", "no seed decides"),
        (always(lambda: os.getpid() > 2), "UNKNOWN", "the number of the process"),
        (always(lambda: hash(("rank", 1)) != 3), "UNKNOWN", "hash() of text"),
        (always(lambda: hash((2.5, 1)) != 3), "PROVED", ""),
        (always(lambda: {Named("a"): 1}[Named("a")] == 1), "PROVED", ""),
        (always(lambda: id(torch.zeros(2)) > 2), "UNKNOWN", "id() of an object"),
        (always(lambda: id([]) > 2), "UNKNOWN", "id() of an object"),
        (always(lambda: hash(object()) != 2), "UNKNOWN", "id() of an object"),
        (always(lambda: hash(torch.zeros(2)) != 2), "UNKNOWN", "id() of an object"),
        (always(lambda: hash(WEIGHT) != 2), "PROVED", ""),
        (always(lambda: torch.zeros(2).data_ptr() != 2), "UNKNOWN", "the address of memory"),
        (always(lambda: torch.zeros(2).untyped_storage().data_ptr() != 2), "UNKNOWN", "the address of memory"),
        (always(lambda: WEAKLY.__setitem__(0, torch.ones(2)) is None), "UNKNOWN", "a weak reference"),
        (always(lambda: weakref.ref(torch.ones(2))() is not None), "UNKNOWN", "a weak reference"),
        (always(lambda: weakref.ref(WEIGHT)() is WEIGHT), "PROVED", ""),
        (always(lambda: KEPT.data_ptr() != 2), "PROVED", ""),
        (always(lambda: id(torch) > 2), "PROVED", ""),
        (always(lambda: not Path("no such file").exists()), "UNKNOWN", "whether there is one"),
        (always(lambda: len(Path(__file__).read_text("utf-8")) > 2), "UNKNOWN", "a step reads a file"),
        (always(lambda: os.makedirs(os.getcwd(), exist_ok=True) is None), "PROVED", ""),
    ],
)
def test_random_numbers(built: Built, verdict: str, said: str) -> None:
    found = report(built)
    assert found.verdict == verdict, found.reason
    assert said in found.reason


@pytest.mark.parametrize(
    ("built", "said"),
    [
        (always(lambda: time.time() > 0), "the clock"),
        (always(lambda: datetime.datetime.now().year > 2), "the clock"),
        (always(lambda: datetime.date.today().year > 2), "the clock"),
        (always(lambda: time.localtime().tm_year > 2), "the clock"),
        (always(lambda: time.strftime("%Y") != "2"), "the clock"),
        (always(lambda: time.clock_gettime(time.CLOCK_MONOTONIC) > 0), "the clock"),
        (at_building(lambda: random.Random().random()), "the operating system"),
        (at_building(lambda: len(socket.gethostname())), "the name of the machine"),
        (lambda: lambda: 0.0, "the factor of 0 at"),
    ],
)
def test_what_is_assumed(built: Built, said: str) -> None:
    """PROVED, with a line that names it."""
    found = report(built)
    assert found.verdict == "PROVED", found.reason
    assert any(said in a for a in found.assumptions)


def test_sets_that_are_gone_through() -> None:
    """PROVED, with the line: every process has an order of its own. Where they are sorted, there is nothing to say."""
    names = {"weight", "bias"}

    def built() -> Factor:
        first = next(iter(names))
        return lambda: 2 if len(first) + len(sorted(names)) > 2 else 1

    found = report(built)
    assert found.verdict == "PROVED", found.reason
    assert sum("test_chance.py" in a and "goes through a set" in a for a in found.assumptions) == 1


def test_a_factor_that_is_not_always_0() -> None:
    """PROVED: another step shows what it multiplies."""

    def built() -> Factor:
        counts = iter(range(9))
        return lambda: float(next(counts))

    found = report(built)
    assert found.verdict == "PROVED", found.reason
    assert not any("factor of 0" in a for a in found.assumptions)
