"""Gradients that are exactly zero: float64 sees noise, enclosures show that both are equal, all in one run."""

from __future__ import annotations

import math

import pytest

import trainverify as tv
from trainverify.evaluate.compare import unsettled
from trainverify.evaluate.run import random_inputs
from trainverify.evaluate.small import shrink_system
from trainverify.graph.obligations import obligations
from trainverify.graph.plan import Plan, units
from trainverify.ops import OPS
from trainverify.verdicts import compare_at, related, verify


def logical() -> tv.Program:
    """A softmax does not see what is added to all of a row: the bias has no gradient."""
    b = tv.program("shift")
    x, w, shift = b.input("x", (6, 5)), b.parameter("w", (7, 5)), b.parameter("shift", (6, 1))
    y = b.softmax(b.add(b.linear(x, w, name="h"), shift, name="shifted"), name="y")
    b.loss(b.sum_(b.mul(y, b.exp(y)), name="loss"))
    return tv.complete(b.build())


def plan(factor: float = 1.0) -> Plan:
    p = tv.plan("shift", tv.Mesh(dp=2))
    with p.ranks() as r:
        x, w = r.input("x", (3, 5), "(dp b) k"), r.parameter("w", (7, 5), "o k")
        shift = r.parameter("shift", (3, 1), "(dp b) k")
        y = r.softmax(r.add(r.linear(x, w, name="h"), shift, name="shifted"), name="y")
        part = r.sum_(r.mul(y, r.exp(y)), name="part")
        r.backward(part)
        r.loss(r.all_reduce(part, group="dp", name="loss"))
        r.output(r.mul(r.all_reduce(r.gradient(w), group="dp"), value=factor, name="w.grad.all"), "gradient", "w")
        r.output(r.gradient(shift), "gradient", "shift")
    return p.build()


def test_zero_gradients_are_equal() -> None:
    report = verify(logical(), plan())
    assert report.verdict == "PROVED"
    assert len(report.obligations) == 3


def test_a_real_difference_is_left() -> None:
    made, wanted = plan(1.001), logical()
    system = related(wanted, made, OPS, units(made), obligations(wanted, made, units(made))[0])
    small = shrink_system(system)
    found, _ = compare_at(small, made, system.obligations, 0)
    left = unsettled(small, made.lineage, found, random_inputs(small, 0))
    assert {str(s.obligation) for s in left} == {"gradient of w"}
    assert verify(wanted, made).verdict == "REFUTED"


# -- hyperparameters are decimals as they are written: a unit in the last place of one is no mistake --------------------------


def trained(how: tv.SGD | tv.AdamW) -> tv.Program:
    b = tv.program("step")
    x, w = b.input("x", (4, 3)), b.parameter("w", (2, 3))
    b.loss(b.mean(b.square(b.linear(x, w)), name="loss"))
    return tv.complete(b.build(), how)


ADAM = tv.AdamW(lr=0.1)
UNITS = {
    "lr of sgd": (tv.SGD(lr=0.1), tv.SGD(lr=0.3 / 3)),
    "lr": (ADAM, tv.AdamW(lr=0.3 / 3)),
    "decay": (ADAM, tv.AdamW(lr=0.1, weight_decay=math.nextafter(0.01, 1))),
    "eps": (ADAM, tv.AdamW(lr=0.1, eps=math.nextafter(1e-8, 1))),
}
MORE = {
    "lr of sgd": (tv.SGD(lr=0.1), tv.SGD(lr=0.1000000001)),
    "lr": (ADAM, tv.AdamW(lr=0.1000000001)),
    "decay": (ADAM, tv.AdamW(lr=0.1, weight_decay=0.0100000001)),
    "eps": (ADAM, tv.AdamW(lr=0.1, eps=1.00001e-8)),
}


@pytest.mark.parametrize("which", UNITS)
def test_a_hyperparameter_that_was_computed(which: str) -> None:
    """Expected: UNKNOWN, literal rounding: 0.3 / 3 is 0.1 but for its last digit; REFUTED if it is off by more."""
    one, other = UNITS[which]
    report = verify(trained(one), trained(other), points=1)
    assert report.verdict == "UNKNOWN", report.reason
    assert report.reason.startswith("literal rounding")
    assert verify(trained(one), trained(one), points=1).verdict == "PROVED"
    one, other = MORE[which]
    assert verify(trained(one), trained(other), points=1).verdict == "REFUTED"
