"""The end of the step that nnScaler leaves to the trainer: the reported loss, the declared correction, clipping, the optimizer, ZeRO."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import reduce

from trainverify.files.errors import FileError
from trainverify.graph.program import Output
from trainverify.nnscaler.device import Device
from trainverify.nnscaler.trainer import Trainer
from trainverify.nnscaler.writer import Shard

Copies = dict[tuple[int, str], int]  # (device, weight) → number of ranks that hold the same


def finish(devices: Sequence[Device], trainer: Trainer, width: int) -> None:
    """Outputs of every device's program. The loss of the step is the sum of what micro-batches and replicas report."""
    dump = devices[0].dump
    n, replicas = len(dump.devices), dump.replicas
    share = Fraction(1, replicas * dump.microbatches) if trainer.correction == "mean" else Fraction(1)
    copies = _copies(devices)
    regular = _regular(devices, copies, width)
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
            norm = _stages_norm(d, grads, copies, width) if regular else _ranks_norm(d, grads, copies)
            grads = _clipped(d, grads, norm, trainer.clip)
        if trainer.optimizer is not None:
            _update(d, grads, trainer)


def _scaled(d: Device, x: str, share: Fraction, name: str) -> str:
    return x if share == 1 else d.emit("mul", (x,), [name], {"value": share})[0]


def _copies(devices: Sequence[Device]) -> Copies:
    """How many ranks hold what a device holds of a weight."""
    found: dict[object, int] = {}
    keys: dict[tuple[int, str], object] = {}
    for d in devices:
        for h in d.held:
            if h.sample is None:
                keys[d.device, h.local] = key = (h.logical, h.slice.indmap)
                found[key] = found.get(key, 0) + d.dump.replicas
    return {place: found[key] for place, key in keys.items()}


def _regular(devices: Sequence[Device], copies: Copies, width: int) -> bool:
    """Whether every weight is on one stage only, in different pieces on its devices or the same on all of them."""
    stages: dict[str, set[int]] = {}
    for d in devices:
        for h in d.held:
            if h.sample is None:
                stages.setdefault(h.logical, set()).add(d.device // width)
    counts = {n // devices[0].dump.replicas for n in copies.values()}
    return counts <= {1, width} and all(len(s) == 1 for s in stages.values()) and all(d.gradients() for d in devices)


def _stages_norm(d: Device, grads: dict[str, str], copies: Copies, width: int) -> str:
    """√Σ of squares: pieces add up over a stage, stages over the pipeline; copies count once."""
    n = len(d.dump.devices)
    stage = d.device // width
    sums = []
    for cut in (False, True):
        found = [g for w, g in grads.items() if (copies[d.device, w] == d.dump.replicas and width > 1) == cut]
        if found:
            label = "pieces" if cut else "whole"
            (norm,) = d.emit("grad_norm", found, [f"norm.{label}"], {})
            (square,) = d.emit("square", (norm,), [f"squares.{label}.own"], {})
            if cut:
                group = d.group(range(stage * width, (stage + 1) * width))
                (square,) = d.emit("all_reduce", (square,), [f"squares.{label}"], {"group": group})
            sums.append(square)
    total = reduce(lambda a, b: d.emit("add", (a, b), ["squares.stage"], {})[0], sums)
    if n > width:
        (total,) = d.emit("all_reduce", (total,), ["squares"], {"group": d.group(range(d.device % width, n, width))})
    return d.emit("sqrt", (total,), ["grad_norm"], {})[0]


def _ranks_norm(d: Device, grads: dict[str, str], copies: Copies) -> str:
    """√Σ of squares over all ranks, each divided by the number of copies."""
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
    return d.emit("sqrt", (total,), ["grad_norm"], {})[0]


def _clipped(d: Device, grads: dict[str, str], norm: str, most: float) -> dict[str, str]:
    """Gradients limited by the norm of all of them."""
    (factor,) = d.emit("clip_factor", (norm,), ["clip_factor"], {"max_norm": most})
    d.outputs += [Output(norm, "metric", "grad_norm"), Output(factor, "metric", "clip_factor")]
    return {w: d.emit("mul", (g, factor), [w + ".clipped"], {})[0] for w, g in grads.items()}


def _shard(d: Device, weight: str, trainer: Trainer) -> Shard | None:
    """What a rank updates with ZeRO: a piece of a weight that a reducer's ranks share; None if nothing divides."""
    groups = d.shared.get(weight)
    if not trainer.zero or groups is None:
        return None
    n = len(groups[0]) // trainer.zero
    if len(groups[0]) % trainer.zero:
        raise FileError(d.dump.path, "execplan", f"ZeRO in {trainer.zero} groups: {len(groups[0])} ranks share {weight}")
    if n < 2:
        return None
    own = tuple(d.device + k * len(d.dump.devices) for k in range(d.dump.replicas))
    parts = tuple(g[g.index(r) // n * n :][:n] for g, r in zip(groups, own, strict=True))
    dim = next((i for i, size in enumerate(d.types[weight].shape) if size % n == 0), None)
    return None if dim is None else Shard(dim, parts, own)


def _update(d: Device, grads: dict[str, str], trainer: Trainer) -> None:
    optimizer = trainer.optimizer
    assert optimizer is not None
    for w, g in grads.items():
        shard = _shard(d, w, trainer)
        slots = [d.state_of(w, slot, domain, shard) for slot, domain in optimizer.state()]
        names = [f"{w}.new", *(f"{s}.new" for s in slots)]
        if shard is None:
            new = d.emit(optimizer.op, (w, g, *slots), names, optimizer.attrs(w))
        else:
            pieces = [d.sharded(x, shard, f"{x}.shard") for x in (w, g)]
            names[0] = f"{w}.shard.new"
            new = d.emit(optimizer.op, (*pieces, *slots), names, optimizer.attrs(w))
            group = d.groups_of(shard.groups)
            new = (*d.emit("all_gather", (new[0],), [f"{w}.new"], {"group": group, "dim": shard.dim}), *new[1:])
        for role, old, fresh in zip(("parameter", *("state" for _ in slots)), [w, *slots], new, strict=True):
            d.outputs.append(Output(fresh, role, old))  # type: ignore[arg-type]
