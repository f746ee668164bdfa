"""--ops FILE: operators of the user, in a program and in a plan; files that fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import trainverify as tv
from trainverify import cli, files
from trainverify.build.tape import Tape, Tensor
from trainverify.cli.user_ops import table_with
from trainverify.ops.table import OpTable

DECLARED = '''
from __future__ import annotations
from dataclasses import dataclass
from trainverify.ops.table import op
from trainverify.primitives import node as F
from trainverify.primitives.node import Node

print("a file may print")

@dataclass
class Unrelated:
    x: int

@op("swiglu", "my operators", example="x[b,k] gate[b,k]")
def swiglu(x: Node, gate: Node, *, beta: float = 1) -> Node:
    """x · gate · sigmoid(beta·gate)."""
    return x * gate / (1 + F.call("exp", -(gate * beta)))
'''


def body(b: Tape, x: Tensor, w: Tensor, beta: float) -> Tensor:
    y = b.linear(x, w, name="y")
    made: Tensor = b.mean(b.swiglu(y, y, beta=beta, name="gated"), name="loss.local")
    return made


def logical(ops: OpTable) -> tv.Program:
    b = tv.program("model", ops)
    x, w = b.input("x", (6, 10)), b.parameter("w", (4, 10))
    b.loss(body(b, x, w, 1.5))
    return tv.complete(b.build(), tv.SGD(lr=0.5), ops=ops)


def plan(ops: OpTable, beta: float) -> tv.Plan:
    p = tv.plan("plan", tv.Mesh(dp=3), ops)
    with p.ranks() as r:
        x, w = r.input("x", (2, 10), "(dp b) k"), r.parameter("w", (4, 10), "o k")
        loss = body(r, x, w, beta)
        r.backward(loss)
        r.loss(r.all_reduce(loss, group="dp", op="avg", name="loss"))
        grad = r.all_reduce(r.gradient(w), group="dp", op="avg", name="w.grad.mean")
        r.output(grad, "gradient", "w")
        r.update(w, r.sgd(w, grad, lr=0.5, name="w.new"))
    return p.build()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(DECLARED, "utf-8")
    ops = table_with(Path("mine.py"))
    files.write("model.json", logical(ops))
    files.write("good.json", plan(ops, 1.5))
    files.write("wrong.json", plan(ops, 1.25))
    return tmp_path


def test_operator_of_the_user(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, code, verdict in (("good.json", 0, "PROVED"), ("wrong.json", 1, "REFUTED")):
        capsys.readouterr()
        assert cli.run(["verify", "model.json", name, "--ops", "mine.py", "--json"]) == code
        out, err = capsys.readouterr()
        found = json.loads(out)
        assert found["verdict"] == verdict
        assert err == "a file may print\n"
    assert found["first_wrong"]["tensor"] == "gated"
    assert cli.run(["validate", "good.json", "--ops", "mine.py", "--logical", "model.json"]) == 0
    capsys.readouterr()
    assert cli.run(["ops", "swiglu", "--ops", "mine.py"]) == 0
    assert "y[b,k] = x[b,k]·gate[b,k] / (1 + exp(" in capsys.readouterr().out


def test_without_the_file_it_is_unsupported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["verify", "model.json", "good.json"]) == 3
    assert "unsupported" in capsys.readouterr().out
    assert cli.run(["validate", "good.json"]) == 3


FAILING = {
    "raise ValueError('no\\nway')": "line 1: ValueError: no\\nway",
    "import sys; sys.exit(0)": "line 1: SystemExit: 0",
    "x = = 1": "SyntaxError: ",
    "import no_such_module": "line 1: ModuleNotFoundError: No module named 'no_such_module'",
    "x = 1": "declares no operator",
    DECLARED.replace('"swiglu"', '"linear"'): "operator 'linear' exists already or is reserved",
    DECLARED.replace("x: Node, gate", "x: Nodes, gate"): "NameError: name 'Nodes' is not defined",
}


@pytest.mark.parametrize("text", FAILING, ids=range(len(FAILING)))
def test_file_that_fails(folder: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.py").write_text(text, "utf-8")
    for command in (["verify", "model.json", "good.json"], ["validate", "good.json"], ["ops"]):
        capsys.readouterr()
        assert cli.run([*command, "--ops", "bad.py"]) == 2
        out, err = capsys.readouterr()
        line = err.removeprefix("a file may print\n")
        assert out == ""
        assert line.startswith("error: bad.py: ")
        assert FAILING[text] in line
        assert line.count("\n") == 1


def test_files_that_are_no_python(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("ops.txt").write_text(DECLARED, "utf-8")
    Path("folder.py").mkdir()
    capsys.readouterr()
    for name, line in (
        ("nowhere.py", "nowhere.py: No such file or directory"),
        ("folder.py", "folder.py: not a regular file"),
        ("ops.txt", "ops.txt: not a Python file; its name must end in .py"),
    ):
        assert cli.run(["ops", "--ops", name]) == 2
        assert capsys.readouterr() == ("", f"error: {line}\n")


@pytest.mark.parametrize("error", ["AttributeError('x')", "SystemExit(0)", "ValueError('x')"])
def test_operator_that_raises_is_no_proof(folder: Path, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(DECLARED.replace("    return x * gate", f"    raise {error}\n    return x * gate"), "utf-8")
    assert cli.run(["verify", "model.json", "good.json", "--ops", "mine.py"]) in (1, 4)


BROKEN = {
    "raise AttributeError('x')": "line 17: AttributeError: x",
    "return F.contract('b k, k b -> b', x, gate)": "swiglu(f32[5,7], f32[5,7]): contract:",
    "return x.no_such_thing": "line 17: AttributeError: ",
    "return x ** gate": "line 17: ",
}


@pytest.mark.parametrize("body", BROKEN)
def test_operator_that_cannot_be_used_is_refused(folder: Path, body: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("broken.py").write_text(DECLARED.replace('return x * gate / (1 + F.call("exp", -(gate * beta)))', body), "utf-8")
    assert cli.run(["ops", "--ops", "broken.py"]) == 2
    err = capsys.readouterr().err.removeprefix("a file may print\n")
    assert err.startswith("error: broken.py: the example of 'swiglu' fails: ")
    assert BROKEN[body] in err


def test_operator_without_an_example_is_not_tried(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = DECLARED.replace(', example="x[b,k] gate[b,k]"', "").replace("    return x", "    x = F.take(x, 4, 0, 1)\n    return x")
    Path("shy.py").write_text(text, "utf-8")
    assert cli.run(["ops", "--ops", "shy.py"]) == 0
    assert "swiglu: not tried; give it an example" in capsys.readouterr().out


def test_scalar_functions_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["ops"]) == 0
    assert "exp/1, log/1" in capsys.readouterr().out
    assert cli.run(["ops", "--json"]) == 0
    found = {s["name"]: s for s in json.loads(capsys.readouterr().out)["scalars"]}
    assert found["log"] == {"name": "log", "arity": 1, "takes": "real", "defined_if": ["argument 0 is positive"]}
    assert cli.run(["ops", "erf"]) == 0
