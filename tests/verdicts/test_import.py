"""What building a plan loads: builders and operators. Engines and solvers are loaded when something is verified."""

from __future__ import annotations

import subprocess
import sys


def loaded(code: str) -> set[str]:
    run = subprocess.run([sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_engines_and_solvers_are_not_loaded() -> None:
    modules = loaded("import trainverify as tv\ntv.plan")
    assert "trainverify.build.plan" in modules
    assert not {m for m in modules if m.startswith(("z3", "rich", "typer", "trainverify.prove", "trainverify.evaluate"))}


def test_they_are_when_something_is_verified() -> None:
    assert "trainverify.prove.algebra.kernel" in loaded("import trainverify as tv\ntv.verify")


def test_the_function_stays_when_its_module_is_imported() -> None:
    loaded("import trainverify.verdicts\nimport trainverify as tv\nassert callable(tv.verify)")
