"""What is written reads back equal, with types; equal content gives equal bytes; nothing is half-written."""

from __future__ import annotations

import gzip
import os
import random
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from files.contents import exact, plans, programs
from trainverify import files
from trainverify.graph.lineage import Layout, Part, Parts, Run
from trainverify.graph.mesh import Mesh
from trainverify.graph.plan import Plan, Template
from trainverify.graph.program import Domain, Function, Op, Output, Program, Ref, Source
from trainverify.graph.types import TensorType

unhurried = settings(deadline=None, max_examples=120, suppress_health_check=list(HealthCheck))


def round_trip(content: Program | Plan, folder: Path, name: str = "file.json") -> Program | Plan:
    files.write(folder / name, content)
    return files.read(folder / name)


@given(programs())
@unhurried
def test_programs_round_trip(tmp_path_factory: Any, program: Program) -> None:
    assert exact(round_trip(program, tmp_path_factory.getbasetemp())) == exact(program)


@given(plans())
@unhurried
def test_plans_round_trip(tmp_path_factory: Any, plan: Plan) -> None:
    assert exact(round_trip(plan, tmp_path_factory.getbasetemp(), "file.json.gz")) == exact(plan)


@given(plans())
@settings(unhurried, max_examples=40)
def test_equal_plans_give_equal_bytes(tmp_path_factory: Any, plan: Plan) -> None:
    def shuffled(table: Any) -> Any:
        return dict(random.Random(3).sample(list(table.items()), len(table)))

    def other(p: Program) -> Program:
        return replace(p, tensors=shuffled(p.tensors), functions=shuffled(p.functions), domains=shuffled(p.domains))

    templates = tuple(replace(t, program=other(t.program), bindings=shuffled(t.bindings)) for t in plan.templates)
    twin = replace(plan, templates=templates, groups=shuffled(plan.groups), functions=shuffled(plan.functions))
    folder = tmp_path_factory.getbasetemp()
    files.write(folder / "one.json.gz", plan)
    files.write(folder / "two.json.gz", twin)
    assert (folder / "one.json.gz").read_bytes() == (folder / "two.json.gz").read_bytes()


X = {"x": TensorType((2, 3))}


def test_types_of_attributes_survive(tmp_path: Path) -> None:
    values = (1, 1.0, True, Fraction(1), "1", None, -0.0, float("inf"), float("-inf"), float("nan"), Ref("r"), (), (1, (2.0, "a")), 10**40)
    program = Program("p", X, ops=(Op("o", (None, "x"), ("x",), tuple((f"a{i}", v) for i, v in enumerate(values))),))
    back = round_trip(program, tmp_path)
    assert isinstance(back, Program)
    assert [(type(v), repr(v)) for _, v in back.ops[0].attrs] == [(type(v), repr(v)) for v in values]


def test_many_lists_are_not_deep_lists(tmp_path: Path) -> None:
    program = Program("p", X, ops=(Op("o", (), (), tuple((f"a{i}", ((1,), (2,))) for i in range(40))),))
    assert round_trip(program, tmp_path) == program


def test_compressed_files_hold_no_time_and_no_name(tmp_path: Path) -> None:
    files.write(tmp_path / "f.json.gz", Program("p", X))
    assert (tmp_path / "f.json.gz").read_bytes()[:8] == b"\x1f\x8b\x08\0\0\0\0\0"


def test_text_of_a_program(tmp_path: Path) -> None:
    program = Program(
        "step",
        {"y": TensorType((2, 5)), "ids": TensorType((2,), "i64"), "w": TensorType((5, 3), "bf16")},
        ("ids",),
        ("w",),
        (),
        (Op("embed", ("ids", None), ("y",), (("by", Fraction(-2, 6)), ("at", Ref("r"))), "backward", "y", Source("m.py", 3)),),
        (Output("y", "gradient", "w"),),
        {"f": Function("f", {}, (), (), ())},
        {"ids": Domain("ids", 7, -100)},
    )
    files.write(tmp_path / "p.json", program)
    assert (tmp_path / "p.json").read_text() == (
        '{\n  "format": "trainverify",\n  "version": 1,\n  "kind": "program",\n  "name": "step",\n'
        '  "inputs": ["ids"],\n  "parameters": ["w"],\n'
        '  "tensors": {\n    "ids": "i64[2]",\n    "w": "bf16[5,3]",\n    "y": "f32[2,5]"\n  },\n'
        '  "domains": {\n    "ids": {"kind":"ids","size":7,"ignore":-100}\n  },\n'
        '  "functions": {\n    "f": {\n      "inputs": [],\n      "outputs": [],\n      "tensors": {},\n      "ops": []\n    }\n  },\n'
        '  "ops": [\n    {"op":"embed","in":["ids",null],"out":["y"],"attrs":{"by":{"fraction":"-1/3"},"at":{"ref":"r"}},'
        '"phase":"backward","forward":"y","source":"m.py:3"}\n  ],\n'
        '  "outputs": [\n    {"tensor":"y","role":"gradient","of":"w"}\n  ]\n}\n'
    )


