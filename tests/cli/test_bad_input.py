"""Bad files: exit 2 and one line with file, place and reason."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import trainverify as tv
from trainverify import cli, files


def good() -> bytes:
    b = tv.program("model")
    x, w = b.input("x", (6, 10)), b.parameter("w", (4, 10))
    b.loss(b.mean(b.linear(x, w, name="y"), name="loss"))
    path = Path("good.json")
    files.write(path, tv.complete(b.build(), tv.SGD(lr=0.5)))
    return path.read_bytes()


def changed(**fields: object) -> bytes:
    return json.dumps({**json.loads(good()), **fields}).encode()


BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", ""),
    "not JSON": (lambda: b"import torch\n", ""),
    "truncated": (lambda: good()[:-20], ""),
    "truncated gzip": (lambda: gzip.compress(good())[:-20], ""),
    "binary": (lambda: bytes(range(256)) * 9, ""),
    "pickle": (lambda: b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94.", ""),
    "wrong version": (lambda: changed(version=99), "version: version 99 is not supported"),
    "other format": (lambda: changed(format="onnx"), 'format: expected "trainverify", got "onnx"'),
    "unknown field": (lambda: changed(colour=1), "colour: unknown field"),
    "deep nesting": (lambda: changed(ops=[])[:-1] + b', "x": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", ""),
    "bomb": (lambda: gzip.compress(b"[" + b" " * (600 << 20) + b"]", 1), "more than "),
    "negative shape": (lambda: changed(tensors={"x": "f32[-6,10]"}), 'tensors.x: type "f32[-6,10]" has a negative dimension'),
    "NaN": (lambda: changed(ops=[]).replace(b'"ops": []', b'"ops": NaN'), ""),
    "control characters": (lambda: changed(name="a\x1b[31m"), r'name: name "a\u001b[31m" has characters that do not print'),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    make, reason = BAD[name]
    Path("bad.json").write_bytes(make())
    good()
    commands = [["verify", "bad.json", "good.json"], ["verify", "good.json", "bad.json"], ["validate", "bad.json"], ["show", "bad.json"]]
    for arguments in commands[:1] if name == "bomb" else commands:
        begin = time.perf_counter()
        assert cli.run(arguments) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("error: bad.json: ")
        assert reason in err
        assert err.count("\n") == 1
        assert err[:-1].isprintable()
        assert time.perf_counter() - begin < 60


def test_files_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    good()
    odd = "[bold]\n\udcff.json"
    for path, line in (
        ("nowhere.json", "error: nowhere.json: No such file or directory\n"),
        ("folder", "error: folder: not a regular file\n"),
        (odd, "error: [bold]\\n\\udcff.json: No such file or directory\n"),
    ):
        for arguments in (["verify", path, "good.json"], ["verify", "good.json", path], ["validate", path], ["show", path]):
            assert cli.run(arguments) == 2
            assert capsys.readouterr() == ("", line)


def test_swapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    good()
    p = tv.plan("plan", tv.Mesh(dp=3))
    with p.ranks() as r:
        r.loss(r.mean(r.input("x", (2, 10), "(dp b) k"), name="loss"))
    files.write("plan.json", p.build())
    assert cli.run(["verify", "plan.json", "good.json"]) == 2
    hint = "(the logical program comes first: verify LOGICAL PLAN)"
    assert capsys.readouterr() == ("", f'error: plan.json: kind: expected "program", got "plan" {hint}\n')
    assert cli.run(["validate", "plan.json", "--logical", "plan.json"]) == 2
