"""Lineage of a plan against the logical program: every source is covered, nothing is claimed twice, all outputs are there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from trainverify.check.coverage import Box, TooFine, flat, overlap, plain, show, uncovered, volume
from trainverify.check.findings import Report, others
from trainverify.check.layouts import Layouts, ill_formed, part_problem, stray
from trainverify.check.operators import malformed
from trainverify.graph.lineage import Layout, Part, Parts
from trainverify.graph.obligations import is_partial, obligations
from trainverify.graph.plan import Plan, Template
from trainverify.graph.program import Output, Program
from trainverify.graph.types import TensorType


def check_lineage(logical: Program, plan: Plan, units: Sequence[Template], report: Report) -> None:
    """All checks of lineage and obligations. Every rank runs one of `units`."""
    _Lineage(logical, plan, units, report).check()


class _Lineage:
    def __init__(self, logical: Program, plan: Plan, units: Sequence[Template], report: Report):
        self.logical = logical
        self.plan = plan
        self.mesh = plan.mesh
        self.units = units
        self.report = report
        self.layouts = Layouts(plan.mesh)
        self.unit_of = {r: i for i, u in enumerate(units) for r in u.ranks}
        self._by_unit: dict[tuple[int, ...], dict[int, tuple[int, ...]]] = {}  # some ranks, by unit
        self.kinds = {n: kind for kind, ns in _kinds(logical) for n in ns}
        self.local_kinds = [{n: kind for kind, ns in _kinds(u.program) for n in ns} for u in units]
        self.types = {n: t for n, t in logical.tensors.items() if malformed(t) is None}
        self.broken: set[str] = set()  # logical tensors with a layout that cannot be read
        self.doubtful: set[str] = set()  # local tensors with one
        self._split: dict[Any, dict[int, tuple[int, ...]]] = {}
        self._seen: set[Any] = set()

    def check(self) -> None:
        good = [lay for lay in dict.fromkeys(self.plan.lineage) if self._readable(lay)]  # said twice is said once
        for lay in good:
            self._fits(lay)
        self._locals(good)
        self._logicals(good)
        self._obligations(good)

    def shown(self, lay: Layout) -> str:
        """A layout in the user's notation."""
        form = "explicit parts" if isinstance(lay.form, Parts) else str(lay.form)
        where = f", {', '.join(f'{a}={i}' for a, i in lay.where)}" if lay.where else ""
        return f"{lay.local} ~ {lay.logical}: {self.types.get(lay.logical, '?')} {form} on {self.mesh}{where}"

    def split(self, lay: Layout) -> dict[int, tuple[int, ...]]:
        """Holders by program."""
        key = id(lay) if isinstance(lay.form, Parts) else lay.where
        if key not in self._split:
            found: dict[int, list[int]] = {}
            for r in lay.holders(self.mesh):
                found.setdefault(self.unit_of[r], []).append(r)
            self._split[key] = {u: tuple(rs) for u, rs in found.items()}
        return self._split[key]

    # -- one layout ---------------------------------------------------------------------------------------------------

    def _readable(self, lay: Layout) -> bool:
        """What it names exists, and it can be read as a layout of that tensor."""

        def bad(code: str, message: str, rank: int | None = None) -> bool:
            self.report.add(code, f"{self.shown(lay)}: {message}", rank=rank, tensor=lay.local)
            self.broken.add(lay.logical)
            self.doubtful.add(lay.local)
            return False

        problem = stray(lay, self.mesh)
        if problem is not None:
            return bad("TV302", problem)
        if lay.logical not in self.logical.tensors:
            return bad("TV302", f"{self.logical.name} has no tensor {lay.logical!r}")
        if lay.logical not in self.types:
            self.broken.add(lay.logical)
            return False  # its type is malformed
        for u, ranks in self.split(lay).items():
            if lay.local not in self.units[u].program.tensors:
                name = self.units[u].program.name
                return bad("TV302", f"{name} on rank {ranks[0]} has no tensor {lay.local!r}{others(len(ranks) - 1, 'ranks')}", ranks[0])
            if malformed(self.units[u].program.tensors[lay.local]) is not None:
                self.broken.add(lay.logical)
                self.doubtful.add(lay.local)
                return False
        problem = ill_formed(lay, self.mesh, self.types[lay.logical].shape)
        return True if problem is None else bad("TV303", problem)

    def _fits(self, lay: Layout) -> None:
        kind = self.types[lay.logical]
        for u, ranks in self.split(lay).items():
            program = self.units[u].program
            self._shape(lay, kind, u, ranks)
            mine, theirs = self.local_kinds[u].get(lay.local), self.kinds.get(lay.logical)
            if mine is None:
                continue
            if mine != theirs:
                what = f"a{'n' if theirs == 'input' else ''} {theirs}" if theirs else "computed"
                text = f"{lay.local!r} is {'an' if mine == 'input' else 'a'} {mine} of {program.name}, {lay.logical!r} is {what}"
                self.report.add("TV310", f"{self.shown(lay)}: {text}", rank=ranks[0], tensor=lay.local)
                continue
            here, there = program.domains.get(lay.local), self.logical.domains.get(lay.logical)
            if here != there:
                text = f"{program.name} assumes {here or 'nothing'} of {lay.local!r}, the logical program {there or 'nothing'}"
                self.report.add("TV309", f"{self.shown(lay)}: {text} of {lay.logical!r}", rank=ranks[0], tensor=lay.local)

    def _shape(self, lay: Layout, kind: TensorType, u: int, ranks: tuple[int, ...]) -> None:
        """Kinds are equal and a local tensor has the size of its piece."""
        local = self.units[u].program.tensors[lay.local]
        if local.kind != kind.kind:
            text = f"{lay.local!r} is {local}, {lay.logical!r} is {kind}"
            self.report.add("TV303", f"{self.shown(lay)}: {text}", rank=ranks[0], tensor=lay.local)
            self.broken.add(lay.logical)
        if isinstance(lay.form, Parts):
            chosen = set(ranks)
            for rank, parts in lay.form.by_rank:
                key = (parts, local.shape, kind.shape)
                if rank not in chosen or key in self._seen:
                    continue
                self._seen.add(key)
                problem = next((p for part in parts if (p := part_problem(part, local.shape, kind.shape)) is not None), None)
                if problem is None:
                    try:
                        self._shares(lay, rank, parts, kind.shape)
                    except TooFine as error:
                        self.report.add("TV304", f"{self.shown(lay)}: {error}", rank=rank, tensor=lay.local, severity="unsupported")
                else:
                    self.report.add("TV303", f"{self.shown(lay)}: {problem}", rank=rank, tensor=lay.local)
                    self.broken.add(lay.logical)
                    self.doubtful.add(lay.local)
            return
        for rank, shape in self.layouts.shapes(lay, kind.shape, (lay.where, u, len(ranks)), ranks):
            if shape != local.shape:
                text = f"rank {rank} holds a piece {list(shape)}, but {lay.local!r} is {local}"
                self.report.add("TV303", f"{self.shown(lay)}: {text}", rank=rank, tensor=lay.local)
                self.broken.add(lay.logical)
                self.doubtful.add(lay.local)
                break

    def _shares(self, lay: Layout, rank: int, parts: tuple[Part, ...], shape: tuple[int, ...]) -> None:
        """A rank does not hold one share of a position twice, nor shares of two different sums."""
        if all(p.partial is None for p in parts):
            return
        held = [p for p in parts if not p.padding]
        logical = [tuple((r,) for r in p.logical) for p in held]
        boxes = [box if p.flat else flat(box, shape) for p, box in zip(held, logical, strict=True)]
        for i, a in enumerate(held):
            for j in range(i):
                b = held[j]
                if a.partial is None and b.partial is None:
                    continue
                differs = a.partial is None or b.partial is None or (a.partial[0], a.partial[2]) != (b.partial[0], b.partial[2])
                if (differs or a.partial == b.partial) and _meet(boxes[j], boxes[i]):
                    self.report.add("TV304", f"{self.shown(lay)}: {b} and {a} of rank {rank}", rank=rank, tensor=lay.local)
                    return

    # -- local tensors ------------------------------------------------------------------------------------------------

    def _locals(self, good: Sequence[Layout]) -> None:
        """Every source has lineage on every rank; pieces of one local tensor do not overlap and leave nothing out."""
        claims: dict[int, dict[tuple[str, str | None], list[Layout]]] = {u: {} for u in range(len(self.units))}
        for lay in good:
            for u in self.split(lay):
                # a source is one thing; a tensor that is computed may be found in several logical ones
                logical = None if lay.local in self.local_kinds[u] else lay.logical
                claims[u].setdefault((lay.local, logical), []).append(lay)
        for u, unit in enumerate(self.units):
            for (local, logical), layouts in claims[u].items():
                if local not in self.doubtful:
                    self._local(u, local, layouts, source=logical is None)
            for name, kind in self.local_kinds[u].items():
                if (name, None) not in claims[u] and name not in self.doubtful and name in unit.program.tensors:
                    self._unheld(unit, name, kind, unit.ranks)

    def _unheld(self, unit: Template, name: str, kind: str, ranks: Sequence[int]) -> None:
        text = f"{kind} {name}: {unit.program.tensors[name]} of {unit.program.name}{others(len(ranks) - 1, 'ranks')}"
        hint = f"say which part of which logical tensor {name!r} holds"
        self.report.add("TV301", text, rank=ranks[0], tensor=name, hint=hint)

    def _local(self, u: int, local: str, layouts: list[Layout], source: bool) -> None:
        unit = self.units[u]
        held: dict[int, list[Layout]] = {}
        if len(layouts) > 1 or isinstance(layouts[0].form, Parts):
            for lay in layouts:
                for r in self.split(lay)[u]:
                    held.setdefault(r, []).append(lay)
            ranks: Iterable[int] = held
        else:
            ranks = self.split(layouts[0])[u]
        if source:
            covered = set(ranks)
            missing = [r for r in unit.ranks if r not in covered] if len(covered) < len(unit.ranks) else []
            if missing:
                self._unheld(unit, local, self.local_kinds[u][local], missing)
        explicit = {id(lay): dict(lay.form.by_rank) for lay in layouts if isinstance(lay.form, Parts)}
        seen: set[Any] = set()
        for rank, here in held.items():
            if len(here) == 1 and id(here[0]) not in explicit:
                continue  # one piece of the right size
            parts: list[Part] = []
            for lay in here:
                known = explicit.get(id(lay))
                parts += lay.parts(self.mesh, rank, self.types[lay.logical].shape) if known is None else known[rank]
            key = tuple((p.local, tuple(r.size for r in p.logical), p.flat) for p in parts)
            if key not in seen:
                seen.add(key)
                self._pieces(unit, local, rank, here, parts)

    def _pieces(self, unit: Template, local: str, rank: int, layouts: list[Layout], parts: list[Part]) -> None:
        kind = unit.program.tensors[local]
        found = [
            (p.flat, tuple(plain(s, s + r.size) for s, r in zip(p.local, p.logical, strict=True)))
            for p in parts
            if (len(p.local) == (1 if p.flat else len(kind.shape)) == len(p.logical))
        ]
        if len(found) != len(parts):
            return  # said already
        who = f"{local}: {kind} of {unit.program.name}"
        logicals = ", ".join(dict.fromkeys(lay.logical for lay in layouts))
        try:
            boxes, shape = _same_space(found, kind.shape)
            boxes = [piece for b in boxes for piece in _plain(b)]
            pair = overlap([b for b in boxes if volume(b)])
            gap = uncovered(boxes, shape)
        except TooFine as error:
            self.report.add("TV303", f"{who} ~ {logicals}: {error}", rank=rank, tensor=local, severity="unsupported")
            return
        if pair is not None and len(boxes) == len(parts):
            solid = [p for p, b in zip(parts, boxes, strict=True) if volume(b)]
            a, b = (solid[i] for i in pair)
            self.report.add("TV304", f"{who} ~ {logicals}: {a} and {b} overlap in it", rank=rank, tensor=local)
        elif pair is not None:
            self.report.add("TV304", f"{who} ~ {logicals}: parts overlap in it", rank=rank, tensor=local)
        if gap is not None:
            hint = "declare padding as a part with padding=True"
            self.report.add("TV303", f"{who} ~ {logicals}: no part speaks of {show(gap)}", rank=rank, tensor=local, hint=hint)

    # -- logical tensors ----------------------------------------------------------------------------------------------

    def _logicals(self, good: Sequence[Layout]) -> None:
        """Every logical source is held, whole, and all of it."""
        by_logical: dict[str, list[Layout]] = {}
        for lay in good:
            by_logical.setdefault(lay.logical, []).append(lay)
        for name, kind in self.kinds.items():
            if name in self.broken or name not in self.types:
                continue
            held = [x for x in by_logical.get(name, []) if all(x.local in self.local_kinds[u] for u in self.split(x))]
            if not held:
                text = f"{kind} {name}: {self.types[name]} of {self.logical.name} lives on no rank"
                self.report.add("TV301", text, tensor=name)
                continue
            partial = next((x for x in held if is_partial(x)), None)
            if partial is not None:
                text = f"{self.shown(partial)}: {'an input' if kind == 'input' else f'a {kind}'} has no summands"
                self.report.add("TV306", text, tensor=partial.local)
            else:
                self._complete(f"{kind} {name}", self.types[name].shape, held)
        for lay in good:
            if is_partial(lay) and lay.logical not in self.kinds and lay.logical not in self.broken:
                self._summands(lay)

    def _complete(self, what: str, shape: tuple[int, ...], held: Sequence[Layout]) -> None:
        try:
            boxes, space = _same_space([b for x in held for b in self.layouts.reach(x, shape)], shape)
            gap = uncovered(boxes, space)
        except TooFine as error:
            text = f"{what}: {self.shown(held[0])}: {error}"
            self.report.add("TV305", text, tensor=held[0].local, severity="unsupported")
            return
        if gap is not None:
            where = f"flat positions {show(gap)}" if len(space) != len(shape) else show(gap)
            text = f"{what}: no rank holds {where} of {self.shown(held[0])}{others(len(held) - 1, 'layouts')}"
            self.report.add("TV305", text, tensor=held[0].local)

    def _summands(self, lay: Layout) -> None:
        """All shares of a sum are somewhere."""
        if isinstance(lay.form, Parts):
            shares: dict[Any, set[int]] = {}
            for parts in dict.fromkeys(ps for _, ps in lay.form.by_rank):
                for p in parts:
                    if p.partial is not None:
                        shares.setdefault((p.partial[0], p.partial[2], p.flat, p.logical), set()).add(p.partial[1])
            for (_, n, _, runs), found in shares.items():
                if len(found) < n:
                    text = f"{self.shown(lay)}: {len(found)} of {n} summands of [{', '.join(map(str, runs))}] exist"
                    self.report.add("TV305", text, tensor=lay.local)
                    return
            return
        axes = [a for a, p in getattr(lay.form, "axes", ()) if hasattr(p, "op")] or [a for a, _ in getattr(lay.form, "partial", ())]
        chosen = next((a for a in axes if a in dict(lay.where) and self.mesh.length(a) > 1), None)
        if chosen is not None:
            text = f"{self.shown(lay)}: the summands with another {chosen} do not exist"
            self.report.add("TV305", text, tensor=lay.local)

    # -- obligations --------------------------------------------------------------------------------------------------

    def _obligations(self, good: Sequence[Layout]) -> None:
        self._something()
        plan = Plan(self.plan.name, self.mesh, self.plan.templates, self.plan.groups, tuple(good), self.plan.functions)
        found, missing = obligations(self.logical, plan, self.units)
        for m in missing:
            if m.output.of not in self.broken and m.output.tensor not in self.broken:
                hint = None if m.rank is None else f"report it as an output, with role {m.output.role!r} of {m.local!r}"
                self.report.add("TV307", m.reason, rank=m.rank, tensor=m.local, hint=hint)
        declared = {id(lay) for lay in good}
        for obligation in found:
            output = obligation.output
            kind = self.types.get(output.tensor)
            if kind is None or output.of in self.broken or output.tensor in self.broken:
                continue
            for holding in obligation.holdings:
                self._holding(output, kind, holding.layout, holding.ranks)
            pieces = [h.layout for h in obligation.holdings]
            if any(id(x) in declared for x in pieces) and not any(map(is_partial, pieces)):
                self._complete(str(output), kind.shape, pieces)  # others live as their parameter does
        if not self.logical.outputs:
            self.report.add("TV308", f"{self.logical.name} has no outputs")

    def _holding(self, output: Output, kind: TensorType, lay: Layout, ranks: tuple[int, ...]) -> None:
        if is_partial(lay):
            text = f"{output}: {self.shown(lay)} at the end of the step"
            self.report.add("TV306", text, rank=ranks[0], tensor=lay.local, hint="reduce it before it is reported")
            return
        problem = ill_formed(lay, self.mesh, kind.shape)
        if problem is not None:
            self.report.add("TV303", f"{output}: {self.shown(lay)}: {problem}", rank=ranks[0], tensor=lay.local)
            return
        if ranks not in self._by_unit:
            by_unit: dict[int, list[int]] = {}
            for r in ranks:
                by_unit.setdefault(self.unit_of[r], []).append(r)
            self._by_unit[ranks] = {u: tuple(rs) for u, rs in by_unit.items()}
        for u, rs in self._by_unit[ranks].items():
            local = self.units[u].program.tensors.get(lay.local)
            if local is not None and malformed(local) is None:
                self._shape(lay, kind, u, rs)

    def _something(self) -> None:
        """The logical program says enough to be verified."""
        has = {(o.role, o.of) for o in self.logical.outputs}
        name = self.logical.name
        stepped = any(role == "parameter" for role, _ in has)
        if not any(role == "loss" for role, _ in has):
            text = f"{name} reports no loss" + (": none is compared" if stepped else "")
            self.report.add("TV308", text, hint="report what is minimised as the loss", severity="warning" if stepped else "error")
        parameters = self.logical.parameters
        bare = [p for p in parameters if ("gradient", p) not in has and ("parameter", p) not in has]
        if bare and len(bare) == len(parameters):
            text = f"{name} has neither gradients nor updated parameters: only the forward pass would be verified"
            self.report.add("TV308", text, hint="complete(...) makes the whole training step")
            return
        for p in parameters:
            if p in bare or (stepped and ("parameter", p) not in has):
                what = "gradient and updated value" if p in bare else "updated value"
                text = f"parameter {p} of {name} has no {what} among the outputs"
                self.report.add("TV308", text, tensor=p, hint="declare a parameter that is not trained as state")


