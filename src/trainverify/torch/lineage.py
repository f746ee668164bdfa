"""Lineage from what ranks hold: DTensor placements, names and shapes of plain tensors, and what the user says."""

from __future__ import annotations

import fnmatch
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainverify.graph.lineage import Form, Layout, Part, Partial, Parts, Placement, Placements, Run, Shard, layout
from trainverify.graph.mesh import Mesh
from trainverify.graph.program import Program
from trainverify.torch.inputs import Batch, Spelling, lies
from trainverify.torch.placed import Described

Cuts = Mapping[str, Spelling]  # name of a parameter, or a pattern of names → how it is cut


class NoLineage(Exception):
    """A tensor of which nobody says how it is cut."""


@dataclass(frozen=True)
class Held:
    """A rank's program and what is known about its tensors."""

    rank: int
    program: Program
    placed: Mapping[str, Described]


class Axes:
    """Which mesh axes a group of ranks runs along."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self._known: dict[tuple[int, ...], tuple[str, ...]] = {}
        names = mesh.names
        for count in range(1, len(names) + 1):
            for axes in itertools.combinations(names, count):
                for rank in range(mesh.size):
                    self._known.setdefault(mesh.group(rank, axes), axes)

    def of(self, ranks: Sequence[int]) -> tuple[str, ...]:
        if len(ranks) == 1:
            return ()
        found = self._known.get(tuple(ranks))
        if found is None:
            raise NoLineage(
                f"{self.mesh} has no axes along which ranks {list(ranks)} lie in this order; say mesh={{…}} as the device mesh is"
            )
        return tuple(a for a in found if self.mesh.length(a) > 1)


def form_of(place: Described, axes: Axes, rank: int) -> Form:
    """What is known of a tensor of one rank as a form."""
    if "pattern" in place:
        return layout("", str(place["pattern"])).form
    if "flat" in place:
        held = [Part((at,), (Run(start, count),), flat=True) for at, start, count in place["flat"]]
        empty = [Part((at,), (Run(0, count),), flat=True, padding=True) for at, count in place.get("padding", ())]
        return Parts(((rank, (*held, *empty)),))
    if "boxes" in place:
        return Parts(((rank, tuple(Part(tuple(at), tuple(Run(*run) for run in runs)) for at, runs in place["boxes"])),))
    return placements_of(place, axes)


def placements_of(place: Described, axes: Axes) -> Placements:
    """DTensor placements in our order: a strided shard comes after the shards to its right that it strides over."""
    placed: list[tuple[str, Placement]] = []
    later: list[tuple[str, Placement]] = []
    described = [(axes.of(ranks), text) for ranks, text in place["axes"]]
    for i, (names, text) in enumerate(described):
        kind, *rest = text.split()
        if kind == "replicate" or not names:
            continue
        if kind == "shard":
            placed += [(a, Shard(int(rest[0]))) for a in names]
        elif kind == "strided":
            dim, factor = int(rest[0]), int(rest[1])
            over = math.prod(axes.mesh.length(a) for ns, t in described[i + 1 :] if t == f"shard {dim}" for a in ns)
            if factor == over:
                later += [(a, Shard(dim)) for a in names]
            elif factor == 1:
                placed += [(a, Shard(dim)) for a in names]
            else:
                raise NoLineage(f"a strided shard with factor {factor} over {over} shards")
        elif kind == "partial" and rest[0] in ("sum", "avg"):
            placed += [(a, Partial(rest[0])) for a in names]
        else:
            raise NoLineage(f"placement {text}")
    return Placements(tuple(placed + later))


def cut_of(name: str, cuts: Cuts) -> Spelling | None:
    if name in cuts:
        return cuts[name]
    return next((form for pattern, form in cuts.items() if fnmatch.fnmatch(name, pattern)), None)


def is_partial(form: Form) -> bool:
    return isinstance(form, Placements) and any(isinstance(p, Partial) for _, p in form.axes)


class Lineages:
    """All layouts of a plan."""

    def __init__(self, logical: Program, ranks: Sequence[Held], mesh: Mesh, batch: Batch, cuts: Cuts):
        self.logical, self.ranks, self.mesh, self.batch, self.cuts = logical, ranks, mesh, batch, cuts
        self.axes = Axes(mesh)

    def layouts(self) -> Iterator[Layout]:
        for name in self.logical.inputs:
            if name in self.batch:
                yield lies(name, self.batch[name])
            else:
                held = {h.rank: self.mask_form(h, name) for h in self.ranks if name in h.program.inputs}
                yield from self.joined(name, name, held)
        for h in self.ranks:
            if more := [n for n in h.program.inputs if n not in self.logical.inputs]:
                raise NoLineage(f"rank {h.rank} draws the dropout mask {more[0]}, which the reference does not draw")
        self._same_names()
        for name in (*self.logical.parameters, *self.logical.state):
            for local in (name, *self.copies(name)):
                held = {h.rank: self.form(h, local, local) for h in self.ranks if local in h.program.tensors}
                if held:
                    yield from self.joined(name, local, held)

    def _same_names(self) -> None:
        """Names come from where the models are found. Where ranks have others than the reference, nothing says which is which."""
        known = {*self.logical.parameters, *self.logical.state}
        held = {n for h in self.ranks for n in (*h.program.parameters, *h.program.state, *h.placed)}
        gone = next((n for n in self.logical.parameters if n not in held and not self.copies(n)), None)
        for h in self.ranks if gone is not None else ():
            if (more := next((n for n in h.program.parameters if n not in known and "of" not in h.placed.get(n, {})), None)) is not None:
                hint = "let the steps of both refer to models with the same names"
                raise NoLineage(f"rank {h.rank} has a parameter {more}, which the reference has not, and no rank has {gone}; {hint}")

    def copies(self, name: str) -> list[str]:
        """Other tensors of ranks that hold a parameter."""
        return list(dict.fromkeys(n for h in self.ranks for n, place in h.placed.items() if place.get("of") == name))

    def form(self, h: Held, name: str, local: str) -> Form:
        """How a source lies on one rank."""
        if name in h.placed:
            return form_of(h.placed[name], self.axes, h.rank)
        shape, whole = h.program.tensors[local].shape, self.logical.tensors[name].shape
        base = next((p for p in self.logical.parameters if name == p or name.startswith(p + ".")), name)
        said = cut_of(base, self.cuts)
        if said is not None:
            return layout(name, said).form
        if shape == whole:
            return Placements(())
        hint = f"say how it is cut: cuts={{{base!r}: '(tp o) k'}}"
        raise NoLineage(f"{name} is {list(shape)} on rank {h.rank} and {list(whole)} on one device; {hint}")

    def mask_form(self, h: Held, name: str) -> Form:
        """How a dropout mask lies: as its activation does. Every dimension that is shorter than in the reference is cut over the only
        mesh axes of that size."""
        said = cut_of(name, self.cuts)
        if said is not None:
            return layout(name, said).form
        shape, whole = h.program.tensors[name].shape, self.logical.tensors[name].shape
        axes = [a for a in self.mesh.names if self.mesh.length(a) > 1]
        ways: list[Placements] = []
        for dims in itertools.product((None, *range(len(whole))), repeat=len(axes)):
            shards = [(a, d) for a, d in zip(axes, dims, strict=True) if d is not None]
            sizes = [math.prod(self.mesh.length(a) for a, e in shards if e == d) for d in range(len(whole))]
            if len(shape) == len(whole) and all(s * n == w for s, n, w in zip(shape, sizes, whole, strict=True)):
                ways.append(Placements(tuple((a, Shard(d)) for a, d in shards)))
        if len(ways) != 1:
            hint = f"say how it is cut: cuts={{{name!r}: '(dp b) s h'}}"
            raise NoLineage(f"the dropout mask {name} is {list(shape)} on rank {h.rank} and {list(whole)} on one device; {hint}")
        return ways[0]

    def joined(self, logical: str, local: str, held: Mapping[int, Form]) -> Iterator[Layout]:
        """Ranks with equal forms in one layout."""
        by_form: dict[Form, list[int]] = {}
        explicit = tuple(part for form in held.values() if isinstance(form, Parts) for part in form.by_rank)
        if explicit:
            yield Layout(logical, local, Parts(explicit))
        for rank, form in held.items():
            if not isinstance(form, Parts):
                by_form.setdefault(form, []).append(rank)
        for form, ranks in by_form.items():
            if len(ranks) == self.mesh.size:
                yield Layout(logical, local, form)
                continue
            where = self.where(ranks)
            if where is not None:
                yield Layout(logical, local, form, where)
                continue
            whole = Layout(logical, local, form)
            shape = self.logical.tensors[logical].shape
            yield Layout(logical, local, Parts(tuple((r, whole.parts(self.mesh, r, shape)) for r in ranks)))

    def where(self, ranks: Sequence[int]) -> tuple[tuple[str, int], ...] | None:
        """Mesh coordinates that exactly these ranks have."""
        common = [(a, c) for a, c in self.mesh.coordinates(ranks[0]).items() if all(self.mesh.coordinates(r)[a] == c for r in ranks)]
        found = self.mesh.ranks(**dict(common))
        return tuple(common) if found == tuple(sorted(ranks)) else None

    def gradients(self) -> tuple[list[Layout], set[str]]:
        """Layouts of gradients that do not lie as their parameters do, and the parameters whose gradients are summands on some rank."""
        found: list[Layout] = []
        partial: set[str] = set()
        for name in self.logical.parameters:
            target = self.logical.output("gradient", name)
            if target is None:
                continue
            by_local: dict[str, dict[int, Form]] = {}
            differs = False
            for h, own in itertools.product(self.ranks, (name, *self.copies(name))):
                local, place = h.program.output("gradient", own), h.placed.get(f"gradient of {own}")
                if local is None:
                    continue
                form: Form = form_of(place, self.axes, h.rank) if place is not None else self.form(h, own, own)
                if is_partial(form):
                    partial.add(name)
                differs = differs or own != name or form != self.form(h, own, own)
                by_local.setdefault(local, {})[h.rank] = form
            if differs and name not in partial:
                for local, held in by_local.items():
                    found += list(self.joined(target, local, held))
        return found, partial
