"""Adapters: what every prim does on one member of its group. A group's order is that of its ranks, sorted."""

from __future__ import annotations

from fractions import Fraction
from functools import reduce
from typing import TYPE_CHECKING, Any, Final

from trainverify.nnscaler.dump import Prim, Slice, positions

if TYPE_CHECKING:
    from trainverify.nnscaler.device import Device, Scope

# fused prim → (forward, backward)
_FUSED: Final = {
    "AllReduceIdentityPrim": ("all_reduce", "identity"),
    "IdentityAllreducePrim": ("identity", "all_reduce"),
    "AllReduceAllReducePrim": ("all_reduce", "all_reduce"),
    "ReduceScatterAllGatherPrim": ("reduce_scatter", "all_gather"),
    "AllGatherReduceScatterPrim": ("all_gather", "reduce_scatter"),
    "AllGatherSplitPrim": ("all_gather", "chunk"),
    "SplitAllGatherPrim": ("chunk", "all_gather"),
    "AllToAllAllToAllPrim": ("all_to_all", "all_to_all"),
}


def fused(d: Device, prim: Prim, forward: bool, x: str, name: str) -> str:
    """A differentiable prim: one thing forward, its conjugate backward."""
    what = direction(prim.kind, forward)
    dims = [prim.kwargs.get(k) for k in ("odim", "idim")]
    return apply(d, what, x, name, prim.kwargs, dims if forward else dims[::-1])


def direction(kind: str, forward: bool) -> str:
    """What a fused prim does in a forward or in a backward adapter."""
    return _FUSED[kind][0 if forward else 1]


def apply(d: Device, what: str, x: str, name: str, kwargs: Any, dims: Any = (None, None)) -> str:
    """One tensor through a collective of the group in `ranks`."""
    if what == "identity":
        return x
    group = positions(kwargs["ranks"])
    named = d.group(group)
    if len(group) == 1:
        return d.emit("identity", (x,), [name], {})[0]
    match what:
        case "chunk":
            return chunk(d, x, name, kwargs["dim"], group)
        case "all_reduce":
            return d.emit("all_reduce", (x,), [name], {"group": named})[0]
        case "all_to_all":
            return d.emit("all_to_all", (x,), [name], {"group": named, "split_dim": dims[0], "concat_dim": dims[1]})[0]
        case _:
            (joined,) = d.emit(what, (x,), [name], {"group": named, "dim": kwargs["dim"]})
            return ordered(d, joined, name, kwargs["dim"], kwargs["order"]) if "order" in kwargs else joined


def ordered(d: Device, x: str, name: str, dim: int, order: tuple[int, ...]) -> str:
    """Equal pieces in another order; no prim of nnScaler does that, a mended plan may."""
    size = d.types[x].shape[dim] // len(order)
    pieces = [d.emit("slice", (x,), [name], {"dim": dim, "start": i * size, "stop": (i + 1) * size})[0] for i in order]
    return d.emit("concat", pieces, [name], {"dim": dim})[0]


def chunk(d: Device, x: str, name: str, dim: int, group: tuple[int, ...]) -> str:
    """The piece at the device's own position in the group."""
    shape = d.types[x].shape
    if not 0 <= dim < len(shape) or shape[dim] % len(group):
        raise d.broken("TV105", f"dimension {dim} of {list(shape)} does not divide among {len(group)} devices")
    size = shape[dim] // len(group)
    at = group.index(d.device)
    return d.emit("slice", (x,), [name], {"dim": dim, "start": at * size, "stop": (at + 1) * size})[0]


