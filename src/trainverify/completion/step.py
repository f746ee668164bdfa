"""From a forward program to the whole training step: micro-batches, backward, clipping, optimizer.

The result is an ordinary program whose outputs are what a plan must reproduce: the loss, every parameter's
gradient, its new value and state, and the gradient norm and clip factor when there is clipping.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Literal

from trainverify.build.program import ProgramBuilder
from trainverify.build.tape import BuildError, Tensor
from trainverify.completion.optimizers import SGD, AdamW, Optimizer
from trainverify.completion.steps import several_steps
from trainverify.graph.program import CALL, Op, Program, inline
from trainverify.ops import OPS
from trainverify.ops.table import OpTable

__all__ = ["SGD", "Accumulate", "AdamW", "Optimizer", "complete", "finish"]

# What several micro-batches' losses make together:
#   sum        Σ loss
#   mean       the mean of the micro-batches' losses. It is the loss per sequence when that is what a micro-batch's
#              loss is; of losses per token it is the mean of means, where every micro-batch weighs the same
#   per_token  each loss is a quotient total / count: Σ total / Σ count, as if there were no micro-batches
Accumulate = Literal["sum", "mean", "per_token"]


def complete(
    forward: Program,
    optimizer: Optimizer | None = None,
    *,
    microbatches: int = 1,
    accumulate: Accumulate | None = None,
    auxiliary: Mapping[str, float] | None = None,
    clip: float | None = None,
    master: bool = False,
    steps: int = 1,
    ops: OpTable = OPS,
) -> Program:
    """The training step of a forward program that reports one loss.

    With several micro-batches the forward program is one of them: inputs of the step have so many times more rows
    (dimension 0), and `accumulate` says what the losses make together. `auxiliary` gives weights to metrics of the
    forward program (averaged over micro-batches, or added for `sum`): what is differentiated is the loss plus these,
    what is reported is the loss itself and every metric without its weight. Buffers that the forward program updates
    pass from one micro-batch to the next. `clip` limits the norm of all gradients together. `master` keeps
    parameters in f32 beside their working copies. `steps` runs it several times, each on a batch of its own.
    """
    flat = inline(forward)
    metrics = {str(o.of): o.tensor for o in flat.outputs if o.role == "metric"}
    auxiliary = auxiliary or {}
    _check(flat, metrics, auxiliary, microbatches, accumulate)
    quotient = _quotient(flat) if accumulate == "per_token" else None
    b = ProgramBuilder(forward.name, ops)
    known = _declare(b, flat, microbatches)
    passes = _passes(b, flat, known, microbatches, quotient if microbatches > 1 else None)
    b.prefix = ""

    def combined(name: str, averaged: bool, label: str) -> Tensor:
        return _combine(b, [env[name] for env in passes], averaged, label)

    if quotient is not None and microbatches > 1:
        total, count = (combined(str(i), False, n) for i, n in zip(quotient.inputs, ("loss.total", "loss.count"), strict=True))
        (loss,) = b.emit("div", (total, count), {}, ["loss.mean"])
    else:
        loss = combined(str(flat.output("loss")), accumulate == "mean", "loss.all")
    b.loss(loss)
    objective = loss
    for metric, tensor in metrics.items():
        value = combined(tensor, accumulate != "sum", metric + ".all")
        b.metric(metric, value)
        if metric in auxiliary:
            (weighted,) = b.emit("mul", (value,), {"value": auxiliary[metric]}, [metric + ".weighted"])
            (objective,) = b.emit("add", (objective, weighted), {}, ["objective"])
    for o in flat.outputs:
        if o.role == "state":
            b.output(passes[-1][o.tensor], "state", o.of)
    b.backward(objective)
    finish(b, [known[n] for n in flat.parameters], optimizer, clip, master)
    return several_steps(b.build(), steps)


def _passes(b: ProgramBuilder, flat: Program, known: dict[str, Tensor], microbatches: int, skipped: Op | None) -> list[dict[str, Tensor]]:
    """The forward passes: all tensors of each. Buffers pass from one to the next."""
    passes = []
    buffers = dict(known)
    for m in range(microbatches):
        env = _cut(b, flat, buffers, m, microbatches)
        _forward(b, flat, env, skipped)
        passes.append(env)
        if m + 1 < microbatches:
            for o in flat.outputs:
                if o.role == "state":
                    (buffers[str(o.of)],) = b.emit("detach", (env[o.tensor],), {}, [str(o.of)])
    return passes


def _check(
    flat: Program, metrics: Mapping[str, str], auxiliary: Mapping[str, float], microbatches: int, accumulate: Accumulate | None
) -> None:
    if flat.output("loss") is None or any(op.name == CALL for op in flat.ops):
        raise BuildError(f"{flat.name}: no output is declared as the loss")
    if any(op.phase != "forward" for op in flat.ops):
        raise BuildError(f"{flat.name}: it has backward ops already")
    for o in flat.outputs:
        if o.role not in ("loss", "metric", "state"):
            raise BuildError(f"{flat.name}: {o} is not for a forward program to report")
    for name in auxiliary:
        if name not in metrics:
            raise BuildError(f"{flat.name} reports no metric {name!r} (it has: {', '.join(metrics) or 'none'})")
    if microbatches > 1 and accumulate is None:
        raise BuildError(f"{microbatches} micro-batches: say what their losses make together (accumulate=sum, mean or per_token)")
    for name in metrics:
        if microbatches > 1 and name not in auxiliary:
            raise BuildError(f"metric {name!r} of the forward pass has no meaning over several micro-batches")


def _quotient(flat: Program) -> Op:
    """The op that divides a loss by a count."""
    loss = flat.output("loss")
    op = next((op for op in flat.ops if loss in op.outputs), None)
    if op is None or op.name != "div" or len(op.inputs) != 2:
        raise BuildError(f"{flat.name}: accumulated per token, the loss must be a total divided by a count; it is {op or loss}")
    return op


def _declare(b: ProgramBuilder, flat: Program, microbatches: int) -> dict[str, Tensor]:
    """The sources of the step: those of the forward program, with the rows of all micro-batches."""
    known: dict[str, Tensor] = {}
    for names, into in ((flat.inputs, b._inputs), (flat.parameters, b._parameters), (flat.state, b._state)):
        for n in names:
            shape = flat.tensors[n].shape
            if names is flat.inputs and microbatches > 1:
                if not shape:
                    raise BuildError(f"input {n!r} has no dimension that runs over the batch")
                shape = (shape[0] * microbatches, *shape[1:])
            known[n] = b._source(into, n, shape, flat.tensors[n].dtype, flat.domains.get(n))
    b._trainable.update(flat.parameters)
    return known


def _cut(b: ProgramBuilder, flat: Program, known: Mapping[str, Tensor], m: int, microbatches: int) -> dict[str, Tensor]:
    """What micro-batch m starts from."""
    env = dict(known)
    if microbatches > 1:
        b.prefix = f"mb{m}/"
        for n in flat.inputs:
            rows = flat.tensors[n].shape[0]
            (env[n],) = b.emit("slice", (known[n],), {"dim": 0, "start": m * rows, "stop": (m + 1) * rows}, [n])
    return env


def _forward(b: ProgramBuilder, flat: Program, env: dict[str, Tensor], skipped: Op | None) -> None:
    for op in flat.ops:
        if op is not skipped:
            made = b.emit(op.name, [None if i is None else env[i] for i in op.inputs], op.attributes, list(op.outputs), op.source)
            env.update(zip(op.outputs, made, strict=True))


def _combine(b: ProgramBuilder, values: Sequence[Tensor], averaged: bool, name: str) -> Tensor:
    total = values[0]
    for value in values[1:]:
        (total,) = b.emit("add", (total, value), {}, [name])
    if averaged and len(values) > 1:
        (total,) = b.emit("mul", (total,), {"value": Fraction(1, len(values))}, [name])
    return total


def finish(b: ProgramBuilder, parameters: list[Tensor], optimizer: Optimizer | None, clip: float | None, master: bool = False) -> None:
    """Gradients as outputs, clipping, optimizer."""
    b.phase = "optimizer"
    grads = {w.name: b.gradient(w) for w in parameters}
    for w in parameters:
        b.output(grads[w.name], "gradient", w.name)
    if clip is not None:
        (norm,) = b.emit("grad_norm", tuple(grads.values()), {}, ["grad_norm"])
        (factor,) = b.emit("clip_factor", (norm,), {"max_norm": clip}, ["clip_factor"])
        b.metric("grad_norm", norm)
        b.metric("clip_factor", factor)
        grads = {n: b.emit("mul", (g, factor), {}, [n + ".clipped"])[0] for n, g in grads.items()}
    if optimizer is None:
        return
    for w in parameters:
        weight, grad = w, grads[w.name]
        if master:
            weight = b.state(w.name + ".master", w.shape, "f32")
            if grad.type.dtype != "f32":
                (grad,) = b.emit("to", (grad,), {"dtype": "f32"}, [w.name + ".grad32"])
        slots = [b.state(f"{w.name}.{s}", w.shape, weight.type.dtype, domain=d) for s, d in optimizer.state()]
        names = [f"{weight.name}.new", *(f"{s.name}.new" for s in slots)]
        new = b.emit(optimizer.op, (weight, grad, *slots), optimizer.attrs(w.name), names)
        for old, fresh in zip([weight, *slots], new, strict=True):
            b.update(old, fresh)
        if master:
            (working,) = b.emit("to", (new[0],), {"dtype": w.type.dtype}, [w.name + ".new"])
            b.update(w, working)
