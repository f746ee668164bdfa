"""Around the stages: limits of memory and time, crashes, interruptions, engines that contradict each other, the solver's models."""

from __future__ import annotations

import json
import resource
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import z3

import trainverify as tv
from tools.campaign.agree import BAD, agree, compare, staged
from trainverify import cli, files
from trainverify.bench.stages import bench
from trainverify.domains.polynomials import Scalars
from trainverify.prove import attempt as attempts
from trainverify.prove.staged import execute, workers
from trainverify.prove.staged.execute import Limits
from trainverify.prove.staged.solver import Z3
from trainverify.prove.staged.stages import TOO_LONG
from trainverify.verdicts import Disagreement, single, verify
from verdicts.mlp import logical, plan


def test_memory_of_a_worker_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """An obligation that eats memory is UNKNOWN with the reason, the others are proved."""
    real = workers.check

    def check(stage, *args, **kwargs):  # type: ignore[no-untyped-def]
        if stage.goal.name == "loss":
            eaten = bytearray(resource.getrlimit(resource.RLIMIT_AS)[0])  # more than there may be
            assert eaten
        return real(stage, *args, **kwargs)

    monkeypatch.setattr(workers, "check", check)
    monkeypatch.setattr(workers, "_MEMORY", 300)
    report = verify(logical(), plan(), engine="smt", points=1, workers=2)
    assert report.verdict == "UNKNOWN"
    assert {o.name for o in report.obligations if o.status != "proved"} == {"loss"}
    assert any("loss: out of memory" in n for n in report.notes), report.notes


def test_a_check_that_crashes_is_not_a_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    real = workers.check

    def check(stage, *args, **kwargs):  # type: ignore[no-untyped-def]
        if stage.goal.name == "loss":
            raise ZeroDivisionError("planted")
        return real(stage, *args, **kwargs)

    monkeypatch.setattr(workers, "check", check)
    for n in (0, 2):
        report = verify(logical(), plan(), engine="smt", points=1, workers=n)
        assert report.verdict == "UNKNOWN"
        assert {o.name for o in report.obligations if o.status != "proved"} == {"loss"}
        assert any("loss: the check failed: ZeroDivisionError: planted" in note for note in report.notes), report.notes


def test_an_interruption_reports_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle: UNKNOWN, and nothing is lost or invented."""
    real = workers.check

    def check(stage, *args, **kwargs):  # type: ignore[no-untyped-def]
        if stage.goal.name == "loss":
            raise KeyboardInterrupt
        return real(stage, *args, **kwargs)

    monkeypatch.setattr(workers, "check", check)
    report = verify(logical(), plan(), engine="smt", points=1)
    assert report.verdict == "UNKNOWN"
    status = {o.name: o.status for o in report.obligations}
    assert status["loss"] != "proved"
    assert "proved" in status.values()
    assert any(n.startswith("interrupted") for n in report.notes), report.notes


def test_elements_after_a_failure_have_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first element that is not shown ends its stage; nothing is said of the others."""
    asked: list[int] = []

    def check(stage, n, elements, limits):  # type: ignore[no-untyped-def]
        asked.append(n)
        return execute.Result(n != 1, "" if n != 1 else "planted", "normal form")

    monkeypatch.setattr(workers, "check", check)
    heard: dict[int, bool] = {}
    stage = Mock(goal=Mock())
    workers.run_all([(stage, n) for n in range(4)], None, Limits(), 0, lambda n, r: heard.update({n: r.proved}))  # type: ignore[arg-type, misc]
    assert asked == [0, 1]
    assert heard == {0: True, 1: False}


def test_time_of_an_obligation_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "check", lambda s, n, a, limits: execute.check(s, n, a, Limits(seconds=-1.0)))
    report = verify(logical(), plan(), engine="smt", points=1)
    assert report.verdict == "UNKNOWN"
    assert any("time limit of the obligation" in n for n in report.notes), report.notes


