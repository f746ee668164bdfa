"""Layouts in a file: the three spellings of lineage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from trainverify.files.errors import Bad, expected, show
from trainverify.files.limits import Limits
from trainverify.files.scalars import at, each, fields, integer, listed, one_of, pairs
from trainverify.graph.lineage import (
    Form,
    Layout,
    LineageError,
    Part,
    Partial,
    Parts,
    Pattern,
    Placement,
    Placements,
    Replicate,
    Run,
    Shard,
    pattern_dims,
)
from trainverify.graph.mesh import Mesh

REDUCTIONS: Final = ("sum", "avg")


def encode_layout(layout: Layout) -> dict[str, Any]:
    data: dict[str, Any] = {"logical": layout.logical}
    if layout.local != layout.logical:
        data["local"] = layout.local
    if layout.where:
        data["where"] = [list(pair) for pair in layout.where]
    match layout.form:
        case Placements(axes):
            data["placements"] = [[axis, _placement(p)] for axis, p in axes]
        case Pattern(text, fixed, partial):
            data["pattern"] = text
            if fixed:
                data["fixed"] = [list(f) for f in fixed]
            if partial:
                data["partial"] = [list(p) for p in partial]
        case Parts(by_rank):
            data["parts"] = [[rank, [_part(p) for p in parts]] for rank, parts in by_rank]
    return data


def _placement(placement: Placement) -> Any:
    match placement:
        case Shard(dim):
            return {"shard": dim}
        case Partial(op):
            return {"partial": op}
        case Replicate():
            return "replicate"


def _part(part: Part) -> dict[str, Any]:
    data: dict[str, Any] = {
        "local": list(part.local),
        "logical": [[r.start, r.block] if (r.count, r.stride) == (1, 0) else [r.start, r.block, r.count, r.stride] for r in part.logical],
    }
    if part.partial is not None:
        data["partial"] = list(part.partial)
    if part.flat is not False:
        data["flat"] = part.flat
    if part.padding is not False:
        data["padding"] = part.padding
    return data


class LineageDecoder:
    """Reads layouts for one mesh."""

    def __init__(self, mesh: Mesh, name: Callable[[Any], str], limits: Limits):
        self.mesh = mesh
        self.size = mesh.size
        self.axes: Mapping[str, int] = dict(mesh.axes)
        self.name = name
        self.most = limits.elements
        self.dimensions = limits.dimensions
        self.runs: dict[tuple[int, ...], Run] = {}

    def layout(self, data: Any) -> Layout:
        fields(data, ("logical",), ("local", "where", "placements", "pattern", "fixed", "partial", "parts"))
        spelt = [k for k in ("placements", "pattern", "parts") if k in data]
        if len(spelt) != 1:
            raise Bad(f"expected one of placements, pattern, parts, got {' and '.join(spelt) or 'none'}")
        for key in ("fixed", "partial"):
            if key in data and spelt != ["pattern"]:
                raise Bad("only a pattern has this field", key)
        logical = at(self.name, data, "logical")
        local = at(self.name, data, "local") if "local" in data else logical
        where = at(self.where, data, "where") if "where" in data else ()
        return Layout(logical, local, self.form(data, spelt[0]), where)

    def form(self, data: dict[str, Any], key: str) -> Form:
        if key == "placements":
            return Placements(at(lambda d: pairs(d, self.axis, self.placement), data, key))
        if key == "parts":
            return Parts(at(self.by_rank, data, key))
        text = at(self.pattern, data, key)
        fixed = at(self.fixed, data, "fixed") if "fixed" in data else ()
        partial = at(lambda d: pairs(d, self.axis, reduction), data, "partial") if "partial" in data else ()
        return Pattern(text, fixed, partial)

    def axis(self, data: Any) -> str:
        name = self.name(data)
        if name not in self.axes:
            raise Bad(f"no axis {show(name)} in {self.mesh}")
        return name

    def where(self, data: Any) -> tuple[tuple[str, int], ...]:
        found = pairs(data, self.axis, lambda i: integer(i, 0, self.size))
        for i, (axis, index) in enumerate(found):
            if index >= self.axes[axis]:
                raise Bad(f"no {axis}={index} in {self.mesh}", i)
        return found

    def placement(self, data: Any) -> Placement:
        if data == "replicate" and type(data) is str:
            return Replicate()
        if type(data) is dict and data.keys() == {"shard"}:
            return Shard(at(lambda d: integer(d, 0, self.dimensions - 1), data, "shard"))
        if type(data) is dict and data.keys() == {"partial"}:
            return Partial(one_of(data, "partial", REDUCTIONS))
        raise expected('"replicate", {"shard": …} or {"partial": …}', data)

    def pattern(self, data: Any) -> str:
        if type(data) is not str:
            raise expected("a pattern", data)
        if data:
            self.name(data)
        try:
            pattern_dims(data)
        except LineageError as e:
            raise Bad(str(e)) from None
        return data

    def fixed(self, data: Any) -> tuple[tuple[str, int, int], ...]:
        result: dict[str, tuple[str, int, int]] = {}
        for i, item in enumerate(listed(data)):
            try:
                if type(item) is not list or len(item) != 3:
                    raise expected("[name, index, size]", item)
                name, size = self.name(item[0]), integer(item[2], 1, self.most)
                if name in result:
                    raise Bad(f"{show(name)} is given twice")
                result[name] = (name, integer(item[1], 0, size - 1), size)
            except Bad as e:
                raise e.inside(i) from None
        return tuple(result.values())

    def by_rank(self, data: Any) -> tuple[tuple[int, tuple[Part, ...]], ...]:
        result: dict[int, tuple[Part, ...]] = {}
        for i, item in enumerate(listed(data)):
            try:
                if type(item) is not list or len(item) != 2:
                    raise expected("[rank, parts]", item)
                rank = integer(item[0], 0, 1 << 62)
                if rank >= self.size:
                    raise Bad(f"rank {rank} is not in {self.mesh}")
                if rank in result:
                    raise Bad(f"rank {rank} is given twice")
                result[rank] = self.parts(item[1])
            except Bad as e:
                raise e.inside(i) from None
        return tuple(result.items())

    def parts(self, data: Any) -> tuple[Part, ...]:
        try:
            return each(self.part, listed(data))
        except Bad as e:
            raise e.inside(1) from None

    def part(self, data: Any) -> Part:
        fields(data, ("local", "logical"), ("partial", "flat", "padding"))
        local = at(self.numbers, data, "local")
        logical = at(self.regions, data, "logical")
        flat, padding = (at(boolean, data, k) if k in data else False for k in ("flat", "padding"))
        if not padding and len(local) != len(logical):
            raise Bad(f"{len(local)} starts for {len(logical)} runs")
        if flat and not padding and len(local) != 1:
            raise Bad(f"a flat part has one run, got {len(local)}")
        partial = at(self.share, data, "partial") if "partial" in data else None
        return Part(local, logical, partial, flat, padding)

    def numbers(self, data: Any) -> tuple[int, ...]:
        return each(lambda n: integer(n, 0, self.most), listed(data))

    def regions(self, data: Any) -> tuple[Run, ...]:
        return each(self.run, listed(data))

    def run(self, data: Any) -> Run:
        numbers = self.numbers(data)
        if len(numbers) not in (2, 4):
            raise Bad(f"expected [start, block] or [start, block, count, stride], got {len(numbers)} values")
        if (known := self.runs.get(numbers)) is not None:
            return known
        run = Run(*numbers)
        if run.count < 1:
            raise Bad("0 is less than 1", 2)
        if max(run.stop, run.size) > self.most:
            raise Bad(f"a run past {self.most}")
        self.runs[numbers] = run
        return run

    def share(self, data: Any) -> tuple[Any, int, int]:
        if type(data) is not list or len(data) != 3:
            raise expected("[op, index, count]", data)
        op, index, count = data
        n = integer(count, 1, self.most)
        return reduction(op), integer(index, 0, n - 1), n


def boolean(data: Any) -> bool:
    if type(data) is not bool:
        raise expected("true or false", data)
    return data


def reduction(data: Any) -> Any:
    for known in REDUCTIONS:
        if type(data) is str and data == known:
            return known
    raise expected('"sum" or "avg"', data)