def _kinds(program: Program) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return ("input", program.inputs), ("parameter", program.parameters), ("state", program.state)


def _same_space(found: Sequence[tuple[bool, Box]], shape: tuple[int, ...]) -> tuple[list[Box], tuple[int, ...]]:
    """Boxes in the tensor, or, as soon as one is flat, all in the flattened tensor."""
    if not any(is_flat for is_flat, _ in found):
        return [box for _, box in found], shape
    return [box if is_flat else flat(box, shape) for is_flat, box in found], (math.prod(shape),)


def _intervals(box: Box) -> list[tuple[int, int]]:
    """A flat box as sorted ranges."""
    return sorted((r.start + i * r.stride, r.start + i * r.stride + r.block) for r in box[0] for i in range(r.count))


def _plain(box: Box) -> list[Box]:
    """A flat box as ranges; others have nothing but ranges."""
    return [box] if len(box) != 1 else [(plain(a, b),) for a, b in _intervals(box)]


def _meet(a: Box, b: Box) -> bool:
    """Whether two flat boxes have positions in common."""
    mine, theirs = _intervals(a), _intervals(b)
    i = j = 0
    while i < len(mine) and j < len(theirs):
        if mine[i][0] < theirs[j][1] and theirs[j][0] < mine[i][1]:
            return True
        if mine[i][1] <= theirs[j][1]:
            i += 1
        else:
            j += 1
    return False
