"""The engine around the stages: workers that die, contradictions, agreement with the algebra on random programs."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest

import trainverify as tv
from tools.campaign.agree import compare, staged
from tools.campaign.run import make
from trainverify.graph.lineage import layout
from trainverify.prove.staged import workers
from trainverify.verdicts import single, verify
from trainverify.zoo.parallel import Degrees, gpt_plan, gpt_step
from verdicts.mlp import logical, plan
from zoo.parallel.pipelines import GPT2


def test_a_worker_that_dies_costs_its_own_stages_only(monkeypatch: pytest.MonkeyPatch) -> None:
    real = workers.check

    def check(stage, *args, **kwargs):  # type: ignore[no-untyped-def]
        if stage.goal.name == "loss":
            os.kill(os.getpid(), signal.SIGKILL)
        return real(stage, *args, **kwargs)

    monkeypatch.setattr(workers, "check", check)
    report = verify(logical(), plan(), engine="smt", points=1, workers=2)
    assert report.verdict == "UNKNOWN"
    open_ = {o.name for o in report.obligations if o.status != "proved"}
    assert open_ == {"loss"}
    assert any("the worker process ended" in n for n in report.notes)


def test_contradictory_lineage_is_not_a_proof() -> None:
    other = replace(plan(), lineage=(*plan().lineage, layout("t", "(dp mb b) k", "x0", fixed={"mb": (0, 2)})))
    assert verify(logical(), other, engine="smt", points=1).verdict == "INVALID"


def test_repeated_tokens_are_covered() -> None:
    """Overwriting instead of adding up is right only where no token occurs twice."""

    def step(adds: bool) -> tv.Program:
        b = tv.program("tokens")
        ids, w = b.input("ids", (5,), "i64", ids=7), b.input("w", (7, 3))
        x = b.embedding(ids, w)
        hits = b.sum(b.one_hot(ids, num_classes=7), dim=0, name="hits")
        counted = b.to(hits, dtype="f32") if adds else b.to(b.to(hits, dtype="bool"), dtype="f32")
        b.loss(b.sum(b.mul(b.sum(b.mul(x, x), name="squares"), b.sum(b.mul(counted, counted), name="occurrences"))))
        return b.build()

    assert verify(step(True), step(True), engine="smt", points=1).verdict.startswith("PROVED")
    assert verify(step(True), step(False), engine="smt", points=8).verdict == "REFUTED"


def test_an_embedding_gradient_that_overwrites_is_refuted() -> None:
    """The gradient of the last occurrence only: right where no token occurs twice."""
    b = tv.program("tokens")
    ids, t, w = b.input("ids", (5,), "i64", ids=7), b.input("t", (5, 3)), b.parameter("w", (7, 3))
    b.loss(b.sum(b.mul(b.embedding(ids, w, name="x"), t, name="xt")))
    right = tv.complete(b.build())

    b = tv.program("overwritten")
    ids, t, w = b.input("ids", (5,), "i64", ids=7), b.input("t", (5, 3)), b.parameter("w", (7, 3))
    b.loss(b.sum(b.mul(b.embedding(ids, w, name="x"), t, name="xt")))
    equal = b.to(b.eq(b.reshape(ids, shape=(5, 1)), b.reshape(ids, shape=(1, 5))), dtype="f32", name="equal")
    later = b.sum(b.triu(equal, diagonal=1), dim=1, name="later")
    last = b.to(b.le(later, value=0.5), dtype="f32", name="last")
    b.mul(t, b.reshape(last, shape=(5, 1)), name="kept")
    extra = b.build()
    made = {o for op in right.ops for o in op.outputs}
    ops = [op for op in extra.ops if op.outputs[0] not in made]
    at = next(i for i, op in enumerate(right.ops) if op.outputs == ("w.grad",))
    wrong = replace(right.ops[at], inputs=("ids", "w", "kept"))
    tensors = {**right.tensors, **{n: extra.tensors[n] for op in ops for n in op.outputs}}
    program = replace(right, ops=(*right.ops[:at], *ops, wrong, *right.ops[at + 1 :]), tensors=tensors)

    assert verify(right, right, engine="smt", points=1).verdict.startswith("PROVED")
    report = verify(right, program, engine="smt", points=4)
    assert report.verdict == "REFUTED", report.reason
    assert report.difference is not None
    assert str(report.difference.obligation) == "gradient of w"


@pytest.mark.parametrize("seed", [0, 1, 2, 17])
@pytest.mark.parametrize("mutant", [False, True], ids=["correct", "mistake"])
def test_engines_agree_on_random_programs(seed: int, mutant: bool) -> None:
    case = make(seed, mutant)
    first = verify(case.logical, case.plan, points=1).verdict
    second = verify(case.logical, case.plan, points=1, engine="smt").verdict
    if first == "PROVED":
        assert second in ("PROVED", "PROVED(reduced)", "UNKNOWN")
    if first in ("REFUTED", "INVALID"):
        assert second == first


def faint(by: float) -> tv.Program:
    """Of two outputs one is tiny beside the other; what it is multiplied by is no rounding."""
    b = tv.program("faint")
    x = b.input("x", (5,))
    b.output(b.sum(b.mul(x, value=by * 1e-11, name="tiny"), name="small"), "metric", "small")
    b.loss(b.sum(b.mul(x, value=1e4, name="huge"), name="loss"))
    return b.build()


@pytest.mark.parametrize(("by", "verdict"), [(1, "PROVED(reduced)"), (1.5, "REFUTED")])
def test_a_tiny_difference_is_no_rounding(by: float, verdict: str) -> None:
    assert verify(faint(1), faint(by), engine="smt", points=1).verdict == verdict
    differ = [str(o) for o, why in staged(faint(1), single(faint(by))).failed.items() if why.startswith("differs")]
    assert differ == ([] if by == 1 else ["metric small"])


def test_rounding_of_what_is_0_is_no_difference() -> None:
    """Expected: proved. The gradient is 0, and in float64 something else in each program, on all points."""
    case = make(6012, False)
    assert "gradient of w1" in {str(o) for o in staged(case.logical, case.plan).proved}


def single_number() -> tv.Program:
    b = tv.program("one")
    b.loss(b.reshape(b.input("x", (1,)), shape=()))
    return b.build()


def no_rows(factor: float) -> tv.Program:
    b = tv.program("empty")
    x, none = b.input("x", (3,)), b.input("none", (0,))
    b.loss(b.sum(b.mul(b.concat(x, none, dim=0), value=factor)))
    return b.build()


def test_a_program_with_a_single_element() -> None:
    """Marks that are no elements were looked up in its table."""
    assert verify(single_number(), single_number(), points=1, engine="both").verdict == "PROVED"


def test_inputs_without_elements() -> None:
    """They could not be cut out for a rank."""
    assert verify(no_rows(0.5), no_rows(0.5), points=1, engine="both").verdict == "PROVED(reduced)"
    report = verify(no_rows(0.5), no_rows(0.25), points=1, engine="both")
    assert (report.verdict, report.difference is not None) == ("REFUTED", True)


def test_points_on_which_the_logical_program_has_no_value_say_nothing() -> None:
    """Expected: proved by both. Where all labels of a sequence are ignored, both programs have 0/0, and not in the same tensors."""
    config = replace(GPT2, layers=1, batch=4, loss="per_sequence")
    assert compare(gpt_step(config), gpt_plan(config, Degrees(dp=2, microbatches=2))).what == "both: PROVED"
