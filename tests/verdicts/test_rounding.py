"""Gradients that are exactly zero: float64 sees noise, enclosures show that both are equal, all in one run."""

from __future__ import annotations

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
