"""Adapters: what every prim does on one member of its group. A group's order is that of its ranks, sorted."""

from __future__ import annotations

from fractions import Fraction
from functools import reduce
from typing import Any, Final

from trainverify.graph.types import TensorType
from trainverify.nnscaler.device import Device, Scope
from trainverify.nnscaler.dump import Prim, Slice, Thing, positions

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
        case "RDScatterPrim":
            _scatter(d, prim, scope)
        case "RDGatherPrim":
            _gather(d, prim, scope)
        case "RVScatterPrim":
            _shares(d, prim, scope)
        case "RVGatherPrim" | "ReducePrim":
            _sum(d, prim, scope)
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
        case "VChunkPrim":
            raise d.broken("TV104", "nnScaler has no function for VChunkPrim at run time: this plan cannot run")
        case _:  # a fused prim in an adapter that is not differentiable: its forward function is called
            source, target = _one(d, prim)
            value = fused(d, prim, True, d.get(scope, source), target.full.name)
            d.checked(target, value)
            scope.values[target.tid] = value


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
        _receive(d, prim.outputs[0], source, scope)
    else:
        raise d.broken("TV204", f"MovePrim from {source} to {target} on device {d.device}")


def _broadcast(d: Device, prim: Prim, scope: Scope) -> None:
    group, root = positions(prim.kwargs["ranks"]), prim.kwargs["src"]
    if root not in group:
        raise d.broken("TV202", f"BroadcastPrim from {root} in the group {list(group)}")
    _spread(d, prim, scope, group, root, 1)


def _shares(d: Device, prim: Prim, scope: Scope) -> None:
    """The sender's tensor divided by the number of receivers, on all of them and on the sender."""
    root, receivers = prim.kwargs["src"], prim.kwargs["dsts"]
    _spread(d, prim, scope, positions((root, *receivers)), root, len(receivers))


def _spread(d: Device, prim: Prim, scope: Scope, group: tuple[int, ...], root: int, parts: int) -> None:
    attrs = {"group": d.group(group), "root": root}
    if d.device == root:
        if len(prim.inputs) != 1:
            raise d.broken("TV101", f"{prim.kind} with {len(prim.inputs)} inputs on the device that sends")
        source = prim.inputs[0]
        value = d.get(scope, source)
        if parts > 1:
            (value,) = d.emit("mul", (value,), [source.full.name], {"value": Fraction(1, parts)})
        (name,) = d.emit("broadcast", (value,), [source.full.name], attrs)
        for t in prim.outputs:
            scope.values[t.tid] = name
        return
    t = _received(d, prim)
    name = d.declare(t.full.name, t.type)
    d.add("broadcast", (), (name,), attrs)
    scope.values[t.tid] = name


def _scatter(d: Device, prim: Prim, scope: Scope) -> None:
    """The sender's tensor cut along a dimension; the n-th receiver in the list gets the n-th piece. The sender keeps all of it."""
    source, receivers, dim = prim.kwargs["src"], prim.kwargs["dsts"], prim.kwargs["dim"]
    _apart(d, prim, source, receivers)
    if d.device != source:
        _receive(d, _received(d, prim), source, scope)
        return
    x = d.get(scope, _sent(d, prim))
    shape = d.types[x].shape
    if not 0 <= dim < len(shape) or shape[dim] % len(receivers):
        raise d.broken("TV105", f"dimension {dim} of {list(shape)} does not divide among {len(receivers)} devices")
    size = shape[dim] // len(receivers)
    for i, peer in enumerate(receivers):
        attrs = {"dim": dim, "start": i * size, "stop": (i + 1) * size}
        (piece,) = d.emit("slice", (x,), [prim.inputs[0].full.name], attrs)
        d.add("send", (piece,), (), {"peer": peer})
    for t in prim.outputs:
        scope.values[t.tid] = x


