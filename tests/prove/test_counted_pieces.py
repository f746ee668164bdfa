"""Positions along an axis that something else cuts into unequal pieces, and literals among labels."""

from __future__ import annotations

import pytest

import trainverify as tv
from prove.meaning import check_program
from trainverify.build.plan import RankBuilder
from trainverify.build.program import ProgramBuilder
from trainverify.build.tape import Tensor
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.verdicts import verify

ROWS, LENGTH, CLASSES = 6, 7, 5
Builder = ProgramBuilder | RankBuilder


def scored(b: Builder, x: Tensor, labels: Tensor, start: int, moved: int, last: int) -> Tensor:
    """Scores times their position, against the labels of the next position; the last has none."""
    positions = b.to(b.arange(start=start, stop=start + LENGTH), dtype="f32")
    scores = b.mul(x, b.view(positions, shape=(LENGTH, 1)))
    none = b.full(shape=(x.shape[0], moved), value=last, dtype="i64")
    following = b.concat(b.slice(labels, dim=1, start=moved, stop=LENGTH), none, dim=1)
    rows = x.shape[0] * LENGTH
    flat = b.log_softmax(b.view(scores, shape=(rows, CLASSES)), dim=1)
    return b.nll_loss(flat, b.view(following, shape=(rows,)), reduction="sum")


def model() -> Program:
    b = tv.program("positions and labels")
    x, labels = b.input("x", (ROWS, LENGTH, CLASSES)), b.input("labels", (ROWS, LENGTH), "i64", ids=CLASSES, ignore=-100)
    b.loss(scored(b, x, labels, 0, 1, -100))
    return b.build()


def plan(start: int = 0, moved: int = 1, last: int = -100) -> Plan:
    p = tv.plan("positions and labels", tv.Mesh(dp=2))
    with p.ranks() as r:
        x = r.input("x", (ROWS // 2, LENGTH, CLASSES), "(dp b) s c")
        labels = r.input("labels", (ROWS // 2, LENGTH), "(dp b) s", dtype="i64", ids=CLASSES, ignore=-100)
        r.loss(r.all_reduce(scored(r, x, labels, start, moved, last), group="dp"))
    return p.build()


def test_proved() -> None:
    """PROVED, and the forms mean what the programs compute."""
    check_program(model(), 0)
    report = verify(model(), plan())
    assert report.verdict == "PROVED", report.reason


@pytest.mark.parametrize("wrong", [{"start": 1}, {"moved": 2}, {"last": 0}, {"last": CLASSES - 1}])
def test_refuted(wrong: dict[str, int]) -> None:
    """REFUTED: positions that begin elsewhere, labels of another position, a last position that has a label."""
    assert verify(model(), plan(**wrong)).verdict == "REFUTED"
