"""HLO text: computations, instructions, their attributes, and the user's lines."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from trainverify.translate.emit import Unmapped
from trainverify.translate.targets import CaptureError

DTYPES: Final[Mapping[str, str]] = {
    "f64": "float64",
    "f32": "float32",
    "bf16": "bfloat16",
    "f16": "float16",
    "s64": "int64",
    "s32": "int32",
    "s16": "int16",
    "s8": "int8",
    "u8": "uint8",
    "u16": "uint16",
    "u32": "uint32",
    "u64": "uint64",
    "pred": "bool",
}
_ARRAY: Final = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{[^}]*\})?")
_INSTRUCTION: Final = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = ")
_OPENING: Final = {"(": ")", "{": "}", "[": "]"}


@dataclass(frozen=True)
class Aval:
    """The type of an array, as JAX has it."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Instruction:
    name: str
    types: tuple[Aval, ...]  # one, or those of a tuple
    is_tuple: bool
    opcode: str
    operands: tuple[str, ...]
    text: str  # between the parentheses, as it is
    attrs: Mapping[str, str]
    root: bool


@dataclass(frozen=True)
class Computation:
    name: str
    instructions: tuple[Instruction, ...]

    @property
    def root(self) -> Instruction:
        return next((i for i in self.instructions if i.root), self.instructions[-1])


@dataclass(frozen=True)
class Module:
    computations: Mapping[str, Computation]
    entry: str
    partitions: int
    frames: Mapping[int, tuple[tuple[str, int, str], ...]] = field(
        default_factory=dict
    )  # stack → (file, line, function), the innermost first


def _balanced(text: str, start: int) -> int:
    """Where the bracket that opens at `start` closes."""
    closing = [_OPENING[text[start]]]
    i, quoted = start + 1, False
    while closing:
        c = text[i]
        if c == '"' and text[i - 1] != "\\":
            quoted = not quoted
        elif not quoted and c in _OPENING:
            closing.append(_OPENING[c])
        elif not quoted and c == closing[-1]:
            closing.pop()
        i += 1
    return i - 1


def pieces(text: str) -> list[str]:
    """Parts between commas that are not within brackets or quotes."""
    found, depth, quoted, last = [], 0, False, 0
    for i, c in enumerate(text):
        if c == '"' and (i == 0 or text[i - 1] != "\\"):
            quoted = not quoted
        elif not quoted and c in "({[":
            depth += 1
        elif not quoted and c in ")}]":
            depth -= 1
        elif c == "," and not depth and not quoted:
            found.append(text[last:i].strip())
            last = i + 1
    rest = text[last:].strip()
    return [*found, rest] if rest else found


def array_type(text: str) -> Aval:
    found = _ARRAY.match(text)
    if found is None or found.group(1) not in DTYPES:
        return Aval((), text.split("[")[0])
    sizes = found.group(2)
    return Aval(tuple(int(n) for n in sizes.split(",")) if sizes else (), DTYPES[found.group(1)])


def instruction(line: str) -> Instruction:
    line = re.sub(r"/\*[^*]*\*/", "", line)
    head = _INSTRUCTION.match(line)
    if head is None:
        raise CaptureError(f"HLO that is not understood: {line.strip()[:120]}")
    rest = line[head.end() :]
    is_tuple = rest.startswith("(")
    if is_tuple:
        end = _balanced(rest, 0) + 1
        types = tuple(array_type(p) for p in pieces(rest[1 : end - 1]))
    else:
        found = _ARRAY.match(rest)
        end = found.end() if found else rest.index(" ")
        types = (array_type(rest[:end]),)
    rest = rest[end:].lstrip()
    opening = rest.index("(")
    closing = _balanced(rest, opening)
    inside = rest[opening + 1 : closing]
    attrs = dict(p.partition("=")[::2] for p in pieces(rest[closing + 1 :].lstrip(", ")))
    if "device_ids" in attrs:  # of a mesh: part of the groups
        attrs["replica_groups"] += ", device_ids=" + attrs.pop("device_ids")
    operands = tuple(p.split(" ")[-1].lstrip("%") for p in pieces(inside))
    return Instruction(head.group(2), types, is_tuple, rest[:opening].strip(), operands, inside, attrs, head.group(1) is not None)


def parse(text: str) -> Module:
    lines = text.splitlines()
    computations: dict[str, Computation] = {}
    entry = ""
    current: list[Instruction] | None = None
    name = ""
    for line in lines:
        if current is None:
            found = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$", line)
            if found:
                name, current = found.group(2), []
                entry = name if found.group(1) else entry
        elif line.startswith("}"):
            computations[name], current = Computation(name, tuple(current)), None
        elif line.strip():
            current.append(instruction(line))
    if not entry:
        raise CaptureError("HLO without an entry computation")
    partitions = re.search(r"num_partitions=(\d+)", lines[0])
    return Module(computations, entry, int(partitions.group(1)) if partitions else 1, _frames(lines))


