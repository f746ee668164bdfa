"""Captures of the same sources and arguments are used again; after any change of what a capture read, they are not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

from trainverify import files
from trainverify.graph.program import Op, Program, Source
from trainverify.graph.types import TensorType
from trainverify.torch.cache import Cache, Found, mark, noted
from trainverify.torch.captured import Captured
from trainverify.torch.launch import run

MODEL = """
import json
from pathlib import Path
import torch
settings = json.loads((Path(__file__).parent / "settings.json").read_text())
def model():
    return torch.nn.Linear(7, settings["width"])
def averaged(grad):
    torch.distributed.all_reduce(grad, op=torch.distributed.ReduceOp.AVG)
"""
TRAIN = """
import torch
import trainverify.torch as tvt
from parts import averaged, model
batch = {"x": tvt.Reals((6, 7), "(dp b) k")}
loss = {"dp": "avg"}
def stepping(reduce):
    own = model()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    def step(batch):
        loss = own(batch["x"]).square().mean()
        loss.backward()
        for p in own.parameters():
            reduce(p.grad)
        optimizer.step()
        return loss
    return step
def reference():
    return stepping(lambda grad: None)
def distributed(rank, world):
    return stepping(averaged)
"""


class Project:
    def __init__(self, folder: Path):
        self.folder, self.cache = folder / "project", folder / "cache"
        self.folder.mkdir()
        self.written = 0
        self.write("parts.py", MODEL)
        self.write("train.py", TRAIN)
        self.write("settings.json", json.dumps({"width": 5}))

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text, "utf-8")
        self.written += 1
        os.utime(self.folder / name, (1_000_000_000 + self.written,) * 2)  # long ago

    def run(self, cached: bool = True, **environment: str) -> tuple[str, int]:
        """The verdict, and how many captures were used again."""
        more = ["--cache"] if cached else []
        command = [sys.executable, "-m", "trainverify", "torch", "train.py:reference", "train.py:distributed", "--world-size", "3"]
        where = {**os.environ, "XDG_CACHE_HOME": str(self.cache), **environment}
        done = subprocess.run([*command, "--json", *more], cwd=self.folder, env=where, capture_output=True, text=True, check=False)
        report = json.loads(done.stdout)
        notes = [n for n in report.get("notes", ()) if "used again" in n]
        return report["verdict"], int(notes[0].split()[0]) if notes else 0


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.mark.capture
def test_used_again(project: Project) -> None:
    """PROVED each time: captured without being kept, captured, from the cache, and captured again without it."""
    assert project.run(cached=False) == ("PROVED", 0)
    assert project.run() == ("PROVED", 0)
    assert project.run() == ("PROVED", 4)
    assert project.run(cached=False) == ("PROVED", 0)
    assert project.run(SOME_SETTING="1") == ("PROVED", 0)
    kept = list((project.cache / "trainverify" / "captures").glob("*.logical.json.gz"))
    assert len(kept) == 8
    assert any(op.name == "all_reduce" for path in kept for op in files.read_program(path).ops)


def test_a_changed_module_is_captured_again(project: Project) -> None:
    """PROVED, then REFUTED: a module that the file imports sums where it averaged."""
    assert project.run() == ("PROVED", 0)
    project.write("parts.py", MODEL.replace("ReduceOp.AVG", "ReduceOp.SUM"))
    assert project.run() == ("REFUTED", 0)


@pytest.mark.capture
def test_a_changed_setting_is_captured_again(project: Project) -> None:
    """A file that the code reads counts as well, and so does a module beside it that is new."""
    assert project.run() == ("PROVED", 0)
    project.write("settings.json", json.dumps({"width": 6}))
    assert project.run() == ("PROVED", 0)
    assert project.run() == ("PROVED", 4)
    project.write("more.py", "")
    assert project.run() == ("PROVED", 0)


READS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a name beside a file": (lambda folder: ((folder / "setting").read_text(), (folder / "sum").exists()), "sum"),
    "a hidden name": (lambda folder: ((folder / "setting").read_text(), (folder / ".sum").exists()), ".sum"),
    "a hidden file": (lambda folder: (folder / ".setting").read_text(), ".setting"),
    "a file opened for reading and writing": (lambda folder: (folder / "setting").open("r+").read(), "setting"),
    "a folder that is listed": (lambda folder: list((folder / "listed").iterdir()), "listed/sum"),
}


@pytest.mark.parametrize("how", READS)
def test_whatever_is_read_counts(tmp_path: Path, how: str) -> None:
    """A capture depends on it: unchanged at first, changed after it was written."""
    read, name = READS[how]
    (tmp_path / "listed").mkdir()
    for there in ("setting", ".setting"):
        (tmp_path / there).write_text("avg")
        os.utime(tmp_path / there, (1_000_000_000,) * 2)
    (found,) = run([noted(lambda: str(read(tmp_path)))])
    assert isinstance(found, Found)
    assert found.depends is not None
    assert [p for p, was in found.depends.items() if mark(p) != was] == []
    (tmp_path / name).write_text("sum")
    assert [p for p, was in found.depends.items() if mark(p) != was] != []


def test_what_the_capture_itself_changes_is_not_kept(tmp_path: Path) -> None:
    def counted() -> int:
        (tmp_path / f"run {len(list(tmp_path.iterdir()))}").touch()
        return 0

    (found,) = run([noted(counted)])
    assert isinstance(found, Found)
    assert found.depends is None


@pytest.mark.capture
def test_a_broken_file_is_captured_again(project: Project) -> None:
    assert project.run() == ("PROVED", 0)
    for path in (project.cache / "trainverify" / "captures").glob("*.facts.json"):
        path.write_bytes(path.read_bytes()[:-3])
    assert project.run() == ("PROVED", 0)
    assert project.run() == ("PROVED", 4)


def test_lines_that_led_to_an_op_are_kept(tmp_path: Path) -> None:
    """Also where one line is reached in two ways; `Source` compares equal without them."""
    lines = [Source("norm.py", 7, Source("layer.py", n, Source("train.py", 3))) for n in (11, 13)]
    ops = [Op("neg", ("x",), (t,), source=line) for t, line in zip("yzw", (*lines, None), strict=True)]
    program = Program("one", dict.fromkeys("xyzw", TensorType((2, 3), "f32")), inputs=("x",), ops=tuple(ops))
    cache = Cache(tmp_path, "command")
    put = cache.put("rank 0", (Captured(program, 0),), {})
    got = cache.get("rank 0")
    assert got is not None
    for (found,) in (put, got[0]):
        sources = [op.source for op in found.program.ops]
        assert [[str(s), *map(str, s.callers)] for s in sources if s] == [
            ["norm.py:7", "layer.py:11", "train.py:3"],
            ["norm.py:7", "layer.py:13", "train.py:3"],
        ]
        assert sources[2] is None
