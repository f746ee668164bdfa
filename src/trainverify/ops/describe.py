"""What an operator is, in words and formulas, from its definition alone.

`describe` shows one operator; `python -m trainverify.ops.describe` writes the table of all of them.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from trainverify.graph.types import TensorType
from trainverify.ops.table import GRAD, Lowered, OpDef, OpError, OpTable
from trainverify.primitives.node import Node
from trainverify.primitives.notation import Notation

_SIZES: Final = (5, 7, 11, 13, 17, 19)  # of the letters of an example, in order of appearance; none is small or a multiple
_MEMBERS: Final = 3
_TENSOR: Final = re.compile(r"(\w+)(?::(\w+))?\[([^\]]*)\]")


@dataclass(frozen=True)
class Example:
    """Arguments that show an operator: names, types and attributes, and a letter for every size."""

    names: tuple[str, ...]
    types: tuple[TensorType, ...]
    attrs: Mapping[str, Any]
    letters: Mapping[int, str]
    members: int = 0

    def shape(self, shape: tuple[int, ...]) -> str:
        return f"[{','.join(self._size(s) for s in shape)}]"

    def _size(self, size: int) -> str:
        if size in self.letters or size <= 1:
            return self.letters.get(size, str(size))
        pairs = [(m, n, a, b) for (m, a), (n, b) in itertools.combinations(self.letters.items(), 2)]
        readings = [f"{a}·{b}" for m, n, a, b in pairs if m * n == size]
        readings += [f"{a}+{b}" for m, n, a, b in pairs if m + n == size]
        readings += [f"{a}/{b}" for m, n, a, b in pairs if n * size == m]
        return readings[0] if readings else str(size)


def parse(definition: OpDef, text: str) -> Example:
    """`"x[b,k] w:i64[o=6,2]; dim=1"`: tensors with letters (or sizes) for their dimensions, then attributes."""
    tensors, _, options = text.partition(";")
    sizes: dict[str, int] = {}
    fixed = {int(n) for n in re.findall(r"\d+", re.sub(r":\w+\[", "[", tensors))}
    free = iter(s for s in _SIZES if s not in fixed)
    names, types = [], []
    for name, dtype, inside in _TENSOR.findall(tensors):
        shape = []
        for word in filter(None, (w.strip() for w in inside.split(","))):
            letter, _, size = word.partition("=")
            if letter.isdigit():
                shape.append(int(letter))
                continue
            if letter not in sizes:
                sizes[letter] = int(size) if size else next(free)
            shape.append(sizes[letter])
        names.append(name)
        types.append(TensorType(tuple(shape), dtype or "f32"))
    attrs = {k.arg: ast.literal_eval(k.value) for k in _keywords(options) if k.arg is not None}
    members = _MEMBERS if definition.collective else 0
    if members:
        sizes["m"] = members
    return Example(tuple(names), tuple(types), attrs, {n: letter for letter, n in sizes.items()}, members)


def _keywords(options: str) -> list[ast.keyword]:
    call = ast.parse(f"f({options.strip()})", mode="eval").body
    return call.keywords if isinstance(call, ast.Call) else []


def example_of(definition: OpDef, table: OpTable) -> tuple[Example, Lowered] | None:
    """The declared example, or else a matrix for every tensor if the operator takes that."""
    names = definition.tensors or (("x", "y") if definition.variadic else ())
    guesses = [" ".join(f"{n}[a,b]" for n in names[:count]) for count in (len(names), definition.required)]
    for text in [definition.example] if definition.example else guesses:
        example = parse(definition, text)
        try:
            return example, table.lower(definition.name, example.attrs, example.types, example.members)
        except OpError:
            continue
    return None


def _labelled(prefix: str, count: int) -> list[str]:
    return [prefix] if count == 1 else [f"{prefix}{i + 1}" for i in range(count)]


def _derivative(definition: OpDef, table: OpTable, example: Example, outputs: tuple[Node, ...], names: list[str]) -> list[str]:
    given = tuple(i for i, o in enumerate(outputs) if o.kind == "real")
    wrt = tuple(i for i, t in enumerate(example.types) if t.kind == "real")
    if definition.collective or not given or not wrt:
        return []
    attrs = {**example.attrs, "wrt": wrt, "given": given}
    types = (*example.types, *(TensorType(outputs[i].shape) for i in given))
    lowered = table.lower(definition.name + GRAD, attrs, types)
    inputs = [*example.names, *(f"d{names[i]}" for i in given)]
    targets = {f"d{example.names[i]}": o for i, o in zip(wrt, lowered.outputs, strict=True)}
    return Notation(inputs, example.letters).define(targets)


def describe(definition: OpDef, table: OpTable) -> str:
    """Interface, shapes, meaning and derivative of an operator; formulas are its lowered nodes at example sizes."""
    definition = definition.gradient_of or definition
    lines = [f"{definition.name}({signature(definition)})", *(f"  {line}" for line in definition.doc.splitlines() if line)]
    for attribute in definition.attributes:
        lines.append(f"  {attribute.name}: {attribute.describe()}")
    found = None if definition.point_to_point else example_of(definition, table)
    if found is None:
        return "\n".join(lines)
    example, lowered = found
    names = _labelled("z" if "y" in example.names else "y", len(lowered.outputs))
    taken = " ".join(n + example.shape(t.shape) for n, t in zip(example.names, example.types, strict=True))
    made = " ".join(n + example.shape(t.shape) for n, t in zip(names, lowered.types, strict=True))
    chosen = "".join(f", {k} = {v!r}" for k, v in example.attrs.items() if k not in ("group", "root"))
    lines.append(f"shapes: {taken or '()'} → {made}{chosen}")
    lines.append("meaning:" + (" (m: the members of the group)" if definition.collective else ""))
    meaning = Notation(example.names, example.letters).define(dict(zip(names, lowered.outputs, strict=True)))
    lines += [f"  {line}" for line in meaning]
    derivative = _derivative(definition, table, example, lowered.outputs, names)
    if derivative:
        lines += ["derivative:", *(f"  {line}" for line in derivative)]
    return "\n".join(lines)


def signature(definition: OpDef) -> str:
    """Tensors as a caller gives them; `?` marks one that may be left out."""
    tensors = [n if i < definition.required else n + "?" for i, n in enumerate(definition.tensors)]
    return ", ".join([*tensors, "…"] if definition.variadic else tensors)


def reference(table: OpTable) -> str:
    """All operators as a page of Markdown, a table for each family."""
    page = [
        "# Operators",
        "",
        "Generated from the definitions by `python -m trainverify.ops.describe > docs/operators.md`.",
        "`x?` may be left out, `…` takes any number of tensors.",
        "Every local operator `NAME` has a derived `NAME.grad`: it takes the tensors of `NAME`, then the gradients",
        "of the outputs named in `given`, and returns those of the tensors named in `wrt`.",
        "`trainverify ops NAME` prints an operator's formula and its derivative.",
    ]
    families: dict[str, list[OpDef]] = {}
    for definition in table:
        families.setdefault(definition.family, []).append(definition)
    for family, definitions in families.items():
        page += ["", f"## {family.capitalize()}", "", "| operator | tensors | attributes | meaning |", "|---|---|---|---|"]
        for d in definitions:
            attributes = "<br>".join(f"`{a.name}: {a.describe()}`" for a in d.attributes)
            cells = [f"`{d.name}`", signature(d), attributes, " ".join(d.doc.split())]
            page.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
    return "\n".join(page) + "\n"


if __name__ == "__main__":
    from trainverify.ops import OPS

    print(reference(OPS), end="")
