"""`bench torch`: Llama as PyTorch code, captured and proved, with what that costs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="PyTorch is absent: captured code is not measured")


@pytest.mark.capture
def test_one_layer() -> None:
    """Both PROVED, at the widths of Llama-3-8B."""
    command = [sys.executable, "-m", "trainverify", "bench", "torch", "--layers", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    found = json.loads(done.stdout)
    assert found["exit_code"] == done.returncode == 0
    assert [(c["name"], c["verdict"], c["layers"], c["ranks"]) for c in found["cases"]] == [
        ("tp", "PROVED", 1, 8),
        ("fsdp", "PROVED", 1, 8),
    ]
    for c in found["cases"]:
        assert c["ops"] > 500
        assert c["obligations"] > 40
        assert c["capture_seconds"] > 8 * 0.1
        assert 100 < c["capture_megabytes"] < 2000
        assert {"validate", "axes", "logical", "plan", "compare", "cross-check"} <= set(c["seconds"])


def test_other_names_are_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trainverify", "bench", "torch", "--only", "ddp"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "some of tp, fsdp" in done.stderr
