"""Fused optimizers: the arithmetic of the for-loop ones, for every tensor of a list. (For-loop and foreach are ordinary ops.)"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainverify.torch.mappings.table import Arguments, plain, rows
from trainverify.torch.values import Unmapped
from trainverify.translate.literals import root

ROWS, row = rows()


def _gradient(a: Arguments, name: str, x: str, decay: float, coupled: bool) -> tuple[str, str | None]:
    """The gradient as the update uses it, and as it is left behind (None: as it was)."""
    scale = a.optional("grad_scale")
    scaled = None if scale is None else a.e.op("div", (name, a.e.reshape(scale, ())))
    used = scaled or name
    if a.flag("maximize"):
        used = a.e.op("neg", (used,))
    if coupled and decay != 0:
        used = a.e.op("add", (used, a.times(x, a.literal(decay))))
    return used, scaled


def _step(a: Arguments, tensor: Any) -> float:
    found = a.known(tensor)
    if found is None or found.numel() != 1:
        raise Unmapped("a step count that is computed")
    return float(plain(found))


def _unless_infinite(a: Arguments) -> Callable[[str, str], str]:
    """What is new, or what was there where `found_inf` is 1."""
    found = a.optional("found_inf")
    if found is None:
        return lambda old, new: new
    skipped = a.e.op("eq", (a.e.reshape(found, ()),), {"value": 1})
    return lambda old, new: a.e.op("where", (skipped, old, new))


def _adam(decoupled: bool) -> Callable[[Arguments], list[str | None]]:
    def update(a: Arguments) -> list[str | None]:
        """m ← β₁m + (1 − β₁)g, v ← β₂v + (1 − β₂)g², x ← x − lr/(1 − β₁ᵗ) · m / (√v/√(1 − β₂ᵗ) + eps)."""
        e, lr, decay, eps = a.e, a.exact("lr"), a.exact("weight_decay"), a.number("eps")
        beta1, beta2, largest = a.exact("beta1"), a.exact("beta2"), a.flag("amsgrad")
        xs, gs, ms, vs, tops = (a.tensors(n) for n in ("self", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"))
        keep = _unless_infinite(a)
        made: list[list[str | None]] = [[], [], [], [], []]
        for i, (x, m, v, count) in enumerate(zip(xs, ms, vs, a.raw("state_steps"), strict=True)):
            step = _step(a, count)
            g, left = _gradient(a, gs[i], x, decay, not decoupled)
            moved = a.times(x, a.literal(1 - lr * decay)) if decoupled and decay != 0 else x
            first = e.op("add", (a.times(m, a.literal(beta1)), a.times(g, a.literal(1 - beta1))))
            second = e.op("add", (a.times(v, a.literal(beta2)), a.times(e.op("mul", (g, g)), a.literal(1 - beta2))))
            top = e.op("maximum", (tops[i], second)) if largest else second
            root = _over(a, e.op("sqrt", (top,)), (1 - beta2**step) ** 0.5)
            share = e.op("div", (first, e.op("add", (root,), {"value": eps})))
            new = e.op("add", (moved, a.times(share, a.literal(-(lr / (1 - beta1**step))))))
            made[0].append(keep(x, new))
            made[1].append(None if left is None else keep(gs[i], left))
            made[2].append(keep(m, first))
            made[3].append(keep(v, second))
            if tops:
                made[4].append(keep(tops[i], top) if largest else None)
        return [t for part in made for t in part]

    return update


def _over(a: Arguments, x: str, divisor: float) -> str:
    """x / divisor, which is a root of a simple number or a literal as `aten::div` has it."""
    square = root(divisor)
    if square is not None:
        return a.e.op("div", (x, a.e.op("sqrt", (a.e.full((), square, "f32"),))))
    return a.e.op("div", (x,), {"value": a.literal(divisor)})


row("aten::_fused_adam")(_adam(decoupled=False))
row("aten::_fused_adamw")(_adam(decoupled=True))


@row("aten::_fused_sgd")
def sgd(a: Arguments) -> list[str | None]:
    """b ← momentum·b + (1 − dampening)·g, x ← x − lr·(b, or g + momentum·b)."""
    e, lr, decay = a.e, a.exact("lr"), a.exact("weight_decay")
    momentum, dampening, nesterov, begins = a.exact("momentum"), a.exact("dampening"), a.flag("nesterov"), a.flag("is_first_step")
    buffers = a.raw("momentum_buffer_list")
    keep = _unless_infinite(a)
    new: list[str | None] = []
    gradients: list[str | None] = []
    kept: list[str | None] = []
    for i, (x, name) in enumerate(zip(a.tensors("self"), a.tensors("grads"), strict=True)):
        g, left = _gradient(a, name, x, decay, True)
        if momentum != 0:
            before = None if begins else a.read(buffers[i])
            share = a.times(g, a.literal(1 - dampening))
            buffer = g if before is None else e.op("add", (a.times(before, a.literal(momentum)), share))
            if begins and a.raw("found_inf") is not None:
                raise Unmapped("found_inf in the first step, where there is no momentum")
            kept.append(buffer if before is None else keep(before, buffer))
            g = e.op("add", (g, a.times(buffer, a.literal(momentum)))) if nesterov else buffer
        elif buffers:
            kept.append(None)
        new.append(keep(x, e.op("add", (x, a.times(g, a.literal(-lr))))))
        gradients.append(None if left is None else keep(name, left))
    return [*new, *gradients, *kept]
