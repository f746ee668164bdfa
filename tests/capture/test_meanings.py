"""Kernels of other libraries: their meaning is a function that the user gives, checked on numbers where the op runs."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import trainverify.torch as tvt  # noqa: E402
from trainverify.torch.meanings import MEANINGS, WrongMeaning, _compare  # noqa: E402

BATCH = {"x": tvt.Reals((6, 3), "(dp b) k")}
LIBRARY = torch.library.Library("tvkernels", "DEF")
LIBRARY.define("fast(Tensor x, float factor) -> Tensor")
LIBRARY.define("absent(Tensor x, float factor) -> Tensor")
LIBRARY.impl("fast", lambda x, factor: torch.tanh(x) * factor, "CPU")
LIBRARY.impl("fast", lambda x, factor: torch.empty_like(x), "Meta")
LIBRARY.impl("absent", lambda x, factor: torch.empty_like(x), "Meta")


def right(x: Any, factor: float) -> Any:
    e = torch.exp(2 * x)
    return (e - 1) / (e + 1) * factor


def wrong(x: Any, factor: float) -> Any:
    return torch.tanh(x) * (factor + 0.01)


def verify(op: str, function: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(MEANINGS, f"tvkernels::{op}", function)
    kernel = getattr(torch.ops.tvkernels, op)

    def build() -> Any:
        scale = torch.nn.Linear(3, 3, bias=False)

        def step(batch: Any) -> Any:
            with torch.no_grad():
                y = kernel(batch["x"], 0.7)
            loss = scale(y).square().mean()
            loss.backward()
            if torch.distributed.is_initialized():
                torch.distributed.all_reduce(scale.weight.grad, op=torch.distributed.ReduceOp.AVG)
            return {"loss": loss}

        return step

    return tvt.verify(build, lambda rank, world: build(), 2, BATCH, {"dp": 2}, loss={"dp": "avg"}, points=1)


def test_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """PROVED, and the report says that the op was run."""
    report = verify("fast", right, monkeypatch)
    assert report.verdict == "PROVED", report.reason
    assert any("tvkernels::fast" in a and "the op gives the same" in a for a in report.assumptions)


def test_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """PROVED, and the report says that the op could not be run."""
    report = verify("absent", right, monkeypatch)
    assert report.verdict == "PROVED", report.reason
    assert any("tvkernels::absent" in a and "not checked: the op does not run on this machine" in a for a in report.assumptions)


def test_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error: the function computes something else."""
    with pytest.raises(tvt.CaptureError, match="meaning of tvkernels::fast: result 1 differs"):
        verify("fast", wrong, monkeypatch)


def test_infinities_of_another_sign_differ() -> None:
    big = torch.tensor([1.0, float("inf"), float("nan")])
    _compare("lib::op", [big], [big.clone()])
    with pytest.raises(WrongMeaning, match="result 1 differs"):
        _compare("lib::op", [big], [torch.tensor([1.0, float("-inf"), float("nan")])])
