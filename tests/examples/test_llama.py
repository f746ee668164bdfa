"""The buggy twin of the demo: the collective that is forgotten is the one that is named."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from trainverify.verdicts import verify
from trainverify.zoo.recipes import Wish

FILE = Path(__file__).parents[2] / "examples" / "llama.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("llama_example", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_forgotten_sum_is_refuted() -> None:
    code = example()
    logical, plan = Wish("llama3-8b", code.HOW, layers=2).build()
    report = verify(logical, code.forgotten(plan, 1, "layers.1.ffn_norm.grad.tp"), points=1)
    assert report.verdict == "REFUTED"
    assert report.place is not None
    assert report.place.tensor == "layers.1.ffn_norm.grad.tp"
