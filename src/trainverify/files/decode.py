"""From a parsed tree to programs and plans. Default deny: what the format does not name is an error.

Checked here: fields, types, names, limits, ranks, lengths of columns, and that every tensor and function that is
spoken of exists. Whether a program makes sense (order of definitions, shapes, coverage) is not a question of reading.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, Final, TypeVar

from trainverify.files.calls import Sizes, check_calls, function_sizes
from trainverify.files.errors import Bad, expected, show
from trainverify.files.limits import Limits
from trainverify.files.lineage import LineageDecoder
from trainverify.files.scalars import at, count_within, each, fields, integer, listed, one_of, pairs
from trainverify.files.values import WORD, ValueDecoder
from trainverify.graph.mesh import Mesh
from trainverify.graph.plan import Edit, Plan, Template
from trainverify.graph.program import CALL, PHASES, Attrs, Domain, Function, Op, Output, Program, Value
from trainverify.graph.types import TensorType

FORMAT: Final = "trainverify"
VERSION: Final = 1
KINDS: Final = ("program", "plan")
ROLES: Final = ("loss", "gradient", "parameter", "state", "metric")
DOMAINS: Final = ("ids", "nonnegative", "positive", "indicator")
MOST_BITS: Final = 52  # of a number below 1

_HEAD: Final = ("format", "version", "kind")
_OP: Final = ("op", "in", "out")
_OP_MORE: Final = ("attrs", "phase", "forward", "source")
_OP_ALL: Final = frozenset((*_OP, *_OP_MORE))

T = TypeVar("T")


def decode(tree: Any, limits: Limits, kind: str | None = None) -> Program | Plan:
    """The program or plan that a tree describes; `kind` says which of them is wanted."""
    if type(tree) is not dict:
        raise expected("an object", tree)
    for key in _HEAD:
        if key not in tree:
            raise Bad("missing", key)
    if tree["format"] != FORMAT:
        raise expected(show(FORMAT), tree["format"]).inside("format")
    if type(tree["version"]) is not int:
        raise expected("an integer", tree["version"]).inside("version")
    if tree["version"] != VERSION:
        raise Bad(f"version {show(tree['version'])} is not supported; this reader knows version {VERSION}", "version")
    found = one_of(tree, "kind", KINDS)
    if kind is not None and found != kind:
        raise Bad(f"expected {show(kind)}, got {show(found)}", "kind")
    decoder = Decoder(limits)
    return decoder.plan(tree) if found == "plan" else decoder.program(tree, _HEAD)[0]


class Decoder(ValueDecoder):
    """Converts one file."""

    def ops(self, data: Any, tensors: Container[str], functions: Container[str]) -> tuple[Op, ...]:
        items = listed(data)
        self.count("ops", len(items))

        def refer(name: Any) -> str:
            if type(name) is not str or name not in tensors:
                raise _no_tensor(name)
            return self.names.get(name) or self.name(name)

        def one(item: Any) -> Op:
            if type(item) is not dict or len(item) < 3 or not item.keys() <= _OP_ALL:
                fields(item, _OP, _OP_MORE)
            step = "op"
            try:
                name = self.name(item["op"])
                step = "in"
                inputs = each(lambda n: None if n is None else refer(n), listed(item["in"]))
                step = "out"
                outputs = each(refer, listed(item["out"]))
                step = "attrs"
                attrs = self.attrs(item["attrs"]) if "attrs" in item else ()
                if name == CALL:
                    _check_call(attrs, functions)
            except KeyError:
                raise Bad("missing", step) from None
            except Bad as e:
                raise e.inside(step) from None
            if len(item) == 3 + ("attrs" in item):
                return Op(name, inputs, outputs, attrs)
            return Op(name, inputs, outputs, attrs, **rest(item))

        def rest(item: dict[str, Any]) -> dict[str, Any]:
            found: dict[str, Any] = {}
            if "phase" in item:
                found["phase"] = one_of(item, "phase", PHASES)
            for key, convert in (("forward", refer), ("source", self.source)):
                if key in item:
                    try:
                        found[key] = convert(item[key])
                    except Bad as e:
                        raise e.inside(key) from None
            return found

        return each(one, items)

    def attrs(self, data: Any) -> Attrs:
        if type(data) is not dict:
            raise expected("an object", data)
        result = []
        for key, value in data.items():
            name = self.name(key)
            try:
                result.append((name, self.value(value)))
            except Bad as e:
                raise e.inside(key) from None
        return tuple(result)

    def table(self, data: Any, convert: Callable[[Any], T], what: str) -> dict[str, T]:
        """An object from names to something."""
        if type(data) is not dict:
            raise expected("an object", data)
        self.count(what, len(data))
        result: dict[str, T] = {}
        for key, value in data.items():
            name = self.name(key)
            try:
                result[name] = convert(value)
            except Bad as e:
                raise e.inside(key) from None
        return result

    def tensors(self, data: Any) -> dict[str, TensorType]:
        return self.table(data, self.type, "tensors")

    def functions(self, data: Any, outer: Mapping[str, Function]) -> dict[str, Function]:
        if type(data) is not dict:
            raise expected("an object", data)
        known = {*data, *outer}

        def one(body: Any, name: str) -> Function:
            fields(body, ("inputs", "outputs", "tensors", "ops"))
            tensors = at(self.tensors, body, "tensors")
            inputs = at(lambda d: self.references(d, tensors, set()), body, "inputs")
            outputs = at(lambda d: self.references(d, tensors), body, "outputs")
            ops = at(lambda d: self.ops(d, tensors, known), body, "ops")
            return Function(name, tensors, inputs, outputs, ops)

        self.count("functions", len(data))
        result: dict[str, Function] = {}
        for key, body in data.items():
            name = self.name(key)
            try:
                if name in outer:
                    raise Bad("the plan has a function of this name already")
                result[name] = one(body, name)
            except Bad as e:
                raise e.inside(key) from None
        return result

    def references(self, data: Any, tensors: Container[str], seen: set[str] | None = None) -> tuple[str, ...]:
        """Names of tensors that exist; with `seen`, none of them given twice."""

        def one(name: Any) -> str:
            if type(name) is not str or name not in tensors:
                raise _no_tensor(name)
            if seen is not None:
                if name in seen:
                    raise Bad(f"tensor {show(name)} is given twice")
                seen.add(name)
            return self.name(name)

        return each(one, listed(data))

    def program(
        self, data: Any, head: tuple[str, ...] = (), outer: Mapping[str, Function] | None = None, outer_sizes: Sizes | None = None
    ) -> tuple[Program, Sizes]:
        more = ("inputs", "parameters", "state", "domains", "functions", "ops", "outputs")
        fields(data, (*head, "name", "tensors"), more)
        tensors = at(self.tensors, data, "tensors")
        functions = at(lambda d: self.functions(d, outer or {}), data, "functions", {})
        known = {*functions, *(outer or {})}
        seen: set[str] = set()
        program = Program(
            at(self.name, data, "name"),
            tensors,
            inputs=at(lambda d: self.references(d, tensors, seen), data, "inputs", ()),
            parameters=at(lambda d: self.references(d, tensors, seen), data, "parameters", ()),
            state=at(lambda d: self.references(d, tensors, seen), data, "state", ()),
            ops=at(lambda d: self.ops(d, tensors, known), data, "ops", ()),
            outputs=at(lambda d: each(lambda o: self.output(o, tensors), listed(d)), data, "outputs", ()),
            functions=functions,
            domains=at(lambda d: self.domains(d, tensors), data, "domains", {}),
        )
        try:
            sizes = function_sizes(functions, outer_sizes or {}, self.limits)
        except Bad as e:
            raise e.inside("functions") from None
        try:
            check_calls(program.ops, sizes, self.limits)
        except Bad as e:
            raise e.inside("ops") from None
        return program, sizes

    def output(self, data: Any, tensors: Container[str]) -> Output:
        fields(data, ("tensor", "role"), ("of",))
        if data["tensor"] not in tensors if type(data["tensor"]) is str else True:
            raise _no_tensor(data["tensor"]).inside("tensor")
        return Output(self.name(data["tensor"]), one_of(data, "role", ROLES), at(self.name, data, "of", None))

    def domains(self, data: Any, tensors: Container[str]) -> dict[str, Domain]:
        def one(item: Any) -> Domain:
            fields(item, ("kind",), ("size", "ignore", "bits"))
            size = at(lambda d: integer(d, 0, WORD - 1), item, "size", None)
            ignore = at(lambda d: integer(d, 1 - WORD, WORD - 1), item, "ignore", None)
            return Domain(one_of(item, "kind", DOMAINS), size, ignore, at(lambda d: integer(d, 1, MOST_BITS), item, "bits", None))

        result = self.table(data, one, "tensors")
        for name in result:
            if name not in tensors:
                raise _no_tensor(name).inside(name)
        return result

    # plans

    def plan(self, data: Any) -> Plan:
        fields(data, (*_HEAD, "name", "mesh", "templates"), ("groups", "functions", "lineage", "edits", "allow"))
        name = at(self.name, data, "name")
        mesh = at(self.mesh, data, "mesh")
        groups = at(lambda d: self.table(d, lambda g: self.ranks(g, mesh), "groups"), data, "groups", {})
        functions = at(lambda d: self.functions(d, {}), data, "functions", {})
        try:
            sizes = function_sizes(functions, {}, self.limits)
        except Bad as e:
            raise e.inside("functions") from None
        owner: dict[int, Template] = {}
        templates = at(lambda d: each(lambda t: self.template(t, mesh, functions, sizes, owner), listed(d)), data, "templates")
        lineage = at(lambda d: self.lineage(d, mesh), data, "lineage", ())
        added: dict[int, set[str]] = {}
        edits = at(lambda d: self.edits(d, mesh, functions, owner, added), data, "edits", ())
        allow = at(lambda d: each(self.name, listed(d)), data, "allow", ())
        return Plan(name, mesh, templates, groups, lineage, functions, edits, allow)

    def mesh(self, data: Any) -> Mesh:
        axes = pairs(data, self.name, lambda n: integer(n, 1, self.limits.ranks))
        size = math.prod(n for _, n in axes)
        if size > self.limits.ranks:
            raise Bad(f"{size} ranks; the limit is {self.limits.ranks}")
        return Mesh(axes)

    def items(self, data: dict[str, Any]) -> range:
        """`{"range": [start, stop, step]}`; what it stands for is counted before anybody builds it."""
        fields(data, ("range",))
        try:
            bounds = listed(data["range"])
            if len(bounds) != 3:
                raise Bad(f"expected [start, stop, step], got {len(bounds)} values")
            start, stop, step = each(lambda n: integer(n, 1 - WORD, WORD - 1), bounds)
            if step == 0:
                raise Bad("a range with step 0")
            found = range(start, stop, step)
            self.count("expanded", count_within(found))
        except Bad as e:
            raise e.inside("range") from None
        return found

    def ranks(self, data: Any, mesh: Mesh) -> tuple[int, ...]:
        """Distinct ranks of the mesh."""
        size = mesh.size
        if type(data) is dict:
            found = self.items(data)
            for rank in found[:1], found[-1:]:
                if rank and not 0 <= rank[0] < size:
                    raise Bad(f"rank {rank[0]} is not in {mesh}")
            return tuple(found)
        if type(data) is not list:
            raise expected("a list or a range of ranks", data)
        seen: set[int] = set()

        def one(rank: Any) -> int:
            if type(rank) is not int:
                raise expected("a rank", rank)
            if not 0 <= rank < size:
                raise Bad(f"rank {show(rank)} is not in {mesh}")
            if rank in seen:
                raise Bad(f"rank {rank} is given twice")
            seen.add(rank)
            return rank

        return each(one, data)

    def column(self, data: Any, rows: int) -> tuple[Value, ...]:
        """One value per rank: a list, a range, or runs of equal values."""
        if type(data) is dict and "range" in data:
            found = self.items(data)
            _check_length(len(found), rows)
            return tuple(found)
        if type(data) is dict:
            fields(data, ("runs",))
            runs = at(lambda d: each(self.run, listed(d)), data, "runs")
            _check_length(sum(n for _, n in runs), rows)
            self.count("expanded", rows)
            return tuple(v for v, n in runs for _ in range(n))
        if type(data) is not list:
            raise expected("a list, a range or runs", data)
        _check_length(len(data), rows)
        if set(map(type, data)) == {int} and max(data) < WORD and min(data) > -WORD:
            return tuple(data)
        return each(self.value, data)

    def run(self, data: Any) -> tuple[Value, int]:
        items = listed(data)
        if len(items) != 2:
            raise Bad(f"expected [value, count], got {len(items)} values")
        try:
            value = self.value(items[0])
        except Bad as e:
            raise e.inside(0) from None
        try:
            return value, integer(items[1], 1, self.limits.ranks)
        except Bad as e:
            raise e.inside(1) from None

    def template(self, data: Any, mesh: Mesh, functions: Mapping[str, Function], sizes: Sizes, owner: dict[int, Template]) -> Template:
        self.count("templates", 1)
        fields(data, ("program", "ranks"), ("bindings",))
        ranks = at(lambda d: self.ranks(d, mesh), data, "ranks")
        bindings = at(lambda d: self.table(d, lambda c: self.column(c, len(ranks)), "columns"), data, "bindings", {})
        program, _ = at(lambda d: self.program(d, outer=functions, outer_sizes=sizes), data, "program")
        template = Template(program, ranks, bindings)
        for rank in ranks:
            if rank in owner:
                raise Bad(f"rank {rank} runs another template already", "ranks")
            owner[rank] = template
        return template

    def lineage(self, data: Any, mesh: Mesh) -> Any:
        items = listed(data)
        self.count("layouts", len(items))
        return each(LineageDecoder(mesh, self.name, self.limits).layout, items)

    def edits(
        self, data: Any, mesh: Mesh, functions: Mapping[str, Function], owner: Mapping[int, Template], added: dict[int, set[str]]
    ) -> tuple[Edit, ...]:
        def one(item: Any) -> Edit:
            fields(item, ("rank", "path", "ops"), ("tensors",))
            rank = at(lambda d: integer(d, 0, mesh.size - 1), item, "rank")
            if rank not in owner:
                raise Bad(f"rank {rank} runs no program", "rank")
            path = at(lambda d: each(lambda i: integer(i, 0, self.limits.ops), listed(d)), item, "path")
            if not path:
                raise Bad("an edit needs the position of an op", "path")
            tensors = at(self.tensors, item, "tensors", {})
            new = added.setdefault(rank, set())
            new |= tensors.keys()
            program = owner[rank].program
            scope = _Scope(new, program.tensors, (f.tensors for t in (program.functions, functions) for f in t.values()))
            known = {*functions, *program.functions}
            return Edit(rank, path, at(lambda d: self.ops(d, scope, known), item, "ops"), tensors)

        items = listed(data)
        self.count("edits", len(items))
        return each(one, items)


class _Scope:
    """The tensors that an edited rank knows: those of the edit, of its program and of the bodies it may be inside of."""

    def __init__(self, new: set[str], program: Container[str], bodies: Iterable[Container[str]]):
        self.near = (new, program)
        self.bodies = list(bodies)

    def __contains__(self, name: object) -> bool:
        return any(name in table for table in self.near) or any(name in table for table in self.bodies)


def _no_tensor(name: Any) -> Bad:
    return Bad(f"no tensor {show(name)}") if type(name) is str else expected("the name of a tensor", name)


def _check_length(found: int, rows: int) -> None:
    if found != rows:
        raise Bad(f"{found} values for {rows} ranks")


def _check_call(attrs: Attrs, functions: Container[str]) -> None:
    name = next((v for k, v in attrs if k == "function"), None)
    if type(name) is not str:
        raise Bad("a call needs the name of a function", "function")
    if name not in functions:
        raise Bad(f"no function {show(name)}", "function")
