"""Plans that the suite verifies, kept as files and shown to both engines: each once, nothing left out silently, contradictions are loud."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

import trainverify as tv
from tools.campaign import agree, kept
from trainverify.prove import attempt
from trainverify.prove.propose.search import DIFFERS
from trainverify.prove.staged.ledger import StagedProof

ROOT = Path(__file__).parents[2]


def logical() -> tv.Program:
    b = tv.program("step")
    x, w = b.input("x", (6, 10)), b.parameter("w", (4, 10))
    b.loss(b.sum(b.linear(x, w), name="loss"))
    return tv.complete(b.build(), tv.SGD(lr=0.5))


def plan(op: str = "sum") -> tv.Plan:
    p = tv.plan("step", tv.Mesh(dp=2))
    with p.ranks() as r:
        x, w = r.input("x", (3, 10), "(dp b) k"), r.parameter("w", (4, 10), "o k")
        loss = r.sum(r.linear(x, w), name="loss.local")
        r.backward(loss)
        r.loss(r.all_reduce(loss, group="dp", name="loss"))
        grad = r.all_reduce(r.gradient(w), group="dp", op=op, name="w.grad.sum")
        r.output(grad, "gradient", "w")
        r.update(w, r.sgd(w, grad, lr=0.5, name="w.new"))
    return p.build()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A correct plan, a wrong one and the correct one again."""
    for op in ("sum", "avg", "sum"):
        kept.keep(tmp_path, logical(), plan(op), tv.OPS, op)
    return tmp_path


def test_a_pair_is_kept_once_and_read_back(folder: Path) -> None:
    names = kept.kept(folder)
    assert len(names) == 2
    assert {str(kept.read(folder, n)) for n in names} == {str((logical(), plan(op))) for op in ("sum", "avg")}


def test_what_is_not_kept_is_counted(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    kept.keep(folder, logical(), plan(), tv.ops.table.OpTable({}), "its own")
    monkeypatch.setattr(kept, "MOST", 3)
    kept.keep(folder, logical(), plan("max"), tv.OPS, "large")
    assert len(kept.kept(folder)) == 2
    assert agree.main(["--plans", str(folder)]) == 0
    made = json.loads(capsys.readouterr().out)
    classes = {"both: PROVED": 1, "both: REFUTED": 1, "not kept: operators of its own": 1, "not kept: more than 3 ops": 1}
    assert (made["cases"], made["plans"], made["bad"]) == (4, classes, [])


def test_what_no_engine_reads_is_not_compared(tmp_path: Path) -> None:
    correct = plan()
    program = correct.templates[0].program
    strange = replace(program, ops=tuple(replace(op, name="mystery") if op.name == "linear" else op for op in program.ops))
    kept.keep(tmp_path, logical(), replace(correct, templates=(replace(correct.templates[0], program=strange),)), tv.OPS, "")
    assert [c.what for c in agree.plans(tmp_path, 30.0)] == ["both: unsupported"]


@pytest.mark.parametrize(("proved", "what"), [(True, "stages prove"), (False, "the algebra proves")])
def test_an_engine_that_lies_is_a_contradiction(
    proved: bool, what: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lying(system: object, wanted: list[object], *_: object, **options: object) -> StagedProof:
        return StagedProof(proved=list(wanted)) if proved else StagedProof(failed=dict.fromkeys(wanted, DIFFERS))

    monkeypatch.setattr(agree, "prove", lying)
    monkeypatch.setattr(attempt, "prove_by_stages", lying)
    assert agree.main(["--plans", str(folder)]) == 1
    shown = capsys.readouterr().out
    bad = json.loads(shown[shown.index("{") :])["bad"]
    assert [b["what"] for b in bad] == ["contradiction"] * (1 if proved else 2)  # the wrong plan's loss is right
    assert bad[0]["reason"].startswith(what)


def test_a_crash_is_reported_and_the_others_go_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> StagedProof:
        raise RuntimeError("broken")

    monkeypatch.setattr(agree, "prove", broken)
    assert Counter(c.what for c in agree.plans(folder, 30.0)) == {"crash": 2}
    assert Counter(c.what for c in agree.plans(folder, 1e-4)) == {"out of time": 2}


def test_the_suite_keeps_its_plans(tmp_path: Path) -> None:
    """Also in the processes of xdist, and from every door: `verify` is not replaced, what it calls is."""
    command = [sys.executable, "-m", "pytest", "-n", "1", "--keep-plans", str(tmp_path), str(ROOT / "tests/axes/test_ranges.py")]
    subprocess.run(command, check=True, capture_output=True, timeout=120, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT / "src")})
    notes = [p.read_text("utf-8") for p in tmp_path.glob("kept.*.txt")]
    assert len(kept.kept(tmp_path)) == len(notes) == 1
    assert "test_enough_places_are_not_refuted" in notes[0]
