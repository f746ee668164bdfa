"""Losses and their derivatives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from trainverify.torch.mappings.table import Arguments, rows

ROWS, row = rows()
REDUCTIONS: Final = ("none", "mean", "sum")


def _nll(a: Arguments) -> tuple[str, tuple[str, ...], dict[str, object]]:
    """The scores; targets and, if they have some, weights of the classes; attributes. One sample alone is a batch of one."""
    x, target, weight = a.tensor("self"), a.tensor("target"), a.optional("weight")
    if len(a.e.shape(x)) == 1:
        x, target = a.e.reshape(x, (1, *a.e.shape(x))), a.e.reshape(target, (1,))
    return (
        x,
        (target, *([] if weight is None else [weight])),
        {"reduction": REDUCTIONS[a.integer("reduction")], "ignore_index": a.integer("ignore_index")},
    )


def _total_weight(a: Arguments, x: str, target: str, weight: Sequence[str], attrs: Mapping[str, object]) -> str:
    """The weights of all targets that count, added up."""
    if weight:  # what nll_loss of ones adds up, with the sign turned
        ones = a.e.full(a.e.shape(x), -1, a.e.tensors[x].dtype)
        return a.e.op("nll_loss", (ones, target, *weight), {**attrs, "reduction": "sum"})
    return a.e.op("sum", (a.e.cast(a.e.op("ne", (target,), {"value": attrs["ignore_index"]}), "f32"),))


@row("aten::nll_loss_forward")
def nll_loss_forward(a: Arguments) -> tuple[str, str]:
    x, (target, *weight), attrs = _nll(a)
    loss = a.e.op("nll_loss", (x, target, *weight), attrs)
    if attrs["reduction"] == "none":
        return a.e.reshape(loss, a.e.shape(a.tensor("target"))), a.e.full((), 0, "f32")
    return loss, _total_weight(a, x, target, weight, attrs)


@row("aten::nll_loss_backward")
def nll_loss_backward(a: Arguments) -> str:
    """A mean is over the total weight that is given: if the forward pass computed it, it is that of the same targets."""
    x, (target, *weight), attrs = _nll(a)
    g, total = a.tensor("grad_output"), a.tensor("total_weight")
    if attrs["reduction"] == "none":
        g = a.e.reshape(g, a.e.shape(target))
    elif attrs["reduction"] == "mean" and not _same_total(a, total, _total_weight(a, x, target, weight, attrs)):
        g, attrs = a.e.op("div", (g, total)), {**attrs, "reduction": "sum"}
    made = a.e.op("nll_loss.grad", (x, target, *weight, g), {**attrs, "wrt": (0,)})
    return a.e.reshape(made, a.e.shape(a.tensor("self")))


def _same_total(a: Arguments, one: str, other: str) -> bool:
    return a.e.fingerprint(_uncast(a, one)) == a.e.fingerprint(_uncast(a, other))


def _uncast(a: Arguments, name: str) -> str:
    """A real number before it was rounded to another dtype."""
    while (op := a.e.made.get(name)) is not None and op.name == "to" and a.e.kind(str(op.inputs[0])) == "real":
        name = str(op.inputs[0])
    return name


@row("aten::mse_loss")
def mse_loss(a: Arguments) -> str:
    return a.e.op("mse_loss", (a.tensor("self"), a.tensor("target")), {"reduction": REDUCTIONS[a.integer("reduction")]})


@row("aten::mse_loss_backward")
def mse_loss_backward(a: Arguments) -> str:
    attrs = {"reduction": REDUCTIONS[a.integer("reduction")], "wrt": (0,)}
    return a.e.op("mse_loss.grad", (a.tensor("self"), a.tensor("target"), a.tensor("grad_output")), attrs)


@row("aten::binary_cross_entropy_with_logits")
def bce_with_logits(a: Arguments) -> str:
    x, target, weight, positive = a.tensor("self"), a.tensor("target"), a.optional("weight"), a.optional("pos_weight")
    reduction = REDUCTIONS[a.integer("reduction")]
    if weight is None and positive is None:
        return a.e.op("binary_cross_entropy_with_logits", (x, target), {"reduction": reduction})
    one = a.e.full((), 1, "f32")
    loss = a.e.op("softplus", (a.e.op("neg", (x,)),))
    if positive is not None:  # log(1 + e⁻ˣ)·(1 + (p − 1)·target) + (1 − target)·x
        extra = a.e.op("mul", (a.e.op("sub", (positive, one)), target))
        loss = a.e.op("mul", (loss, a.e.op("add", (one, extra))))
    loss = a.e.op("add", (loss, a.e.op("mul", (a.e.op("sub", (one, target)), x))))
    loss = loss if weight is None else a.e.op("mul", (loss, weight))
    return loss if reduction == "none" else a.e.op(reduction, (loss,))
