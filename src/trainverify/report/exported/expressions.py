"""Primitive nodes as NumPy expressions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final

from trainverify.primitives.node import Literal, Node, ordered
from trainverify.primitives.scalars import SCALARS, nearest_float

LONGEST: Final = 90  # characters of an expression that is written within another

_INFIX: Final = {
    "add": "({0} + {1})",
    "sub": "({0} - {1})",
    "mul": "({0} * {1})",
    "div": "({0} / {1})",
    "neg": "(-{0})",
    "lt": "({0} < {1})",
    "le": "({0} <= {1})",
    "eq": "({0} == {1})",
    "and": "({0} & {1})",
    "or": "({0} | {1})",
    "not": "(~{0})",
    "floordiv": "({0} // {1})",
    "mod": "({0} % {1})",
    "as_bool": "({0} != 0)",
    "as_real": "np.asarray({0}, dtype=float)",
    "as_int": "np.trunc({0}).astype(int)",
    "max": "np.maximum({0}, {1})",
    "min": "np.minimum({0}, {1})",
    "erf": "erf({0})",
    "uniform": "uniform({0}, {1}, {2})",
    "detach": "{0}",
    "pi": "np.pi",
} | {fn: f"np.{fn}({{0}})" for fn in ("exp", "log", "sin", "cos", "tanh", "abs", "sign", "floor")}
_ROWWISE: Final = {"cumsum": "np.cumsum({0}, axis={1})", "argmax": "np.argmax({0}, axis={1})", "argmin": "np.argmin({0}, axis={1})"}
_LETTERS: Final = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Unwritable(Exception):
    """A node that has no NumPy expression here."""


@dataclass
class Writer:
    """Statements that compute nodes; temporary names are new in each."""

    lines: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)  # functions that the file must define
    count: int = 0

    def write(self, outputs: Sequence[Node], inputs: Sequence[str | None]) -> list[str]:
        """Expressions for `outputs`; `inputs[i]` is what input node i is called. What is used twice or long gets a name."""
        nodes = ordered(tuple(outputs))
        uses = Counter(id(a) for n in nodes for a in n.args) + Counter(id(o) for o in outputs)
        text: dict[int, str] = {}
        for node in nodes:
            made = self._expression(node, text, inputs)
            plain = node.prim in ("input", "const") or (node.prim == "broadcast" and not node.args[0].shape)
            if not plain and not any(node is o for o in outputs) and (uses[id(node)] > 1 or len(made) > LONGEST):
                self.count += 1
                self.lines.append(f"t{self.count} = {_bare(made)}")
                made = f"t{self.count}"
            text[id(node)] = made
        return [f"np.asarray({text[id(o)]})" if _scalar(o) else _bare(text[id(o)]) for o in outputs]

    def _expression(self, node: Node, text: dict[int, str], inputs: Sequence[str | None]) -> str:
        args = [text[id(a)] for a in node.args]
        if node.prim == "map":
            return self._map(node, text)
        if node.prim == "input":
            name: str | None = inputs[node.attrs[0]]
            if name is None:
                raise Unwritable("an input that is not there")
            return name
        if node.prim == "const":
            return literal(node.attrs[0], node.kind)
        return self._shaped(node, [f"np.asarray({a})" if _scalar(n) else a for n, a in zip(node.args, args, strict=True)])

    def _map(self, node: Node, text: dict[int, str]) -> str:
        """Operands that do not fill the shape are broadcast by NumPy, if one does."""
        fn, param = node.attrs[0], node.attrs[1] if len(node.attrs) > 1 else None
        full = [a.prim != "broadcast" for a in node.args]
        args = [_thin(a, text) if any(full) and not f else text[id(a)] for a, f in zip(node.args, full, strict=True)]
        if fn in ("erf", "uniform"):
            self.used.add(fn)
        if fn == "pow":
            return _power(args[0], param, node.kind)
        if fn == "one_minus_power":
            return repr(float(SCALARS[fn].numeric(param)))
        if fn not in _INFIX or param is not None:
            raise Unwritable(f"the function {fn}")
        return _INFIX[fn].format(*args)

    def _shaped(self, node: Node, args: list[str]) -> str:
        shape, attrs = node.shape, node.attrs
        match node.prim:
            case "broadcast":
                return f"np.broadcast_to({_spread(node, args[0])}, {shape})"
            case "contract":
                return _contract(attrs[0], attrs[1], args)
            case "reshape":
                return f"{args[0]}.reshape({shape})"
            case "transpose":
                return f"{args[0]}.transpose({attrs[0]})"
            case "iota":
                return f"({attrs[0]} + {attrs[1]} * np.arange({shape[0]}))"
            case "select":
                return f"np.where({', '.join(args)})"
            case "reduce":
                return f"np.{attrs[0]}({args[0]}, axis={attrs[1]})"
            case "slice":
                return f"{args[0]}[{_slice(attrs[0], attrs[1], attrs[2], shape[attrs[0]])}]"
            case "concat":
                return f"np.concatenate([{', '.join(args)}], axis={attrs[0]})"
            case "pad":
                d, low, high, value = attrs
                width = tuple((low, high) if i == d else (0, 0) for i in range(len(shape)))
                return f"np.pad({args[0]}, {width}, constant_values={literal(value, node.kind)})"
            case "one_hot":
                return f"({args[0]}[..., None] == np.arange({attrs[0]}, {attrs[0] + shape[-1]})).astype(float)"
            case "gather":
                self.used.add("gather")
                return f"gather({args[0]}, {args[1]}, {attrs[0]})"
            case "rowwise":
                return self._rowwise(attrs, args[0])
        raise Unwritable(f"the primitive {node.prim}")

    def _rowwise(self, attrs: tuple[Any, ...], x: str) -> str:
        fn, d, descending = attrs
        if fn in _ROWWISE:
            return _ROWWISE[fn].format(x, d)
        order = f"np.argsort({'-' if descending else ''}{x}, axis={d}, kind='stable')"
        return order if fn == "argsort" else f"np.take_along_axis({x}, {order}, axis={d})"


def _scalar(node: Node) -> bool:
    """Whether its expression is a number, not an array."""
    return node.prim == "const" or (node.prim == "map" and all(_scalar(a) for a in node.args))


def literal(value: Literal, kind: str) -> str:
    """A number, so that NumPy makes the right kind of it."""
    if kind != "real":
        return f"np.{bool(value)}_" if kind == "bool" else repr(int(value))
    number = nearest_float(value)
    if number != number or number in (float("inf"), float("-inf")):
        return "np.nan" if number != number else "np.inf" if number > 0 else "(-np.inf)"
    if isinstance(value, Fraction) and value.denominator > 1 and max(abs(value.numerator), value.denominator) < 1 << 53:
        return f"({value.numerator} / {value.denominator})"
    return repr(number) if number >= 0 else f"({number!r})"


def _bare(text: str) -> str:
    """Without parentheses around the whole."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for i, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if not depth and i < len(text) - 1:
            return text
    return text[1:-1]