def test_what_the_solver_cannot_say_in_time_is_not_shown() -> None:
    s = Scalars()
    x, y, z = (s.symbol(n) for n in "xyz")
    p = s.sub(s.add(s.power(x, 5), s.mul(s.power(y, 4), z)), s.add(s.mul(s.power(z, 3), s.mul(x, y)), s.const(7)))
    answer = Z3(seconds=0.001).implied(s, ("nonzero", frozenset(s.add(s.mul(p, p), s.const(1)).items())), [])
    assert answer.status == "unknown"
    assert "solver: " in answer.reason


def _squares(power: int) -> tv.Program:
    b = tv.program("squares")
    x = b.input("x", (5, 3))
    b.loss(b.sum(b.pow(x, exponent=power)))
    return b.build()


def test_both_stops_when_only_a_broken_staged_engine_proves(monkeypatch: pytest.MonkeyPatch) -> None:
    real = attempts.prove_by_stages

    def everything(system, wanted, *args, **kwargs):  # type: ignore[no-untyped-def]
        return replace(real(system, wanted, *args, **kwargs), proved=list(wanted), failed={}, violated={})

    assert verify(_squares(2), _squares(4), engine="both", points=1).verdict == "REFUTED"
    monkeypatch.setattr(attempts, "prove_by_stages", everything)
    with pytest.raises(Disagreement, match="loss was proved by smt, but rank 0 computes"):
        verify(_squares(2), _squares(4), engine="both", points=1)


def test_both_stops_when_only_a_broken_algebra_proves(monkeypatch: pytest.MonkeyPatch) -> None:
    real = attempts.by_algebra

    def everything(proof, system):  # type: ignore[no-untyped-def]
        made = real(proof, system)
        return replace(made, proved=dict.fromkeys(made.failed, ("algebra", attempts.FULL_SIZE)), failed={})

    monkeypatch.setattr(attempts, "by_algebra", everything)
    with pytest.raises(attempts.Contradiction, match="the algebra proves loss, but to the staged engine it differs"):
        verify(_squares(2), _squares(4), engine="both", points=1)


def _mean_as_a_literal(centred: bool) -> tv.Program:
    """Σ (x − Σ x / 16) = 0: not at reduced sizes, where Σ x / 16 is not the mean."""
    b = tv.program("l")
    x, w = b.input("x", (16, 3)), b.input("w", (3,))
    left = b.sum(b.sub(x, b.mul(b.sum(x, dim=0), value=1 / 16)), dim=0) if centred else b.mul(w, value=0.0)
    b.loss(b.sum(b.mul(left, w), name="loss"))
    return b.build()


def test_a_count_as_a_literal_is_no_contradiction() -> None:
    report = verify(_mean_as_a_literal(True), _mean_as_a_literal(False), engine="both", points=1)
    assert report.verdict == "PROVED", report.reason


@pytest.mark.parametrize(("other", "verdict"), [(8.0, "PROVED(reduced)"), (3.0, "REFUTED")])
def test_a_proof_that_holds_at_its_sizes_only(other: float, verdict: str) -> None:
    """n·(n − 2)·(n − other) = 0, n the number of rows: at two rows, where stages show it, and at 8, or at three and not at 8."""

    def program(zero: bool) -> tv.Program:
        b = tv.program("l")
        x, w = b.input("x", (8, 3)), b.input("w", (3,))
        n = b.sum(b.div(x, x), dim=0)
        left = b.mul(b.mul(n, b.sub(n, value=2.0)), b.sub(n, value=other))
        b.loss(b.sum(b.mul(w, value=0.0) if zero else b.mul(w, left), name="loss"))
        return b.build()

    report = verify(program(False), program(True), engine="smt", points=1)
    assert report.verdict == verdict, report.reason


