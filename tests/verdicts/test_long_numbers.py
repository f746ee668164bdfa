"""Numbers that are too long to be written: corrections of AdamW after many steps, high powers, literals beyond float64, keys of 64 bits.

Each with the plan that is a little wrong. Every verdict is there within seconds, in both engines.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest

import trainverify as tv
from trainverify.build.tape import Tape, Tensor
from trainverify.ops import OPS
from trainverify.ops.table import OpError
from trainverify.primitives.scalars import SCALARS
from trainverify.prove.attempt import Engine

ENGINES: tuple[Engine, ...] = ("algebra", "smt")
PROVED = {"algebra": "PROVED", "smt": "PROVED(reduced)"}


def trained(step: int, **how: Any) -> tv.Program:
    b = tv.program("model")
    x, w = b.input("x", (6, 5)), b.parameter("w", (4, 5))
    b.loss(b.mean(b.square(b.linear(x, w, name="y"), name="sq"), name="loss"))
    return tv.complete(b.build(), tv.AdamW(lr=1e-3, step=step, **how))


def in_parallel(step: int, **how: Any) -> tv.Plan:
    p = tv.plan("plan", tv.Mesh(dp=3))
    with p.ranks() as r:
        x, w = r.input("x", (2, 5), "(dp b) k"), r.parameter("w", (4, 5), "o k")
        m, v = r.state("w.m", (4, 5), "o k"), r.state("w.v", (4, 5), "o k", domain="nonnegative")
        loss = r.mean(r.square(r.linear(x, w, name="y"), name="sq"), name="loss.local")
        r.backward(loss)
        r.loss(r.all_reduce(loss, group="dp", op="avg", name="loss"))
        grad = r.all_reduce(r.gradient(w), group="dp", op="avg", name="w.grad.mean")
        r.output(grad, "gradient", "w")
        new = r.adamw(w, grad, m, v, lr=1e-3, step=step, name=["w.new", "m.new", "v.new"], **how)
        for old, fresh in zip((w, m, v), new, strict=True):
            r.update(old, fresh)
    return p.build()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("step", [400, 1440, 10_000, 1_000_000, 10**12])
def test_adamw_after_many_steps_is_proved(step: int, engine: Engine) -> None:
    begin = time.process_time()
    assert tv.verify(trained(step), in_parallel(step), engine=engine).verdict == PROVED[engine]
    assert time.process_time() - begin < 10


@pytest.mark.parametrize(("step", "other"), [(400, 401), (409, 410), (1440, 1441), (10_000, 9_999), (1_000_000, 1_000_001)])
def test_adamw_a_step_too_late_is_refuted(step: int, other: int) -> None:
    """At a million steps the corrections differ by 1e-437: enclosures have the digits for it."""
    report = tv.verify(trained(step), in_parallel(other))
    assert (report.verdict, report.reason) == ("REFUTED", "updated parameter w differs on rank 0; first wrong tensor: w.new on rank 0")


def test_adamw_with_another_beta_is_refuted() -> None:
    report = tv.verify(trained(2000), in_parallel(2000, beta2=0.9991))
    assert (report.verdict, report.reason.partition(" differs")[0]) == ("REFUTED", "updated parameter w")


def test_adamw_further_than_enclosures_go_is_unknown() -> None:
    report = tv.verify(trained(10**9), in_parallel(10**9 + 1))
    assert (report.verdict, report.reason) == ("UNKNOWN", "1 of 5 obligations not proved; agreed on 3 random points")


@pytest.mark.parametrize("how", [{"beta1": 0.0}, {"beta1": Fraction(1, 10**320)}, {"beta2": Fraction(10**20 - 1, 10**20)}])
def test_adamw_with_betas_that_float64_does_not_have(how: dict[str, Any]) -> None:
    assert tv.verify(trained(5000, **how), in_parallel(5000, **how)).verdict == "PROVED"


@pytest.mark.parametrize(("name", "value"), [("beta1", 1.0), ("beta2", 1), ("beta1", -0.5), ("beta2", 1.5)])
def test_betas_that_correct_nothing(name: str, value: float) -> None:
    with pytest.raises(OpError, match=f"beta {value} is not between 0 and 1"):
        trained(3, **{name: value})


@pytest.mark.parametrize(
    "of", [(Fraction(9, 10), 30), (Fraction(999, 1000), 900), (Fraction(1, 10**5), 7), (Fraction(10**9 - 1, 10**9), 10)]
)
def test_a_constant_is_the_number_it_stands_for(of: tuple[Fraction, int]) -> None:
    exact = 1 - of[0] ** of[1]
    row = SCALARS["one_minus_power"]
    assert abs(float(row.numeric(of)) / float(exact) - 1) < 1e-13
    assert row.ball(of).contains(float(exact)) or abs(float(row.ball(of).mid()) / float(exact) - 1) < 1e-14


# -- one function of all elements ------------------------------------------------------------------------------------------

Made = Callable[[Tape, Tensor], Tensor]


def pair(mine: Made, plans: Made | None = None) -> tuple[tv.Program, tv.Plan]:
    """The sum of a function of x·w, its gradient and an update; `plans` is what the plan has instead."""
    b = tv.program("model")
    x, w = b.input("x", (6, 5)), b.parameter("w", (5,))
    b.loss(b.sum(mine(b, b.mul(x, w, name="xw")), name="loss"))
    p = tv.plan("plan", tv.Mesh(dp=3))
    with p.ranks() as r:
        x, w = r.input("x", (2, 5), "(dp b) k"), r.parameter("w", (5,), "k")
        loss = r.sum((plans or mine)(r, r.mul(x, w, name="xw")), name="loss.local")
        r.backward(loss)
        r.loss(r.all_reduce(loss, group="dp", name="loss"))
        grad = r.all_reduce(r.gradient(w), group="dp", name="w.grad.sum")
        r.output(grad, "gradient", "w")
        r.update(w, r.sgd(w, grad, lr=0.5, name="w.new"))
    return tv.complete(b.build(), tv.SGD(lr=0.5)), p.build()


def power(exponent: float | Fraction) -> Made:
    return lambda b, x: b.pow(x, exponent=exponent)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("exponent", [10**6, 1e6, 10**9, 1e9, 0.5e9, -(10**9), 10**18 + 1, 1e300])
def test_high_powers_are_proved(exponent: float, engine: Engine) -> None:
    begin = time.process_time()
    assert tv.verify(*pair(power(exponent)), engine=engine).verdict == PROVED[engine]
    assert time.process_time() - begin < 10


HARD: dict[str, Made] = {
    "of a sum": lambda b, x: b.pow(b.add(x, value=Fraction(5, 2)), exponent=10**9),
    "of a multiple": lambda b, x: b.pow(b.mul(x, value=Fraction(3, 7)), exponent=-(10**9)),
    "of a number": lambda b, x: b.mul(x, b.pow(b.full(shape=(5,), value=Fraction(3, 2), dtype="f32"), exponent=10**9)),
    "of a root": lambda b, x: b.mul(x, b.pow(b.sqrt(b.full(shape=(5,), value=Fraction(3, 2), dtype="f32")), exponent=10**9)),
    "a root of it": lambda b, x: b.pow(b.add(b.square(x), value=1), exponent=Fraction(10**9 + 1, 2)),
    "of what may be 0": lambda b, x: b.pow(b.relu(x), exponent=-(10**9)),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", HARD)
def test_high_powers_end_with_a_verdict(name: str, engine: Engine) -> None:
    begin = time.process_time()
    assert tv.verify(*pair(HARD[name]), engine=engine).verdict in (PROVED[engine], "UNKNOWN")
    assert time.process_time() - begin < 20


@pytest.mark.parametrize(("mine", "plans"), [(51, 50), (1000, 1001), (-3, -4)])
def test_another_power_is_refuted(mine: int, plans: int) -> None:
    report = tv.verify(*pair(lambda b, x: b.pow(b.exp(x), exponent=mine), lambda b, x: b.pow(b.exp(x), exponent=plans)))
    assert (report.verdict, report.reason.partition(";")[0]) == ("REFUTED", "loss differs on rank 0")


@pytest.mark.parametrize("engine", ENGINES)
def test_another_high_power_is_refuted(engine: Engine) -> None:
    """Where float64 has nothing but 0: enclosures do not meet."""
    report = tv.verify(*pair(power(10**9), power(10**9 + 1)), engine=engine)
    assert (report.verdict, report.reason.partition(";")[0]) == ("REFUTED", "loss differs on rank 0")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("exponent", [10**9, 10**18])
def test_powers_of_integers(exponent: int, engine: Engine) -> None:
    def scaled(b: Tape, x: Tensor) -> Tensor:
        return b.mul(x, b.float(b.pow(b.arange(stop=5), exponent=exponent)))  # 0, 1, and what has no room

    assert tv.verify(*pair(scaled), engine=engine).verdict in (PROVED[engine], "UNKNOWN")


@pytest.mark.parametrize("exponent", [float("inf"), float("-inf"), float("nan")])
def test_exponents_that_are_no_numbers(exponent: float) -> None:
    with pytest.raises(OpError, match=f"an exponent that is {exponent}"):
        pair(power(exponent))


# -- literals --------------------------------------------------------------------------------------------------------------

LITERALS: dict[str, tuple[Made, str]] = {
    "added": (lambda b, x: b.add(x, value=10**400), "PROVED"),
    "divided by": (lambda b, x: b.div(x, value=10**400), "PROVED"),
    "a fraction of it": (lambda b, x: b.mul(x, value=Fraction(10**400, 10**400 + 1)), "PROVED"),
    "a bound that nothing reaches": (lambda b, x: b.clamp(x, min=-(10**400), max=Fraction(10**400, 3)), "PROVED"),
    "multiplied with": (lambda b, x: b.mul(x, value=-(10**400)), "UNKNOWN"),  # float64 has no value to compare
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", LITERALS)
def test_literals_beyond_float64(name: str, engine: Engine) -> None:
    made, verdict = LITERALS[name]
    assert tv.verify(*pair(made), engine=engine).verdict == (PROVED[engine] if verdict == "PROVED" else verdict)


@pytest.mark.parametrize("name", ["divided by", "a fraction of it"])
def test_literals_beyond_float64_that_differ(name: str) -> None:
    made, _ = LITERALS[name]
    report = tv.verify(*pair(made, lambda b, x: b.mul(made(b, x), value=2)))
    assert report.verdict == "REFUTED"


@pytest.mark.parametrize("value", [10**2000, -(10**5000), Fraction(1, 10**2000)], ids=["long", "longer than Python prints", "fraction"])
def test_literals_that_are_too_long(value: float) -> None:
    bits = max(Fraction(value).numerator.bit_length(), Fraction(value).denominator.bit_length())
    with pytest.raises(OpError) as error:
        pair(lambda b, x: b.mul(x, value=value))
    assert str(error.value) == f"mul: attribute value has a number of {bits} bits; the limit is 4096"


@pytest.mark.parametrize(
    ("op", "attrs", "reason"),
    [
        ("arange", {"stop": 3 - 2**63, "start": -(2**63) - 1}, "-9223372036854775809 does not fit into 64 bits"),
        ("arange", {"stop": 2**62 * 3, "step": 2**62}, "9223372036854775808 does not fit into 64 bits"),
        ("full", {"shape": (2,), "value": 2**63, "dtype": "i64"}, "9223372036854775808 does not fit into 64 bits"),
        ("full", {"shape": (2,), "value": 10**99, "dtype": "i64"}, "an integer of 329 bits does not fit into 64 bits"),
    ],
)
def test_integers_that_no_tensor_holds(op: str, attrs: dict[str, Any], reason: str) -> None:
    with pytest.raises(OpError, match=reason):
        OPS.lower(op, attrs, ())


# -- keys ------------------------------------------------------------------------------------------------------------------


def dropped(key: int, offset: int, cut: bool) -> Made:
    def made(b: Tape, x: Tensor) -> Tensor:
        own = {"origin": b.each(lambda at: (at["dp"] * 2, 0)), "logical_shape": (6, 5)} if cut else {}
        return b.dropout(x, p=0.5, key=key, offset=offset, **own)

    return made


@pytest.mark.parametrize(("key", "offset"), [(2**63, 0), (2**64 - 1, 3), (-(2**63), 0), (7, 2**63 + 5), (2**63 - 1, 2**64 - 1)])
def test_keys_of_64_bits(key: int, offset: int) -> None:
    assert tv.verify(*pair(dropped(key, offset, False), dropped(key, offset, True))).verdict == "PROVED"
    report = tv.verify(*pair(dropped(key, offset, False), dropped(key ^ 1, offset, True)))
    assert (report.verdict, report.reason.partition(";")[0]) == ("REFUTED", "loss differs on rank 0")
    report = tv.verify(*pair(dropped(key, offset, False), dropped(key, offset ^ 1, True)))
    assert report.verdict == "REFUTED"


@pytest.mark.parametrize(("name", "value"), [("key", 2**64), ("key", -(2**63) - 1), ("offset", 10**30)])
def test_keys_of_more(name: str, value: int) -> None:
    with pytest.raises(OpError, match=f"the {name} is not a number of 64 bits"):
        pair(dropped(value if name == "key" else 7, value if name == "offset" else 0, False))
