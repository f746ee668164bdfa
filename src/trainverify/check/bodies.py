"""Ops of a program or function body: definitions, types, calls, references.

A body is looked at once. Only ops with references are looked at again, once per distinct combination of
values that ranks and calls bind: the cost never depends on ranks × ops.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from trainverify.check.findings import Report, names
from trainverify.check.operators import Operators, Problem, Types, malformed
from trainverify.graph.plan import Groups, Template
from trainverify.graph.program import (
    ALONE,
    CALL,
    MAX_CALL_DEPTH,
    PHASES,
    Function,
    Op,
    Program,
    Ref,
    Source,
    Value,
    call_bindings,
    refers,
    resolve,
)
from trainverify.graph.types import TensorType

MOST_OPS: Final = 20_000_000  # ops of one rank with all calls expanded
_NAMES_A_RANK: Final = ("peer", "root", "tag")  # integers that do not change the type of anything


@dataclass(frozen=True)
class Body:
    """A program or a function, as these checks see it: `results` are the tensors that leave it."""

    label: str
    tensors: Mapping[str, TensorType]
    sources: tuple[str, ...]
    ops: tuple[Op, ...]
    results: tuple[str, ...]

    @classmethod
    def of(cls, item: Program | Function) -> Body:
        if isinstance(item, Program):
            return cls(item.name, item.tensors, item.sources, item.ops, tuple(o.tensor for o in item.outputs))
        return cls(f"function {item.name}", item.tensors, item.inputs, item.ops, item.outputs)


def references(value: Value) -> Iterator[str]:
    if isinstance(value, Ref):
        yield value.name
    elif isinstance(value, tuple):
        for v in value:
            yield from references(v)


def op_references(op: Op) -> list[str]:
    return list(dict.fromkeys(n for _, v in op.attrs for n in references(v)))


def where(op: Op) -> Source | None:
    return op.source if isinstance(op.source, Source) else None


class Bodies:
    """Checks of bodies that share functions' signatures, groups (None: a logical program) and a report."""

    def __init__(self, operators: Operators, report: Report, groups: Groups | None):
        self.operators = operators
        self.report = report
        self.groups = groups
        self._done: set[Any] = set()
        self._types_of: dict[int, dict[str, TensorType]] = {}  # of a body, by its id: tensors with a well-formed type
        self._kept: list[Any] = []  # keeps checked objects alive: their ids are keys
        self._fine: set[Any] = set()  # ops without names that nothing is wrong with
        self._numbers: dict[TensorType, int] = {}
        self._number_of: dict[int, int] = {}  # of a type that is well-formed, by its id

    # -- once per body ------------------------------------------------------------------------------------------------

    def check(self, item: Program | Function, functions: Mapping[str, Function]) -> None:
        callees = tuple(id(functions.get(str(op.get("function")))) for op in item.ops if op.name == CALL)
        key = (id(item), callees)
        if key in self._done:
            return
        self._done.add(key)
        self._kept.append(item)
        body = Body.of(item)
        types = self._types_of[id(item)] = self._definitions(body)
        fine: set[int] = set()
        for op, sort in zip(body.ops, item.sorts, strict=True):
            if sort in fine:
                continue
            like = None if sort == ALONE else self._like(op, types)
            if like is not None and like in self._fine:
                fine.add(sort)
                continue
            count = self.report.count
            name: object = op.name
            if not isinstance(name, str):
                self.report.add("TV104", f"{body.label}: {op.name!r} is not the name of an operator", source=where(op))
            elif op.name == CALL:
                self._call(body, op, types, functions)
            else:
                self._op(body, op, types)
            if len({k for k, _ in op.attrs}) != len(op.attrs):
                self.report.add("TV106", f"{body.label}: {op}: an attribute is given twice", source=where(op))
            if op.phase not in PHASES:
                self.report.add("TV106", f"{body.label}: {op}: no phase {op.phase!r} ({', '.join(PHASES)})", source=where(op))
            if like is not None and self.report.count == count:
                self._fine.add(like)
        self._backward(body)

    def _like(self, op: Op, types: Mapping[str, TensorType]) -> Any:
        """What an op is without names; None for a call, or if a tensor has no type. Attributes as text: 1 is not True."""
        if op.name == CALL:
            return None
        number = self._number_of
        try:
            given = tuple([None if i is None else number[id(types[i])] for i in op.inputs])
            made = tuple([number[id(types[o])] for o in op.outputs])
        except KeyError:
            return None
        return op.name, repr(op.attrs) if op.attrs else "", given, made, op.phase

    def types_of(self, item: Program | Function) -> dict[str, TensorType]:
        """The tensors of a body that have a well-formed type."""
        if id(item) not in self._types_of:
            self._kept.append(item)
            self._types_of[id(item)] = {n: t for n, t in item.tensors.items() if self.well_formed(t) is None}
        return self._types_of[id(item)]

    def well_formed(self, kind: TensorType) -> str | None:
        """What is wrong with a type, if anything."""
        if id(kind) in self._number_of:
            return None
        bad = malformed(kind)
        if bad is None:
            self._number_of[id(kind)] = self._numbers.setdefault(kind, len(self._numbers))
            self._kept.append(kind)
        return bad

    def _definitions(self, body: Body) -> dict[str, TensorType]:
        """Single assignment in order; returns the tensors that have a type to go on with."""
        report, label = self.report, body.label
        known = self._number_of
        types = dict(body.tensors)
        for name, kind in body.tensors.items():
            if id(kind) not in known and (bad := self.well_formed(kind)) is not None:
                del types[name]
                report.add("TV113", f"{label}: tensor {name!r}: {bad}", tensor=name)
        defined: dict[str, int] = {}
        for name in body.sources:
            if name in defined:
                report.add("TV103", f"{label}: {name!r} is declared twice", tensor=name)
            defined[name] = -1
            if name not in body.tensors:
                report.add("TV113", f"{label}: {name!r} is declared without a type", tensor=name)
        early: list[tuple[Op, int, str]] = []  # what is used before it is there
        for i, op in enumerate(body.ops):
            for source in op.inputs:
                if source is not None and source not in defined:
                    early.append((op, i, source))
            for name in op.outputs:
                if name in defined:
                    first = "is a source" if defined[name] < 0 else f"is a result of {body.ops[defined[name]]}"
                    report.add("TV103", f"{label}: {op}: {name!r} {first} already", tensor=name, source=where(op))
                else:
                    defined[name] = i
                if name not in body.tensors:
                    report.add("TV113", f"{label}: {op}: {name!r} has no type", tensor=name, source=where(op))
        for op, i, source in early:
            if source not in defined:
                report.add("TV101", f"{label}: {op}: nothing defines {source!r}", tensor=source, source=where(op))
            elif defined[source] == i:
                report.add("TV102", f"{label}: {op}: {source!r} is its own result", tensor=source, source=where(op))
            else:
                later = body.ops[defined[source]]
                at = f" ({where(later)})" if where(later) else ""
                report.add("TV102", f"{label}: {op}: {source!r} is defined later, by {later}{at}", tensor=source, source=where(op))
        for name in body.tensors if body.tensors.keys() - defined.keys() else ():
            if name not in defined:
                report.add("TV101", f"{label}: {name!r} has a type, but nothing defines it", tensor=name)
        if body.label.startswith("function "):
            for name in body.results:
                if name not in defined:
                    report.add("TV101", f"{label}: it returns {name!r}, which nothing defines", tensor=name)
        return types

    def _backward(self, body: Body) -> None:
        forward = {o for op in body.ops if op.phase == "forward" for o in op.outputs}
        for op in body.ops:
            if op.forward is not None and op.forward not in forward:
                self.report.add(
                    "TV111",
                    f"{body.label}: {op} belongs to {op.forward!r}, which is no result of a forward op",
                    tensor=op.forward,
                    source=where(op),
                )

    def _op(self, body: Body, op: Op, types: Mapping[str, TensorType]) -> None:
        definition = self.operators.definition(op.name)
        if definition is None:
            hint = "pass its definition with ops="
            self.report.add("TV104", f"{body.label}: {op}: {op.name!r}", source=where(op), hint=hint, severity="unsupported")
            return
        if self.groups is None and (definition.collective or definition.point_to_point):
            self.report.add("TV112", f"{body.label}: {op}", source=where(op), hint="a logical program runs on one device")
            return
        if not refers(op):
            self.types(body, op, op.attributes, types, None)

    def types(self, body: Body, op: Op, attrs: Mapping[str, Value], types: Mapping[str, TensorType], rank: int | None) -> None:
        """Result types of one op whose attributes are known."""
        definition = self.operators.definition(op.name)
        if definition is None or any(i is not None and i not in types for i in op.inputs):
            return  # found already
        members = 0
        if definition.collective:
            found = (self.groups or {}).get(attrs.get("group"))  # type: ignore[arg-type]
            if found is None and isinstance(attrs.get("group"), str):
                return  # the checks of groups say so
            members = 0 if found is None else len(found)
        inputs: Types = tuple(None if i is None else types[i] for i in op.inputs)
        expected = self.operators.results(op, attrs, inputs, members)
        if isinstance(expected, Problem):
            shown = str(op) if rank is None else str(_with(op, attrs))
            self.report.add(
                expected.code, f"{body.label}: {shown}: {expected.message}", rank=rank, source=where(op), severity=expected.severity
            )
            return
        if definition.collective and definition.receivers == "root" and not op.outputs:
            return
        if expected is None:
            if len(op.outputs) != 1:
                self.report.add("TV105", f"{body.label}: {op}: it has 1 result, {len(op.outputs)} are named", rank=rank, source=where(op))
            return
        if len(expected) != len(op.outputs):
            message = f"{body.label}: {op}: it has {len(expected)} results, {len(op.outputs)} are named"
            self.report.add("TV105", message, rank=rank, source=where(op))
            return
        for name, kind in zip(op.outputs, expected, strict=True):
            if name in types and types[name] != kind:
                message = f"{body.label}: {op}: {name!r} is {kind}, declared {types[name]}"
                self.report.add("TV105", message, rank=rank, tensor=name, source=where(op))

    def _call(self, body: Body, op: Op, types: Mapping[str, TensorType], functions: Mapping[str, Function]) -> None:
        def bad(message: str) -> None:
            self.report.add("TV107", f"{body.label}: {op}: {message}", source=where(op))

        function = functions.get(op.get("function")) if isinstance(op.get("function"), str) else None
        if function is None:
            bad(f"no function {op.get('function')!r}")
            return
        for what, given, wanted in (("takes", op.inputs, function.inputs), ("returns", op.outputs, function.outputs)):
            if len(given) != len(wanted):
                bad(f"{function.name} {what} {len(wanted)} tensors, not {len(given)}")
                continue
            for mine, theirs in zip(given, wanted, strict=True):
                if mine is None:
                    bad(f"{function.name} needs {theirs!r}")
                    continue
                a, b = types.get(mine), function.tensors.get(theirs)
                if a is not None and b is not None and a != b:
                    bad(f"{mine!r} is {a}, {function.name} {what} {theirs!r} as {b}")

    # -- calls of calls -----------------------------------------------------------------------------------------------

    def cycles(self, functions: Mapping[str, Function]) -> bool:
        """Functions that contain themselves, nested too deeply, or expand to too many ops. True if any does."""
        depth: dict[str, int] = {}
        size: dict[str, int] = {}
        state: dict[str, int] = {}
        bad = False
        for root in functions:
            stack = [(root, iter(_callees(functions[root])))] if root not in state else []
            while stack:
                name, rest = stack[-1]
                state[name] = 1
                following = next(rest, None)
                if following is None:
                    inner = _callees(functions[name])
                    depth[name] = 1 + max((depth.get(c, 0) for c in inner), default=0)
                    size[name] = len(functions[name].ops) + sum(size.get(c, 0) for c in inner)
                    state[name] = 2
                    stack.pop()
                elif state.get(following) == 1:
                    path = [n for n, _ in stack]
                    loop = [*path[path.index(following) :], following]
                    self.report.add("TV107", f"function {following} calls itself: {' → '.join(loop)}")
                    bad = True
                elif following in functions and following not in state:
                    stack.append((following, iter(_callees(functions[following]))))
        for name in functions:
            if depth[name] > MAX_CALL_DEPTH:
                self.report.add("TV107", f"function {name}: calls nested {depth[name]} deep", severity="unsupported")
                bad = True
            if size[name] > MOST_OPS:
                self.report.add("TV107", f"function {name} expands to {size[name]:,} ops", severity="unsupported")
                bad = True
        return bad

    # -- references ---------------------------------------------------------------------------------------------------

    def references(self, program: Program, functions: Mapping[str, Function], unit: Template | None) -> None:
        """Every reference is bound, and every op fits with every combination of values that occurs.

        Call graphs are known to be free of cycles here.
        """
        _References(self, program, functions, unit).run()


