"""The end of a step: gradients synchronised, the norm over all ranks, clipping, the optimizer."""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from functools import reduce

from trainverify.build.tape import BuildError, Tensor
from trainverify.completion.optimizers import Optimizer
from trainverify.zoo.parallel.stage import Stage
from trainverify.zoo.parallel.zero import Bucket


def finish(stage: Stage, tokens: Tensor | None, optimizer: Optimizer | None, clip: float | None, master: bool = False) -> None:
    """`tokens` is what gradients are still to be divided by. `master` keeps parameters in f32 beside their working copies."""
    r = stage.r
    grads = {b.name: _final(stage, b, tokens) for b in stage.buckets}
    for b in stage.buckets:
        _report(stage, b, grads[b.name])
    if clip is not None:
        norm = _norm(stage, grads)
        factor = r.clip_factor(norm, max_norm=clip, name="clip_factor")
        r.metric("grad_norm", norm)
        r.metric("clip_factor", factor)
        grads = {n: r.mul(g, factor, name=n + ".clipped") for n, g in grads.items()}
    if optimizer is not None:
        for b in stage.buckets:
            _update(stage, b, grads[b.name], optimizer, master)


def _final(stage: Stage, b: Bucket, tokens: Tensor | None) -> Tensor:
    """The gradient of what this rank updates: summed over all who compute summands of it."""
    r, w, zero = stage.r, b.first, b.zero
    if zero == 0:
        g = stage.over_dp(r.gradient(stage.tensors[b.name]), f"{b.name}.grad.dp", w.data)
    elif zero == 1:
        g = b.scattered([r.gradient(stage.tensors[x.name]) for x in b.weights], f"{b.name}.grad.shard")
    else:
        g = stage.shards[b.name] if zero == 2 else r.gradient(stage.tensors[b.name])
    if w.summed and stage.axes.size(w.summed) > 1:
        g = r.all_reduce(g, group=w.summed, name=f"{b.name}.grad.{'+'.join(w.summed)}")
    if w.tied is not None:
        g = r.all_reduce(g, group=w.tied, name=f"{b.name}.grad.tied")
    return g if tokens is None else r.div(g, tokens, name=f"{b.name}.grad.final")


def _report(stage: Stage, b: Bucket, g: Tensor) -> None:
    """A gradient lives as its parameter does, or (ZeRO 1 and 2) as the shard of it that this rank has."""
    if b.zero in (0, 3):
        stage.r.output(g, "gradient", b.name)
        return
    for w in b.weights:
        stage.r.lives(g, stage.gradients[w.name], b.form(w, alone=True))
        stage.r.output(g, "gradient", w.name)


def _norm(stage: Stage, grads: dict[str, Tensor]) -> Tensor:
    """√Σ of squares. Pieces add up over the axes they are split along; copies count once."""
    r, mesh = stage.r, stage.axes.mesh
    kinds: dict[tuple[str, ...], list[Tensor]] = {}
    for b in stage.buckets:
        if b.first.counted:
            axes = b.first.split + (b.axes if b.zero else ())
            along = tuple(a for a in mesh.names if a in axes and mesh.length(a) > 1)
            kinds.setdefault(along, []).append(grads[b.name])
    sums = []
    for along, found in kinds.items():
        label = "+".join(along) or "whole"
        squares = r.square(r.grad_norm(*found, name=f"norm.{label}"), name=f"squares.{label}.local")
        sums.append(r.all_reduce(squares, group=along, name=f"squares.{label}") if along else squares)
    total = reduce(lambda a, b: r.add(a, b, name="squares.stage"), sums)
    if stage.how.pp > 1:
        total = r.all_reduce(total, group="pp", name="squares")
    return r.sqrt(total, name="grad_norm")


def _update(stage: Stage, b: Bucket, grad: Tensor, optimizer: Optimizer, master: bool) -> None:
    """The optimizer on what this rank has of the weights, then whole weights from all shards."""
    r, zero = stage.r, b.zero
    attrs = optimizer.attrs(b.first.name)
    if any(optimizer.attrs(w.name) != attrs for w in b.weights):
        raise BuildError(f"{b.name}: weights that the optimizer treats differently are in one bucket")
    stored = [stage.tensors[b.name]] if zero in (0, 3) else [stage.tensors[w.name] for w in b.weights]
    if master:
        weight = _state(stage, b, "master", None)
        if grad.type.dtype != "f32":
            grad = r.to(grad, dtype="f32", name=f"{b.name}.grad32")
    else:
        weight = stored[0] if zero in (0, 3) else b.own(stored, f"{b.name}.shard")
    slots = [_state(stage, b, s, d) for s, d in optimizer.state()]
    names = [f"{weight.name}.new", *(f"{s.name}.new" for s in slots)]
    new = r.emit(optimizer.op, (weight, grad, *slots), attrs, names)
    for old, fresh in zip([*([weight] if master else []), *slots], new[0 if master else 1 :], strict=True):
        r.update(old, fresh)
    fresh = new[0]
    if master:
        fresh = r.to(fresh, dtype=stored[0].type.dtype, name=f"{b.name}.working")
    whole = [fresh] if zero in (0, 3) else b.gathered(fresh, f"{b.name}.new", [f"{w.name}.new" for w in b.weights])
    for old, value in zip(stored, whole, strict=True):
        r.update(old, value)


def _state(stage: Stage, b: Bucket, slot: str, domain: str | None) -> Tensor:
    first, *others = b.weights
    made = stage.r.state(f"{b.name}.{slot}", b.shape, b.form(first), f"{first.name}.{slot}", domain=domain)
    for w in others:
        stage.r.lives(made, f"{w.name}.{slot}", b.form(w))
    return made