def plain(d: Device, prim: Prim, scope: Scope) -> None:
    """A prim that names its own tensors."""
    kwargs = prim.kwargs
    match prim.kind:
        case "MovePrim":
            _move(d, prim, scope)
        case "BroadcastPrim":
            _broadcast(d, prim, scope)
        case "IdentityPrim":
            source, target = _one(d, prim)
            scope.values[target.tid] = d.get(scope, source)
        case "SelectPrim":
            source, target = _one(d, prim)
            scope.values[target.tid] = _select(d, d.get(scope, source), target, kwargs)
        case "MergeDimPrim":
            target = _target(d, prim)
            xs = [d.get(scope, t) for t in prim.inputs]
            scope.values[target.tid] = d.emit("concat", xs, [target.full.name], {"dim": kwargs["dim"]})[0]
        case "SumPrim":
            target = _target(d, prim)
            xs = [d.get(scope, t) for t in prim.inputs]
            scope.values[target.tid] = reduce(lambda a, b: d.emit("add", (a, b), [target.full.name], {})[0], xs)
        case "AllReducePrim" | "AllGatherPrim" | "ReduceScatterPrim" | "ChunkPrim" | "AllToAllPrim":
            names = {
                "AllReducePrim": "all_reduce",
                "AllGatherPrim": "all_gather",
                "ReduceScatterPrim": "reduce_scatter",
                "ChunkPrim": "chunk",
                "AllToAllPrim": "all_to_all",
            }
            source, target = _one(d, prim)
            dims = (kwargs.get("odim"), kwargs.get("idim"))
            value = apply(d, names[prim.kind], d.get(scope, source), target.full.name, kwargs, dims)
            d.checked(target, value)
            scope.values[target.tid] = value
        case _:
            raise d.broken("TV104", f"{prim.kind} has no meaning here", unsupported=True)


def _target(d: Device, prim: Prim) -> Slice:
    if len(prim.outputs) != 1 or not prim.inputs:
        raise d.broken("TV101", f"{prim.kind} with {len(prim.inputs)} inputs and {len(prim.outputs)} outputs")
    return prim.outputs[0]


def _one(d: Device, prim: Prim) -> tuple[Slice, Slice]:
    if len(prim.inputs) != 1 or len(prim.outputs) != 1:
        raise d.broken("TV101", f"{prim.kind} with {len(prim.inputs)} inputs and {len(prim.outputs)} outputs")
    return prim.inputs[0], prim.outputs[0]


def _move(d: Device, prim: Prim, scope: Scope) -> None:
    source, target = prim.kwargs["src"], prim.kwargs["dst"]
    if d.device == source and prim.inputs:
        d.add("send", (d.get(scope, prim.inputs[0]),), (), {"peer": target})
    elif d.device == target and prim.outputs:
        t = prim.outputs[0]
        name = d.declare(t.full.name, t.type)
        d.add("recv", (), (name,), {"peer": source, "shape": t.type.shape, "dtype": t.type.dtype})
        scope.values[t.tid] = name
    else:
        raise d.broken("TV204", f"MovePrim from {source} to {target} on device {d.device}")


def _broadcast(d: Device, prim: Prim, scope: Scope) -> None:
    group, root = positions(prim.kwargs["ranks"]), prim.kwargs["src"]
    if root not in group:
        raise d.broken("TV202", f"BroadcastPrim from {root} in the group {list(group)}")
    attrs = {"group": d.group(group), "root": root}
    if d.device == root:
        source = _one(d, prim)[0] if prim.outputs else prim.inputs[0]
        (name,) = d.emit("broadcast", (d.get(scope, source),), [source.full.name], attrs)
        if prim.outputs:
            scope.values[prim.outputs[0].tid] = name
        return
    if len(prim.outputs) != 1:
        raise d.broken("TV101", f"BroadcastPrim with {len(prim.outputs)} outputs")
    t = prim.outputs[0]
    name = d.declare(t.full.name, t.type)
    d.add("broadcast", (), (name,), attrs)
    scope.values[t.tid] = name


def _select(d: Device, x: str, target: Slice, kwargs: Any) -> str:
    """A region, divided by the number of summands it becomes."""
    region, parts = kwargs["indmap"], kwargs["valmap"]
    if not isinstance(region, tuple) or any(not isinstance(p, tuple) or len(p) != 2 for p in region):
        raise d.broken("TV104", f"SelectPrim of {region!r}", unsupported=True)
    for dim, (start, stop) in enumerate(region):
        if (start, stop) != (0, d.types[x].shape[dim]):
            (x,) = d.emit("slice", (x,), [target.full.name], {"dim": dim, "start": start, "stop": stop})
    n = parts if isinstance(parts, int) else parts[1]
    return x if n == 1 else d.emit("mul", (x,), [target.full.name], {"value": Fraction(1, n)})[0]
