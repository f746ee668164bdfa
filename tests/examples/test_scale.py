"""A plan of 8192 ranks: seconds and megabytes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path


def test_8192_ranks_within_10_seconds_and_1_gib(tmp_path: Path) -> None:
    begin = time.perf_counter()
    run = subprocess.run([sys.executable, str(Path(__file__).with_name("large.py")), str(tmp_path)], capture_output=True, text=True)
    seconds = time.perf_counter() - begin
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 1 << 30
    assert seconds < 10
