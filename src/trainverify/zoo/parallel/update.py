"""The end of a step: gradients synchronised, the norm over all ranks, clipping, the optimizer."""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from functools import reduce

from trainverify.build.tape import Tensor
from trainverify.complete.optimizers import Optimizer
from trainverify.zoo.parallel.stage import Stage, Weight


def finish(stage: Stage, tokens: Tensor | None, optimizer: Optimizer | None, clip: float | None) -> None:
    """`tokens` is what gradients are still to be divided by."""
    r = stage.r
    grads = {n: _final(stage, n, w, tokens) for n, w in stage.weights.items()}
    for n, g in grads.items():
        r.output(g, "gradient", n)
    if clip is not None:
        norm = _norm(stage, grads)
        factor = r.clip_factor(norm, max_norm=clip, name="clip_factor")
        r.metric("grad_norm", norm)
        r.metric("clip_factor", factor)
        grads = {n: r.mul(g, factor, name=n + ".clipped") for n, g in grads.items()}
    if optimizer is None:
        return
    for n, w in stage.weights.items():
        slots = [r.state(f"{n}.{s}", w.tensor.shape, w.form, domain=d) for s, d in optimizer.state()]
        names = [f"{n}.new", *(f"{s.name}.new" for s in slots)]
        new = r.emit(optimizer.op, (w.tensor, grads[n], *slots), optimizer.attrs(n), names)
        for old, fresh in zip([w.tensor, *slots], new, strict=True):
            r.update(old, fresh)


def _final(stage: Stage, name: str, w: Weight, tokens: Tensor | None) -> Tensor:
    r = stage.r
    g = stage.over_dp(r.gradient(w.tensor), f"{name}.grad.dp")
    if w.summed and stage.axes.size(w.summed) > 1:
        g = r.all_reduce(g, group=w.summed, name=f"{name}.grad.{'+'.join(w.summed)}")
    if w.tied is not None:
        g = r.all_reduce(g, group=w.tied, name=f"{name}.grad.tied")
    return g if tokens is None else r.div(g, tokens, name=f"{name}.grad.final")


def _norm(stage: Stage, grads: dict[str, Tensor]) -> Tensor:
    """√Σ of squares. Pieces add up over the axes they are split along; copies count once."""
    r = stage.r
    kinds: dict[tuple[str, ...], list[Tensor]] = {}
    for n, w in stage.weights.items():
        if w.counted:
            split = w.split if stage.axes.size(w.split) > 1 else ()
            kinds.setdefault(split, []).append(grads[n])
    sums = []
    for split, found in kinds.items():
        label = "+".join(split) or "whole"
        squares = r.square(r.grad_norm(*found, name=f"norm.{label}"), name=f"squares.{label}.local")
        sums.append(r.all_reduce(squares, group=split, name=f"squares.{label}") if split else squares)
    total = reduce(lambda a, b: r.add(a, b, name="squares.stage"), sums)
    if stage.how.pp > 1:
        total = r.all_reduce(total, group="pp", name="squares")
    return r.sqrt(total, name="grad_norm")
