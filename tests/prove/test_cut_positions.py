"""Positions that every rank counts from its own start on, over a cut axis: `arange(start, stop)` where the program has one range."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import trainverify as tv
from trainverify.build.plan import RankBuilder
from trainverify.build.program import ProgramBuilder
from trainverify.build.tape import Tensor
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.verdicts import verify

ROWS, RANKS = 6, 4


def turned(b: ProgramBuilder | RankBuilder, x: Tensor, start: object, stop: object) -> Tensor:
    """Every position times the cosine of its number."""
    numbers = b.float(b.arange(start=start, stop=stop, name="numbers"), name="numbers.float")
    angles = b.unsqueeze(b.cos(b.mul(numbers, value=0.01), name="angles"), dim=1, name="angles.column")
    return b.mul(x, angles, name="turned")


def model(length: int, width: int) -> Program:
    b = tv.program("positions")
    x, w = b.input("x", (ROWS, length, width)), b.input("w", (width, width))
    y = b.linear(turned(b, x, 0, length), w, name="y")
    b.loss(b.sum(b.mul(y, y), name="loss"))
    return b.build()


def plan(length: int, width: int, first: Callable[[int, int], int]) -> Plan:
    """Rank r counts from first(r, length of a rank's part) on."""
    own = length // RANKS
    p = tv.plan("positions", tv.Mesh(cp=RANKS))
    with p.ranks() as r:
        x, w = r.input("x", (ROWS, own, width), "b (cp s) h"), r.input("w", (width, width), "o h")
        start, stop = r.each(lambda at: first(at["cp"], own)), r.each(lambda at: first(at["cp"], own) + own)
        y = r.linear(turned(r, x, start, stop), w, name="y")
        r.loss(r.all_reduce(r.sum(r.mul(y, y), name="part"), group="cp", name="loss"))
    return p.build()


def test_each_from_where_the_one_before_ends() -> None:
    """PROVED at full size."""
    report = verify(model(4096, 320), plan(4096, 320, lambda rank, own: rank * own))
    assert report.verdict == "PROVED", report.reason


@pytest.mark.parametrize(
    "first",
    [
        lambda rank, own: 0,
        lambda rank, own: max(rank * own - 1, 0),
        lambda rank, own: (RANKS - 1 - rank) * own,
        lambda rank, own: (0, 2, 1, 3)[rank] * own,
        lambda rank, own: (rank + 1) * own,
    ],
    ids=["all from 0", "one too early", "in reverse", "two exchanged", "one rank too far"],
)
def test_other_starts(first: Callable[[int, int], int]) -> None:
    """REFUTED: also where all numbers occur, on other ranks."""
    assert verify(model(20, 3), plan(20, 3, first)).verdict == "REFUTED"
