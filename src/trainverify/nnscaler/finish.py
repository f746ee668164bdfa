"""The end of the step that nnScaler leaves to the trainer: the reported loss, the declared correction, clipping, the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import reduce
from typing import TYPE_CHECKING

from trainverify.graph.program import Output

if TYPE_CHECKING:
    from trainverify.nnscaler.device import Device
    from trainverify.nnscaler.plan import Trainer


def finish(devices: Sequence[Device], trainer: Trainer) -> None:
    """Outputs of every device's program. The loss of the step is the sum of what micro-batches and replicas report."""
    dump = devices[0].dump
    n, replicas = len(dump.devices), dump.replicas
    share = Fraction(1, replicas * dump.microbatches) if trainer.correction == "mean" else Fraction(1)
    copies = _copies(devices)
    for d in devices:
        d.cell = None
        d.prefix = ""
        d.phase = "metric"
        losses = d.losses()
        if losses:
            total = reduce(lambda a, b: d.emit("add", (a, b), ["loss.sum"], {})[0], losses)
            if replicas > 1:
                group = d.groups_of(tuple(tuple(d.device + k * n for k in range(replicas)) for _ in range(replicas)))
                (total,) = d.emit("all_reduce", (total,), ["loss.all"], {"group": group})
            d.outputs.append(Output(_scaled(d, total, share, "loss"), "loss"))
        d.phase = "optimizer"
        grads = {w: _scaled(d, g, share, f"{w}.grad.final") for w, g in d.gradients().items()}
        d.outputs += [Output(g, "gradient", w) for w, g in grads.items()]
        if trainer.clip is not None:
            grads = _clipped(d, grads, copies, trainer.clip)
        if trainer.optimizer is not None:
            _update(d, grads, trainer)


def _scaled(d: Device, x: str, share: Fraction, name: str) -> str:
    return x if share == 1 else d.emit("mul", (x,), [name], {"value": share})[0]


def _copies(devices: Sequence[Device]) -> dict[tuple[int, str], int]:
    """How many ranks hold what a device holds of a weight."""
    found: dict[object, int] = {}
    keys: dict[tuple[int, str], object] = {}
    for d in devices:
        for h in d.held:
            if h.sample is None:
                keys[d.device, h.local] = key = (h.logical, h.slice.indmap)
                found[key] = found.get(key, 0) + d.dump.replicas
    return {place: found[key] for place, key in keys.items()}


def _clipped(d: Device, grads: dict[str, str], copies: dict[tuple[int, str], int], most: float) -> dict[str, str]:
    """Gradients limited by the norm of all of them: copies count as one, all ranks add up."""
    kinds: dict[int, list[str]] = {}
    for w, g in grads.items():
        kinds.setdefault(copies[d.device, w], []).append(g)
    sums = []
    for count, found in kinds.items():
        (norm,) = d.emit("grad_norm", found, [f"norm.of{count}"], {})
        (square,) = d.emit("square", (norm,), [f"squares.of{count}.all"], {})
        sums.append(_scaled(d, square, Fraction(1, count), f"squares.of{count}"))
    world = tuple(range(d.dump.ranks))
    if sums:
        total = reduce(lambda a, b: d.emit("add", (a, b), ["squares.device"], {})[0], sums)
    else:  # a device without weights adds nothing
        (total,) = d.emit("full", (), ["squares.device"], {"shape": (), "value": 0.0})
    if len(world) > 1:
        (total,) = d.emit("all_reduce", (total,), ["squares"], {"group": d.groups_of((world,) * d.dump.replicas)})
    (norm,) = d.emit("sqrt", (total,), ["grad_norm"], {})
    (factor,) = d.emit("clip_factor", (norm,), ["clip_factor"], {"max_norm": most})
    d.outputs += [Output(norm, "metric", "grad_norm"), Output(factor, "metric", "clip_factor")]
    return {w: d.emit("mul", (g, factor), [w + ".clipped"], {})[0] for w, g in grads.items()}


def _update(d: Device, grads: dict[str, str], trainer: Trainer) -> None:
    optimizer = trainer.optimizer
    assert optimizer is not None
    for w, g in grads.items():
        slots = [d.state_of(w, slot, domain) for slot, domain in optimizer.state()]
        names = [f"{w}.new", *(f"{s}.new" for s in slots)]
        new = d.emit(optimizer.op, (w, g, *slots), names, optimizer.attrs(w))
        for role, old, fresh in zip(("parameter", *("state" for _ in slots)), [w, *slots], new, strict=True):
            d.outputs.append(Output(fresh, role, old))  # type: ignore[arg-type]
