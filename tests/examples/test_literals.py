"""Literals: one unit in the last place is UNKNOWN, a missing eps of 1e-12 is REFUTED."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import trainverify as tv
from trainverify.build.plan import RankBuilder
from trainverify.build.tape import Tape, Tensor

SCALE, ROOT = 0.08838834764831845, 11.313708498984761  # 1/√128 and √128, each rounded
BELOW = pytest.mark.xfail(strict=True, reason="relative differences below 1e-9 are taken for equal before enclosures look at them")
Body = Callable[[Tape, Tensor, Tensor], Tensor]


def logical(body: Body) -> tv.Program:
    b = tv.program("step")
    x, w = b.input("x", (6, 10)), b.parameter("w", (4, 10))
    b.loss(b.mean(body(b, x, w), name="loss"))
    return tv.complete(b.build(), tv.SGD(lr=0.5))


def plan(body: Body) -> tv.Plan:
    p = tv.plan("step", tv.Mesh(dp=2))
    with p.ranks() as r:
        x, w = r.input("x", (3, 10), "(dp b) k"), r.parameter("w", (4, 10), "o k")
        loss = r.mean(body(r, x, w), name="loss.local")
        r.backward(loss)
        r.loss(average(r, loss, "loss"))
        grad = average(r, r.gradient(w), "w.grad.mean")
        r.output(grad, "gradient", "w")
        r.update(w, r.sgd(w, grad, lr=0.5, name="w.new"))
    return p.build()


def average(r: RankBuilder, x: Tensor, name: str) -> Tensor:
    made: Tensor = r.all_reduce(x, group="dp", op="avg", name=name)
    return made


def scaled(**how: float) -> Body:
    """y·SCALE, or y/ROOT."""
    return lambda b, x, w: getattr(b, *how)(b.linear(x, w, name="y"), value=next(iter(how.values())), name="scaled")


def normed(eps: float) -> Body:
    return lambda b, x, w: b.rms_norm(b.linear(x, w, name="y"), eps=eps, name="normed")


def test_one_ulp_is_unknown() -> None:
    report = tv.verify(logical(scaled(mul=SCALE)), plan(scaled(div=ROOT)))
    assert (report.verdict, report.exit_code) == ("UNKNOWN", 3)
    assert report.reason.startswith("literal rounding: "), report.reason
    assert "literal rounding" in {o.status for o in report.obligations}


def test_the_same_literal_is_proved() -> None:
    assert tv.verify(logical(scaled(mul=SCALE)), plan(scaled(mul=SCALE))).verdict == "PROVED"


def test_more_than_an_ulp_is_refuted() -> None:
    assert tv.verify(logical(scaled(mul=SCALE)), plan(scaled(mul=SCALE * (1 + 1e-13)))).verdict == "REFUTED"


@pytest.mark.parametrize("eps", [1e-5, 1e-12])
def test_missing_eps_is_refuted(eps: float) -> None:
    report = tv.verify(logical(normed(eps)), plan(normed(0.0)))
    assert (report.verdict, report.exit_code) == ("REFUTED", 1), report.reason
    if eps == 1e-5:
        assert report.place is not None
        assert report.place.tensor == "normed"


# -- literals that are sizes: at reduced sizes a correct plan may look wrong ---------------------------------------------


def variance(rows: int) -> tv.Program:
    b = tv.program("variance")
    spread = b.var(b.input("x", (rows, 3)), dim=0, correction=0)
    b.loss(b.sum(b.mul(spread, b.input("w", (3,))), name="loss"))
    return b.build()


def mean_of_squares(rows: int, share: float) -> tv.Plan:
    """E[x²] − E[x]², the sums divided by a literal."""
    p = tv.plan("variance", tv.Mesh(dp=2))
    with p.ranks() as r:
        x, w = r.input("x", (rows // 2, 3), "(dp b) k"), r.input("w", (3,), "k")
        total, squares = (r.all_reduce(r.sum(t, dim=0), group="dp") for t in (x, r.mul(x, x)))
        mean = r.mul(total, value=share)
        spread = r.sub(r.mul(squares, value=share), r.mul(mean, mean))
        r.loss(r.sum(r.mul(spread, w), name="loss"))
    return p.build()


HUGE = 3 << 20  # too many rows to be evaluated


@pytest.mark.parametrize(
    ("rows", "share", "verdict"),
    [(8, 1 / 8, "PROVED"), (8, 1 / 4, "REFUTED"), (1024, 1 / 1024, "PROVED"), (HUGE, 1 / HUGE, "UNKNOWN"), (HUGE, 2 / HUGE, "REFUTED")],
)
def test_a_count_as_a_literal(rows: int, share: float, verdict: str) -> None:
    report = tv.verify(variance(rows), mean_of_squares(rows, share))
    assert report.verdict == verdict, report.reason


def turned(rows: int) -> tv.Program:
    b = tv.program("turned")
    at = b.to(b.arange(stop=rows), dtype="f32")
    b.loss(b.sum(b.mul(b.input("x", (rows, 3)), b.unsqueeze(b.cos(b.mul(at, value=0.3)), dim=1)), name="loss"))
    return b.build()


def turned_in_blocks(rows: int, whole: bool, more: int = 0) -> tv.Plan:
    """Every rank adds the place where its rows begin, as an integer or as a real number."""
    p = tv.plan("turned", tv.Mesh(cp=4))
    with p.ranks() as r:
        mine = rows // 4
        x, at = r.input("x", (mine, 3), "(cp s) k"), r.arange(stop=mine)
        at = at if whole else r.to(at, dtype="f32")
        at = r.add(at, value=r.each(lambda here: (int if whole else float)(here["cp"] * (mine + more))))
        at = r.to(at, dtype="f32") if whole else at
        turned = r.mul(x, r.unsqueeze(r.cos(r.mul(at, value=0.3)), dim=1))
        r.loss(r.all_reduce(r.sum(turned), group="cp", name="loss"))
    return p.build()


@pytest.mark.parametrize(
    ("rows", "more", "whole", "verdict"),
    [
        (16, 0, True, "PROVED"),
        (16, 0, False, "PROVED"),
        (16, 1, True, "REFUTED"),
        (16, 1, False, "REFUTED"),
        (HUGE, 0, True, "PROVED"),
        (HUGE, 0, False, "PROVED"),
        (HUGE, 1, True, "REFUTED"),
        (HUGE, 1, False, "REFUTED"),
    ],
)
def test_where_rows_begin_as_a_literal(rows: int, more: int, whole: bool, verdict: str) -> None:
    report = tv.verify(turned(rows), turned_in_blocks(rows, whole, more))
    assert report.verdict == verdict, report.reason


def test_tiny_literals_are_no_counts() -> None:
    report = tv.verify(variance(HUGE), mean_of_squares(HUGE, 5e-324))
    assert report.verdict == "REFUTED", report.reason
