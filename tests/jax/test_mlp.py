"""MLPs, data and tensor parallel: whole steps, proved at real widths and replayed at small ones."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

pytest.importorskip("jaxlib", reason="JAX is absent: pip install 'trainverify[jax]'")

import mlp
from running import proved

import trainverify.jax as tvj
from trainverify.report import Report

SMALL = {"batch": 8, "width": 6, "hidden": 16, "out": 5}


def test_data_parallel() -> None:
    proved(mlp.reference, mlp.data_parallel, mlp.args, {"dp": 8}, mlp.shapes(**SMALL))


def test_tensor_parallel() -> None:
    proved(mlp.reference, mlp.tensor_parallel, mlp.args, {"dp": 2, "tp": 4}, mlp.shapes(**SMALL))


@pytest.mark.parametrize("distributed", [mlp.tensor_parallel_adam, mlp.optimizer_outside])
def test_adam_with_a_symbolic_step_count(distributed: object) -> None:
    report = proved(mlp.reference_adam, distributed, mlp.shapes(adam=True), {"dp": 2, "tp": 4}, mlp.shapes(**SMALL, adam=True))
    assert any("1/(1 - 9/10^(opt.t + 1))" in o.name for o in report.obligations)


def test_adam_with_turned_signs() -> None:
    distributed = partial(mlp.tensor_parallel_with, mlp.adam_negated)
    proved(mlp.reference_adam, distributed, mlp.shapes(adam=True), {"dp": 2, "tp": 4}, mlp.shapes(**SMALL, adam=True))


def spelled(adam: Any) -> Report:
    args = mlp.shapes(**SMALL, adam=True)
    return tvj.verify(mlp.reference_adam, partial(mlp.tensor_parallel_with, adam), args, {"dp": 2, "tp": 4})


def test_adam_as_in_its_paper() -> None:
    """UNKNOWN: nothing shows that √v + ε·√(1 − βᵗ) is not 0."""
    report = spelled(mlp.adam_of_the_paper)
    assert report.verdict == "UNKNOWN", report.reason
    assert {o.status for o in report.obligations} == {"proved", "agreed"}


@pytest.mark.parametrize("adam", [partial(mlp.adam_negated, b1=0.91), partial(mlp.adam_of_the_paper, power=2)])
def test_adam_spelled_otherwise_and_wrong(adam: Any) -> None:
    """REFUTED: another β, or another power of it."""
    assert spelled(adam).verdict == "REFUTED"
