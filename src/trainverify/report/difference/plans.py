"""What changed between two plans or programs: ops by what they make, in groups of ranks that change alike; groups by their members."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainverify.graph.plan import Groups, Plan, Template, reachable, units
from trainverify.graph.program import Function, Op, Program, Ref, Value, show_value
from trainverify.report.difference.change import Change, between, ranks_in_words

_SHOWN = 8  # values of a reference that are listed, rank by rank


@dataclass(frozen=True)
class Side:
    """The program of some ranks, and what its references mean there."""

    program: Program
    functions: Mapping[str, Function]
    bindings: Mapping[str, tuple[Value, ...]]  # by rank of the group
    groups: Groups

    def value(self, value: Value, group: bool) -> object:
        """A value as all ranks of the group have it; groups by their members."""
        if isinstance(value, tuple):
            return tuple(self.value(v, group) for v in value)
        if isinstance(value, Ref) and value.name in self.bindings:
            column = tuple(self.value(v, group) for v in self.bindings[value.name])
            return column[0] if all(v == column[0] for v in column) else ("by rank", *column)
        return self.groups.get(value, value) if group and isinstance(value, str) else value

    def meaning(self, op: Op) -> object:
        attrs = tuple((k, repr(self.value(v, k == "group"))) for k, v in op.attrs)  # 1, 1.0 and True are not the same
        return op.name, op.inputs, op.outputs, op.phase, attrs

    def text(self, op: Op) -> str:
        refers = [(k, v) for k, v in op.attrs if isinstance(v, Ref) and v.name in self.bindings]
        where = f"  ({op.source})" if op.source is not None else ""
        means = "; ".join(f"{k} {_column(self.value(v, k == 'group'))}" for k, v in refers)
        return f"{op}{where}" + (f"  [{means}]" if means else "")


def _column(value: object) -> str:
    if isinstance(value, tuple) and value[:1] == ("by rank",):
        several = list(dict.fromkeys(value[1:]))
        shown = ", ".join(_plain(v) for v in several[:_SHOWN])
        return f"by rank {shown}" + (f", … ({len(several)})" if len(several) > _SHOWN else "")
    return _plain(value)


def _plain(value: object) -> str:
    return show_value(value) if not isinstance(value, tuple) else "[" + ", ".join(_plain(v) for v in value) + "]"  # type: ignore[arg-type]


def program_changes(old: Program, new: Program) -> list[Change]:
    """Of two logical programs."""
    found = [*between("program", "name", {"": old.name}, {"": new.name})]
    sides = Side(old, old.functions, {}, {}), Side(new, new.functions, {}, {})
    return [*found, *(Change(where or "program", what, a, b) for where, what, a, b in _sides(*sides))]


def plan_changes(old: Plan, new: Plan) -> list[Change]:
    found = [
        *between("plan", "name", {"": old.name}, {"": new.name}),
        *between("plan", "mesh", {"": str(old.mesh)}, {"": str(new.mesh)}),
        *between("plan", "approximation", {a: a for a in old.allow}, {a: a for a in new.allow}),
        *between("plan", "group", _groups(old.groups), _groups(new.groups)),
        *between("plan", "lineage", _lineage(old), _lineage(new)),
    ]
    by_change: dict[tuple[str, str, str | None, str | None], list[int]] = {}
    for ranks, *sides in _pairs(old, new):
        for change in _sides(*sides):
            by_change.setdefault(change, []).extend(ranks)
    alone = sorted(set(range(old.size)) ^ set(range(new.size)))
    if alone:
        there = old.size < new.size
        text = f"{ranks_in_words(alone, -1)}"
        found.append(Change("plan", "ranks", None if there else text, text if there else None))
    size = min(old.size, new.size) if not alone else -1
    for (inside, what, a, b), changed in by_change.items():
        where = ranks_in_words(changed, size)
        found.append(Change(f"{where}, {inside}" if inside else where, what, a, b))
    return found


def _groups(groups: Groups) -> dict[str, str]:
    return {
        name: f"{name}: {', '.join(map(str, ranks[:32]))}{', …' if len(ranks) > 32 else ''} ({len(ranks)})"
        for name, ranks in groups.items()
    }


def _lineage(plan: Plan) -> dict[str, str]:
    """Layouts by local and logical tensor and place, in their notation."""
    found: dict[str, str] = {}
    for lay in plan.lineage:
        key = f"{lay.local} {lay.logical} {lay.where}"
        while key in found:
            key += "'"
        found[key] = str(lay)
    return found


def _pairs(old: Plan, new: Plan) -> Iterator[tuple[tuple[int, ...], Side, Side]]:
    """Ranks that ran one program and run one program now."""
    before, after = units(old), units(new)
    here: dict[int, tuple[int, int]] = {r: (n, i) for n, t in enumerate(before) for i, r in enumerate(t.ranks)}
    there: dict[int, tuple[int, int]] = {r: (n, i) for n, t in enumerate(after) for i, r in enumerate(t.ranks)}
    together: dict[tuple[int, int], list[int]] = {}
    for r in sorted(here.keys() & there.keys()):
        together.setdefault((here[r][0], there[r][0]), []).append(r)
    for (a, b), ranks in together.items():
        yield (
            tuple(ranks),
            _side(old, before[a], [here[r][1] for r in ranks]),
            _side(new, after[b], [there[r][1] for r in ranks]),
        )


def _side(plan: Plan, unit: Template, rows: Sequence[int]) -> Side:
    bindings = {n: tuple(column[i] for i in rows) for n, column in unit.bindings.items()}
    bodies = reachable(unit.program.ops, {**plan.functions, **unit.program.functions})
    return Side(unit.program, bodies, bindings, plan.groups)


def _sides(old: Side, new: Side) -> Iterator[tuple[str, str, str | None, str | None]]:
    """(where inside the program, what, old, new)."""
    a, b = old.program, new.program
    for what, was, now in (
        ("input", a.inputs, b.inputs),
        ("parameter", a.parameters, b.parameters),
        ("state", a.state, b.state),
    ):
        yield from _named(what, {n: f"{n}: {a.tensors[n]}" for n in was}, {n: f"{n}: {b.tensors[n]}" for n in now})
    yield from _named("domain", {n: f"{n}: {d}" for n, d in a.domains.items()}, {n: f"{n}: {d}" for n, d in b.domains.items()})
    yield from _ops("", old, new, a.ops, b.ops, {n: str(t) for n, t in a.tensors.items()}, {n: str(t) for n, t in b.tensors.items()})
    for name in [*old.functions, *(n for n in new.functions if n not in old.functions)]:
        f, g = old.functions.get(name), new.functions.get(name)
        if f is None or g is None:
            some = f or g
            assert some is not None
            text = f"{name}: {len(some.ops)} ops"
            yield "", "function", text if f else None, text if g else None
            continue
        types = [{n: str(t) for n, t in x.tensors.items()} for x in (f, g)]
        yield from _ops(f"function {name}", old, new, f.ops, g.ops, *types)
    yield from _named("output", {str(o): f"{o}: {o.tensor}" for o in a.outputs}, {str(o): f"{o}: {o.tensor}" for o in b.outputs})


def _named(what: str, old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[tuple[str, str, str | None, str | None]]:
    for c in between("", what, old, new):
        yield "", what, c.old, c.new


def _ops(
    where: str, old: Side, new: Side, was: Sequence[Op], now: Sequence[Op], types: Mapping[str, str], now_types: Mapping[str, str]
) -> Iterator[tuple[str, str, str | None, str | None]]:
    """Ops by what they make; those that make nothing by what they send."""
    before, after = _keyed(was), _keyed(now)
    for key, op in before.items():
        other = after.get(key)
        if other is None:
            yield where, "op", old.text(op), None
        elif old.meaning(op) != new.meaning(other):
            yield where, "op", old.text(op), new.text(other)
        else:
            shapes = [(o, types.get(o), now_types.get(o)) for o in op.outputs]
            for o, a, b in shapes:
                if a != b:
                    yield where, "tensor", f"{o}: {a}", f"{o}: {b}"
    for key, op in after.items():
        if key not in before:
            yield where, "op", None, new.text(op)
    kept = [k for k in before if k in after], [k for k in after if k in before]
    if kept[0] != kept[1]:
        first = next(i for i, (a, b) in enumerate(zip(*kept, strict=True)) if a != b)
        yield where, "order", f"{before[kept[0][first]]} comes first", f"{after[kept[1][first]]} comes first"


def _keyed(ops: Sequence[Op]) -> dict[object, Op]:
    found: dict[object, Op] = {}
    for op in ops:
        key: tuple[object, ...] = ("makes", *op.outputs) if op.outputs else (op.name, *op.inputs, 0)
        while key in found:
            key = (*key, "again")
        found[key] = op
    return found
