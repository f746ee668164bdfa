"""Random programs and plans that the format can hold; they need not make sense."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from fractions import Fraction
from functools import cache
from typing import Any

from hypothesis import strategies as st

from trainverify.graph.lineage import Layout, Part, Partial, Parts, Pattern, Placements, Replicate, Run, Shard
from trainverify.graph.mesh import Mesh
from trainverify.graph.plan import Edit, Plan, Template
from trainverify.graph.program import PHASES, Domain, Function, Op, Output, Program, Ref, Source
from trainverify.graph.types import DTYPES, TensorType

names = st.sampled_from(["x", "w", "layer.0/attn.q", 'a"b', "back\\slash", "größe", "𝛼", "a b", "[0]", "ops"]) | st.text(
    st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=6
).filter(str.isprintable)
types = st.builds(
    TensorType,
    st.lists(st.sampled_from([0, 1, 2, 3, 5, 7, 2**40]), max_size=1).map(tuple) | st.just((2, 3, 5)),
    st.sampled_from(list(DTYPES)),
)
sources = st.builds(Source, st.sampled_from(["model.py", "C:\\net.py", "a:b.py", "päth/x.py"]), st.integers(0, 10**9 - 1))
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.sampled_from([0, 1, 0.0, -0.0, 1.0, True, Fraction(1), math.inf, -math.inf, math.nan, 5e-324, 1.7976931348623157e308, 1e22])
    | st.floats(allow_nan=False)
    | st.fractions()
    | st.text(max_size=8)
    | st.builds(Ref, names)
)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)


def some(items: Any, most: int = 3, least: int = 0) -> Any:
    return st.lists(items, min_size=least, max_size=most).map(tuple)


@cache  # to make a strategy takes longer than to draw from it
def unique_names(most: int) -> Any:
    return st.lists(names, max_size=most, unique=True)


op_names = names.filter(lambda n: n != "call")
either = st.booleans()
phases = st.sampled_from(PHASES)
maybe_sources = st.none() | sources


@st.composite
def ops(draw: Any, tensors: list[str], functions: list[str]) -> Op:
    attrs = {n: draw(values) for n in draw(unique_names(3)) if n != "function"}
    name = draw(op_names)
    if functions and draw(either):
        name, attrs = "call", attrs | {"function": draw(st.sampled_from(functions))}
    maybe = st.sampled_from([None, *tensors])
    return Op(
        name,
        draw(some(maybe)),
        draw(some(st.sampled_from(tensors))) if tensors else (),
        tuple(attrs.items()),
        draw(phases),
        draw(maybe),
        draw(maybe_sources),
    )


@st.composite
def functions(draw: Any, outer: list[str]) -> dict[str, Function]:
    """Functions that call earlier ones only."""
    result: dict[str, Function] = {}
    for name in draw(unique_names(2)):
        if name in outer:
            continue
        tensors = {n: draw(types) for n in draw(unique_names(4))}
        inputs = tuple(n for n in tensors if draw(either))
        outputs = draw(some(st.sampled_from(list(tensors)))) if tensors else ()
        result[name] = Function(name, tensors, inputs, outputs, draw(some(ops(list(tensors), [*outer, *result]))))
    return dict(reversed(result.items())) if draw(either) else result


kinds = st.integers(0, 3)
roles = st.sampled_from(["loss", "gradient", "parameter", "state", "metric"])
maybe_names = st.none() | names
numbers = st.none() | st.integers(0, 2**62)
any_domains = st.builds(Domain, st.sampled_from(["ids", "positive"]), numbers, numbers, st.none() | st.integers(1, 52))


@st.composite
def programs(draw: Any, outer: tuple[str, ...] = ()) -> Program:
    tensors = {n: draw(types) for n in draw(unique_names(6))}
    heads: list[list[str]] = [[], [], [], []]
    for n in tensors:
        heads[draw(kinds)].append(n)
    bodies = draw(functions(list(outer)))
    outputs = draw(some(st.builds(Output, st.sampled_from(list(tensors)), roles, maybe_names))) if tensors else ()
    domains = {n: draw(any_domains) for n in heads[0]}
    body = draw(some(ops(list(tensors), [*outer, *bodies])))
    return Program(draw(names), tensors, tuple(heads[0]), tuple(heads[1]), tuple(heads[2]), body, outputs, bodies, domains)


reductions = st.sampled_from(["sum", "avg"])
small = st.integers(0, 2**30)
runs = st.builds(Run, small, small) | st.builds(Run, small, small, st.integers(1, 9), small)


@st.composite
def parts(draw: Any) -> Part:
    flat = draw(either)
    n = 1 if flat else draw(st.integers(0, 3))
    count = draw(st.integers(1, 5))
    partial = draw(st.none() | st.tuples(reductions, st.integers(0, count - 1), st.just(count)))
    exact = {"min_size": n, "max_size": n}
    return Part(tuple(draw(st.lists(small, **exact))), tuple(draw(st.lists(runs, **exact))), partial, flat, draw(either))


@st.composite
def layouts(draw: Any, mesh: Mesh) -> Layout:
    axes = st.lists(st.sampled_from(mesh.names), unique=True) if mesh.axes else st.just([])
    placements = st.builds(Shard, st.integers(0, 5)) | st.just(Replicate()) | st.builds(Partial, reductions)
    which = draw(st.integers(0, 2))
    form: Any
    if which == 0:
        form = Placements(tuple((a, draw(placements)) for a in draw(axes)))
    elif which == 1:
        text = draw(st.sampled_from(["", "(tp o) k", "a", "(a b) () c", "1 k"]))
        fixed = draw(st.sampled_from([(), (("mb", 0, 2),), (("mb", 1, 3), ("v", 4, 5))]))
        form = Pattern(text, fixed, tuple((a, draw(reductions)) for a in draw(axes)))
    else:
        holders = draw(st.lists(st.integers(0, mesh.size - 1), unique=True, max_size=3))
        form = Parts(tuple((r, draw(some(parts()))) for r in holders))
    where = tuple((a, draw(st.integers(0, mesh.length(a) - 1))) for a in draw(axes))
    logical = draw(names)
    return Layout(logical, draw(names | st.just(logical)), form, where)


@st.composite
def columns(draw: Any, n: int) -> tuple[Any, ...]:
    start, step, block = draw(st.integers(-9, 9)), draw(st.integers(-3, 3)), draw(st.integers(1, 5))
    kinds: list[Any] = [
        st.lists(values, min_size=n, max_size=n).map(tuple),
        st.just(tuple(start + step * i for i in range(n))),
        st.just(tuple(start + step * (i // block) for i in range(n))),
        st.just(tuple(f"tp.{i // block}" for i in range(n))),
        st.just(tuple([True, 1, 1.0, Fraction(1), False, 0, 0.0, -0.0][(i + start) % 8] for i in range(n))),
        st.just(tuple(i % 2 == 0 for i in range(n))),
        st.just((math.nan,) * n),
    ]
    return draw(st.one_of(kinds))  # type: ignore[no-any-return]


@st.composite
def plans(draw: Any) -> Plan:
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 5]), max_size=3))
    mesh = Mesh(tuple(zip(draw(st.permutations(["dp", "tp", "pp", "c-p"])), sizes, strict=False)))
    ranks = list(draw(st.permutations(range(mesh.size)))) if draw(either) else list(range(mesh.size))
    cut = draw(st.integers(0, len(ranks)))
    bodies = draw(functions([]))
    templates = []
    for mine in (ranks[:cut], ranks[cut:]):
        bindings = {n: draw(columns(len(mine))) for n in draw(unique_names(3))}
        templates.append(Template(draw(programs(tuple(bodies))), tuple(mine), bindings))
    groups = {n: tuple(draw(st.lists(st.integers(0, mesh.size - 1), unique=True))) for n in draw(unique_names(3))}
    if draw(either):
        groups["all"] = tuple(range(mesh.size))
        groups["back"] = tuple(reversed(range(0, mesh.size, 2)))
    edits = []
    for rank in draw(st.lists(st.sampled_from(ranks), max_size=2)):
        new = {n: draw(types) for n in draw(unique_names(2))}
        program = next(t.program for t in templates if rank in t.ranks)
        inside = draw(some(ops([*program.tensors, *new], [*bodies, *program.functions]), 2))
        edits.append(Edit(rank, draw(some(st.integers(0, 9), 3, 1)), inside, new))
    return Plan(draw(names), mesh, tuple(templates), groups, draw(some(layouts(mesh))), bodies, tuple(edits))


def exact(x: Any) -> Any:
    """Something that is equal only if the two are equal with types; the order of tables does not count."""
    if dataclasses.is_dataclass(x):
        return type(x).__name__, *(exact(getattr(x, f.name)) for f in dataclasses.fields(x))
    if isinstance(x, Mapping):
        return "table", *sorted((k, exact(v)) for k, v in x.items())
    if isinstance(x, tuple):
        return "tuple", *map(exact, x)
    return type(x).__name__, repr(x)
