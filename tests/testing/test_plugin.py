"""`assert_equivalent` in a test suite of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import trainverify as tv
from cli.models import model, plan
from sweep.train import TRAIN
from trainverify.testing.assertion import NotEquivalent, text

ROOT = Path(__file__).parents[2]
PLUGIN = ("-p", "no:trainverify", "-p", "trainverify.testing.plugin")  # also where the package is not installed anew
SUITE = """
import trainverify as tv
from cli.models import model, plan


def test_right():
    assert tv.assert_equivalent(model(), plan()).verdict == "PROVED"


def test_wrong():
    tv.assert_equivalent(model(), plan("sum"))
"""


def pytest_run(folder: Path, *arguments: str, suite: str = SUITE) -> subprocess.CompletedProcess[str]:
    (folder / "test_plans.py").write_text(suite, "utf-8")
    path = f"pythonpath={ROOT / 'tests'} {ROOT / 'src'}"
    call = [sys.executable, "-m", "pytest", "-q", *PLUGIN, "-p", "no:cacheprovider", "-o", path, *arguments, "."]
    plain = {k: v for k, v in os.environ.items() if k != "PYTEST_ADDOPTS"}
    return subprocess.run(call, cwd=folder, env=plain, capture_output=True, encoding="utf-8", timeout=300)


def test_the_message_is_the_explanation(tmp_path: Path) -> None:
    done = pytest_run(tmp_path, "--junit-xml", "junit.xml")
    assert done.returncode == 1
    assert "1 failed, 1 passed" in done.stdout
    assert (
        "E       trainverify.testing.assertion.NotEquivalent: REFUTED plan on mesh(dp=3) against model: gradient of w differs"
        in done.stdout
    )
    assert "repair: at models.py:22: all_reduce(group=dp, op=sum) where all_reduce with avg over dp is needed" in done.stdout
    assert "test_plans.py:11: NotEquivalent" in done.stdout  # the caller's line, not the library's
    assert "trainverify: 1 PROVED, 1 REFUTED\n" in done.stdout
    assert 'name="trainverify" value="PROVED plan' in (tmp_path / "junit.xml").read_text("utf-8")


def test_pages(tmp_path: Path) -> None:
    done = pytest_run(tmp_path, "--trainverify-html", "pages")
    assert done.returncode == 1
    assert sorted(p.name for p in (tmp_path / "pages").iterdir()) == ["test_plans.py-test_right.html", "test_plans.py-test_wrong.html"]
    assert "A small counterexample" in (tmp_path / "pages" / "test_plans.py-test_wrong.html").read_text("utf-8")
    assert pytest_run(tmp_path, "--trainverify-html", "all.html").returncode == 1
    text = (tmp_path / "all.html").read_text("utf-8")
    assert "test_plans.py::test_right" in text
    assert "test_plans.py::test_wrong" in text


def test_what_is_not_proved_fails() -> None:
    report = tv.assert_equivalent(model(), plan(), points=1)
    assert report.verdict == "PROVED"
    with pytest.raises(NotEquivalent) as wrong:
        tv.assert_equivalent(model(), plan("sum"), points=1)
    assert wrong.value.report.verdict == "REFUTED"
    assert str(wrong.value) == text(wrong.value.report)
    with pytest.raises(NotEquivalent, match=r"^PROVED\(reduced\) "):
        tv.assert_equivalent(model(), plan(), points=1, engine="smt")
    assert tv.assert_equivalent(model(), plan(), points=1, engine="smt", accept_reduced=True).verdict == "PROVED(reduced)"


def test_entry_point() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert settings["project"]["entry-points"]["pytest11"] == {"trainverify": "trainverify.testing.plugin"}


def test_loading_the_plugin_loads_no_engine() -> None:
    code = "import sys, pytest; before = set(sys.modules); import trainverify.testing.plugin; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True, timeout=60)
    own = {m for m in done.stdout.split() if not m.endswith("contextvars")}
    assert own == {"trainverify", "trainverify.testing", "trainverify.testing.assertion", "trainverify.testing.plugin"}


CAPTURED = """
import trainverify.torch as tvt
from train import batch, distributed, loss, reference, wrong


def test_right():
    assert tvt.assert_equivalent(reference, distributed, 2, batch, loss=loss).verdict == "PROVED"


def test_wrong():
    tvt.assert_equivalent(reference, wrong, 2, batch, loss=loss)
"""


def test_captured_code(tmp_path: Path) -> None:
    """One test passes and one fails at its line, with the explanation; both verdicts are counted."""
    pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")
    (tmp_path / "train.py").write_text(TRAIN, "utf-8")
    done = pytest_run(tmp_path, "-p", "no:faulthandler", suite=CAPTURED)
    assert "1 failed, 1 passed" in done.stdout
    assert "repair: at train.py:17: mul(value=1/2) is one too many" in done.stdout
    assert "test_plans.py:11: NotEquivalent" in done.stdout
    assert "trainverify: 1 PROVED, 1 REFUTED\n" in done.stdout
