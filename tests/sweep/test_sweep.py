"""Matrices: what they list, verdicts, and a cache of which nothing damaged or foreign is believed."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

import trainverify as tv
from sweep.train import TRAIN
from trainverify import cli, files
from trainverify.cli.judged import options_of
from trainverify.refusal import Refused
from trainverify.sweep import run as running
from trainverify.sweep.cache import Cache, Row
from trainverify.sweep.captured import FLAGS, VALUES, commands
from trainverify.sweep.matrix import Case, cases
from trainverify.sweep.run import How, judge, sweep
from trainverify.sweep.written import exit_code

MATRIX = """
[defaults]
layers = 1
[[zoo]]
model = "llama3-8b"
dp = [1, 2]
tp = [1, 2]
sp = [false, true]
[[zoo.exclude]]
tp = 1
sp = true
[[files]]
logical = "model.json"
plan = "wrong.json"
"""


def model(name: str, factor: float = 1.0) -> tv.Program:
    b = tv.program(name)
    x, w = b.input("x", (3, 5)), b.parameter("w", (2, 5))
    b.loss(b.sum(b.mul(b.linear(x, w, name="y"), value=factor, name="z"), name="loss"))
    return tv.complete(b.build(), tv.SGD(lr=0.5))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "matrix.toml").write_text(MATRIX)
    files.write(tmp_path / "model.json", model("model"))
    files.write(tmp_path / "wrong.json", model("model", 2.0))
    return tmp_path


def pair(folder: Path) -> Case:
    return next(c for c in cases(folder / "matrix.toml") if c.wish is None)


def entries(folder: Path) -> list[Path]:
    return sorted((folder / "cache").rglob("*.json"))


def test_a_matrix_is_all_products_but_those_left_out(folder: Path) -> None:
    names = [c.name for c in cases(folder / "matrix.toml")]
    assert names[0] == "llama3-8b layers=1 dp=1 tp=1"
    assert len(names) == 2 * 3 + 1
    assert not any("tp=1 sp" in n for n in names)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[[zoo]]\nmodel = 'llama9'", "no model 'llama9'"),
        ("[[zoo]]\nmodel = 'gpt2'\ntq = 2", "zoo[0].tq: no option"),
        ("[[zoo]]\ndp = 2", "zoo[0].model: is missing"),
        ("[[files]]\nlogical = 'a'", "files[0].plan: a file is expected"),
        ("[[files]]\nlogical = 'a'\nplan = 'b'\nsteps = 0", "a number of steps"),
        (2 * "[[files]]\nlogical = 'a'\nplan = 'b'\n", "files[1]: b against a: another configuration has this name"),
        ("".join(f"[[files]]\nlogical = 'a'\nplan = 'b{i}'\nname = 'ours'\n" for i in (0, 1)), "files[1]: ours: another configuration"),
        ("", "no configuration"),
        ("zoo = 3", "tables are expected"),
        ("= 3", "matrix.toml: "),
    ],
)
def test_bad_matrices(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "matrix.toml").write_text(text)
    with pytest.raises(Refused) as error:
        cases(tmp_path / "matrix.toml")
    assert reason in str(error.value)


def test_pairs_of_files_that_differ_have_different_names(tmp_path: Path) -> None:
    both = "[[files]]\nlogical = 'a'\nplan = 'b'\n"
    (tmp_path / "matrix.toml").write_text(f"{both}{both}steps = 2\n{both}allow = 'local-batch-norm'\n")
    found = cases(tmp_path / "matrix.toml")
    assert [c.name for c in found] == ["b against a", "b against a steps=2", "b against a allow=local-batch-norm"]


def test_a_sweep_and_its_second_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """REFUTED: the pair of files; all else PROVED."""
    arguments = ["sweep", str(folder / "matrix.toml"), "--cache", str(folder / "cache"), "--json"]
    outputs = ["--html", str(folder / "page.html"), "--junit", str(folder / "junit.xml")]
    assert cli.run([*arguments, *outputs]) == 1
    first = json.loads(capsys.readouterr().out)
    assert first["counts"] == {"PROVED": 6, "REFUTED": 1}
    assert cli.run(arguments) == 1
    second = json.loads(capsys.readouterr().out)
    assert all(r["cached"] for r in second["rows"])
    for old, new in zip(first["rows"], second["rows"], strict=True):
        assert {**old, "cached": True} == new
    suite = ElementTree.parse(folder / "junit.xml").getroot()[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("7", "1", "0")
    assert "REFUTED" in (folder / "page.html").read_text()


def test_what_changed_is_judged_again(folder: Path) -> None:
    how = How(folder / "cache")
    assert judge(pair(folder), how).verdict == "REFUTED"
    files.write(folder / "wrong.json", model("model"))
    row = judge(pair(folder), how)
    assert (row.verdict, row.cached) == ("PROVED", False)


DAMAGE = {
    "cut off": (lambda e: e[: len(e) // 2], "damaged"),
    "empty": (lambda e: "", "damaged"),
    "edited": (lambda e: e.replace("REFUTED", "PROVED"), "damaged"),
    "another version": (lambda e: json.dumps({**json.loads(e), "version": "0"}), "another version"),
    "another configuration": (lambda e: json.dumps({**json.loads(e), "key": "0" * 64}), "another version or configuration"),
    "no table": (lambda e: "[]", "damaged"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_an_entry_that_is_not_ours_is_recomputed(folder: Path, damage: str) -> None:
    """REFUTED, whatever the entry says."""
    how = How(folder / "cache")
    judge(pair(folder), how)
    change, said = DAMAGE[damage]
    (entry,) = entries(folder)
    entry.write_text(change(entry.read_text()))
    row = judge(pair(folder), how)
    assert (row.verdict, row.cached) == ("REFUTED", False)
    assert said in row.note
    again = judge(pair(folder), how)
    assert (again.verdict, again.cached, again.note) == ("REFUTED", True, "")


def test_the_verdict_of_another_pair_is_not_taken(folder: Path) -> None:
    """The content of a right pair's entry under the name of a wrong one's."""
    how = How(folder / "cache")
    judge(pair(folder), how)
    (wrong,) = entries(folder)
    files.write(folder / "wrong.json", model("model"))
    judge(pair(folder), how)
    right = next(e for e in entries(folder) if e != wrong)
    wrong.write_text(right.read_text())
    files.write(folder / "wrong.json", model("model", 2.0))
    assert judge(pair(folder), how).verdict == "REFUTED"


def test_unknown_is_not_kept(folder: Path) -> None:
    how = How(folder / "cache", seconds=1e-4)
    assert judge(pair(folder), how).verdict == "UNKNOWN"
    assert judge(pair(folder), replace(how, seconds=None)).verdict == "REFUTED"


def test_a_folder_that_cannot_be_written_to_is_no_error(folder: Path) -> None:
    (folder / "cache").write_text("a file")
    assert judge(pair(folder), How(folder / "cache")).verdict == "REFUTED"
    assert Cache(folder / "cache").get("0" * 64)[0] is None


def dying(case: Case, how: How) -> Row:
    """Ends its process: always, or once."""
    once = Path(str(case.plan)).parent / "ended"
    if case.name == "always" or (case.name == "once" and not once.exists()):
        once.write_text("")
        os.kill(os.getpid(), signal.SIGKILL)
    return judge(case, how)


def test_a_lost_process_is_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ends its process every time has no verdict, one that does it once has its own."""
    monkeypatch.setattr(running, "judge", dying)
    wanted = [replace(pair(folder), name=n) for n in ("always", "once", "other")]
    rows = {r.name: r for r in sweep(wanted, How(None), 2)}
    assert {n: r.verdict for n, r in rows.items()} == {"always": "UNKNOWN", "once": "REFUTED", "other": "REFUTED"}
    assert "ended without an answer" in rows["always"].reason


