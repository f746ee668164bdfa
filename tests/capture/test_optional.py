"""PyTorch is optional: nothing imports it by itself, and without it the command says what is missing."""

from __future__ import annotations

import subprocess
import sys


def test_nothing_imports_torch() -> None:
    code = "import trainverify, trainverify.cli, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_without_torch() -> None:
    """Exit code 2, and the extra to install."""
    command = "['torch', 'a.py:f', 'a.py:g', '--world-size', '2']"
    code = f"import sys; sys.modules['torch'] = None; from trainverify.cli import run; sys.exit(run({command}))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 2
    assert "pip install 'trainverify[torch]'" in found.stderr
