"""Prims that make what a plan says an adapter makes: how an adapter at fault would have to be.

Used for explanations only. From the index and value maps of what every device has, and of what it should have, one collective (or a
local selection) is found that leads from the first to the second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from trainverify.nnscaler.claims import Use, expected
from trainverify.nnscaler.dump import Cell, Prim, Slice

_PLAIN: Final = {
    "all_reduce": "AllReducePrim",
    "all_gather": "AllGatherPrim",
    "reduce_scatter": "ReduceScatterPrim",
    "all_to_all": "AllToAllPrim",
}
_FUSED: Final = {
    "all_reduce": ("AllReduceIdentityPrim", "IdentityAllreducePrim"),
    "all_gather": ("AllGatherSplitPrim", "SplitAllGatherPrim"),
    "reduce_scatter": ("ReduceScatterAllGatherPrim", "AllGatherReduceScatterPrim"),
    "all_to_all": ("AllToAllAllToAllPrim", "AllToAllAllToAllPrim"),
}
Slices = Mapping[int, Slice]  # by device


def bridge(cell: Cell, sources: Slices, targets: Slices) -> dict[int, Prim] | None:
    """For every device the prim that makes its target; None if no single one does."""
    devices = sorted(targets)
    if any(d not in sources or sources[d].full.shape != targets[d].full.shape for d in devices):
        return None
    local = {d: _local(sources[d], targets[d]) for d in devices}
    found = {d: p for d, p in local.items() if p is not None}
    if len(found) == len(devices):
        return found
    for size in sorted((n for n in range(2, len(devices) + 1) if len(devices) % n == 0), reverse=True):
        blocks = [tuple(devices[i : i + size]) for i in range(0, len(devices), size)]
        for what, dims in _ways(len(targets[devices[0]].full.shape)):
            made = [_together(cell, what, dims, b, sources, targets) for b in blocks]
            if all(m is not None for m in made):
                return {d: p for m in made if m is not None for d, p in m.items()}
    return None


def _local(source: Slice, target: Slice) -> Prim | None:
    """A region of what the device has."""
    pairs = list(zip(source.indmap, target.indmap, strict=True))
    if source.valmap != target.valmap or any(not (a <= c and d <= b) for (a, b), (c, d) in pairs):
        return None
    region = tuple((c - a, d - a) for (a, _), (c, d) in pairs)
    return Prim("SelectPrim", (source,), (target,), {"indmap": region, "valmap": 1})


def _ways(rank: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "all_reduce", ()
    for dim in range(rank):
        yield "all_gather", (dim,)
        yield "reduce_scatter", (dim,)
    for i in range(rank):
        yield from (("all_to_all", (i, o)) for o in range(rank) if o != i)


def _together(
    cell: Cell, what: str, dims: tuple[int, ...], group: tuple[int, ...], sources: Slices, targets: Slices
) -> dict[int, Prim] | None:
    own = [sources[d] for d in group]
    order = list(range(len(group)))
    if what == "all_gather" and not cell.fused:  # the plan may say that pieces do not come in the order of the group
        order.sort(key=lambda i: own[i].indmap[dims[0]])
    pieces = [own[i] for i in order]
    for d in group:
        use = Use(d, cell, "", what, group, dims, sources[d], targets[d])
        if expected(use, sources[d], pieces) != (targets[d].indmap, targets[d].valmap):
            return None
    kwargs: dict[str, Any] = {"ranks": group}
    if what == "all_to_all":
        i, o = dims if cell.isfw or not cell.fused else dims[::-1]
        kwargs |= {"idim": i, "odim": o}
    elif dims:
        kwargs["dim"] = dims[0]
    if order != sorted(order):
        kwargs["order"] = tuple(order)
    kind = _FUSED[what][0 if cell.isfw else 1] if cell.fused else _PLAIN[what]
    return {d: Prim(kind, (sources[d],), (targets[d],), kwargs) for d in group}


def mended(members: Mapping[int, Cell]) -> dict[int, Cell] | None:
    """An adapter of all its devices as the index and value maps want it; None if we do not know how."""
    first = next(iter(members.values()))
    if first.fused:
        whole = {d: c for d, c in members.items() if c.tensors() and c.results()}
        prims = bridge(first, {d: c.tensors()[0] for d, c in whole.items()}, {d: c.results()[0] for d, c in whole.items()})
        if prims is None or len(whole) < len(members):
            return None
        return {d: replace(c, prims=() if prims[d].kind == "SelectPrim" and _same(prims[d]) else (prims[d],)) for d, c in whole.items()}
    return _joined(_paired(members))


def _same(p: Prim) -> bool:
    return p.inputs[0].tid == p.outputs[0].tid


def _paired(members: Mapping[int, Cell]) -> dict[int, Cell]:
    """Moves between those who send a tensor and those who should get it, by tensor id."""
    senders: dict[int, list[int]] = {}
    receivers: dict[int, list[int]] = {}
    for d, c in members.items():
        for p in c.prims:
            if p.kind == "MovePrim":
                for t in p.inputs:
                    senders.setdefault(t.tid, []).append(d)
                for t in p.outputs:
                    receivers.setdefault(t.tid, []).append(d)
    clear = {t for t in senders if len(senders[t]) == 1 == len(receivers.get(t, ()))}
    result = {}
    for d, c in members.items():
        prims = []
        for p in c.prims:
            ids = [t.tid for t in (*p.inputs, *p.outputs)]
            if p.kind == "MovePrim" and len(ids) == 1 and ids[0] in clear:
                p = replace(p, kwargs={**p.kwargs, "src": senders[ids[0]][0], "dst": receivers[ids[0]][0]})
            prims.append(p)
        result[d] = replace(c, prims=tuple(prims))
    return result


def _joined(members: Mapping[int, Cell]) -> dict[int, Cell] | None:
    """What a device gets by moves or has at first, made into what it needs: for its own result, or for the move that sends it."""
    result = dict(members)
    for own in (True, False):  # on the side of those who send, then of those who receive
        sources: dict[int, Slice] = {}
        targets: dict[int, Slice] = {}
        for d, c in members.items():
            sent = [t for p in c.prims if p.kind == "MovePrim" for t in p.inputs]
            got = [t for p in c.prims if p.kind == "MovePrim" for t in p.outputs]
            if bool(sent) != own or len(sent) > 1 or len(got) > 1:
                continue
            have, want = (c.tensors(), sent) if own else (got or c.tensors(), c.results())
            if len(have) == 1 == len(want):
                sources[d], targets[d] = have[0], want[0]
        if not targets:
            continue
        first = next(iter(members.values()))
        prims = bridge(first, sources, targets)
        if prims is None:
            return None
        for d, p in prims.items():
            moves = tuple(m for m in members[d].prims if m.kind == "MovePrim")
            made = () if _same(p) else (p,)
            result[d] = replace(members[d], prims=(*made, *moves) if own else (*moves, *made))
    return result
