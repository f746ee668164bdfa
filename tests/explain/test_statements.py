"""Repairs of statements: what is said holds, for all that a line makes, forward and backward."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest

import trainverify as tv
from trainverify.bugs.cases import CASES
from trainverify.explain.cause import Cause
from trainverify.explain.missing import product_of_sizes
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.report import Report, grouped


def wrong(id: str) -> Report:
    return tv.verify(*next(c for c in CASES if c.id == id).build(False))


def norms(layers: int, power_is: str) -> tuple[Program, Plan]:
    """Layers that divide by the mean square over hidden features, which tp cuts."""
    rows, k = 3, 4
    b = tv.program("norms")
    x, t = b.input("x", (rows, k)), b.input("t", (rows, k))
    y = x
    for i in range(layers):
        w = b.input(f"w{i}", (k,))
        power = b.mean(b.square(y, name=f"sq{i}"), dim=-1, keepdim=True, name=f"power{i}")
        y = b.mul(b.div(y, b.sqrt(b.add(power, value=0.5, name=f"more{i}"), name=f"root{i}"), name=f"n{i}"), w, name=f"y{i}")
    b.loss(b.sum(b.mul(y, t, name="yt"), name="loss"))
    logical = b.build()
    p = tv.plan("norms", tv.Mesh(tp=2))
    with p.ranks() as r:
        x, t = r.input("x", (rows, k // 2), "r (tp k)"), r.input("t", (rows, k // 2), "r (tp k)")
        y = x
        for i in range(layers):
            w = r.input(f"w{i}", (k // 2,), "(tp k)")
            own = r.mean(r.square(y, name=f"sq{i}"), dim=-1, keepdim=True, name=f"own{i}")
            power = own
            if power_is == "averaged":
                power = r.all_reduce(own, group="tp", op="avg", name=f"power{i}")
            elif power_is == "copied":
                power = r.identity(own, name=f"power{i}")
            y = r.mul(r.div(y, r.sqrt(r.add(power, value=0.5, name=f"more{i}"), name=f"root{i}"), name=f"n{i}"), w, name=f"y{i}")
        r.loss(r.all_reduce(r.sum(r.mul(y, t, name="yt"), name="local"), group="tp", name="loss"))
    return logical, p.build()


@pytest.mark.parametrize(("power_is", "named"), [("copied", "power"), ("own", "own")])
def test_one_mistake_at_many_sites_is_one_cause(power_is: str, named: str) -> None:
    assert tv.verify(*norms(4, "averaged")).verdict == "PROVED"
    place = tv.verify(*norms(4, power_is)).place
    assert place is not None
    assert (place.category, place.tensor) == (Cause.MISSING_REDUCTION, f"{named}0")
    assert f"the same for {named}1, {named}2 and 1 more" in place.cause
    assert re.fullmatch(r"insert all_reduce with avg over tp after .*test_statements.py:\d+", place.repair or "")


@pytest.mark.parametrize("id", ["B113", "B86"])
def test_no_tensor_is_named_that_is_not_there_yet_or_does_not_help(id: str) -> None:
    place = wrong(id).place
    assert place is not None
    assert "w1.grad.zero" not in place.cause
    assert "squares1.e.grad" not in place.cause
    assert "agrees on 3 fresh points" in place.cause


@pytest.mark.parametrize("id", ["B13", "B36", "B38", "B40", "B93"])
def test_numbers_of_the_rank_and_no_references(id: str) -> None:
    place = wrong(id).place
    assert place is not None
    assert "$" not in place.cause
    assert "$" not in str(place.op)


def test_forward_and_backward_are_repaired_together() -> None:
    place = wrong("B38").place
    assert place is not None
    assert place.category is Cause.WRONG_BLOCK
    assert "the same for wg.heads.grad" in place.cause


def test_a_factor_is_a_product_of_sizes() -> None:
    sizes = {2, 3, 10}
    assert product_of_sizes(Fraction(9, 20), sizes)
    assert not product_of_sizes(Fraction(0), sizes)
    assert product_of_sizes(Fraction(5), sizes)
    assert not product_of_sizes(Fraction(7), sizes)
    assert not product_of_sizes(Fraction(2639, 3993), sizes)


def test_assumptions_of_one_form_are_one_line() -> None:
    many = [f"input w{i}.v holds numbers ≥ 0" for i in range(5)]
    assert grouped(["the loss is as it is", *many]) == ["the loss is as it is", "5 inputs hold numbers ≥ 0: w0.v … w4.v"]
    assert grouped(many[:3]) == many[:3]


def test_the_report_leads_with_the_repair() -> None:
    report = wrong("B06")
    found = report.json()["first_wrong"]
    assert found["category"] == "MISSING_REDUCTION"
    assert found["repair"].startswith("insert all_reduce over tp after ")
