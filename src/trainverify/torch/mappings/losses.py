"""Losses and their derivatives."""

from __future__ import annotations

from typing import Final

from trainverify.torch.mappings.table import Arguments, rows
from trainverify.torch.values import Unmapped

ROWS, row = rows()
REDUCTIONS: Final = ("none", "mean", "sum")


def _nll(a: Arguments) -> tuple[str, tuple[str, ...], dict[str, object]]:
    """The scores; targets and, if they have some, weights of the classes; attributes."""
    x, target, weight = a.tensor("self"), a.tensor("target"), a.optional("weight")
    if len(a.e.shape(x)) != 2:
        raise Unmapped("nll_loss of a tensor that is not [samples, classes]")
    return (
        x,
        (target, *([] if weight is None else [weight])),
        {"reduction": REDUCTIONS[a.integer("reduction")], "ignore_index": a.integer("ignore_index")},
    )


@row("aten::nll_loss_forward")
def nll_loss_forward(a: Arguments) -> tuple[str, str]:
    x, (target, *weight), attrs = _nll(a)
    loss = a.e.op("nll_loss", (x, target, *weight), attrs)
    if attrs["reduction"] == "none":
        return loss, a.e.full((), 0, "f32")
    counts = a.e.cast(a.e.op("ne", (target,), {"value": attrs["ignore_index"]}), "f32")
    if weight:  # what nll_loss of ones adds up, with the sign turned
        ones = a.e.full(a.e.shape(x), -1, a.e.tensors[x].dtype)
        return loss, a.e.op("nll_loss", (ones, target, *weight), {**attrs, "reduction": "sum"})
    return loss, a.e.op("sum", (counts,))


@row("aten::nll_loss_backward")
def nll_loss_backward(a: Arguments) -> str:
    a.ignore("total_weight")
    x, others, attrs = _nll(a)
    return a.e.op("nll_loss.grad", (x, *others, a.tensor("grad_output")), {**attrs, "wrt": (0,)})


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
