"""The engine around the stages: workers that die, contradictions, agreement with the algebra on random programs."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest

import trainverify as tv
from trainverify.campaign.run import make
from trainverify.graph.lineage import layout
from trainverify.prove.staged import workers
from trainverify.verify import verify
from verify.test_mlp import logical, plan


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
