"""Plans: what every rank runs, stored once per distinct program.

A `Template` is a program with references, the ranks that run it, and one column of values per reference.
An `Edit` changes one op on one rank. `units` gives the programs as they really run: templates, split where
edits apply. Nothing here ever holds one object per rank and op.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trainverify.graph.lineage import Lineage
from trainverify.graph.mesh import Mesh
from trainverify.graph.program import CALL, Function, Op, Program, Ref, Value, bind
from trainverify.graph.types import TensorType

Groups = Mapping[str, tuple[int, ...]]


class PlanError(Exception):
    """A plan that contradicts itself: ranks without a program, an edit of nothing."""


@dataclass(frozen=True)
class Template:
    """`bindings[name][i]` is what `Ref(name)` means on `ranks[i]`."""

    program: Program
    ranks: tuple[int, ...]
    bindings: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)

    def bound(self, rank: int) -> dict[str, Value]:
        i = self.ranks.index(rank)
        return {name: column[i] for name, column in self.bindings.items()}

    def __repr__(self) -> str:
        return f"<{self.program!r} on {len(self.ranks)} ranks>"


@dataclass(frozen=True)
class Edit:
    """On `rank`, the op at `path` is replaced by `ops` (none: deleted; two: something inserted).

    `path` counts ops: (5,) is op 5 of the program, (5, 2) op 2 of the function that op 5 calls.
    """

    rank: int
    path: tuple[int, ...]
    ops: tuple[Op, ...]
    tensors: Mapping[str, TensorType] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    name: str
    mesh: Mesh
    templates: tuple[Template, ...]
    groups: Groups = field(default_factory=dict)
    lineage: Lineage = ()
    functions: Mapping[str, Function] = field(default_factory=dict)
    edits: tuple[Edit, ...] = ()
    allow: tuple[str, ...] = ()  # approximations that it declares: the logical program is changed by them, and the report says so

    @property
    def size(self) -> int:
        return self.mesh.size

    def __repr__(self) -> str:
        ops = sum(len(t.program.ops) for t in self.templates)
        return f"<plan {self.name} on {self.mesh}: {len(self.templates)} programs, {ops} ops>"


def units(plan: Plan) -> tuple[Template, ...]:
    """The templates as they run: a rank with edits has one of its own."""
    if not plan.edits:
        return plan.templates
    edited: dict[int, list[Edit]] = {}
    for edit in plan.edits:
        edited.setdefault(edit.rank, []).append(edit)
    result: list[Template] = []
    for t in plan.templates:
        plain = [i for i, r in enumerate(t.ranks) if r not in edited]
        if plain:
            result.append(pick(t, plain))
        for i, r in enumerate(t.ranks):
            if r in edited:
                alone = pick(t, [i])
                program = alone.program
                for edit in edited[r]:
                    program = apply_edit(program, plan.functions, edit)
                result.append(replace(alone, program=program))
    missing = set(edited) - {r for t in plan.templates for r in t.ranks}
    if missing:
        raise PlanError(f"edit of rank {min(missing)}, which runs no program")
    return tuple(result)


def pick(t: Template, rows: Sequence[int]) -> Template:
    """A template for some of its rows only."""
    if len(rows) == len(t.ranks):
        return t
    return replace(t, ranks=tuple(t.ranks[i] for i in rows), bindings={n: tuple(c[i] for i in rows) for n, c in t.bindings.items()})


def apply_edit(program: Program, functions: Mapping[str, Function], edit: Edit) -> Program:
    """A program with one edit; bodies on the way to it are copied under a name of their own."""
    known = {**functions, **program.functions}
    fresh = dict(program.functions)

    def change(ops: tuple[Op, ...], path: tuple[int, ...]) -> tuple[Op, ...]:
        i, *rest = path
        if not 0 <= i < len(ops):
            raise PlanError(f"edit at {list(edit.path)}: there are {len(ops)} ops")
        if not rest:
            return (*ops[:i], *edit.ops, *ops[i + 1 :])
        name = str(ops[i].get("function"))
        if ops[i].name != CALL or name not in known:
            raise PlanError(f"edit at {list(edit.path)}: op {i} ({ops[i].name}) calls no function")
        body = known[name]
        new = f"{name}@{edit.rank}." + ".".join(map(str, edit.path[: len(edit.path) - len(rest)]))
        while new in known:  # a second edit below the same call
            new += "'"
        inner = change(body.ops, tuple(rest))
        tensors = {**body.tensors, **edit.tensors} if len(rest) == 1 else body.tensors
        fresh[new] = known[new] = replace(body, name=new, ops=inner, tensors=tensors)
        return (*ops[:i], ops[i].with_attrs(function=new), *ops[i + 1 :])

    if not edit.path:
        raise PlanError("edit without a path")
    ops = change(program.ops, edit.path)
    tensors = {**program.tensors, **edit.tensors} if len(edit.path) == 1 else program.tensors
    return replace(program, ops=ops, functions=fresh, tensors=tensors)


def expand(plan: Plan, rank: int) -> Program:
    """The program of one rank, references resolved; bodies it calls come along."""
    for t in units(plan):
        if rank in t.ranks:
            bindings = t.bound(rank)
            bodies = {**plan.functions, **t.program.functions}
            used = reachable(t.program.ops, bodies)
            functions = {n: replace(f, ops=tuple(bind(o, bindings) for o in f.ops)) for n, f in used.items()}
            return replace(t.program, ops=tuple(bind(op, bindings) for op in t.program.ops), functions=functions)
    raise PlanError(f"rank {rank} runs no program")


def reachable(ops: Iterable[Op], functions: Mapping[str, Function]) -> dict[str, Function]:
    """The bodies that a list of ops calls, directly or not."""
    found: dict[str, Function] = {}
    todo = [str(o.get("function")) for o in ops if o.name == CALL]
    while todo:
        name = todo.pop()
        if name in functions and name not in found:
            found[name] = functions[name]
            todo += [str(o.get("function")) for o in functions[name].ops if o.name == CALL]
    return {n: functions[n] for n in sorted(found)}


def fold(
    name: str,
    mesh: Mesh,
    programs: Sequence[Program],
    groups: Groups,
    lineage: Lineage = (),
) -> Plan:
    """A plan from one program per rank. Programs that differ only in integers and names of groups share a template."""
    if len(programs) != mesh.size:
        raise PlanError(f"{len(programs)} programs for {mesh}")
    kinds: dict[Any, list[int]] = {}
    for rank, program in enumerate(programs):
        kinds.setdefault(skeleton(program, groups), []).append(rank)
    templates = [_template([programs[r] for r in ranks], ranks, groups) for ranks in kinds.values()]
    return Plan(name, mesh, tuple(templates), dict(groups), lineage)


def _loose(value: Value, groups: Groups) -> bool:
    """Values that ranks may differ in and still share a template."""
    return (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, str) and value in groups)


def _shape_of(value: Value, groups: Groups) -> Any:
    if isinstance(value, tuple):
        return ("t", *(_shape_of(v, groups) for v in value))
    return "*" if _loose(value, groups) else (type(value).__name__, repr(value))


def _beside_attrs(op: Op) -> tuple[Any, ...]:
    return op.name, op.inputs, op.outputs, op.phase, op.forward, op.source


def skeleton(program: Program, groups: Groups) -> Any:
    """What programs that share a template have in common."""

    def ops(items: tuple[Op, ...]) -> Any:
        return tuple((*_beside_attrs(o), tuple((k, _shape_of(v, groups)) for k, v in o.attrs)) for o in items)

    bodies = tuple((n, tuple(f.tensors.items()), f.inputs, f.outputs, ops(f.ops)) for n, f in sorted(program.functions.items()))
    heads = (program.name, program.inputs, program.parameters, program.state, program.outputs)
    return heads, tuple(program.tensors.items()), tuple(sorted(program.domains.items(), key=lambda x: x[0])), ops(program.ops), bodies


def _template(programs: list[Program], ranks: list[int], groups: Groups) -> Template:
    columns: dict[tuple[Any, ...], str] = {}

    def join(values: tuple[Value, ...]) -> Value:
        first = values[0]
        if isinstance(first, tuple):
            items = [v for v in values if isinstance(v, tuple)]
            return tuple(join(tuple(v[i] for v in items)) for i in range(len(first)))
        if all(v == first for v in values):
            return first
        return Ref(columns.setdefault(values, f"rank.{len(columns)}"))

    def joined(lists: list[tuple[Op, ...]]) -> tuple[Op, ...]:
        result = []
        for same in zip(*lists, strict=True):
            if all(o.attrs == same[0].attrs for o in same):
                result.append(same[0])
                continue
            attrs = tuple((k, join(tuple(o.attrs[i][1] for o in same))) for i, (k, _) in enumerate(same[0].attrs))
            result.append(replace(same[0], attrs=attrs))
        return tuple(result)

    head = programs[0]
    functions = {n: replace(f, ops=joined([p.functions[n].ops for p in programs])) for n, f in head.functions.items()}
    program = replace(head, ops=joined([p.ops for p in programs]), functions=functions)
    return Template(program, tuple(ranks), {name: values for values, name in columns.items()})
