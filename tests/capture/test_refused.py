"""A refusal of the capture sticks, whatever the code does with the error; what Python observes is what a real run would show."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import torch.distributed as dist  # noqa: E402
from torch.distributed import get_backend  # noqa: E402

from capture.stepping import Ending, double, nothing, report  # noqa: E402


def swallowed(read: Callable[[Any], Any]) -> Ending:
    """A real run doubles a gradient: it can read the number."""

    def ending(model: Any) -> None:
        with contextlib.suppress(Exception):
            read(model.bias.grad)
            double(model)

    return ending


READS: dict[str, Callable[[Any], Any]] = {
    "float": lambda g: float(g.sum()),
    "int": lambda g: int(g.sum()),
    "numpy": lambda g: g.numpy(),
    "asarray": lambda g: np.asarray(g),
    "sqrt": lambda g: math.sqrt(g.square().sum()),
    "floor": lambda g: math.floor(g.sum().item()),
    "is_integer": lambda g: g.sum().item().is_integer(),
    "key": lambda g: {g.sum().item(): 1},
    "json": lambda g: json.dumps({"sum": g.sum().item()}),
    "pickle": lambda g: pickle.dumps(g),
    "copy": lambda g: copy.copy(g),
    "equal": lambda g: torch.equal(g, 2 * g),
    "memory": lambda g: g.untyped_storage()[0],
    "nonzero": lambda g: g.nonzero(),
    "sparse": lambda g: g.to_sparse().coalesce(),
    "dlpack": lambda g: np.from_dlpack(g),
    "exchanged": lambda g: dist.all_gather_object([None, None], g),
    "sent": lambda g: dist.gather_object(1, None),
}


@pytest.mark.parametrize("name", READS)
def test_a_swallowed_error(name: str) -> None:
    """UNKNOWN, with the line; a capture that went on without the doubled gradient would be PROVED."""
    found = report(swallowed(READS[name]))
    assert found.verdict == "UNKNOWN", found.reason
    assert "test_refused.py:" in str(found.reason)


def observed(condition: Callable[[Any], Any]) -> Ending:
    """Doubles a gradient where the condition holds, as it does in a real run."""

    def ending(model: Any) -> None:
        if condition(model):
            double(model)

    return ending


OBSERVED: dict[str, Callable[[Any], Any]] = {
    "a number is a float": lambda m: isinstance(m.bias.grad.sum().item(), float) and not hasattr(m.bias.grad.sum().item(), "tensor"),
    "a number has no item": lambda m: not hasattr(m.bias.grad.sum().item(), "item"),
    "a backend": lambda m: dist.get_backend() == "gloo" and get_backend() is dist.Backend.GLOO,
    "a configured backend": lambda m: "cpu:gloo" in dist.get_backend_config(),
    "a named backend": lambda m: dist.group.WORLD.name() == "gloo",
    "the type of a number": lambda m: type(m.bias.grad.sum().item()) is float,
    "the type of a tensor": lambda m: type(m.bias.grad) is torch.Tensor and type(m.bias) is torch.nn.Parameter,
    "types of others": lambda m: isinstance(type(m), type) and issubclass(type(m), torch.nn.Module) and type("A", (), {}).__name__ == "A",
    "a list": lambda m: isinstance(m.bias.grad.tolist()[0], float),
    "addresses": lambda m: m.bias.data_ptr() != m.weight.data_ptr() and m.bias.data_ptr() == m.bias.detach().data_ptr(),
    "an error of PyTorch's": lambda m: not hasattr(m.bias, "no_such_name"),
}


@pytest.mark.parametrize("name", OBSERVED)
def test_what_python_observes(name: str) -> None:
    """REFUTED where only ranks double; the condition holds as it does with gloo."""
    found = report(observed(OBSERVED[name]))
    assert found.verdict == "REFUTED", found.reason


def test_numbers_in_text() -> None:
    """PROVED, and the report says that text decides on nothing."""

    def logging(model: Any) -> None:
        assert f"{model.bias.grad.sum().item():.3f} {model.bias.grad}"

    found = report(logging, nothing)
    assert found.verdict == "PROVED", found.reason
    assert any("for a log" in a for a in found.assumptions)


def attempted(call: Callable[[Any], Any]) -> Ending:
    """Doubles a gradient where a kernel refuses a call."""

    def ending(model: Any) -> None:
        try:
            call(model.bias.grad)
        except (RuntimeError, NotImplementedError):
            double(model)

    return ending


@pytest.mark.parametrize(
    ("call", "verdict"),
    [
        pytest.param(lambda g: (g > 0)[None] @ (g > 0)[:, None], "UNKNOWN", id="product_of_booleans"),
        pytest.param(lambda g: torch.nn.functional.max_pool1d((g > 0).long()[None], 2), "UNKNOWN", id="pool_of_integers"),
        pytest.param(lambda g: (g > 0).long()[None] @ (g > 0).long()[:, None], "PROVED", id="product_of_integers"),
        pytest.param(lambda g: (g > 0).sum() + g.cumsum(0)[0], "PROVED", id="sum_of_booleans"),
    ],
)
def test_types_that_a_kernel_refuses(call: Callable[[Any], Any], verdict: str) -> None:
    """Fake tensors compute what kernels do not: whether they do is tried on zeros."""
    found = report(attempted(call), nothing)
    assert found.verdict == verdict, found.reason
    assert verdict == "PROVED" or "by the types of its tensors" in found.reason


def warned(values: Any) -> Ending:
    """Doubles a gradient where a kernel warns of memory that is not in order."""

    def ending(model: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                torch.searchsorted(torch.arange(4.0), values(model.weight.grad))
            except UserWarning:
                double(model)

    return ending


@pytest.mark.parametrize(("values", "verdict"), [(lambda g: g.t(), "REFUTED"), (lambda g: g, "PROVED")], ids=["warns", "does_not"])
def test_warnings_of_kernels(values: Any, verdict: str) -> None:
    """The kernel runs on zeros, and warns there as in a real run: its handler runs in the capture too."""
    found = report(warned(values), nothing)
    assert found.verdict == verdict, found.reason
