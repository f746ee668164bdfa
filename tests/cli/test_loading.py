"""What is not needed is not loaded: `--version`, `--help` and `import trainverify` are quick."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import trainverify
from trainverify.cli.application import COMMANDS, loaded

SOLVERS = {"z3", "cvc5", "flint", "egglog"}
LARGE = {"numpy", "msgspec", "torch", "jax"}
PACKAGES = {"evaluate", "explain", "mutate", "nnscaler", "prove", "torch", "verdicts", "zoo"}


@pytest.mark.parametrize(
    "code", ["import trainverify", *(f"import trainverify.cli as c; c.run(['{a}'])" for a in ("--version", "--help", "x"))]
)
def test_no_engine_is_loaded(code: str) -> None:
    program = f"import sys\n{code}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, encoding="utf-8", check=True, timeout=300)
    modules = set(done.stdout.splitlines()[-1].split())
    assert "trainverify" in modules
    assert not {m.split(".")[0] for m in modules} & (SOLVERS | LARGE)
    assert not {m.split(".")[1] for m in modules if m.startswith("trainverify.")} & PACKAGES


@pytest.mark.parametrize("name", COMMANDS)
def test_help_lists_what_a_command_says_of_itself(name: str) -> None:
    text = (loaded(name).help or "").replace("\n", " ")
    assert text.startswith(COMMANDS[name])


def test_names_of_the_package() -> None:
    """Each is where the table says, and none is hidden by a module of the same name."""
    importlib.import_module("trainverify.cli.verify")
    assert set(trainverify.__all__) == set(trainverify._HOMES)
    for name, home in trainverify._HOMES.items():
        assert getattr(trainverify, name) is getattr(importlib.import_module(home), name)
        assert f"trainverify.{name}" not in sys.modules
    with pytest.raises(AttributeError):
        trainverify.nothing  # noqa: B018
