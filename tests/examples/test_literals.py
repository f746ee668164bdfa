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
