"""Single obligations at full size: a right plan is not refuted because of a literal, a wrong one is, whatever it counts."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest

import trainverify as tv
from trainverify.evaluate.compare import compare
from trainverify.evaluate.counting import counts_as
from trainverify.evaluate.run import elements
from trainverify.evaluate.slices import Slices
from trainverify.graph.obligations import obligations
from trainverify.graph.plan import units
from trainverify.ops import OPS
from trainverify.verdicts import related

ROWS, WIDTH = 2000, 1024


def steps(count: Any, wrong: bool = False) -> tuple[tv.Program, tv.Plan]:
    """A mean over 2000 rows, on each of two ranks the sum over its own divided by a number. A running sum along the width has no value on
    classes, the maximum no law in the algebra, and there are more than four million elements."""

    def body(b: Any, x: Any, w: Any, plan: bool) -> Any:
        run = b.cumsum(b.mul(x, w), dim=1)
        if not plan:
            return b.relu(run)
        return b.maximum(run, b.mul(run, value=0.25 if wrong else 0))

    b = tv.program("step")
    x, w = b.input("x", (ROWS, WIDTH)), b.parameter("w", (WIDTH,))
    b.loss(b.mean(b.sum(body(b, x, w, False), dim=1), name="loss"))
    p = tv.plan("step", tv.Mesh(dp=2))
    with p.ranks() as r:
        x, w = r.input("x", (ROWS // 2, WIDTH), "(dp b) k"), r.parameter("w", (WIDTH,), "k")
        own = r.mul(r.sum(r.sum(body(r, x, w, True), dim=1)), value=count, name="literal 0")
        r.backward(own)
        r.phase = "optimizer"
        r.loss(r.all_reduce(own, group="dp"))
        grad = r.all_reduce(r.gradient(w), group="dp")
        r.output(grad, "gradient", "w")
        r.update(w, r.sgd(w, grad, lr=0.5))
    return tv.complete(b.build(), tv.SGD(lr=0.5)), p.build()


@pytest.mark.parametrize("count", [Fraction(1, ROWS), 1 / ROWS])
def test_a_right_count_is_not_refuted(count: Any) -> None:
    """Expected: UNKNOWN, since no law covers the maximum; not REFUTED, although the numbers differ at reduced sizes."""
    report = tv.verify(*steps(count), points=1)
    assert report.verdict == "UNKNOWN", report.reason


@pytest.mark.parametrize("count", [Fraction(1, ROWS // 2), 1 / (ROWS + 1), Fraction(1, 3)])
def test_a_wrong_count_is_refuted(count: Any) -> None:
    report = tv.verify(*steps(count), points=1)
    assert report.verdict == "REFUTED", report.reason
    assert report.reason.startswith("loss differs")
    assert report.notes[0].endswith("at full size")


def test_another_mistake_is_refuted() -> None:
    """Expected: REFUTED: a slope of 1/4 where there should be none."""
    assert tv.verify(*steps(Fraction(1, ROWS), wrong=True), points=1).verdict == "REFUTED"


def test_what_does_not_fit_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected: UNKNOWN, with the literal that may count: the difference is there at reduced sizes only."""
    monkeypatch.setattr(Slices, "of", lambda *_: None)
    report = tv.verify(*steps(Fraction(1, ROWS), wrong=True), points=1)
    assert report.verdict == "UNKNOWN", report.reason
    assert "differs at reduced sizes, where 1/2000 in mul (tests/evaluate/test_slices.py" in report.reason
    assert "may count" in report.reason


def test_only_what_an_obligation_needs() -> None:
    """The loss does not need the gradient, and no obligation that is too large is evaluated."""
    logical, plan = steps(Fraction(1, ROWS), wrong=True)
    wanted, _ = obligations(logical, plan, units(plan))
    system = related(logical, plan, OPS, units(plan), wanted)
    loss = next(o for o in wanted if str(o) == "loss")
    part = Slices(system).of(loss)
    assert part is not None
    assert not part.reduced
    assert all(s.op.phase == "forward" for s in part.logical_steps)
    assert [s.obligation for s in compare(part, plan.lineage, [loss], [0])[0][0]] == [loss, loss]  # on both ranks
    assert Slices(system, elements(part) - 1).of(loss) is None
    grad = next(o for o in wanted if str(o) == "gradient of w")
    assert elements(Slices(system).of(grad)) > elements(part)  # type: ignore[arg-type]


def nothing(rows: int, width: int, left: int = 0) -> tuple[tv.Program, tv.Program]:
    """What is 0 but for rounding, and no law says so, beside 0 itself; or beside a little that is no rounding."""
    b = tv.program("nothing")
    x = b.cumsum(b.input("x", (rows, width)), dim=1)
    one, two = b.sum(b.mul(b.relu(x), value=0.1)), b.mul(b.sum(b.maximum(x, b.mul(x, value=0))), value=0.1)
    b.loss(b.sub(one, two, name="loss"))
    q = tv.program("nothing")
    q.loss(q.mul(q.sum(q.relu(q.cumsum(q.input("x", (rows, width)), dim=1))), value=left * 1e-8, name="loss"))
    return b.build(), q.build()


@pytest.mark.parametrize(("rows", "width"), [(7, 5), (750, 601)])
def test_rounding_beside_nothing_is_no_difference(rows: int, width: int) -> None:
    """Expected: UNKNOWN at any size, although 1e-12 instead of 0 is off by all of it; REFUTED beside a part of 1e-8."""
    report = tv.verify(*nothing(rows, width), points=1)
    assert report.verdict == "UNKNOWN", report.reason
    report = tv.verify(*nothing(rows, width, left=1), points=1)
    assert report.verdict == "REFUTED", report.reason