def test_exit_codes() -> None:
    def rows(*verdicts: str) -> list[Row]:
        return [Row(str(i), v, "", 0.0) for i, v in enumerate(verdicts)]

    assert exit_code(rows("PROVED", "PROVED")) == 0
    assert exit_code(rows("PROVED", "NOT BUILT")) == 2
    assert exit_code(rows("NOT BUILT", "UNKNOWN", "PROVED")) == 3
    assert exit_code(rows("PROVED(reduced)")) == 3
    assert exit_code(rows("UNKNOWN", "INVALID", "NOT BUILT")) == 1


def test_no_cluster(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["sweep", str(folder / "matrix.toml"), "--cluster", "tcp://127.0.0.1:1", "--no-cache"]) == 2
    assert capsys.readouterr().err.startswith("error: --cluster")


CAPTURED = """
[[torch]]
reference = "train.py:reference"
distributed = ["train.py:distributed", "train.py:wrong"]
world_size = 2
"""


def test_code_is_captured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Expected: PROVED, and REFUTED with its place; nothing of it is kept."""
    pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")
    (tmp_path / "matrix.toml").write_text(CAPTURED)
    (tmp_path / "train.py").write_text(TRAIN)
    assert cli.run(["sweep", str(tmp_path / "matrix.toml"), "--json", "--no-cache", "--workers", "1"]) == 1
    rows = {r["name"].rpartition(":")[2]: r for r in json.loads(capsys.readouterr().out)["rows"]}
    assert {n: r["verdict"] for n, r in rows.items()} == {"distributed": "PROVED", "wrong": "REFUTED"}
    assert "mul(value=1/2)" in rows["wrong"]["place"]


def test_jobs_are_products_of_their_lists() -> None:
    block = {"script": "train.py", "args": "--rows 8", "world_size": [2, 4], "real": [False], "mesh": "dp=2"}
    found = dict(commands("m", "torch", block))
    assert list(found) == ["torch train.py world_size=2", "torch train.py world_size=4"]
    line = ("torch", "run", "--world-size", "4", "--mesh", "dp=2", "--json", "--", "train.py", "--rows", "8")
    assert found["torch train.py world_size=4"] == line
    jax = {"reference": "a.py:one", "distributed": "a.py:many", "mesh": ["dp=2", "dp=4"], "hlo": True, "name": "ours"}
    assert list(commands("m", "jax", jax))[1] == ("ours mesh=dp=4", ("jax", "--mesh", "dp=4", "--hlo", "--json", "a.py:one", "a.py:many"))


@pytest.mark.parametrize(
    ("kind", "block", "said"),
    [
        ("torch", {"script": "a.py", "worldsize": 2}, "worldsize: no part of a job"),
        ("torch", {"script": "a.py", "reference": "a.py:f"}, "two functions, reference and distributed, or a script"),
        ("torch", {"reference": "a.py:f"}, "two functions"),
        ("jax", {"script": "a.py"}, "script: no part of a job"),
        ("torch", {"script": "a.py", "world_size": "2"}, "world_size: .*int is expected"),
        ("torch", {"script": "a.py", "world_size": []}, "is expected"),
        ("torch", {"script": "a.py", "real": 1}, "real: .*bool is expected"),
    ],
)
def test_jobs_that_are_not_understood(kind: str, block: dict[str, object], said: str) -> None:
    with pytest.raises(Refused, match=said):
        list(commands("m", kind, block))


@pytest.mark.parametrize("kind", ["torch", "jax"])
def test_jobs_have_options_of_their_command(kind: str) -> None:
    assert {f"--{n.replace('_', '-')}" for n in (*VALUES[kind], *FLAGS[kind])} <= options_of(kind)
