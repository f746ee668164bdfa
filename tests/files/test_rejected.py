"""Every bad file is one line: the file, the path inside it, the reason."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from files.rejected import IN_PLAN, IN_PROGRAM, PLAN, PROGRAM, call, changed
from trainverify import files


def message(folder: Path, text: str | bytes, limits: files.Limits | None = None) -> str:
    """What reading this text says, after the name of the file."""
    path = folder / "f.json"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(files.FileError) as e:
        files.read(path, limits or files.Limits())
    line = str(e.value)
    assert line.startswith(f"{path}: ")
    assert line.isprintable()
    return line.removeprefix(f"{path}: ")


def test_the_unchanged_files_are_good(tmp_path: Path) -> None:
    for tree in (PROGRAM, PLAN):
        (tmp_path / "f.json").write_text(json.dumps(tree))
        files.read(tmp_path / "f.json")


@pytest.mark.parametrize(("path", "value", "line"), IN_PROGRAM)
def test_bad_programs(tmp_path: Path, path: list[str | int], value: Any, line: str) -> None:
    assert message(tmp_path, json.dumps(changed(PROGRAM, path, value))) == line


@pytest.mark.parametrize(("path", "value", "line"), IN_PLAN)
def test_bad_plans(tmp_path: Path, path: list[str | int], value: Any, line: str) -> None:
    assert message(tmp_path, json.dumps(changed(PLAN, path, value))) == line


def body(*names: str) -> Any:
    return {"inputs": [], "outputs": [], "tensors": {}, "ops": [call(n) for n in names]}


def calling(functions: dict[str, Any], first: str) -> str:
    return json.dumps(
        {"format": "trainverify", "version": 1, "kind": "program", "name": "p", "tensors": {}, "functions": functions, "ops": [call(first)]}
    )


def test_functions_that_call_each_other(tmp_path: Path) -> None:
    text = calling({"a": body("b"), "b": body("d", "c"), "c": body("d", "b"), "d": body()}, "a")
    assert message(tmp_path, text) == 'functions.b: calls itself: "b" → "c" → "b"'
    ring = {f"f{i}": body(f"f{(i + 1) % 5000}") for i in range(5000)}
    assert message(tmp_path, calling(ring, "f7")) == 'functions.f0: calls itself: "f0" → "f1" → "…" → "f4999" → "f0"'


def test_calls_that_unfold_without_bound(tmp_path: Path) -> None:
    double = {f"f{i}": body(f"f{i + 1}", f"f{i + 1}") for i in range(30)} | {
        "f30": body("leaf"),
        "leaf": {**body(), "ops": [{"op": "o", "in": [], "out": []}]},
    }
    assert message(tmp_path, calling(double, "f0")) == "functions.f4.ops[1]: calls that unfold to more than 50000000 ops"
    chain = {f"f{i}": body(f"f{i + 1}") for i in range(40)} | {"f40": body()}
    assert message(tmp_path, calling(chain, "f0")) == "functions.f7.ops[0]: calls nested more than 32 deep"


HEAD = '{"format": "trainverify", "version": 1, "kind": "program", "name": "p", "tensors": {"x": "f32[2]"}'
TEXTS: list[tuple[str | bytes, str]] = [
    ("", "not JSON at line 1, column 1: Expecting value"),
    ("[]", "expected an object, got a list"),
    ("null", "expected an object, got null"),
    (HEAD, "not JSON at line 1, column 99: Expecting ',' delimiter"),
    (HEAD + "} x", "not JSON at line 1, column 101: Extra data"),
    (HEAD + ",\n}", "not JSON at line 2, column 1: Expecting property name enclosed in double quotes"),
    ('{"a": "\n"}', "not JSON at line 1, column 8: Invalid control character at"),
    (b'\xef\xbb\xbf{"format": 1}', "not JSON at line 1, column 1: Unexpected UTF-8 BOM (decode using utf-8-sig)"),
    (b'{"a": "\xff"}', "not UTF-8 at byte 7"),
    (b"\x80\x04\x95K\x00", "not UTF-8 at byte 0"),
    (HEAD + ', "name": "p"}', '"name" is given twice'),
    (HEAD.replace('"f32[2]"', '"f32[2]", "x": "f32[3]"') + "}", 'tensors: "x" is given twice'),
    (HEAD.replace('"x"', '"\\u0078": "f32[2]", "x"') + "}", 'tensors: "x" is given twice'),
    (HEAD + ', "functions": {"f": {}, "f": {}}}', 'functions: "f" is given twice'),
    (HEAD + ', "ops": [{"op": "a", "in": [], "out": [], "op": "b"}]}', 'ops[0]: "op" is given twice'),
    (
        HEAD + ', "ops": [{"op": "a", "in": [], "out": [], "attrs": {"k": [{"ref": "a", "ref": "b"}]}}]}',
        'ops[0].attrs.k[0]: "ref" is given twice',
    ),
    (HEAD + ', "ops": [{"op": "a", "in": [], "out": [], "attrs": {"k": 1e999}}]}', "ops[0].attrs.k: 1e999 is too large for a number"),
    (HEAD + ', "ops": [{"op": "a", "in": [], "out": [], "attrs": {"k": ' + "1" * 5000 + "}}]}", "an integer with more than 4300 digits"),
    ("[" * 10_000 + "]" * 10_000, "nested more than 32 deep at byte 32"),
    ("[" * 10_000, "nested more than 32 deep at byte 32"),
    ('{"a":' * 10_000, "nested more than 32 deep at byte 160"),
    (HEAD + ', "\\"[[": ' + "[" * 100 + "]" * 100 + "}", "nested more than 32 deep at byte 139"),
    (
        json.dumps({**PROGRAM, "ops": [{"op": "o", "in": [], "out": [], "attrs": {"k": json.loads("[" * 20 + "]" * 20)}}]}),
        "ops[0].attrs.k" + "[0]" * 16 + ": lists nested more than 16 deep",
    ),
    (gzip.compress(b"{}", mtime=0)[:-6], "broken gzip data: Compressed file ended before the end-of-stream marker was reached"),
    (gzip.compress(b"{}", mtime=0) + b"tail", "broken gzip data: Not a gzipped file (b'ta')"),
    (b"\x1f\x8b" + b"\0" * 20, "broken gzip data: Unknown compression method"),
    (json.dumps(PLAN).replace('"tp.0": [0, 1, 2]', '"g": [0], "g": [1]'), 'groups: "g" is given twice'),
]


@pytest.mark.parametrize(("text", "line"), TEXTS)
def test_bad_texts(tmp_path: Path, text: str | bytes, line: str) -> None:
    assert message(tmp_path, text) == line


LIMITS: list[tuple[dict[str, int], Any, str]] = [
    ({"file_bytes": 100}, PLAN, "bytes; the limit is 100"),
    ({"depth": 3}, PLAN, "nested more than 3 deep at byte "),
    ({"values": 20}, PLAN, "more than 20 values"),
    ({"ranks": 5}, PLAN, "mesh: 6 ranks; the limit is 5"),
    ({"templates": 1}, PLAN, "templates[1]: more than 1 templates"),
    ({"tensors": 1}, PLAN, "edits[0].tensors: more than 1 tensors"),
    ({"ops": 1}, PLAN, "edits[0].ops: more than 1 ops"),
    ({"groups": 0}, PLAN, "groups: more than 0 groups"),
    ({"functions": 1}, PROGRAM, "functions: more than 1 functions"),
    ({"columns": 0}, PLAN, "templates[0].bindings: more than 0 columns"),
    ({"layouts": 2}, PLAN, "lineage: more than 2 layouts"),
    ({"edits": 0}, PLAN, "edits: more than 0 edits"),
    ({"expanded": 2}, PLAN, "templates[1].ranks.range: more than 2 items in ranges and runs"),
    ({"inlined_ops": 0}, PROGRAM, "ops[1]: calls that unfold to more than 0 ops"),
    ({"dimensions": 1}, PROGRAM, "tensors.x: a tensor of 2 dimensions; the limit is 1"),
    ({"elements": 6}, PROGRAM, 'tensors.w: type "f32[5,3]" has more than 6 elements'),
    ({"name": 3}, PROGRAM, "a type of 8 characters; the limit is 3"),
]


@pytest.mark.parametrize(("limits", "tree", "line"), LIMITS)
def test_limits(tmp_path: Path, limits: dict[str, int], tree: Any, line: str) -> None:
    assert line in message(tmp_path, json.dumps(tree), files.Limits(**limits))


def test_the_kind_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    path.write_text(json.dumps(PLAN))
    with pytest.raises(files.FileError) as e:
        files.read_program(path)
    assert str(e.value) == f'{path}: kind: expected "program", got "plan"'
    assert (e.value.path, e.value.where) == (str(path), "kind")
    path.write_text(json.dumps(PROGRAM))
    with pytest.raises(files.FileError, match='kind: expected "plan", got "program"'):
        files.read_plan(path)


def test_an_error_is_one_short_line() -> None:
    error = files.FileError("a\nb" + "c" * 1000, "x\x1b" * 1000, "line\u2028break" * 1000)
    assert "\n" not in str(error)
    assert str(error).isprintable()
    assert str(error).startswith(r"a\nbccc")
    assert len(str(error)) < 1100
