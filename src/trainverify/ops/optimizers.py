"""Optimizer updates and gradient clipping, as ordinary operators on parameters or shards of them."""

from __future__ import annotations

from fractions import Fraction
from typing import Final

from trainverify.ops.table import op
from trainverify.primitives import node as F
from trainverify.primitives.node import Node

_OPTIMIZER = "optimizer"


def exact(value: float) -> Fraction | float:
    """A hyperparameter as written: decimal literals are exact rationals (0.1 is 1/10), so that products of them are too."""
    return value if isinstance(value, int | Fraction) else Fraction(repr(value))


EXACT_BITS: Final = 4096  # of a bias correction that is written as a fraction


def unbiased(moment: Node, beta: float, step: int) -> Node:
    """moment / (1 − βᵗ), with the number itself: a fraction while that is short, else a constant by the name of β and t."""
    b = Fraction(exact(beta))
    if not 0 <= b < 1:
        raise F.ShapeError(f"beta {beta} is not between 0 and 1 (without 1)")
    if b == 0 or step * b.denominator.bit_length() <= EXACT_BITS:
        return moment * (1 / (1 - b**step if b else Fraction(1)))
    return moment / F.call("one_minus_power", param=(b, step))


@op("sgd", _OPTIMIZER, example="w[a,b] grad[a,b] momentum_buffer[a,b]; lr=0.1, momentum=0.9")
def sgd(
    w: Node,
    grad: Node,
    momentum_buffer: Node | None = None,
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    first: bool = False,
) -> Node | tuple[Node, ...]:
    """One step of torch.optim.SGD; with momentum it returns (w, buffer). `first`: the buffer starts as the gradient."""
    g = grad + w * exact(weight_decay) if weight_decay else grad
    if momentum_buffer is None:
        if momentum:
            raise F.ShapeError("momentum needs a buffer")
        return w - g * exact(lr)
    kept = momentum_buffer * exact(momentum)
    buffer = g if first else kept + g * (1 - exact(dampening))
    step = g + buffer * exact(momentum) if nesterov else buffer
    return w - step * exact(lr), buffer


@op("adamw", _OPTIMIZER, example="w[a] grad[a] m[a] v[a]; lr=0.1, step=1")
def adamw(
    w: Node,
    grad: Node,
    m: Node,
    v: Node,
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    step: int,
) -> tuple[Node, ...]:
    """Step number `step` (from 1) of torch.optim.AdamW: returns (w, m, v). Decay is decoupled, moments are bias-corrected."""
    if step < 1:
        raise F.ShapeError("steps count from 1")
    b1, b2, rate = Fraction(exact(beta1)), Fraction(exact(beta2)), Fraction(exact(lr))
    m_new = m * b1 + grad * (1 - b1)
    v_new = v * b2 + grad * grad * (1 - b2)
    corrected = F.power(unbiased(v_new, beta2, step), Fraction(1, 2))
    update = unbiased(m_new, beta1, step) / (corrected + exact(eps))
    return w * (1 - rate * Fraction(exact(weight_decay))) - update * rate, m_new, v_new


@op("clip_factor", _OPTIMIZER, example="norm[]; max_norm=1")
def clip_factor(norm: Node, *, max_norm: float, eps: float = 1e-6) -> Node:
    """min(1, max_norm / (norm + eps)), as torch.nn.utils.clip_grad_norm_ multiplies gradients by."""
    return F.call("min", F.cast(F.const(1), "real"), exact(max_norm) / (norm + exact(eps)))
