"""Planted bugs: each is refuted, at a line of the user's file."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("jaxlib", reason="JAX is absent: pip install 'trainverify[jax]'")

import gspmd
import jax.numpy as jnp
import mlp
import planted
from jax.sharding import PartitionSpec as P

import jax
import trainverify.jax as tvj
from jax import lax
from trainverify.jax.hlo import dump


def test_the_correct_step_is_proved() -> None:
    assert tvj.verify(planted.stepped(planted.two_layers_alone), planted.correct, planted.MLP, planted.MESH).verdict == "PROVED"


@pytest.mark.parametrize("name", planted.BUGS)
def test_a_bug_is_refuted_with_a_line_of_the_user(name: str) -> None:
    report = tvj.verify(*planted.BUGS[name])
    assert report.verdict == "REFUTED", report.reason
    assert report.place is not None
    assert report.place.line is not None
    assert report.place.line.file.endswith("planted.py")


def test_new_values_that_lie_in_another_way_are_named() -> None:
    report = tvj.verify(*planted.BUGS["out_specs that are not the in_specs"])
    assert [f.tensor for f in report.findings if f.code == "TV510"] == ["params.w1"]


def test_a_collective_cut_out_of_xlas_program_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    original = dump.parse

    def without_one(text: str) -> Any:
        found = [line for line in text.splitlines() if re.search(r" all-reduce\(", line)]
        line = found[0]
        made = re.sub(r"all-reduce\((%[\w.\-]+)\).*", r"copy(\1), metadata={op_name=\"x\"}", line)
        frame = re.search(r"stack_frame_id=\d+", line)
        return original(text.replace(line, made.replace('op_name="x"', f'op_name="x" {frame.group(0) if frame else ""}')))

    monkeypatch.setattr(dump, "parse", without_one)
    report = tvj.verify(mlp.reference, gspmd.mlp_step, mlp.args, {"dp": 2, "tp": 4}, reader="hlo")
    assert report.verdict == "REFUTED", report.reason
    assert report.place is not None
    assert report.place.line is not None
    assert report.place.line.file.endswith("mlp.py")


def test_replicas_that_nothing_compares_are_not_one_array() -> None:
    def many(mesh: Any) -> Any:
        local = jax.shard_map(lambda x: x * lax.axis_index("tp"), mesh=mesh, in_specs=(P("dp"),), out_specs=P("dp"), check_vma=False)
        return lambda w, x: (w, jnp.sum(local(x)))

    report = tvj.verify(lambda w, x: (w, jnp.sum(x)), many, (tvj.Reals((3,)), tvj.Reals((4, 6))), {"dp": 2, "tp": 2})
    assert report.verdict == "UNKNOWN"
    assert "check_vma=False" in report.reason
