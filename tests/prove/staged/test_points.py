"""Points that alignment looks at: what is the same on all of them is taken for the same, and found out later at a cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

import trainverify as tv
from prove.staged.alignment import aligned
from tools.campaign import agree
from trainverify.graph.plan import units
from trainverify.graph.program import Program
from trainverify.limits import OutOfTime
from trainverify.ops import OPS
from trainverify.prove.propose import points
from trainverify.prove.propose.proposal import Proposal
from trainverify.prove.staged.graphs import LOGICAL
from trainverify.prove.staged.reduce import reduced
from trainverify.verdicts import related, single, verify
from trainverify.zoo.parallel import deepseek_plan, deepseek_step
from zoo.parallel.bugs import BUGS, base
from zoo.parallel.capacity import FEW
from zoo.parallel.experts import HOW


def clipped(most: float) -> Program:
    """A gradient that is clipped if it is large."""
    b = tv.program("clipped")
    x, y = b.input("x", (5,)), b.input("y", (5,))
    g = b.mul(x, y, name="g")
    b.output(b.mul(g, b.clip_factor(b.grad_norm(g, name="norm"), max_norm=most, name="factor"), name="less"), "metric", "less")
    b.loss(b.sum(g, name="loss"))
    return b.build()


@pytest.mark.parametrize("most", [0.5, 3.0, 5.0])
def test_a_point_is_looked_for_on_which_gradients_are_clipped(most: float) -> None:
    found = aligned(clipped(most), single(clipped(most)))
    factors = {float(run.logical["factor"]) for run in found.values.runs}
    assert len(factors) > 1
    assert (LOGICAL, 0, "less") not in found.claims  # it is not g


def test_a_bound_that_no_point_reaches_ends_the_search() -> None:
    """Expected: proved. What is clipped looks like what is not, on all points; a stage finds out."""
    found = aligned(clipped(1e9), single(clipped(1e9)))
    assert {float(run.logical["factor"]) for run in found.values.runs} == {1.0}
    assert verify(clipped(1e9), clipped(1e9), engine="smt", points=1).verdict == "PROVED(reduced)"


def layers(count: int, wrong: bool = False) -> Program:
    """ReLUs behind each other: few numbers decide for all rows together. A wrong one asks the next row for the last."""
    b = tv.program("layers")
    x = b.input("x", (7, 2))
    weights = [(b.parameter(f"w{n}", (2, 2)), b.parameter(f"b{n}", (2,))) for n in range(count)]
    for n, (w, bias) in enumerate(weights):
        y = b.linear(x, w, bias, name=f"y{n}")
        x = b.relu(y, name=f"x{n}")
    if wrong:
        x = b.mul(y, b.float(b.gt(b.roll(y, shifts=(1,), dims=(0,), name="next"), value=0, name="open"), name="mask"), name="last")
    loss = b.sum(x, name="loss")
    b.loss(loss)
    b.backward(loss)
    for p in (p for pair in weights for p in pair):
        b.output(b.gradient(p), "gradient", p.name)
        b.update(p, b.gradient(p))
    return b.build()


def rows(found: Proposal, name: str) -> int:
    """How many rows of a logical tensor are told apart, of two."""
    values = np.stack([run.logical[name] for run in found.values.runs])
    return len(np.unique(values, axis=1)[0])


def test_rows_that_are_chosen_together_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected: proved, and rows have another gradient each at the beginning; on ordinary points they have not."""
    assert rows(aligned(layers(5), single(layers(5))), "y0.grad") == 2
    assert verify(layers(5), layers(5), engine="smt", points=1).verdict == "PROVED(reduced)"
    monkeypatch.setattr(points, "BLURRED", None)
    assert rows(aligned(layers(5), single(layers(5))), "y0.grad") == 1


@pytest.mark.parametrize("count", [3, 5])
def test_rows_that_are_mixed_up_are_not_shown(count: int) -> None:
    """REFUTED: on most points all rows are open, or none is; of five layers behind each other one of the last points shows it."""
    wrong = layers(count, wrong=True)
    assert "loss" not in {str(o) for o in agree.staged(layers(count), single(wrong)).proved}
    assert verify(layers(count), wrong, engine="smt", points=16).verdict == "REFUTED"


def test_stages_that_are_out_of_time_say_what_the_algebra_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: object) -> None:
        raise OutOfTime("late")

    monkeypatch.setattr(agree, "staged", late)
    assert agree.compare(clipped(0.1), single(clipped(0.1))).what == "PROVED, stages out of time"
    assert agree.compare(clipped(0.1), single(clipped(0.11))).what == "REFUTED, stages out of time"


@pytest.mark.parametrize("name", ["divided by half of the rows", "tokens counted over the wrong dimension"])
def test_points_without_a_value_are_not_all(name: str) -> None:
    """Expected: different. On the first points a sequence has no valid label, and the loss no value."""
    where, _, _, change = BUGS[name]
    logical, plan = base(where)
    proof = agree.staged(logical, change(plan))
    assert "loss" in {str(o) for o, why in proof.failed.items() if why.startswith("differs")}


def test_tokens_that_are_counted_late_have_places_on_some_points() -> None:
    """Expected: twice as many, with larger inputs; on small ones nearly all choose the experts whose two places are taken."""
    step, plan = deepseek_step(FEW), deepseek_plan(FEW, replace(HOW, dp=2, sp=True, microbatches=2))
    small = reduced(related(step, plan, OPS, units(plan), []))

    def late(sizes: Sequence[Sequence[float]]) -> float:
        seen = [run.logical["layers.0.moe.places"] for run in points.runs(small, plan.lineage, range(6), sizes)]
        return float(np.stack(seen).any(axis=-1)[:, :, 3:].mean())

    assert late(points.ordinary_sizes(small)) >= 2 * late(points.QUIETLY)
