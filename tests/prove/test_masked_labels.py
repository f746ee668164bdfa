"""Labels that are set to class 0 where they are ignored, as `loss_parallel` does: one-hots of `where(valid, label, 0)` over tp."""

from __future__ import annotations

import pytest

import trainverify as tv
from prove.meaning import check_program
from prove.some_listed import some
from trainverify.build.plan import RankBuilder
from trainverify.build.program import ProgramBuilder
from trainverify.build.tape import Tensor
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.verdicts import verify

ROWS, WIDTH, CLASSES, IGNORE = 96, 320, 5000, -100


def model() -> Program:
    b = tv.program("labels")
    x, labels = b.input("x", (ROWS, WIDTH)), b.input("labels", (ROWS,), "i64", ids=CLASSES, ignore=IGNORE)
    w = b.input("w", (CLASSES, WIDTH))
    b.loss(b.nll_loss(b.linear(x, w, name="scores"), labels, reduction="sum", name="loss"))
    return b.build()


def choose(b: ProgramBuilder | RankBuilder, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Which labels count, and the labels with class 0 in the place of the others."""
    valid = b.ne(labels, value=IGNORE, name="valid")
    return valid, b.where(valid, labels, b.full(shape=(), value=0, dtype="i64", name="zero"), name="safe")


def plan(masked: bool = True, fill: int = 0) -> Plan:
    """tp = 2; without the second mask ignored rows add their score of class 0 to the loss."""
    p = tv.plan("labels", tv.Mesh(tp=2))
    with p.ranks() as r:
        x, labels = r.input("x", (ROWS, WIDTH), "r h"), r.input("labels", (ROWS,), "r", dtype="i64", ids=CLASSES, ignore=IGNORE)
        w = r.input("w", (CLASSES // 2, WIDTH), "(tp v) h")
        valid, safe = choose(r, labels)
        start = r.each(lambda at: at["tp"] * CLASSES // 2)
        hot = r.float(r.one_hot(safe, num_classes=CLASSES // 2, start=start, name="hot"), name="hot.float")
        found = r.all_reduce(r.einsum(r.linear(x, w, name="scores"), hot, spec="rv,rv->r", name="part"), group="tp", name="found")
        if masked:
            found = r.where(valid, found, r.full(shape=(), value=fill, dtype="f32", name="none"), name="kept")
        r.loss(r.neg(r.sum(found, name="total"), name="loss"))
    return p.build()


def test_masked_twice() -> None:
    """PROVED: what class 0 stands for is masked again."""
    report = verify(model(), plan())
    assert report.verdict == "PROVED", report.reason


def chosen_scores(fill: int) -> Program:
    """Scores of the labels; of class `fill` where a label is ignored."""
    b = tv.program("scores")
    x, labels = b.input("x", (3, 5)), b.input("labels", (3,), "i64", ids=5, ignore=IGNORE)
    safe = b.where(b.ne(labels, value=IGNORE), labels, b.full(shape=(), value=fill, dtype="i64"), name="safe")
    hot = b.float(b.one_hot(safe, num_classes=5, name="hot"), name="hot.float")
    b.metric("found", b.einsum(x, hot, spec="rv,rv->r", name="found"))
    return b.build()


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_forms_mean_what_they_say(share: float) -> None:
    """Also with every position listed."""
    for seed in range(5):
        found = check_program(chosen_scores(0), seed, list_some=some(seed, share))
        assert not found.wrong
        assert not found.without


def test_another_class_has_no_form() -> None:
    """Class 2 in the place of ignored labels is not taken for class 0."""
    found = check_program(chosen_scores(2), 0, list_some=some(0, 0.0))
    assert not found.wrong
    assert found.without


def test_masked_once() -> None:
    """REFUTED: an ignored label counts as one of class 0."""
    assert verify(model(), plan(masked=False)).verdict == "REFUTED"


def test_masked_by_one() -> None:
    """REFUTED: an ignored row has the loss −1."""
    assert verify(model(), plan(fill=1)).verdict == "REFUTED"
