"""What `trainverify diff` says of plans, programs and reports, and its exit codes."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import trainverify as tv
from cli.models import model, plan
from trainverify import cli, files
from trainverify.bugs.cases import CASES
from trainverify.graph.plan import Edit, Plan, expand, fold
from trainverify.graph.program import Op, Source
from trainverify.graph.types import TensorType
from trainverify.report.difference.plans import plan_changes, program_changes
from trainverify.report.difference.reports import report_changes
from trainverify.verdicts import verify

Run = Callable[..., tuple[int, str, str]]


def with_ops(p: Plan, change: Callable[[tuple[Op, ...]], tuple[Op, ...]]) -> Plan:
    (t,) = p.templates
    return replace(p, templates=(replace(t, program=replace(t.program, ops=change(t.program.ops))),))


def summary(old: Plan, new: Plan) -> list[tuple[str, str, str]]:
    return [(c.where, c.what, c.kind) for c in plan_changes(old, new)]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(tmp_path)
    files.write("model.json", model())
    files.write("good.json", plan())
    files.write("wrong.json.gz", plan("sum"))

    def call(*arguments: str) -> tuple[int, str, str]:
        code = cli.run(arguments)
        return (code, *capsys.readouterr())

    return call


def test_nothing_changed() -> None:
    assert plan_changes(plan(), plan()) == []
    assert program_changes(model(), model()) == []


def test_other_lines_and_other_spellings_are_no_change() -> None:
    """Ranks written one by one, and an op on another line."""
    p = plan()
    same = fold(p.name, p.mesh, [expand(p, r) for r in range(3)], p.groups, p.lineage)
    assert same.templates != p.templates
    assert plan_changes(p, same) == []
    assert plan_changes(p, with_ops(p, lambda ops: tuple(replace(op, source=Source("b.py", 7)) for op in ops))) == []


def test_one_attribute() -> None:
    (change,) = plan_changes(plan(), plan("sum"))
    assert (change.where, change.what, change.kind) == ("all ranks", "op", "changed")
    assert change.old is not None
    assert change.new is not None
    assert "op=avg" in change.old
    assert "op=sum" in change.new


def test_one_rank() -> None:
    """An edit of rank 1 is a change on rank 1."""
    p = plan()
    op = p.templates[0].program.ops[1]
    edited = replace(p, edits=(Edit(1, (1,), (replace(op, name="abs"),)),))
    assert summary(p, edited) == [("rank 1", "op", "changed")]
    assert summary(edited, p) == [("rank 1", "op", "changed")]
    assert summary(p, replace(p, edits=(Edit(2, (1,), ()),))) == [("rank 2", "op", "removed")]


def test_members_of_groups_count_not_their_names() -> None:
    p = plan()
    (name,) = p.groups
    assert summary(p, replace(p, groups={name: (0, 2, 1)})) == [("plan", "group", "changed"), *[("all ranks", "op", "changed")] * 2]
    other = with_ops(p, lambda ops: tuple(op.with_attrs(group="g") if op.get("group") else op for op in ops))
    assert summary(p, replace(other, groups={"g": p.groups[name]})) == [("plan", "group", "removed"), ("plan", "group", "added")]


def test_order_lineage_types_and_ranks() -> None:
    p = plan()
    swapped = with_ops(p, lambda ops: (*ops[:-2], ops[-1], ops[-2]))
    assert summary(p, swapped) == [("all ranks", "order", "changed")]
    assert summary(p, replace(p, lineage=p.lineage[1:])) == [("plan", "lineage", "removed")]
    (t,) = p.templates
    wider = replace(t.program, tensors={**t.program.tensors, "y": TensorType((2, 4), "bf16")})
    assert summary(p, replace(p, templates=(replace(t, program=wider),))) == [("all ranks", "tensor", "changed")]


def test_every_bug_of_the_corpus_is_a_difference() -> None:
    for case in CASES[::8]:
        changes = plan_changes(case.build(True)[1], case.build(False)[1])
        assert changes, case.id
        assert plan_changes(case.build(False)[1], case.build(False)[1]) == []


def test_reports() -> None:
    right, wrong = verify(model(), plan(), points=1).json(), verify(model(), plan("sum"), points=1).json()
    assert report_changes(right, {**right, "seconds": 1e9, "notes": ["other"]}) == []
    found = [(c.what, c.kind) for c in report_changes(right, wrong)]
    assert found == [
        ("verdict", "changed"),
        ("reason", "changed"),
        ("obligation", "changed"),
        ("obligation", "changed"),
        ("first wrong tensor", "added"),
    ]


def test_command(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("diff", "good.json", "good.json") == (0, "no difference between these two plans\n", "")
    code, text, _ = run("diff", "good.json", "wrong.json.gz")
    assert code == 1
    assert text.splitlines()[0] == "all ranks"
    assert text.splitlines()[1].startswith("  ~ op w.grad.mean = all_reduce(w.grad, group=$group.dp, op=avg)")
    code, text, _ = run("diff", "good.json", "wrong.json.gz", "--json")
    assert code == 1
    assert {k: json.loads(text)[k] for k in ("command", "exit_code", "kind")} == {"command": "diff", "exit_code": 1, "kind": "plan"}
    for file, verdict in (("good.json", 0), ("wrong.json.gz", 1)):
        code, text, _ = run("verify", "model.json", file, "--json", "--points", "1")
        assert code == verdict
        Path(f"{verdict}.report.json").write_text(text)
    assert run("diff", "0.report.json", "1.report.json")[0] == 1
    assert run("diff", "1.report.json", "1.report.json")[0] == 0
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(Path("wrong.json.gz").read_bytes())))
    assert run("diff", "good.json", "-")[0] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("good.json", "nothing.json"), "nothing.json: No such file or directory"),
        (("good.json", "model.json"), "good.json is a plan, model.json is a program"),
        (("-", "-"), "standard input can be one of the two files"),
    ],
)
def test_unreadable(run: Run, arguments: tuple[str, ...], message: str) -> None:
    assert run("diff", *arguments) == (2, "", f"error: {message}\n")


def test_changes_of_many_layers_are_counted(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    p = plan()
    more = tuple(tv.layout("w", "o k", local=f"layers.{n}.w") for n in range(12))
    files.write("many.json", replace(p, lineage=(*p.lineage, *more)))
    code, text, _ = run("diff", "good.json", "many.json")
    assert code == 1
    assert text == 'plan\n  + lineage layers.0.w ~ w "o k"  (and 11 more like it)\n'


@pytest.mark.parametrize("command", [(), ("diff",), ("verify",), ("bench", "algebra")])
def test_short_help(run: Run, command: tuple[str, ...]) -> None:
    code, text, _ = run(*command, "-h")
    assert code == 0
    assert text.startswith("Usage: trainverify")
