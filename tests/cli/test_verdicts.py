"""Exit codes and JSON of every command. Run in this process."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import trainverify as tv
from cli.models import model, plan
from trainverify import cli, files
from trainverify.graph.program import Op

Run = Callable[..., tuple[int, str, str]]
CLI_PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text("utf-8")


def with_op(p: tv.Plan, change: Callable[[Op], Op]) -> tv.Plan:
    """The first op of the only program changed."""
    (t,) = p.templates
    return replace(p, templates=(replace(t, program=replace(t.program, ops=(change(t.program.ops[0]), *t.program.ops[1:]))),))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    files.write("model.json", model())
    files.write("good.json", plan())
    files.write("wrong.json.gz", plan("sum"))
    files.write("invalid.json", with_op(plan(), lambda op: replace(op, inputs=("x", "y"))))
    files.write("unsupported.json", with_op(plan(), lambda op: replace(op, name="mystery")))
    return tmp_path


@pytest.fixture
def run(folder: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str) -> tuple[int, str, str]:
        code = cli.run(arguments)
        return (code, *capsys.readouterr())

    return call


VERIFY = [
    ("good.json", 0, "PROVED plan on mesh(dp=3) against model: 3 obligations at full size; random evaluation agrees on 3 points"),
    ("model.json", 0, "PROVED model on mesh(one=1) against model: 3 obligations at full size; random evaluation agrees on 3 points"),
    (
        "wrong.json.gz",
        1,
        "REFUTED plan on mesh(dp=3) against model: gradient of w differs on rank 0; first wrong tensor: w.grad.mean on rank 0",
    ),
    ("invalid.json", 1, "INVALID plan on mesh(dp=3) against model: "),
    ("unsupported.json", 3, "UNKNOWN plan on mesh(dp=3) against model: unsupported: "),
]


@pytest.mark.parametrize(("name", "code", "line"), VERIFY, ids=[v[0] for v in VERIFY])
def test_verify(run: Run, name: str, code: int, line: str) -> None:
    got, out, err = run("verify", "model.json", name)
    assert got == code
    assert out.startswith(line)
    assert not err
    assumed = "Assumed, and not shown by this verdict:\n  - arithmetic is that of real numbers" in out
    assert assumed != (name == "invalid.json")  # an ill-formed plan rests on nothing


VALIDATE = [("model.json", 0, "VALID"), ("good.json", 0, "VALID"), ("invalid.json", 1, "INVALID"), ("unsupported.json", 3, "UNSUPPORTED")]


@pytest.mark.parametrize(("name", "code", "verdict"), VALIDATE, ids=[v[0] for v in VALIDATE])
def test_validate(run: Run, name: str, code: int, verdict: str) -> None:
    got, out, err = run("validate", name)
    assert (got, out.splitlines()[0], err) == (code, f"{verdict} {name}", "")
    got, out, err = run("validate", name, "--json")
    found = json.loads(out)
    assert (got, found["exit_code"], found["verdict"], found["subject"]) == (code, code, verdict, name)
    assert (verdict == "VALID") == (not found["findings"])


def test_validate_with_the_logical_program(run: Run) -> None:
    assert run("validate", "good.json", "--logical", "model.json") == (0, "VALID good.json\n", "")
    code, out, _ = run("validate", "good.json")
    assert (code, out) == (0, "VALID good.json\nlineage and outputs were not checked: that needs --logical\n")
    code, out, err = run("validate", "model.json", "--logical", "model.json")
    assert (code, out, err) == (2, "", "error: model.json: a program; --logical goes with a plan\n")


def test_show(run: Run) -> None:
    code, out, _ = run("show", "good.json")
    assert code == 0
    assert out.startswith("plan plan on mesh(dp=3)\n  group dp.0: 0, 1, 2\n")
    code, out, _ = run("show", "good.json", "--rank", "2")
    assert code == 0
    assert "  y = linear(x, w): f32[2,4]  # forward, " in out
    assert run("show", "good.json", "--rank", "3") == (2, "", "error: good.json: rank 3 runs no program\n")
    assert run("show", "model.json", "--rank", "1") == (2, "", "error: model.json: a program has one rank, 0\n")


def test_ops(run: Run) -> None:
    code, out, _ = run("ops")
    assert code == 0
    assert "\n  linear " in out
    code, out, _ = run("ops", "linear.grad")
    assert code == 0
    assert run("ops", "nope") == (2, "", "error: unknown operator 'nope'; `trainverify ops` lists all\n")


def test_version(run: Run) -> None:
    code, out, _ = run("--version")
    assert code == 0
    assert re.fullmatch(r"trainverify \d+\.\d+\.\d+\n", out)


def documented(name: str) -> list[str]:
    """Fields that docs/cli.md lists in a row of a table."""
    (row,) = re.findall(rf"^\| {re.escape(name)} \| (.*) \|$", CLI_PAGE, re.MULTILINE)
    return re.findall(r"`([a-z_]+)`", row)


def json_of(run: Run, *arguments: str) -> dict[str, Any]:
    code, out, err = run(*arguments, "--json")
    assert not err
    assert out.isascii()
    assert out.count("\n") == 1
    found: dict[str, Any] = json.loads(out)
    assert found["exit_code"] == code
    return found


@pytest.mark.parametrize("name", [v[0] for v in VERIFY])
def test_json_of_verify(run: Run, name: str) -> None:
    found = json_of(run, "verify", "model.json", name)
    assert list(found) == ["command", "exit_code", *documented("`verify`")]
    for f in found["findings"]:
        assert list(f) == documented("an item of `findings`")
    for o in found["obligations"]:
        assert list(o) == documented("an item of `obligations`")
    refuted = found["verdict"] == "REFUTED"
    assert (found["difference"] is not None) == (found["first_wrong"] is not None) == refuted
    if refuted:
        assert list(found["difference"]) == documented("`difference` (null unless REFUTED)")
        assert list(found["first_wrong"]) == documented(
            "`first_wrong` (null unless REFUTED, or INVALID by one rank that is unlike the others)"
        )
        assert list(found["first_wrong"]["op"]) == documented("`op`, `logical_op` (or null)")
        assert found["first_wrong"]["op"]["source"].startswith("models.py:")
        assert {o["status"] for o in found["obligations"]} == {"proved", "different"}


def test_json_of_the_others(run: Run) -> None:
    assert list(json_of(run, "validate", "good.json")) == ["command", "exit_code", *documented("`validate`")]
    shown = json_of(run, "show", "good.json", "--rank", "1")
    assert list(shown) == ["command", "exit_code", *documented("`show`")]
    assert (shown["kind"], shown["rank"], shown["lines"][0]) == ("plan", 1, "program all")
    every = json_of(run, "ops")
    assert list(every) == ["command", "exit_code", *documented("`ops`")]
    *fields, description = documented("an item of `operators`")
    assert description == "description"
    assert all(list(o) == fields for o in every["operators"])
    assert [list(o) for o in json_of(run, "ops", "linear")["operators"]] == [[*fields, description]]


USAGE = [[], ["nope"], ["verify"], ["verify", "model.json"], ["verify", "a", "b", "c"], ["show", "model.json", "--rank", "x"]]
USAGE += [
    ["verify", "model.json", "good.json", *more] for more in (["--points", "0"], ["--timeout", "0"], ["--memory", "-1"], ["--colour"])
]


@pytest.mark.parametrize("arguments", USAGE, ids=" ".join)
def test_wrong_usage(run: Run, arguments: list[str]) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert re.fullmatch(r"error: .*; see trainverify.* --help\n", err)
    found = json_of(run, *arguments)
    assert list(found) == ["error", "exit_code"]


@pytest.mark.parametrize("error", [ValueError("a\nb"), RecursionError(), AssertionError("x"), SystemExit(0), KeyError("k")], ids=repr)
def test_internal_error(run: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def broken(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("trainverify.cli.verify.verify", broken)
    monkeypatch.setattr("trainverify.cli.validate.validate", broken)
    for arguments in (["verify", "model.json", "good.json"], ["validate", "good.json"]):
        code, out, err = run(*arguments)
        assert (code, out) == (4, "")
        assert err.startswith(f"error: internal error, no verdict: {type(error).__name__}")
        assert err.count("\n") == 1
        assert list(json_of(run, *arguments)) == ["error", "exit_code"]
    monkeypatch.setenv("TRAINVERIFY_TRACEBACK", "1")
    assert "in broken" in run("verify", "model.json", "good.json")[2]


def test_no_exit_code_is_not_success(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainverify.cli.application.app", lambda *_, **__: None)
    code, out, err = run("verify", "model.json", "good.json")
    assert (code, out) == (4, "")
    assert err.startswith("error: internal error, no verdict: ")


def test_help_and_version_never_replace_a_verdict(run: Run) -> None:
    """0 means PROVED: a parser that takes flags for given would say so about anything."""
    assert run("verify", "model.json", "wrong.json.gz")[0] == 1
    assert run("verify", "--help")[0] == 0
    assert run("--version")[0] == 0
    assert run()[0] == 2


def test_interrupted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trainverify.cli.verify.verify", broken)
    assert run("verify", "model.json", "good.json") == (130, "", "error: interrupted; no verdict\n")


def test_out_of_memory_is_no_verdict_about_the_plan(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("trainverify.cli.verify.verify", broken)
    code, out, _ = run("verify", "model.json", "good.json")
    assert (code, out.splitlines()[0]) == (3, "UNKNOWN good.json against model.json: out of memory")