@pytest.mark.parametrize(
    ("column", "stored"),
    [
        (tuple(range(8)), '{"range":[0,8,1]}'),
        ((7, 6, 5, 4, 3, 2, 1, 0), '{"range":[7,-1,-1]}'),
        ((3,) * 8, '{"runs":[[3,8]]}'),
        (("a",) * 5 + ("b",) * 3, '{"runs":[["a",5],["b",3]]}'),
        ((True,) * 8, '{"runs":[[true,8]]}'),
        ((0, 1, 2, 3, 4, 5, 6, 6), "[0,1,2,3,4,5,6,6]"),
        ((False, True, 2, 3, 4, 5, 6, 7), "[false,true,2,3,4,5,6,7]"),
        ((1.0,) * 4 + (1,) * 4, "[1.0,1.0,1.0,1.0,1,1,1,1]"),
        ((0.0,) * 4 + (-0.0,) * 4, "[0.0,0.0,0.0,0.0,-0.0,-0.0,-0.0,-0.0]"),
    ],
)
def test_columns_are_compact_and_exact(tmp_path: Path, column: tuple[Any, ...], stored: str) -> None:
    plan = Plan("p", Mesh(dp=8), (Template(Program("r", {}), tuple(range(8)), {"c": column}),))
    back = round_trip(plan, tmp_path)
    assert exact(back) == exact(plan)
    assert f'"c": {stored}\n' in (tmp_path / "file.json").read_text()


def test_every_kind_of_run_survives(tmp_path: Path) -> None:
    runs = (Run(3, 2), Run(3, 2, 1, 7), Run(3, 2, 5, 0), Run(3, 2, 5, 7))
    part = Part((0, 1, 2, 3), runs, ("avg", 1, 2), padding=True)
    plan = Plan("p", Mesh(dp=2), (), lineage=(Layout("x", "y", Parts(((1, (part,)), (0, ()))), (("dp", 1),)),))
    assert exact(round_trip(plan, tmp_path)) == exact(plan)


def test_gzip_is_told_by_its_bytes(tmp_path: Path) -> None:
    program = Program("p", X)
    files.write(tmp_path / "a.json", program)
    text = (tmp_path / "a.json").read_bytes()
    (tmp_path / "b.json").write_bytes(gzip.compress(text))
    (tmp_path / "c.json.gz").write_bytes(text)
    assert files.read(tmp_path / "b.json") == files.read(tmp_path / "c.json.gz") == program


@pytest.mark.parametrize("name", ["f.json", "f.json.gz"])
def test_a_failed_write_changes_nothing(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write(tmp_path / name, Program("old", X))
    before = (tmp_path / name).read_bytes()

    def broken(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        with pytest.raises(files.FileError, match="No space left on device"):
            files.write(tmp_path / name, Program("new", X))
    with pytest.raises(files.FileError):
        files.write(tmp_path / name, Program("new", X, inputs=("missing",)))
    assert (tmp_path / name).read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("moment", ["open", "fsync", "replace"])
def test_an_interrupted_write_leaves_no_draft(tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python acts on Ctrl-C after a call of the system has had its effect, and before its result is stored."""
    files.write(tmp_path / "f.json", Program("old", X))
    real = getattr(os, moment)

    def interrupted(*arguments: Any) -> None:
        real(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, moment, interrupted)
        with pytest.raises(KeyboardInterrupt):
            files.write(tmp_path / "f.json", Program("new", X))
    assert [p.name for p in tmp_path.iterdir()] == ["f.json"]
    assert files.read_program(tmp_path / "f.json").name == ("new" if moment == "replace" else "old")


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    files.write(tmp_path / "link.json", Program("p", X))
    assert (tmp_path / "link.json").is_symlink()
    assert files.read_program(tmp_path / "real.json") == Program("p", X)


class Strange(int):
    pass


nested: Any = 1
for _ in range(20_000):
    nested = (nested,)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (Program("", X), "name: a name must not be empty"),
        (Program("p", {"a\nb": TensorType(())}), r'tensors: name "a\nb" has characters that do not print'),
        (Program("p", {"a": TensorType((-2,))}), 'tensors.a: type "f32[-2]" has a negative dimension'),
        (Program("p", {"a": TensorType((2,), "f31")}), 'tensors.a: type "f31[2]" has an unknown dtype; known: f64, f32, '),
        (Program("p", X, ops=(Op("o", ("y",), ()),)), 'ops[0].in[0]: no tensor "y"'),
        (Program("p", X, ops=(Op("o", (), (), (("a", 1), ("a", 2))),)), "ops[0].attrs: an attribute is given twice"),
        (Program("p", X, ops=(Op("o", (), (), (("a", {"ref": "b"}),)),)), "ops[0].attrs.a: a value of type dict cannot be stored"),
        (Program("p", X, ops=(Op("o", (), (), (("a", Strange(3)),)),)), "ops[0].attrs.a: a value of type Strange cannot be stored"),
        (Program("p", X, ops=(Op("o", (), (), (("a", "\ud800"),)),)), "ops[0].attrs.a: a string with half a surrogate pair"),
        (Program("p", X, ops=(Op("o", (), (), (("a", nested),)),)), "lists nested more than 16 deep"),
        (Program("p", X, functions={"f": Function("g", {}, (), (), ())}), 'functions.f: its name is "g"'),
        ("text", "expected a program or a plan, got str"),
    ],
)
def test_what_could_not_be_read_is_not_written(tmp_path: Path, program: Any, message: str) -> None:
    with pytest.raises(files.FileError) as e:
        files.write(tmp_path / "f.json", program)
    assert message in str(e.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["folder", "missing/f.json", "pipe"])
def test_places_that_are_no_files(tmp_path: Path, kind: str) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    reason = "No such file or directory" if "/" in kind else "not a regular file"
    for action in (lambda p: files.write(p, Program("p", X)), files.read):
        with pytest.raises(files.FileError) as e:
            action(tmp_path / kind)
        assert str(e.value) == f"{tmp_path / kind}: {reason}"
