"""Llama with grouped queries, rotary positions and SwiGLU: whole steps at real widths, replayed at small ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("jaxlib", reason="JAX is absent: pip install 'trainverify[jax]'")

import llama
from running import proved

import trainverify.jax as tvj

CASES: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "tensor parallel": ("tensor_parallel", {"dp": 2, "tp": 4}, {}),
    "accumulation by scan": ("tensor_parallel", {"dp": 2, "tp": 4}, {"micro": 2}),
    "remat": ("tensor_parallel", {"dp": 2, "tp": 4}, {"remat": True}),
    "sequence parallel": ("sequence_parallel", {"dp": 2, "tp": 4}, {}),
    "cut vocabulary": ("vocabulary_parallel", {"dp": 2, "tp": 4}, {}),
    "fully sharded": ("fully_sharded", {"dp": 4}, {}),
}


LONG = ("accumulation by scan", "remat", "sequence parallel")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.capture) if n in LONG else n for n in CASES])
def test_proved_at_real_widths(name: str) -> None:
    function, mesh, options = CASES[name]
    c = replace(llama.Config(), **options)
    proved(llama.reference(c), lambda mesh: getattr(llama, function)(c, mesh), llama.shapes(c), mesh)


@pytest.mark.parametrize("name", CASES)
def test_replayed(name: str) -> None:
    function, mesh, options = CASES[name]
    c = replace(llama.SMALL, **options)

    def distributed(mesh: Any) -> Any:
        return getattr(llama, function)(c, mesh)

    made = tvj.pair(llama.reference(c), distributed, llama.shapes(c), mesh)
    found = tvj.replay(llama.reference(c), distributed, llama.shapes(c), made)
    assert found.agrees, str(found)


WIDE = replace(llama.Config(), heads=32, kv=8, dim=4096, ffn=14336, vocab=128256, seq=4096)


@pytest.mark.capture
def test_all_layers_of_llama_3_8b() -> None:
    c = replace(WIDE, layers=32, batch=8)
    proved(llama.reference(c), lambda mesh: llama.tensor_parallel(c, mesh), llama.shapes(c), {"dp": 8, "tp": 8})


@pytest.mark.capture
def test_8192_ranks() -> None:
    c = replace(WIDE, batch=2048)
    proved(llama.reference(c), lambda mesh: llama.tensor_parallel(c, mesh), llama.shapes(c), {"dp": 1024, "tp": 8})
