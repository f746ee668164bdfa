"""Losses and their derivatives."""

from __future__ import annotations

from typing import Final

from trainverify.torch.mappings.table import Arguments, rows
from trainverify.torch.values import Unmapped

ROWS, row = rows()
REDUCTIONS: Final = ("none", "mean", "sum")


def _nll(a: Arguments) -> tuple[str, str, dict[str, object]]:
    if a.raw("weight") is not None:
        raise Unmapped("weights of classes")
    x, target = a.tensor("self"), a.tensor("target")
    if len(a.e.shape(x)) != 2:
        raise Unmapped("nll_loss of a tensor that is not [samples, classes]")
    return x, target, {"reduction": REDUCTIONS[a.integer("reduction")], "ignore_index": a.integer("ignore_index")}


@row("aten::nll_loss_forward")
def nll_loss_forward(a: Arguments) -> tuple[str, str]:
    x, target, attrs = _nll(a)
    valid = a.e.cast(a.e.op("ne", (target,), {"value": attrs["ignore_index"]}), "f32")
    count = a.e.op("sum", (valid,)) if attrs["reduction"] != "none" else a.e.full((), 0, "f32")
    return a.e.op("nll_loss", (x, target), attrs), count


@row("aten::nll_loss_backward")
def nll_loss_backward(a: Arguments) -> str:
    a.ignore("total_weight")
    x, target, attrs = _nll(a)
    return a.e.op("nll_loss.grad", (x, target, a.tensor("grad_output")), {**attrs, "wrt": (0,)})


@row("aten::mse_loss")
def mse_loss(a: Arguments) -> str:
    return a.e.op("mse_loss", (a.tensor("self"), a.tensor("target")), {"reduction": REDUCTIONS[a.integer("reduction")]})


@row("aten::mse_loss_backward")
def mse_loss_backward(a: Arguments) -> str:
    attrs = {"reduction": REDUCTIONS[a.integer("reduction")], "wrt": (0,)}
    return a.e.op("mse_loss.grad", (a.tensor("self"), a.tensor("target"), a.tensor("grad_output")), attrs)


@row("aten::binary_cross_entropy_with_logits")
def bce_with_logits(a: Arguments) -> str:
    if a.raw("weight") is not None or a.raw("pos_weight") is not None:
        raise Unmapped("weights of samples or classes")
    attrs = {"reduction": REDUCTIONS[a.integer("reduction")]}
    return a.e.op("binary_cross_entropy_with_logits", (a.tensor("self"), a.tensor("target")), attrs)
