"""A slice of the campaign of random JAX steps: what host devices really do, against our verdict."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jaxlib", reason="JAX is absent: pip install 'trainverify[jax]'")

ROOT = Path(__file__).parents[2]
PROGRAMS = 4


def test_no_program_is_judged_wrongly() -> None:
    command = [sys.executable, "-m", "tools.jax_steps", "--count", str(PROGRAMS), "--seed", "0", "--verbose"]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=580, check=False)
    line = rf"^\[\d+/{PROGRAMS}\] (right|wrong|later|does not run): seed (\d+) .*?: (PROVED|REFUTED|INVALID|UNKNOWN)"
    judged = re.findall(line, done.stderr, re.M)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(judged) == PROGRAMS, done.stderr
    assert {kind for kind, seed, _ in judged if int(seed) % 2 == 0} == {"right"}
    assert sum(verdict == "PROVED" for *_, verdict in judged) >= 1
    assert sum(kind == "wrong" and verdict in ("REFUTED", "INVALID") for kind, _, verdict in judged) >= 1
