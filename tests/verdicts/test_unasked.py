"""What a plan does that no output of the logical program asks about: each wrong plan is refused, and its right twin proved."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

import trainverify as tv
from trainverify.graph.plan import Plan
from trainverify.graph.program import Output, Program
from trainverify.report import Report
from trainverify.verdicts import verify

Engine = Literal["algebra", "smt"]
ENGINES: tuple[Engine, ...] = ("algebra", "smt")


def step(decay: float | None = None, frozen: float | None = None, copies: tuple[float, ...] = (), dp: int = 2) -> tuple[Program, Plan]:
    """A linear model with a frozen scale `c` and a buffer `s`, both state that the logical step leaves alone."""
    b = tv.program("l")
    x, w, c, s = b.input("x", (6, 5)), b.parameter("w", (3, 5)), b.state("c", (3,)), b.state("s", (3,))
    b.loss(b.mean(b.mul(b.add(b.linear(x, w, name="y"), s), c, name="z"), name="loss"))
    p = tv.plan("p", tv.Mesh(dp=dp))
    with p.ranks() as r:
        x, w = r.input("x", (6 // dp, 5), "(dp b) k"), r.parameter("w", (3, 5), "o k")
        c, s = r.state("c", (3,), "o"), r.state("s", (3,), "o")
        loss = r.mean(r.mul(r.add(r.linear(x, w, name="y"), s), c, name="z"), name="loss.local")
        r.backward(loss)
        r.loss(r.all_reduce(loss, group="dp", op="avg", name="loss"))
        g = r.all_reduce(r.gradient(w), group="dp", op="avg", name="g")
        r.output(g, "gradient", "w")
        r.update(w, r.sgd(w, g, lr=0.1, name="w.new"))
        if decay is not None:
            r.update(s, r.mul(s, value=decay, name="s.new"))
        if frozen is not None:
            r.update(c, r.mul(c, value=frozen, name="c.new"))
        for n, factor in enumerate(copies):
            again = r.state(f"c{n}", (3,), "o", "c")
            r.update(again, r.mul(again, value=factor, name=f"c{n}.new"))
    return tv.complete(b.build(), tv.SGD(lr=0.1)), p.build()


def obligations(report: Report) -> list[str]:
    return [o.name for o in report.obligations]


USUAL = ["loss", "gradient of w", "updated parameter w"]


@pytest.mark.parametrize("engine", ENGINES)
def test_state_that_is_reported_as_it_was_is_proved(engine: Engine) -> None:
    report = verify(*step(decay=1.0, frozen=1.0), engine=engine, accept_reduced=True)
    assert report.verdict.startswith("PROVED"), report.reason
    assert obligations(report) == [*USUAL, "unchanged state c", "unchanged state s"]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_buffer_that_decays_in_the_plan_only_is_refuted(engine: Engine) -> None:
    report = verify(*step(decay=0.9), engine=engine)
    assert report.verdict == "REFUTED", report.reason
    assert report.reason == "unchanged state s differs on rank 0; first wrong tensor: s.new on rank 0"


def test_weight_decay_on_a_frozen_weight_is_refuted() -> None:
    report = verify(*step(frozen=0.999))
    assert (report.verdict, report.reason.split(";")[0]) == ("REFUTED", "unchanged state c differs on rank 0")


def test_of_two_local_copies_both_stay() -> None:
    assert verify(*step(copies=(1.0, 1.0))).verdict == "PROVED"
    report = verify(*step(copies=(1.0, 0.5)))
    assert (report.verdict, report.reason.split(";")[0]) == ("REFUTED", "unchanged state c differs on rank 0")


def parameter_copies(second: bool) -> tuple[Program, Plan]:
    """A parameter that the only rank holds twice; the logical step updates it."""
    b = tv.program("l")
    x, w = b.input("x", (2, 5)), b.parameter("w", (3, 5))
    b.loss(b.mean(b.linear(x, w), name="loss"))
    p = tv.plan("p", tv.Mesh(one=1))
    with p.ranks() as r:
        x, w, v = r.input("x", (2, 5), "b k"), r.parameter("w", (3, 5), "o k"), r.parameter("v", (3, 5), "o k", "w")
        loss = r.mean(r.linear(x, w), name="loss")
        r.backward(loss)
        r.loss(loss)
        g = r.gradient(w)
        for t in (w, v) if second else (w,):
            r.output(g, "gradient", t.name)
            r.update(t, r.sgd(t, g, lr=0.1, name=f"{t.name}.new"))
    return tv.complete(b.build(), tv.SGD(lr=0.1)), p.build()


def test_of_two_local_copies_of_a_parameter_both_are_updated() -> None:
    assert verify(*parameter_copies(True)).verdict == "PROVED"
    report = verify(*parameter_copies(False))
    assert report.verdict == "INVALID"
    assert [f.code for f in report.findings] == ["TV307", "TV307"]
    assert "holds v but has no updated parameter w" in " ".join(f.message for f in report.findings)


def test_state_that_only_the_plan_has_is_invalid() -> None:
    logical, _ = step()
    p = tv.plan("p", tv.Mesh(dp=2))
    with p.ranks() as r:
        x = r.input("x", (3, 5), "(dp b) k")
        extra = r._source(r._state, "extra", (3,), "f32", None)
        r.update(extra, r.mul(extra, value=2.0))
        r.loss(r.mean(r.linear(x, r.parameter("w", (3, 5), "o k")), name="loss"))
    report = verify(logical, p.build())
    assert report.verdict == "INVALID"
    assert "TV301" in {f.code for f in report.findings if f.tensor == "extra"}


def gradients(where: dict[str, int] | None, optimizer: bool, wrong: bool = False) -> tuple[Program, Plan]:
    """A whole gradient that only some ranks declare; without an optimizer nothing else says what the others have."""
    b = tv.program("l")
    x, w = b.input("x", (6, 5)), b.parameter("w", (3, 5))
    b.loss(b.mean(b.linear(x, w), name="loss"))
    logical = tv.complete(b.build(), tv.SGD(lr=0.1)) if optimizer else tv.complete(b.build())
    name = next(o.tensor for o in logical.outputs if o.role == "gradient")
    p = tv.plan("p", tv.Mesh(dp=2))
    for i in range(2):
        with p.ranks(dp=i) as r:
            x, w = r.input("x", (3, 5), "(dp b) k"), r.parameter("w", (3, 5), "o k")
            loss = r.mean(r.linear(x, w), name="loss.local")
            r.backward(loss)
            r.loss(r.all_reduce(loss, group="dp", op="avg", name="loss"))
            g = r.all_reduce(r.gradient(w), group="dp", op="sum" if wrong and i else "avg", name="g")
            if where is None or where["dp"] == i:
                r.lives(g, name, "o k")
                r.output(g, "gradient", "w")
            if optimizer:
                r.update(w, r.sgd(w, g, lr=0.1, name="w.new"))
    return logical, p.build()


def test_a_gradient_on_all_ranks_is_proved() -> None:
    assert verify(*gradients(None, optimizer=False)).verdict == "PROVED"


def test_a_gradient_on_fewer_ranks_than_hold_the_parameter_is_invalid() -> None:
    report = verify(*gradients({"dp": 0}, optimizer=False))
    assert report.verdict == "INVALID"
    assert [(f.code, f.message) for f in report.findings if f.severity == "error"] == [
        ("TV307", "rank 1 of 'dp1' holds w but has no gradient of w")
    ]


def test_a_gradient_on_fewer_ranks_will_do_if_the_update_is_demanded_on_all() -> None:
    report = verify(*gradients({"dp": 0}, optimizer=True))
    assert report.verdict == "PROVED", report.reason
    assert [(o.name, o.holders) for o in report.obligations] == [("loss", 2), ("gradient of w", 1), ("updated parameter w", 2)]


def claimed(half: bool) -> tuple[Program, Plan]:
    """A loss that rank 0 reports and both ranks claim to have."""
    b = tv.program("l")
    x, w = b.input("x", (6, 5)), b.parameter("w", (3, 5))
    b.loss(b.sum(b.linear(x, w), name="loss"))
    p = tv.plan("p", tv.Mesh(dp=2))
    for i in range(2):
        with p.ranks(dp=i) as r:
            x, w = r.input("x", (3, 5), "(dp b) k"), r.parameter("w", (3, 5), "o k")
            local = r.sum(r.linear(x, w), name="loss.local")
            r.backward(local)
            whole = r.all_reduce(local, group="dp", name="loss.sum" if half and i else "loss")
            if half and i:
                r.mul(whole, value=0.5, name="loss")
            if i == 0:
                r.loss(whole)
            r.output(r.all_reduce(r.gradient(w), group="dp", name="g"), "gradient", "w")
    p.lineage.append(tv.layout("loss", {}, "loss"))
    return tv.complete(b.build()), p.build()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_claim_on_all_ranks_is_checked_on_those_that_report_nothing(engine: Engine) -> None:
    right = verify(*claimed(False), engine=engine, accept_reduced=True)
    assert right.verdict.startswith("PROVED"), right.reason
    assert [(o.name, o.holders) for o in right.obligations] == [("loss", 1), ("gradient of w", 2), ("declared lineage of loss", 1)]
    wrong = verify(*claimed(True), engine=engine)
    assert wrong.verdict == "REFUTED", wrong.reason
    assert wrong.reason.split(";")[0] == "declared lineage of loss differs on rank 1"


def test_a_role_reported_twice_is_invalid() -> None:
    logical, plan = step()
    (template,) = plan.templates
    program = template.program
    twice = (*program.outputs, Output("loss.local", "loss"))
    report = verify(logical, replace(plan, templates=(replace(template, program=replace(program, outputs=twice)),)))
    assert report.verdict == "INVALID"
    assert [(f.code, f.message) for f in report.findings if f.severity == "error"] == [("TV108", "all: there are two outputs for the loss")]