def _callees(function: Function) -> list[str]:
    return [str(op.get("function")) for op in function.ops if op.name == CALL]


def _with(op: Op, attrs: Mapping[str, Value]) -> Op:
    return Op(op.name, op.inputs, op.outputs, tuple((k, attrs[k]) for k, _ in op.attrs))


@dataclass(frozen=True)
class _Outline:
    """What of a body depends on references: ops, calls, and the names it needs from outside."""

    body: Body
    types: Mapping[str, TensorType]
    ops: tuple[Op, ...]
    calls: tuple[Op, ...]
    free: frozenset[str]


class _References:
    def __init__(self, bodies: Bodies, program: Program, functions: Mapping[str, Function], unit: Template | None):
        self.bodies = bodies
        self.report = bodies.report
        self.program = program
        self.functions = functions
        self.ranks = () if unit is None else unit.ranks
        self.columns: Mapping[str, tuple[Value, ...]] = {} if unit is None else unit.bindings
        self._outlines: dict[str | None, _Outline] = {}
        self._visited: set[Any] = set()
        self._projected: dict[tuple[str, str], tuple[Value, ...]] = {}
        self._distinct: dict[tuple[tuple[str, str], ...], list[tuple[int, tuple[Value, ...]]]] = {}

    def run(self) -> None:
        self._visit(None, {})

    def outline(self, name: str | None) -> _Outline:
        if name not in self._outlines:
            item = self.program if name is None else self.functions[name]
            body = Body.of(item)
            types = self.bodies.types_of(item)
            calls = tuple(op for op in body.ops if op.name == CALL and op.get("function") in self.functions)
            varying: dict[int, bool] = {}  # sorts of ops that have references
            for op, sort in zip(body.ops, item.sorts, strict=True):
                if sort not in varying:
                    varying[sort] = refers(op)
            found = zip(body.ops, item.sorts, strict=True)
            ops = tuple([op for op, sort in found if (refers(op) if sort == ALONE else varying[sort]) and op.name != CALL])
            free = {n for op in ops for n in op_references(op)}
            for call in calls:
                bound = call_bindings(call)
                needed = self.outline(call.get("function")).free
                free |= {n for v in bound.values() for n in references(v)} | (needed - set(bound))
                for n in bound:
                    self._binding(body, call, n, needed)
            self._outlines[name] = _Outline(body, types, ops, calls, frozenset(free))
        return self._outlines[name]

    def _binding(self, body: Body, call: Op, name: str, needed: frozenset[str]) -> None:
        if name in self.columns:
            message = f"{body.label}: {call}: it binds ${name}, and so do the ranks of {self.program.name}"
            self.report.add("TV110", message, source=where(call))
        elif name not in needed:
            message = f"{body.label}: {call}: {call.get('function')} does not use ${name}"
            self.report.add("TV110", message, source=where(call), severity="warning")

    def _visit(self, name: str | None, bindings: Mapping[str, Value]) -> None:
        outline = self.outline(name)
        bound = {n: bindings[n] for n in sorted(outline.free) if n in bindings}
        key = (name, repr(bound))
        if key in self._visited:
            return
        self._visited.add(key)
        for op in outline.ops:
            self._op(outline, op, bound)
        for call in outline.calls:
            given = {k: resolve(v, bound) for k, v in call_bindings(call).items()}
            self._bound(outline.body, call, [n for v in given.values() for n in references(v)])
            self._visit(call.get("function"), {**bound, **given})

    def _bound(self, body: Body, op: Op, needed: list[str]) -> bool:
        missing = [n for n in needed if n not in self.columns]
        if missing:
            who = "no call" if self.bodies.groups is None else f"neither a call nor the ranks of {self.program.name}"
            message = f"{body.label}: {op}: {who} bind{'s' if who == 'no call' else ''} {names('$' + n for n in missing)}"
            self.report.add("TV110", message, source=where(op))
        return not missing

    def _op(self, outline: _Outline, op: Op, bound: Mapping[str, Value]) -> None:
        attrs = {k: resolve(v, bound) for k, v in op.attrs}
        needed = list(dict.fromkeys(n for v in attrs.values() for n in references(v)))
        if not self._bound(outline.body, op, needed):
            return
        if not needed:
            self.bodies.types(outline.body, op, attrs, outline.types, None)
            return
        # a reference that is a group or peer as a whole counts by what it does to types; others by their values
        role = {v.name: k for k, v in attrs.items() if isinstance(v, Ref) and k in ("group", *_NAMES_A_RANK)}
        plain = {n for k, v in attrs.items() if not (isinstance(v, Ref) and role.get(v.name) == k) for n in references(v)}
        for row, values in self._combinations(tuple((n, "" if n in plain else role.get(n, "")) for n in needed)):
            here = dict(zip(needed, values, strict=True))
            concrete = {k: resolve(v, here) for k, v in attrs.items()}
            self.bodies.types(outline.body, op, concrete, outline.types, self.ranks[row])

    def _combinations(self, key: tuple[tuple[str, str], ...]) -> list[tuple[int, tuple[Value, ...]]]:
        """The distinct values that some references have together, each with the first row that has them."""
        if key not in self._distinct:
            seen: dict[str, tuple[int, tuple[Value, ...]]] = {}
            for row, values in enumerate(zip(*(self._column(n, role) for n, role in key), strict=True)):
                seen.setdefault(repr(values), (row, values))
            self._distinct[key] = list(seen.values())
        return self._distinct[key]

    def _column(self, name: str, role: str) -> tuple[Value, ...]:
        """A column with values that cannot make a difference to types made equal."""
        key = (name, role)
        if key not in self._projected:
            column = self.columns[name]
            if role == "group":
                groups = self.bodies.groups or {}
                first: dict[int, Value] = {}
                column = tuple(first.setdefault(len(groups[v]), v) if isinstance(v, str) and v in groups else v for v in column)
            elif role in _NAMES_A_RANK:
                some = next((v for v in column if type(v) is int), None)
                column = tuple(some if type(v) is int else v for v in column)
            self._projected[key] = column
        return self._projected[key]
