"""`trainverify doctor`: what is installed and what is missing; one line on a version that is not tested."""

from __future__ import annotations

import importlib.metadata
import json
import re
import tomllib
from pathlib import Path

import pytest

from trainverify.cli import run
from trainverify.versions import TESTED, Installed, installed, listed, warning

ROOT = Path(__file__).parents[2]


def test_it_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json"]) == 0
    rows = {r["name"]: r for r in json.loads(capsys.readouterr().out)["libraries"]}
    assert rows.keys() == {"Python", *TESTED}
    assert rows["numpy"]["version"] == importlib.metadata.version("numpy")
    assert run(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^ok +z3-solver +4\.", shown, re.MULTILINE)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 3 only if nothing works without it."""
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name in gone:
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    gone = {"torch", "deepspeed"}
    assert run(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^missing +torch .*pip install 'trainverify\[torch\]'", shown, re.MULTILINE)
    assert re.search(r"^missing +deepspeed .*pip install deepspeed==0\.19\.8", shown, re.MULTILINE)
    gone = {"z3-solver"}
    assert run(["doctor"]) == 3


def test_another_version_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0+cpu")
    assert warning("torch") is None
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.12.1")
    tested = listed(TESTED["torch"][0])
    assert warning("torch") == f"torch 2.12.1 is installed; captures are tested with {tested} (trainverify doctor)"
    assert [listed(v) for v in (("1",), ("1", "2"), ("1", "2", "3"))] == ["1", "1 and 2", "1, 2 and 3"]
    assert installed("torch").state == "untested"
    assert Installed("torch", None, ("2.13.0",), "").state == "missing"


@pytest.mark.parametrize("version", TESTED["torch"][0])
def test_no_line_on_a_tested_version(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"{version}+cu130")
    assert warning("torch") is None
    assert installed("torch").state == "ok"


def test_tested_versions_are_those_of_the_makefile() -> None:
    """What is said to be tested is what the tests install."""
    pinned: dict[str, dict[str, None]] = {}
    for name, version in re.findall(r"\b([a-z-]+)==(\d[\d.]+)", (ROOT / "Makefile").read_text()):
        pinned.setdefault(name, {})[version] = None
    tested = {n: versions for n, (versions, _) in TESTED.items() if versions}
    assert pinned.keys() == tested.keys()
    for name, versions in tested.items():
        assert next(iter(pinned[name])) == versions[0]
        assert pinned[name].keys() >= set(versions)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["torch"] == ["torch>=2.5,<3"]  # an installed one is left alone
