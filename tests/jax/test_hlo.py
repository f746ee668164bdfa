"""XLA's program after SPMD partitioning: the same models, distributed by the compiler. Proved at real widths, replayed at small ones."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("jaxlib", reason="JAX is absent: pip install 'trainverify[jax]'")

import gspmd
import llama
import mlp

import trainverify.jax as tvj
from trainverify.jax.hlo.text import instruction, literal, replica_groups

SMALL = {"batch": 8, "width": 6, "hidden": 16, "out": 5}
MESH = {"dp": 2, "tp": 4}
LLAMA = {"tensor": (gspmd.TENSOR, MESH), "fully sharded": (gspmd.FULLY, {"dp": 4}), "vocabulary": (gspmd.VOCABULARY, MESH)}


def replayed(one: Any, many: Any, args: Any, mesh: Any) -> None:
    found = tvj.replay(one, many, args, tvj.pair(one, many, args, mesh, reader="hlo"))
    assert found.agrees, str(found)


@pytest.mark.parametrize(("one", "many", "adam"), [(mlp.reference, gspmd.mlp_step, False), (mlp.reference_adam, gspmd.mlp_adam, True)])
def test_mlp(one: Any, many: Any, adam: bool) -> None:
    report = tvj.verify(one, many, mlp.shapes(adam=adam), MESH, reader="hlo")
    assert report.verdict == "PROVED", report.reason
    replayed(one, many, mlp.shapes(**SMALL, adam=adam), MESH)


@pytest.mark.capture
@pytest.mark.parametrize("name", LLAMA)
def test_llama(name: str) -> None:
    cut, mesh = LLAMA[name]
    c = llama.Config()
    report = tvj.verify(llama.reference(c), lambda mesh: gspmd.llama_step(c, mesh, cut), llama.shapes(c), mesh, reader="hlo")
    assert report.verdict == "PROVED", report.reason


@pytest.mark.parametrize("name", LLAMA)
def test_llama_replayed(name: str) -> None:
    cut, mesh = LLAMA[name]

    def many(mesh: Any) -> Any:
        return gspmd.llama_step(llama.SMALL, mesh, cut)

    replayed(llama.reference(llama.SMALL), many, llama.shapes(llama.SMALL), mesh)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,2},{1,3}}", [(0, 2), (1, 3)]),
        ("[2,2]<=[4]", [(0, 1), (2, 3)]),
        ("[2,2]<=[2,2]T(1,0)", [(0, 2), (1, 3)]),
        ("mesh['a'=2,'b'=2] {'b'}", [(0, 1), (2, 3)]),
        ("mesh['a'=2,'b'=2] {'a'}", [(0, 2), (1, 3)]),
        ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}", [(0, 1), (2, 3)]),
        ("mesh['a'=2,'b'=2] {'b','a'}", [(0, 2, 1, 3)]),
        ("{}", [(0, 1, 2, 3)]),
    ],
)
def test_spellings_of_groups(text: str, groups: list[tuple[int, ...]]) -> None:
    assert replica_groups(text, 4) == groups


def test_an_instruction() -> None:
    i = instruction('  ROOT %d.1 = f32[8,5]{1,0} dot(%a, %b.2), lhs_contracting_dims={1}, metadata={op_name="x, y" stack_frame_id=3}')
    assert (i.name, i.opcode, i.operands, i.types[0].shape, i.root) == ("d.1", "dot", ("a", "b.2"), (8, 5), True)
    assert i.attrs["lhs_contracting_dims"] == "{1}"
    assert literal("{ { 1, -2 }, { 3, inf } }")[1][1] == float("inf")
