"""What a plan says of its tensors (index and value maps), compared with what its adapters and operations do.

Claims decide nothing: a verdict comes from what runs. A claim that does not hold is a warning that names the adapter, or part of
the explanation if the plan is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from trainverify.check.findings import Finding
from trainverify.nnscaler.annotations import unfounded
from trainverify.nnscaler.dump import FUSED, Cell, Dump, Slice, positions
from trainverify.nnscaler.prims import direction

Region = tuple[tuple[int, int], ...]
_PLAIN = {
    "AllReducePrim": "all_reduce",
    "AllGatherPrim": "all_gather",
    "ReduceScatterPrim": "reduce_scatter",
    "ChunkPrim": "chunk",
    "AllToAllPrim": "all_to_all",
}


@dataclass(frozen=True)
class Use:
    """A prim on one device: what it does to what. `at` is its place in the adapter's list."""

    device: int
    cell: Cell
    kind: str
    what: str
    group: tuple[int, ...]
    dims: tuple[int, ...]
    source: Slice | None
    target: Slice | None
    at: int = 0

    def where(self) -> str:
        side = "forward" if self.cell.isfw else "backward"
        return f"{side} adapter {self.cell.cid} ({self.kind}) on device {self.device}"


@dataclass(frozen=True)
class Problem:
    """A prim whose result is not what the plan says, or whose partners are missing."""

    use: Use
    code: str
    text: str


def claims(dump: Dump) -> Iterator[Finding]:
    """Adapters and operations whose results are not what the plan says they are."""
    for p in problems(dump):
        yield Finding(p.code, f"{p.use.where()}: {p.text}", p.use.device, None, None, None, "warning")
    for device, cell, why in unfounded(dump):
        message = f"cell {cell.cid} ({cell.signature}) on device {device}: {why}"
        yield Finding("TV402", message, device, None, None, None, "warning")


def problems(dump: Dump) -> Iterator[Problem]:
    """Prims that do not do what the plan says of their tensors."""
    together: dict[object, dict[int, Use]] = {}
    for device in dump.devices:
        for cell in adapters(dump, device):
            counts: dict[object, int] = {}
            for use in uses(cell, device):
                key: object = (cell.cid, use.kind, use.what, use.group)
                counts[key] = counts.get(key, -1) + 1
                together.setdefault((key, counts[key]), {})[device] = use
    for members in together.values():
        for use in members.values():
            absent = [d for d in use.group if d not in members] if use.what not in ("chunk", "identity", "move") else []
            if absent:
                text = f"device {absent[0]} is in its group {list(use.group)} and has no such prim in this adapter"
                yield Problem(use, "TV203", text)
            problem = _problem(use, members)
            if problem is not None:
                yield Problem(use, "TV402", problem)


def adapters(dump: Dump, device: int) -> Iterator[Cell]:
    """The adapters of a device, each once."""
    for cell in {id(s.cell): s.cell for s in dump.sequences[device]}.values():
        if cell.kind == "IRAdapter":
            yield cell
        yield from (n for n in cell.nodes if n.kind == "IRAdapter")


def uses(cell: Cell, device: int) -> Iterator[Use]:
    for at, p in enumerate(cell.prims):
        ranks = p.kwargs.get("ranks")
        group = positions(ranks) if isinstance(ranks, tuple) else ()
        dims = tuple(p.kwargs[k] for k in ("dim", "idim", "odim") if k in p.kwargs)
        if cell.fused and p.kind in FUSED:
            sources, targets = cell.tensors(), cell.results()
            if sources and targets:
                what = direction(p.kind, cell.isfw)
                yield Use(device, cell, p.kind, what, group, dims if cell.isfw else dims[::-1], sources[0], targets[0], at)
            continue
        source, target = (ts[0] if ts else None for ts in (p.inputs, p.outputs))
        if p.kind == "MovePrim":
            yield Use(device, cell, p.kind, "move", (p.kwargs["src"], p.kwargs["dst"]), (), source, target, at)
        elif p.kind == "BroadcastPrim":
            yield Use(device, cell, p.kind, "broadcast", (p.kwargs["src"], *group), (), source, target, at)
        elif p.kind in _PLAIN:
            yield Use(device, cell, p.kind, _PLAIN[p.kind], group, dims, source, target, at)


def _problem(use: Use, members: Mapping[int, Use]) -> str | None:
    if use.target is None:
        return None
    if use.what in ("move", "broadcast"):
        sender = members.get(use.group[0])
        if sender is None or sender.source is None or sender.device == use.device:
            return None
        made: tuple[Region, tuple[int, int]] | None = (sender.source.indmap, sender.source.valmap)
    else:
        sources = [members[d].source for d in use.group if d in members] if use.what not in ("chunk", "identity") else []
        if (
            use.source is None
            or any(s is None or s.full is not use.source.full for s in sources)
            or len(sources) not in (0, len(use.group))
        ):
            return None
        made = expected(use, use.source, [s for s in sources if s is not None])
    if made is None:
        return "the pieces that it joins do not follow each other in the order of the group, or are no summands of one tensor"
    if (use.target.indmap, use.target.valmap) != made:
        return f"the plan says that it makes {_text(use.target)}, it makes {_text(Slice(0, use.target.full, made[0], made[1]))}"
    return None


def _text(t: Slice) -> str:
    region = ", ".join(f"{a}:{b}" for a, b in t.indmap)
    return f"{t.full.name}[{region}]" + ("" if t.valmap == (0, 1) else f" part {t.valmap[0]} of {t.valmap[1]}")


def expected(use: Use, own: Slice, sources: list[Slice]) -> tuple[Region, tuple[int, int]] | None:
    """Region and part that a prim makes from those that it is said to take; None if they do not go together."""
    region, part = own.indmap, own.valmap
    at = use.group.index(use.device) if use.device in use.group else 0
    n = len(use.group)
    if use.what == "identity" or n == 1:
        return region, part
    if use.what in ("all_reduce", "reduce_scatter"):
        total = part[1]
        if total % n or len({s.valmap[0] for s in sources}) != n or any(s.valmap[1] != total or s.indmap != region for s in sources):
            return None
        part = (0, 1) if total == n else (part[0] // n, total // n)
    if use.what in ("chunk", "reduce_scatter"):
        region = _piece(region, use.dims[0], at, n)
    if use.what == "all_gather":
        return _joined(sources, use.dims[0], part)
    if use.what == "all_to_all":
        joined = _joined(sources, use.dims[0], part)
        return None if joined is None else (_piece(joined[0], use.dims[1], at, n), part)
    return region, part


def _piece(region: Region, dim: int, at: int, n: int) -> Region:
    a, b = region[dim]
    size = (b - a) // n
    return (*region[:dim], (a + at * size, a + (at + 1) * size), *region[dim + 1 :])


def _joined(sources: list[Slice], dim: int, part: tuple[int, int]) -> tuple[Region, tuple[int, int]] | None:
    first = sources[0].indmap
    stop = first[dim][0]
    for s in sources:
        rest = (*s.indmap[:dim], *s.indmap[dim + 1 :])
        if s.indmap[dim][0] != stop or rest != (*first[:dim], *first[dim + 1 :]) or s.valmap != part:
            return None
        stop = s.indmap[dim][1]
    return (*first[:dim], (first[dim][0], stop), *first[dim + 1 :]), part
