"""Activations and losses by PyTorch's own formulas: they and their derivatives are what its kernels compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import torch.nn.functional as F  # noqa: E402

from capture.tracing import agree, traced  # noqa: E402

GIVEN = torch.tensor([[-7.5, -2.0, -0.3], [0.4, 2.5, 8.0]], dtype=torch.float64)  # on both sides of every bend
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "hardtanh": lambda a: F.hardtanh(a, -0.5, 2.0),
    "relu6": F.relu6,
    "leaky_relu": lambda a: F.leaky_relu(a, 0.3),
    "elu": lambda a: F.elu(a, 0.7),
    "selu": F.selu,
    "softplus": F.softplus,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "logsigmoid": F.logsigmoid,
    "huber": lambda a: F.huber_loss(a, torch.zeros_like(a), delta=0.5),
    "smooth_l1": lambda a: F.smooth_l1_loss(a, torch.zeros_like(a), reduction="sum", beta=0.5),
    "group_norm": lambda a: F.group_norm(a.reshape(1, 6, 1).expand(2, 6, 2) * torch.arange(1.0, 3.0), 3, a.new_ones(6) * 2, a.new_ones(6)),
    "expm1": torch.expm1,
    "log1p": lambda a: torch.log1p(a.square()),
}


def with_derivative(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def run(a: Any) -> Any:
        a = a.detach().requires_grad_()
        value = fn(a)
        (slope,) = torch.autograd.grad(value.square().sum(), a)
        return [value.detach(), slope]

    return run


@pytest.mark.parametrize("name", FUNCTIONS)
def test_formula(name: str) -> None:
    run = with_derivative(FUNCTIONS[name])
    agree(run, GIVEN.clone())
    _, results = traced(run, [GIVEN.clone()])
    for found, kernel in zip(results, run(GIVEN.clone()), strict=True):  # outside, PyTorch's own kernels run
        assert torch.allclose(found, kernel, rtol=1e-7, atol=1e-12)  # kernels have 1/6 as a float32


@pytest.mark.parametrize("fn", [lambda a: F.leaky_relu(a, 0.3, inplace=True), lambda a: F.elu(a[:, 1:], 0.7, inplace=True)])
def test_in_place(fn: Callable[[Any], Any]) -> None:
    agree(lambda a: [fn(b := a.clone()), b], GIVEN.clone())


def test_a_formula_without_rows_is_refused_by_its_name() -> None:
    translator, _ = traced(lambda a: [torch.erfinv(a), a.clone().lgamma_()], [GIVEN.clone()])
    assert "aten::erfinv" in translator.missing


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_writes_its_statistics(training: bool) -> None:
    """Its schema does not say that they are written."""

    def run(a: Any, mean: Any, var: Any, weight: Any) -> Any:
        return torch.ops.aten.native_batch_norm(a, weight, None, mean, var, training, 0.3, 1e-3)[0]

    given = (
        GIVEN.reshape(3, 2).clone(),
        torch.tensor([0.5, 2.0]).double(),
        torch.tensor([3.0, 7.0]).double(),
        torch.tensor([2.0, 5.0]).double(),
    )
    translator = agree(run, *given, also=(1, 2))
    assert (translator.read(given[1]) == "x1") is not training
