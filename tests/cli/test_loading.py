"""What is not needed is not loaded: `--version`, `--help`, `import trainverify`, `validate`, and `verify` of what is right are quick."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Mapping

import pytest

import trainverify
from cli.models import model, plan
from trainverify import files
from trainverify.cli.application import COMMANDS, loaded

SOLVERS = {"z3", "cvc5", "flint", "egglog"}
LARGE = {"numpy", "msgspec", "torch", "jax"}
PACKAGES = {"evaluate", "explain", "mutate", "nnscaler", "prove", "torch", "verdicts", "zoo"}


def modules_of(code: str) -> set[str]:
    """What a process has loaded after it."""
    program = f"import sys\n{code}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, encoding="utf-8", check=True, timeout=300)
    return set(done.stdout.splitlines()[-1].split())


def command(*arguments: str) -> str:
    return f"import trainverify.cli as c; c.run({list(arguments)})"


@pytest.mark.parametrize("code", ["import trainverify", *(command(a) for a in ("--version", "--help", "x"))])
def test_no_engine_is_loaded(code: str) -> None:
    modules = modules_of(code)
    assert "trainverify" in modules
    assert not {m.split(".")[0] for m in modules} & (SOLVERS | LARGE)
    assert not {m.split(".")[1] for m in modules if m.startswith("trainverify.")} & PACKAGES


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    folder = tmp_path_factory.mktemp("files")
    made = {"model": model(), "right": plan(), "wrong": plan("sum")}
    for name, content in made.items():
        files.write(folder / f"{name}.json", content)
    return {name: str(folder / f"{name}.json") for name in made}


def own(modules: set[str]) -> set[str]:
    return {m.removeprefix("trainverify.") for m in modules if m.startswith("trainverify.")}


@pytest.mark.parametrize("logical", [False, True])
def test_validate_loads_what_checks(written: Mapping[str, str], logical: bool) -> None:
    """Neither what proves nor what evaluates."""
    modules = modules_of(command("validate", written["right"], *(["--logical", written["model"]] if logical else [])))
    assert "trainverify.check.validate" in modules
    assert not {m.split(".")[0] for m in modules} & {*SOLVERS, "torch", "jax"}
    packages = PACKAGES - {"evaluate"} | {"approximate", "axes", "completion"}
    assert not {m.split(".")[0] for m in own(modules)} & packages
    assert {m for m in own(modules) if m.startswith("evaluate.")} == {"evaluate.moved"}  # what reports call a point
    assert len(own(modules)) < 80


def test_verify_loads_no_more_than_its_engine(written: Mapping[str, str]) -> None:
    """A plan that is proved needs no solver, no model of the zoo and no search for a cause; one that is wrong does need the last."""
    modules = modules_of(command("verify", written["model"], written["right"]))
    assert {"flint", "trainverify.prove.algebra.engine"} <= modules
    assert not {m.split(".")[0] for m in modules} & {"z3", "torch", "jax"}
    assert not own(modules) & {"explain.locate", "prove.staged.solver", "prove.propose.search", "zoo.llama", "prove.listed.engine"}
    assert "trainverify.explain.locate" in modules_of(command("verify", written["model"], written["wrong"]))
    assert "z3" in modules_of(command("verify", written["model"], written["right"], "--engine", "smt", "--workers", "0"))


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
