"""Balls: what they can tell apart, what they cannot, and when they refuse to answer."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from flint import arb

from ops.references import REFERENCES
from trainverify.domains.ball import Ball, ball, balls, precision
from trainverify.domains.numeric import NUMERIC
from trainverify.graph.types import TensorType
from trainverify.ops import OPS
from trainverify.primitives import node as F
from trainverify.primitives.scalars import SCALARS, Undecided

RNG = np.random.default_rng(2)


def run(name: str, *inputs: Any, widen: bool = False, **attrs: Any) -> Any:
    lowered = OPS.lower(name, attrs, tuple(TensorType(v.shape, "f64") for v in inputs))
    return Ball(widen_literals=widen).run(lowered.outputs, list(inputs))[0]


def agree_to(digits: int, a: Any, b: Any) -> bool:
    bound = arb(10) ** -digits
    return all(bool(x.overlaps(y)) and bool(abs(x - y) < bound) for x, y in zip(a.flat, b.flat, strict=True))


def disjoint(a: Any, b: Any) -> bool:
    return any(not x.overlaps(y) for x, y in zip(a.flat, b.flat, strict=True))


def test_softmax_does_not_see_a_shift() -> None:
    with precision(200):
        x = balls(RNG.standard_normal((3, 5)))
        assert agree_to(40, run("softmax", x), run("softmax", x + ball(Fraction(7, 3))))


def test_logsumexp_moves_with_a_shift() -> None:
    with precision(200):
        x, c = balls(RNG.standard_normal((2, 7))), ball(Fraction(-5, 7))
        assert agree_to(40, run("logsumexp", x, dim=1) + c, run("logsumexp", x + c, dim=1))


def test_softmax_sees_a_missing_maximum_as_the_same_function() -> None:
    with precision(200):
        x = balls(RNG.standard_normal((3, 5)))
        e = run("exp", x)
        assert agree_to(40, run("softmax", x), e / run("sum", e, dim=1, keepdim=True))


def test_a_missing_eps_is_told_apart() -> None:
    with precision(160):
        x = balls(RNG.standard_normal((2, 5)))
        assert disjoint(run("rms_norm", x, eps=1e-12), run("rms_norm", x, eps=0))


@pytest.mark.parametrize(("widen", "told_apart"), [(False, True), (True, False)])
def test_a_literal_stands_for_its_neighbourhood_when_widened(widen: bool, told_apart: bool) -> None:
    with precision(160):
        x = balls(RNG.standard_normal((2, 3)))
        product = run("mul", x, value=0.08838834764831845, widen=widen)
        quotient = run("div", x, value=11.313708498984761, widen=widen)
        assert disjoint(product, quotient) is told_apart


def test_integers_and_rationals_are_never_widened() -> None:
    with precision(160):
        assert ball(3, widen=True).is_exact()
        assert ball(2.0, widen=True).is_exact()
        assert bool(ball(Fraction(1, 3), widen=True).rad() < arb(2) ** -150)
        assert ball(-math.inf, widen=True).is_exact()


def test_comparing_balls_that_meet_is_undecided() -> None:
    x = F.input_(0, (), "real")
    third = np.array(None)
    third[()] = arb(1) / 3
    with pytest.raises(Undecided):
        Ball().run([F.call("lt", x * 3, 1)], [third])
    with pytest.raises(Undecided):
        Ball().run([F.call("floor", x * 3)], [third])


def test_a_value_equals_its_own_maximum() -> None:
    """Inexact balls, yet which one is largest is certain: the derivative of amax exists."""
    x = F.input_(0, (3,), "real")
    y = F.call("exp", x)
    hit = F.call("eq", y, F.reduce("max", y, [0], keepdim=True))
    assert list(Ball().run([hit], [balls(np.array([0.3, 2.0, -1.0]))])[0]) == [False, True, False]


def test_undefined_values_decide_nothing() -> None:
    x = F.input_(0, (), "real")
    y = F.call("log", x)
    with pytest.raises(Undecided):
        Ball().run([F.call("eq", y, y)], [balls(np.array(-1.0))])


ACROSS = arb(0, 1e-9)


@pytest.mark.parametrize(
    ("certain", "fn", "param", "args"),
    [
        (False, "pow", Fraction(1, 2), [ACROSS]),
        (False, "pow", Fraction(-1, 2), [ACROSS]),
        (False, "pow", Fraction(3, 2), [ACROSS]),
        (False, "pow", -1, [ACROSS]),
        (False, "log", None, [ACROSS]),
        (False, "div", None, [arb(1), ACROSS]),
        (True, "pow", Fraction(3, 2), [ACROSS - 1]),
        (True, "log", None, [ACROSS - 1]),
        (True, "div", None, [ACROSS + 1, arb(0)]),
        (True, "tanh", None, [arb("nan")]),
    ],
)
def test_only_what_no_point_of_a_ball_has_a_value_for_is_no_number(certain: bool, fn: str, param: Any, args: list[arb]) -> None:
    found = SCALARS[fn].ball(*args) if param is None else SCALARS[fn].ball(*args, param)
    assert found.is_nan() is certain
    assert found.overlaps(arb(7))


def test_argmax_needs_only_the_largest_to_be_certain() -> None:
    x = F.input_(0, (3,), "real")
    tied = F.call("log", F.call("exp", F.select(x > 1, x, Fraction(1, 3))))
    assert Ball().run([F.rowwise("argmax", tied, 0)], [balls(np.array([0.3, 2.0, -1.0]))])[0][()] == 1
    with pytest.raises(Undecided):
        Ball().run([F.rowwise("argsort", tied, 0)], [balls(np.array([0.3, 2.0, -1.0]))])


@pytest.mark.parametrize("name", [d.name for d in OPS if not d.collective and not d.point_to_point])
def test_enclosures_contain_the_values_at_every_point_of_wide_inputs(name: str) -> None:
    sample = REFERENCES[name][1][0]
    inputs, radius = sample.draw(8), 1e-3
    lowered = OPS.lower(name, sample.attrs, sample.types)
    wide = [v if v is None else balls(v) for v in inputs]
    reals = [i for i, v in enumerate(inputs) if v is not None and v.dtype.kind == "f"]
    for i in reals:
        wide[i] = np.vectorize(lambda b: arb(b, radius), otypes=[object])(wide[i])
    try:
        enclosures = Ball().run(lowered.outputs, wide)
    except Undecided:
        assert name in ("floor", "moe_gate", "sort", "argsort", "topk", "relu", "to", "eq", "ne", "lt", "le", "gt", "ge")
        return
    rng = np.random.default_rng(9)
    for _ in range(3):
        point = [v + rng.uniform(-radius, radius, v.shape) if i in reals else v for i, v in enumerate(inputs)]
        for enclosure, value in zip(enclosures, NUMERIC.run(lowered.outputs, point), strict=True):
            for b, v in zip(enclosure.flat, value.flat, strict=True):
                assert not isinstance(b, arb) or b.lower() - 1e-9 <= v <= b.upper() + 1e-9