def beside_a_mean(count: Any, wrong: bool = False) -> tuple[tv.Program, tv.Plan]:
    """The same loss without gradients, and a mean as metric, which the algebra shows, divided in one line."""

    def divided(r: Any, x: Any) -> Any:
        return r.mul(x, value=count)

    b = tv.program("step")
    x = b.input("x", (ROWS, WIDTH))
    b.metric("mean", b.mean(b.sum(x, dim=1)))
    b.loss(b.mean(b.sum(b.relu(b.cumsum(x, dim=1)), dim=1), name="loss"))
    p = tv.plan("step", tv.Mesh(dp=2))
    with p.ranks() as r:
        x = r.input("x", (ROWS // 2, WIDTH), "(dp b) k")
        r.metric("mean", r.all_reduce(divided(r, r.sum(r.sum(x, dim=1))), group="dp"))
        run = r.cumsum(x, dim=1)
        most = r.maximum(run, r.mul(run, value=0.25 if wrong else 0))
        r.loss(r.all_reduce(divided(r, r.sum(r.sum(most, dim=1))), group="dp"))
    return b.build(), p.build()


@pytest.mark.parametrize("wrong", [False, True])
def test_beside_what_is_proved(wrong: bool) -> None:
    """Expected: UNKNOWN for a right plan, as no law covers the maximum; REFUTED for a wrong one, though the mean beside it is proved."""
    report = tv.verify(*beside_a_mean(Fraction(1, ROWS), wrong), points=1)
    assert report.verdict == ("REFUTED" if wrong else "UNKNOWN"), report.reason
    assert {x.name: x.status for x in report.obligations}["metric mean"] == "proved"


def test_literals_that_may_count() -> None:
    """A hint: which literal a report names."""
    assert counts_as(Fraction(1, 4096), 4096)
    assert counts_as(7.0, 8)  # one less
    assert counts_as(0.3 / 4096, 4096)
    assert counts_as(8192, 4096)
    assert not counts_as(0.3, 4096)
    assert not counts_as(1, 8)


def per_channel(divided: Callable[[Any, Any, Any], Any]) -> tv.Program:
    """What a batch norm averages: all rows and places of each of 17 channels."""
    b = tv.program("channels")
    x, w = b.input("x", (8192, 17, 1000)), b.input("w", (17,))
    mean = divided(b, x, b.sum(b.square(x), dim=(0, 2), name="s"))
    b.loss(b.sum(b.mul(mean, w), name="loss"))
    return b.build()


def by_ones(b: Any, x: Any, s: Any) -> Any:
    return b.div(s, b.sum(b.full(shape=x.shape, value=1.0), dim=(0, 2), name="n"))


def by_literal(count: Any) -> Callable[[Any, Any, Any], Any]:
    return lambda b, x, s: b.div(s, value=count)


def test_a_count_of_dimensions_that_are_apart() -> None:
    """Expected: PROVED, and no internal error; REFUTED with another count; not REFUTED if the count is rounded."""
    assert tv.verify(per_channel(by_literal(8192 * 1000)), per_channel(by_ones), points=1).verdict == "PROVED"
    assert tv.verify(per_channel(by_ones), per_channel(by_literal(8192 * 1000)), points=1).verdict == "PROVED"
    assert tv.verify(per_channel(by_ones), per_channel(lambda b, x, s: b.mul(s, value=1 / 8192000)), points=1).verdict == "UNKNOWN"
    assert tv.verify(per_channel(by_ones), per_channel(by_literal(8192 * 17)), points=1).verdict == "REFUTED"


def repeated(scaled: Callable[[Any, Any], Any], turned: bool = False) -> tv.Program:
    """8192 equal rows, added up; beside it so many numbers that nothing is run at full size."""
    b = tv.program("rows")
    x, w, more = b.input("x", (1000,)), b.input("w", (1000,)), b.input("more", (8192, 1000))
    w = b.flip(w, dims=(0,)) if turned else w
    b.loss(b.sum(b.add(b.mul(scaled(b, x), w), b.sum(more, dim=0)), name="loss"))
    return b.build()


def added(b: Any, x: Any) -> Any:
    return b.sum(b.expand(b.unsqueeze(x, dim=0), shape=(8192, 1000)), dim=0)


def in_two(first: float, second: float) -> Callable[[Any, Any], Any]:
    return lambda b, x: b.mul(b.mul(x, value=first), value=second)


def by_a_root(b: Any, x: Any) -> Any:
    """√8192·√8192: not equal by a unit in the last place."""
    return b.mul(b.mul(x, value=8192**0.5), value=8192**0.5)


def test_a_count_in_two_literals() -> None:
    """Expected: PROVED, and no internal error: 64·128 counts 8192 rows, of which reduced sizes have fewer; classes of positions agree."""
    assert tv.verify(repeated(added), repeated(in_two(64.0, 128.0)), points=1).verdict == "PROVED"
    assert tv.verify(repeated(added), repeated(by_a_root), points=1).verdict == "UNKNOWN"
    assert tv.verify(repeated(added), repeated(in_two(64.0, 129.0)), points=1).verdict == "REFUTED"


def test_an_exchange_that_classes_do_not_see_is_refuted() -> None:
    """Expected: REFUTED at full size: on classes both programs agree, and at reduced sizes too where every input is one number."""
    report = tv.verify(repeated(in_two(64.0, 128.0)), repeated(in_two(64.0, 128.0), turned=True), points=1)
    assert report.verdict == "REFUTED"
    assert report.notes[0].endswith("at full size")
