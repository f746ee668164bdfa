"""From programs and plans to a tree, and from the tree to text: one op, tensor, group or layout per line.

Equal content gives equal bytes: tensors are in the order of their definition, other tables in the order of their names.
What the format cannot hold is left in the tree as `Wrong`; reading the tree back finds it, with its place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from itertools import chain, groupby
from typing import Any, Final

import msgspec

from trainverify.files.decode import FORMAT, VERSION
from trainverify.files.errors import Bad, Wrong, show
from trainverify.files.lineage import encode_layout
from trainverify.graph.plan import Edit, Plan, Template
from trainverify.graph.program import Domain, Function, Op, Output, Program, Ref, Value
from trainverify.graph.types import TensorType

Tree = dict[str, Any]


def encode(content: Program | Plan) -> Tree:
    if isinstance(content, Program):
        return {"format": FORMAT, "version": VERSION, "kind": "program", **_program(content)}
    if isinstance(content, Plan):
        return {"format": FORMAT, "version": VERSION, "kind": "plan", **_plan(content)}
    raise Bad(f"expected a program or a plan, got {type(content).__name__}")


def _given(**fields: Any) -> Tree:
    """Without the fields that are empty."""
    return {k: v for k, v in fields.items() if v}


def _program(p: Program) -> Tree:
    return {
        "name": p.name,
        **_given(inputs=list(p.inputs), parameters=list(p.parameters), state=list(p.state)),
        "tensors": _tensors(p.tensors, chain(p.sources, (o for op in p.ops for o in op.outputs))),
        **_given(
            domains={n: _domain(d) for n, d in _sorted(p.domains)},
            functions=_functions(p.functions),
            ops=[_op(op) for op in p.ops],
            outputs=[_output(o) for o in p.outputs],
        ),
    }


def _plan(p: Plan) -> Tree:
    return {
        "name": p.name,
        "mesh": [list(axis) for axis in p.mesh.axes],
        **_given(groups={n: _ranks(g) for n, g in _sorted(p.groups)}, functions=_functions(p.functions)),
        "templates": [_template(t) for t in p.templates],
        **_given(lineage=[encode_layout(x) for x in p.lineage], edits=[_edit(e) for e in p.edits], allow=list(p.allow)),
    }


def _sorted(table: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return sorted(table.items(), key=lambda item: str(item[0]))


def _tensors(tensors: Mapping[str, TensorType], defined: Iterable[str] = ()) -> Tree:
    first = dict.fromkeys(n for n in defined if n in tensors)
    texts: dict[TensorType, str] = {}

    def text(kind: TensorType) -> str:
        if kind not in texts:
            texts[kind] = str(kind)
        return texts[kind]

    rest = sorted((n for n in tensors if n not in first), key=str) if len(first) < len(tensors) else ()
    return {n: text(tensors[n]) for n in chain(first, rest)}


def _functions(functions: Mapping[str, Function]) -> Tree:
    return {n: _function(f) if n == f.name else Wrong(f"its name is {show(f.name)}") for n, f in _sorted(functions)}


def _function(f: Function) -> Tree:
    return {
        "inputs": list(f.inputs),
        "outputs": list(f.outputs),
        "tensors": _tensors(f.tensors, chain(f.inputs, (o for op in f.ops for o in op.outputs))),
        "ops": [_op(op) for op in f.ops],
    }


def _op(op: Op) -> Tree:
    data: Tree = {"op": op.name, "in": list(op.inputs), "out": list(op.outputs)}
    if op.attrs:
        attrs = {k: _value(v) for k, v in op.attrs}
        data["attrs"] = attrs if len(attrs) == len(op.attrs) else Wrong("an attribute is given twice")
    if op.phase != "forward":
        data["phase"] = op.phase
    if op.forward is not None:
        data["forward"] = op.forward
    if op.source is not None:
        data["source"] = f"{op.source.file}:{op.source.line}"
    return data


def _value(value: Value, level: int = 0) -> Any:
    kind = type(value)
    if kind is str or kind is int or kind is bool or value is None:
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, tuple):
        return [_value(v, level + 1) for v in value] if level < 100 else Wrong("lists nested too deeply")
    if isinstance(value, Ref):
        return {"ref": value.name}
    if isinstance(value, Fraction):
        return {"fraction": f"{value.numerator}/{value.denominator}"}
    return Wrong(f"a value of type {kind.__name__} cannot be stored")


def _output(o: Output) -> Tree:
    return {"tensor": o.tensor, "role": o.role} | ({} if o.of is None else {"of": o.of})


def _domain(d: Domain) -> Tree:
    return {"kind": d.kind} | {k: v for k, v in (("size", d.size), ("ignore", d.ignore), ("bits", d.bits)) if v is not None}


def _template(t: Template) -> Tree:
    return {"ranks": _ranks(t.ranks), **_given(bindings={n: _column(c) for n, c in _sorted(t.bindings)}), "program": _program(t.program)}


def _edit(e: Edit) -> Tree:
    return {"rank": e.rank, "path": list(e.path), "ops": [_op(op) for op in e.ops], **_given(tensors=_tensors(e.tensors))}


def _ranks(ranks: tuple[int, ...]) -> Any:
    return _range(ranks) or list(ranks)


def _range(items: tuple[Any, ...]) -> Tree | None:
    """Three or more integers with a constant step."""
    if len(items) < 3 or set(map(type, items)) != {int}:
        return None
    step = items[1] - items[0]
    stop = items[0] + step * len(items)
    if step == 0 or items[-1] != stop - step or items != tuple(range(items[0], stop, step)):
        return None
    return {"range": [items[0], stop, step]}


def _column(column: tuple[Value, ...]) -> Any:
    """A range; runs where they are a quarter as many as the values; else a list."""
    if (found := _range(column)) is not None:
        return found
    values = [_value(v) for v in column]
    kinds = set(map(type, values))
    if len(kinds) == 1 and kinds <= {int, str, bool}:  # of other kinds, equal does not mean identical
        runs = [[v, sum(1 for _ in same)] for v, same in groupby(values)]
        if 4 * len(runs) <= len(values):
            return {"runs": runs}
    return values


# Sections that are spread over lines, and what their items are; a record has one line per field.
_SECTIONS: Final[Mapping[str, str | None]] = {
    "groups": None,
    "functions": "record",
    "templates": "record",
    "tensors": None,
    "domains": None,
    "bindings": None,
    "ops": None,
    "outputs": None,
    "lineage": None,
    "edits": None,
}


def text(tree: Tree) -> Iterator[bytes]:
    """The text of a checked tree, in pieces."""
    yield from _spread(tree, "record", b"\n")
    yield b"\n"


def _spread(value: Any, kind: str, pad: bytes) -> Iterator[bytes]:
    """A record or a section over lines; `pad` is a line break and the indentation."""
    inner = pad + b"  "
    if isinstance(value, list):
        items: Iterator[tuple[bytes, Any, str | None]] = ((b"", v, _SECTIONS[kind]) for v in value)
        first, last = b"[", b"]"
    else:
        items = ((_ENCODER.encode(k) + b": ", v, _kind(k) if kind == "record" else _SECTIONS[kind]) for k, v in value.items())
        first, last = b"{", b"}"
    separator = first
    for key, item, below in items:
        if below is None or not item:
            yield separator + inner + key + _ENCODER.encode(item)
        else:
            yield separator + inner + key
            yield from _spread(item, below, inner)
        separator = b","
    yield pad + last


def _kind(key: str) -> str | None:
    return "record" if key == "program" else key if key in _SECTIONS else None


_ENCODER: Final = msgspec.json.Encoder()