def _table(lines: list[str], title: str) -> Iterator[tuple[int, str]]:
    if title in lines:
        for line in lines[lines.index(title) + 1 :]:
            number, _, rest = line.partition(" ")
            if not number.isdigit():
                return
            yield int(number), rest


def _frames(lines: list[str]) -> dict[int, tuple[tuple[str, int, str], ...]]:
    files = {n: t.strip('"') for n, t in _table(lines, "FileNames")}
    functions = {n: t.strip('"') for n, t in _table(lines, "FunctionNames")}

    def fields(text: str) -> dict[str, int]:
        return {k: int(v) for k, v in re.findall(r"(\w+)=(\d+)", text)}

    places = {n: fields(t) for n, t in _table(lines, "FileLocations")}
    stack = {n: fields(t) for n, t in _table(lines, "StackFrames")}
    found: dict[int, tuple[tuple[str, int, str], ...]] = {}
    for n in stack:
        chain: list[tuple[str, int, str]] = []
        at, seen = n, set()
        while at in stack and at not in seen:
            seen.add(at)
            p = places.get(stack[at].get("file_location_id", 0), {})
            chain.append((files.get(p.get("file_name_id", 0), ""), p.get("line", 0), functions.get(p.get("function_name_id", 0), "")))
            at = stack[at].get("parent_frame_id", 0) - 1
        found[n] = tuple(chain)
    return found


def integers(text: str | None) -> tuple[int, ...]:
    """`{0,1}` as numbers."""
    return tuple(int(n) for n in re.findall(r"-?\d+", text or ""))


def replica_groups(text: str, partitions: int) -> list[tuple[int, ...]]:
    """All spellings: lists, `[2,4]<=[8]`, `[4,2]<=[2,4]T(1,0)`, and axes of a mesh."""
    text = text.strip()
    found = re.fullmatch(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if found:
        shape, source = integers(found.group(1)), integers(found.group(2))
        order = np.arange(int(np.prod(source))).reshape(source)
        if found.group(3):
            order = order.transpose(integers(found.group(3)))
        return [tuple(int(x) for x in row) for row in order.reshape(shape)]
    if text.startswith("mesh["):
        return _along_axes(text)
    if not re.fullmatch(r"\{(\{[\d,]*\},?)*\}", text):
        raise Unmapped(f"replica_groups={text}")
    groups = [integers(g) for g in re.findall(r"\{([\d,]+)\}", text)]
    return groups or [tuple(range(partitions))]


def _along_axes(text: str) -> list[tuple[int, ...]]:
    """`mesh['a'=2,'b'=4] {'b'}`: ranks that differ along the named axes only, the first of them slowest. `device_ids` says in which
    order the mesh has them: `([4,2]T(1,0))` is that of a transposed array."""
    found = re.fullmatch(r"mesh\[((?:'\w+'=\d+,?)+)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{((?:'\w+',?)*)\}", text)
    if found is None:
        raise Unmapped(f"replica_groups={text}")
    axes = [(n, int(k)) for n, k in re.findall(r"'(\w+)'=(\d+)", found.group(1))]
    sizes = [k for _, k in axes]
    ranks = np.arange(int(np.prod(sizes)))
    if found.group(2):
        ranks = ranks.reshape(integers(found.group(2)))
        ranks = ranks.transpose(integers(found.group(3))) if found.group(3) else ranks
    names, along = [n for n, _ in axes], re.findall(r"'(\w+)'", found.group(4))
    order = [names.index(n) for n in names if n not in along] + [names.index(n) for n in along]
    count = int(np.prod([k for n, k in axes if n in along]))
    return [tuple(int(x) for x in row) for row in ranks.reshape(sizes).transpose(order).reshape(-1, count)]


def literal(text: str) -> Any:
    """The numbers of a constant, nested as they are written."""
    spelled = text.strip().replace("{", "[").replace("}", "]")
    spelled = re.sub(r"\binf\b", "1e999", spelled)  # which reads as infinite
    spelled = re.sub(r"\btrue\b", "True", re.sub(r"\bfalse\b", "False", spelled))
    if "..." in spelled or not re.fullmatch(r"(?:[\[\],\s\d.eE+\-]|True|False)+", spelled):  # numbers that were left out
        raise Unmapped(f"the constant {text[:40]}")
    try:
        return ast.literal_eval(spelled)
    except (ValueError, SyntaxError) as error:
        raise Unmapped(f"the constant {text[:40]}") from error


__all__ = ["Aval", "Computation", "Instruction", "Module", "integers", "literal", "parse", "pieces", "replica_groups"]