def _gather(d: Device, prim: Prim, scope: Scope) -> None:
    """Pieces joined along a dimension on the receiver, in the order of the list of senders. A sender keeps its own."""
    senders, target, dim = prim.kwargs["srcs"], prim.kwargs["dst"], prim.kwargs["dim"]
    _apart(d, prim, target, senders)
    if d.device != target:
        x = d.get(scope, _sent(d, prim))
        d.add("send", (x,), (), {"peer": target})
        scope.values.update({t.tid: x for t in prim.outputs})
        return
    t = _received(d, prim)
    shape = t.type.shape
    if not 0 <= dim < len(shape) or shape[dim] % len(senders):
        raise d.broken("TV105", f"dimension {dim} of {list(shape)} does not divide among {len(senders)} devices")
    piece = (*shape[:dim], shape[dim] // len(senders), *shape[dim + 1 :])
    pieces = []
    for peer in senders:
        pieces.append(d.declare(t.full.name, TensorType(piece, t.type.dtype)))
        d.add("recv", (), (pieces[-1],), {"peer": peer, "shape": piece, "dtype": t.type.dtype})
    scope.values[t.tid] = d.emit("concat", pieces, [t.full.name], {"dim": dim})[0]


def _sum(d: Device, prim: Prim, scope: Scope) -> None:
    """The senders' tensors added up on the receiver. Of RVGather the receiver's own does not count; of Reduce all in the group do."""
    target = prim.kwargs["dst"]
    apart = prim.kind == "RVGatherPrim"
    group = positions((*prim.kwargs["srcs"], target) if apart else prim.kwargs["ranks"])
    if target not in group:
        raise d.broken("TV202", f"{prim.kind} to {target} in the group {list(group)}")
    attrs = {"group": d.group(group), "root": target}
    if d.device != target:
        x = d.get(scope, _sent(d, prim))
        d.add("reduce", (x,), (), attrs)
        scope.values.update({t.tid: x for t in prim.outputs})
        return
    t = _received(d, prim)
    if apart:
        (x,) = d.emit("full", (), [t.full.name], {"shape": t.type.shape, "value": 0.0, "dtype": t.type.dtype})
    else:
        x = d.get(scope, _sent(d, prim))
    (value,) = d.emit("reduce", (x,), [t.full.name], attrs)
    d.checked(t, value)
    scope.values[t.tid] = value


def _apart(d: Device, prim: Prim, one: int, others: tuple[int, ...]) -> None:
    """The one end of a scatter or gather is none of the other ends: a device cannot send to itself."""
    if one in others or len(set(others)) < len(others):
        raise d.broken("TV204", f"{prim.kind} between {one} and {list(others)}: nnScaler sends one message to each of some other devices")
    if d.device not in (one, *others):
        raise d.broken("TV204", f"{prim.kind} between {one} and {list(others)} on device {d.device}")


def _sent(d: Device, prim: Prim) -> Slice:
    if len(prim.inputs) != 1:
        raise d.broken("TV101", f"{prim.kind} with {len(prim.inputs)} inputs on a device that sends")
    return prim.inputs[0]


def _received(d: Device, prim: Prim) -> Slice:
    if len(prim.outputs) != 1:
        raise d.broken("TV101", f"{prim.kind} with {len(prim.outputs)} outputs on a device that receives")
    return prim.outputs[0]


def _receive(d: Device, t: Slice, peer: int, scope: Scope) -> None:
    name = d.declare(t.full.name, t.type)
    d.add("recv", (), (name,), {"peer": peer, "shape": t.type.shape, "dtype": t.type.dtype})
    scope.values[t.tid] = name


def _select(d: Device, x: str, target: Slice, kwargs: Any) -> str:
    """A region, divided by the number of summands it becomes."""
    shape = d.types[x].shape
    region = tuple(_bounds(p) for p in kwargs["indmap"]) if isinstance(kwargs["indmap"], tuple) else ()
    n = kwargs["valmap"] if isinstance(kwargs["valmap"], int) else kwargs["valmap"][-1]
    if len(region) != len(shape) or any(p is None for p in region) or not isinstance(n, int) or n < 1:
        raise d.broken("TV105", f"SelectPrim of {kwargs['indmap']!r}, part of {kwargs['valmap']!r}, from {list(shape)}")
    for dim, bounds in enumerate(region):
        if bounds is not None and bounds != (0, shape[dim]):
            (x,) = d.emit("slice", (x,), [target.full.name], {"dim": dim, "start": bounds[0], "stop": bounds[1]})
    return x if n == 1 else d.emit("mul", (x,), [target.full.name], {"value": Fraction(1, n)})[0]


def _bounds(p: Any) -> tuple[int, int] | None:
    """Where a region starts and stops: a pair, or a slice of Python as nnScaler has it."""
    items = p.value if isinstance(p, Thing) and p.kind == "slice" else p
    if not isinstance(items, list | tuple) or len(items) not in (2, 3) or (len(items) == 3 and items[2] not in (None, 1)):
        return None
    return (items[0], items[1]) if isinstance(items[0], int) and isinstance(items[1], int) else None
