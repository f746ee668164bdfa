"""A plan of 8192 ranks: seconds and megabytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_8192_ranks_within_10_seconds_and_1_gib(tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, str(Path(__file__).with_name("large.py")), str(tmp_path)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    peak, seconds = map(float, run.stdout.split())
    assert peak < 1 << 30
    assert seconds < 10
