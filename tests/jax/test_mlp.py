"""MLPs, data and tensor parallel: whole steps, proved at real widths and replayed at small ones."""

from __future__ import annotations

import pytest

pytest.importorskip("jaxlib", reason="JAX is absent: pip install 'trainverify[jax]'")

import mlp
from running import proved

SMALL = {"batch": 8, "width": 6, "hidden": 16, "out": 5}


def test_data_parallel() -> None:
    proved(mlp.reference, mlp.data_parallel, mlp.args, {"dp": 8}, mlp.shapes(**SMALL))


def test_tensor_parallel() -> None:
    proved(mlp.reference, mlp.tensor_parallel, mlp.args, {"dp": 2, "tp": 4}, mlp.shapes(**SMALL))


@pytest.mark.parametrize("distributed", [mlp.tensor_parallel_adam, mlp.optimizer_outside])
def test_adam_with_a_symbolic_step_count(distributed: object) -> None:
    report = proved(mlp.reference_adam, distributed, mlp.shapes(adam=True), {"dp": 2, "tp": 4}, mlp.shapes(**SMALL, adam=True))
    assert any("1/(1 - 9/10^(opt.t + 1))" in o.name for o in report.obligations)