def _thin(node: Node, text: dict[int, str]) -> str:
    """What is broadcast, with dimensions of size 1 where it does not vary."""
    inner = node.args[0]
    if not inner.shape:
        return text[id(inner)]
    return _spread(node, text[id(inner)])


def _spread(node: Node, text: str) -> str:
    dims, n = node.attrs[0], len(node.shape)
    if tuple(dims) == tuple(range(n - len(dims), n)):  # NumPy adds leading dimensions by itself
        return text
    return f"{text}.reshape({tuple(s if i in dims else 1 for i, s in enumerate(node.shape))})"


def _power(x: str, p: Any, kind: str) -> str:
    if kind != "real":
        return f"({x} ** {int(p)})"
    if p in (Fraction(1, 2), Fraction(-1, 2)):
        return f"np.sqrt({x})" if p > 0 else f"(1.0 / np.sqrt({x}))"
    return f"({x} ** {literal(p, 'real')})"


def _contract(terms: Sequence[Sequence[int]], target: Sequence[int], args: list[str]) -> str:
    if len(terms) == 1 and [t for t in terms[0] if t in target] == list(target):
        gone = tuple(i for i, t in enumerate(terms[0]) if t not in target)
        return f"np.sum({args[0]}, axis={gone})"
    names = {n: i for i, n in enumerate(dict.fromkeys(t for term in terms for t in term))}
    if len(names) > len(_LETTERS):
        raise Unwritable("a contraction of so many dimensions")
    spec = ",".join("".join(_LETTERS[names[t]] for t in term) for term in terms)
    return f'np.einsum("{spec}->{"".join(_LETTERS[names[t]] for t in target)}", {", ".join(args)})'


def _slice(d: int, start: int, step: int, size: int) -> str:
    stop: int | None = start + step * size
    if step < 0 and stop is not None and stop < 0:
        stop = None
    by = "" if step == 1 else f":{step}"
    return ":, " * d + f"{start}:{'' if stop is None else stop}{by}"