@pytest.mark.parametrize("broken", ["algebra", "smt"])
def test_engines_that_contradict_each_other_are_an_internal_error(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 4 and no verdict, whichever of the two says PROVED of a wrong plan."""
    files.write(tmp_path / "logical.json", _squares(2))
    files.write(tmp_path / "wrong.json", _squares(4))
    command = ["verify", str(tmp_path / "logical.json"), str(tmp_path / "wrong.json"), "--engine", "both", "--workers", "0"]
    assert cli.run(command) == 1
    assert capsys.readouterr().out.startswith("REFUTED ")

    real = getattr(attempts, FORGED[broken])

    def everything(*given):  # type: ignore[no-untyped-def]
        made = real(*given)
        return replace(made, proved=dict.fromkeys(made.failed, (broken, attempts.FULL_SIZE)), failed={})

    monkeypatch.setattr(attempts, FORGED[broken], everything)
    assert cli.run(command) == 4
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: internal error, no verdict: ")
    assert "loss" in err
    assert cli.run([*command, "--json"]) == 4
    shown = json.loads(capsys.readouterr().out)
    assert shown["exit_code"] == 4
    assert "verdict" not in shown


FORGED = {"algebra": "by_algebra", "smt": "by_stages"}


def test_a_model_of_the_solver_is_a_counterexample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random numbers do not get there: the solver says where, and enclosures confirm it. So does a point on the other side of the clamp."""

    def step(most: float | None) -> tv.Program:
        b = tv.program("clamped")
        x = b.input("x", (3,))
        b.loss(b.sum(x if most is None else b.clamp(x, max=most)))
        return b.build()

    assert verify(step(100.0), step(100.0), engine="smt", points=1).verdict.startswith("PROVED")
    assert verify(step(None), step(100.0), points=1).verdict == "REFUTED"
    monkeypatch.setattr("trainverify.evaluate.branches.search", lambda *given: iter(()))
    report = verify(step(None), step(100.0), engine="smt", points=1)
    assert report.verdict == "REFUTED", report.notes
    assert report.difference is not None
    assert any("counterexample: the solver's model" in n for n in report.notes), report.notes
    assert verify(step(None), step(100.0), points=1).verdict == "UNKNOWN"  # the algebra with random points does not see it


def test_few_random_programs_agree() -> None:
    found = list(agree((1, 8), seconds=60))
    assert not [c for c in found if c.what in BAD], found
    assert {c.what for c in found} == {"both: PROVED", "both: REFUTED", "both: INVALID"}


def test_bench_measures_workers_and_memory() -> None:
    rows = list(bench(quick=True))
    assert [r.workers for r in rows] == [0, 2]
    assert {r.verdict for r in rows} == {"all proved"}
    assert all(r.megabytes > 0 and r.seconds > 0 for r in rows)
    assert rows[1].worker_megabytes > 0
    assert rows[0].stages == rows[1].stages


def test_agreement_looks_at_literals_before_it_calls_it_a_contradiction() -> None:
    """Engines alone see a difference where a count is a literal; asked together they do not."""
    found = compare(_mean_as_a_literal(True), single(_mean_as_a_literal(False)))
    assert found.what == "both: PROVED, after a look at literals", found


def deep(spelled: bool) -> tv.Program:
    """600 functions of functions, whose values soon stay the same."""
    b = tv.program("deep")
    x = b.input("x", (4,))
    y = x
    for _ in range(600):
        y = b.exp(b.mul(b.add(y, b.mul(x, value=10.0)), value=0.1) if spelled else b.add(b.mul(y, value=0.1), x))
    b.loss(b.sum(y, name="loss"))
    return b.build()


def test_what_has_the_same_values_by_chance_is_told_apart() -> None:
    """Expected: proved; after some steps all have one value, and only how they are made says which is which."""
    assert not staged(deep(False), single(deep(False))).failed


def test_a_deep_chain_has_no_stage() -> None:
    """Written otherwise, nothing has a name: followed back element by element that is deeper than Python's stack; no crash, and no
    verdict."""
    proof = staged(deep(False), single(deep(True)))
    assert list(proof.failed.values()) == [TOO_LONG]


def test_a_solver_that_forgets_its_limit_is_reminded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Z3's limit of time is lost if it passes before its search begins: here it has none at all."""
    monkeypatch.setattr(z3.Solver, "set", lambda *_, **__: None)
    s = Scalars()
    x, y, z = (s.symbol(n) for n in "xyz")
    p = s.sub(s.add(s.power(x, 5), s.mul(s.power(y, 4), z)), s.add(s.mul(s.power(z, 3), s.mul(x, y)), s.const(7)))
    answer = Z3(seconds=0.1).implied(s, ("nonzero", frozenset(s.add(s.mul(p, p), s.const(1)).items())), [])
    assert answer.status in ("unknown", "error")
    assert "solver: " in answer.reason
