"""From a forward program to the whole training step: micro-batches, backward, clipping, optimizer.

The result is an ordinary program whose outputs are what a plan must reproduce: the loss, every parameter's
gradient, its new value and state, and the gradient norm and clip factor when there is clipping.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from trainverify.build.program import ProgramBuilder
from trainverify.build.tape import BuildError, Tensor
from trainverify.graph.program import CALL, Program, inline
from trainverify.ops import OPS
from trainverify.ops.table import OpTable


@dataclass(frozen=True)
class SGD:
    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    first: bool = False  # no step has been taken: the momentum buffer starts as the gradient

    def state(self) -> tuple[tuple[str, str | None], ...]:
        return (("momentum", None),) if self.momentum else ()

    def attrs(self, parameter: str) -> dict[str, object]:
        plain = {"lr": self.lr, "weight_decay": self.weight_decay}
        return {k: v for k, v in plain.items() if v} | (
            {"momentum": self.momentum, "dampening": self.dampening, "nesterov": self.nesterov, "first": self.first}
            if self.momentum
            else {}
        )

    op = "sgd"


def _decays(parameter: str) -> bool:
    return True


@dataclass(frozen=True)
class AdamW:
    """`decays` tells by name which parameters are in the group with weight decay."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    step: int = 1
    decays: Callable[[str], bool] = _decays

    def state(self) -> tuple[tuple[str, str | None], ...]:
        return (("m", None), ("v", "nonnegative"))

    def attrs(self, parameter: str) -> dict[str, object]:
        decay = self.weight_decay if self.decays(parameter) else 0.0
        return {"lr": self.lr, "beta1": self.beta1, "beta2": self.beta2, "eps": self.eps, "weight_decay": decay, "step": self.step}

    op = "adamw"


Optimizer = SGD | AdamW


def complete(
    forward: Program,
    optimizer: Optimizer | None = None,
    microbatches: int = 1,
    accumulate: Literal["sum", "mean"] = "sum",
    clip: float | None = None,
    master: bool = False,
    ops: OpTable = OPS,
) -> Program:
    """The training step of a forward program that reports one loss.

    With several micro-batches every input is cut along dimension 0 and the losses are added (`sum`) or averaged
    (`mean`); what that means for the loss per token is the user's choice of loss. `master` keeps parameters in
    f32 beside their working copies.
    """
    flat = inline(forward)
    loss_name = flat.output("loss")
    if loss_name is None or any(op.name == CALL for op in flat.ops):
        raise BuildError(f"{forward.name}: no output is declared as the loss")
    if any(op.phase != "forward" for op in flat.ops):
        raise BuildError(f"{forward.name}: it has backward ops already")
    b = ProgramBuilder(forward.name, ops)
    known: dict[str, Tensor] = {}
    for n in flat.inputs:
        d = flat.domains.get(n)
        known[n] = b._source(b._inputs, n, flat.tensors[n].shape, flat.tensors[n].dtype, d)
    for n in flat.parameters:
        known[n] = b.parameter(n, flat.tensors[n].shape, flat.tensors[n].dtype)
    for n in flat.state:
        known[n] = b._source(b._state, n, flat.tensors[n].shape, flat.tensors[n].dtype, flat.domains.get(n))
    weight = Fraction(1, microbatches) if accumulate == "mean" else Fraction(1)
    losses: list[Tensor] = []
    extra: dict[str, Tensor] = {}
    for m in range(microbatches):
        b.prefix = f"mb{m}/" if microbatches > 1 else ""
        env = dict(known)
        for n in flat.inputs if microbatches > 1 else ():
            rows = known[n].shape[0] if known[n].shape else 0
            if rows % microbatches or not rows:
                raise BuildError(f"input {n!r} {list(known[n].shape)} cannot be cut into {microbatches} micro-batches")
            size = rows // microbatches
            (env[n],) = b.emit("slice", (known[n],), {"dim": 0, "start": m * size, "stop": (m + 1) * size}, [n])
        for op in flat.ops:
            inputs = [None if i is None else env[i] for i in op.inputs]
            made = b.emit(op.name, inputs, op.attributes, list(op.outputs), op.source)
            env.update(zip(op.outputs, made, strict=True))
        loss = env[loss_name]
        extra.update({o.tensor: env[o.tensor] for o in flat.outputs if o.role != "loss"})
        seed = (
            None
            if weight == 1
            else [b.emit("full", (), {"shape": loss.shape, "value": weight, "dtype": loss.type.dtype}, ["loss.grad"])[0]]
        )
        b.backward(loss, seeds=seed)
        losses.append(loss)
    b.prefix = ""
    for o in flat.outputs:  # buffers that the forward pass updates, metrics it reports
        if o.role != "loss":
            if microbatches > 1:
                raise BuildError(f"output {o} of the forward pass has no meaning over several micro-batches")
            b.outputs.append(o)
    total = losses[0]
    for loss in losses[1:]:
        (total,) = b.emit("add", (total, loss), {}, ["loss.total"])
    if weight != 1:
        (total,) = b.emit("mul", (total,), {"value": weight}, ["loss.mean"])
    b.loss(total)
    finish(b, [known[n] for n in flat.parameters], optimizer, clip, master)
    return b.build()


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
