"""Index notation: primitive nodes printed as formulas, `y[b,o] = Σ_k x[b,k]·w[o,k] + bias[o]`.

Every element of a result is written in terms of elements of the inputs. Views and slices become index
arithmetic; a value that is used more than once gets a line of its own (`t1[b,k] = …`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

from trainverify.primitives.node import Node, topological
from trainverify.primitives.scalars import SCALARS

_LETTERS: Final = "ijklmnpqrstuvwabcdefghxyz"
# how tightly a text holds together; an operand that holds less is put in parentheses
_CASES, _SUM, _PRODUCT, _ATOM = 0, 1, 2, 3
_PRECEDENCE: Final = {"add": _SUM, "sub": _SUM, "mul": _PRODUCT, "div": _PRODUCT, "neg": _SUM, "and": _CASES, "or": _CASES}
_PLAIN: Final = ("input", "const", "iota", "reshape", "transpose", "slice", "broadcast")
Text = tuple[str, int]


@dataclass(frozen=True)
class Index:
    """Σ coefficient·atom + constant; an atom is an index letter (its size known) or any text that stands for a position."""

    terms: tuple[tuple[str, int], ...]
    constant: int = 0

    def __add__(self, other: Index) -> Index:
        sums = Counter(dict(self.terms))
        for atom, c in other.terms:
            sums[atom] += c
        return Index(tuple((a, c) for a, c in sums.items() if c), self.constant + other.constant)

    def times(self, factor: int, shift: int = 0) -> Index:
        return Index(tuple((a, c * factor) for a, c in self.terms if c * factor), self.constant * factor + shift)

    def __str__(self) -> str:
        parts = []
        for atom, c in self.terms:
            parts.append(("-" if c < 0 else "+") + ("" if abs(c) == 1 else str(abs(c))) + atom)
        if self.constant or not parts:
            parts.append(f"{self.constant:+d}")
        return "".join(parts).removeprefix("+")


def whole(number: int) -> Index:
    return Index((), number)


class Notation:
    """Writes nodes; `names` are the inputs' names, `letters` the preferred index letter of a size."""

    def __init__(self, names: Sequence[str], letters: Mapping[int, str]):
        self.names = names
        self.letters = letters
        self.lines: list[str] = []
        self._sizes: dict[str, int] = {}
        self._used: set[str] = set()
        self._named: dict[int, str] = {}
        self._shared: set[int] = set()

    def define(self, outputs: Mapping[str, Node]) -> list[str]:
        """One line for each output, after the lines of what they share."""
        uses: Counter[int] = Counter()
        weight: dict[int, int] = {}
        for node in topological(outputs.values()):
            uses.update(id(a) for a in node.args)
            weight[id(node)] = sum(weight[id(a)] for a in node.args) + (node.prim not in _PLAIN)
        self._shared = {i for i, n in uses.items() if n > 1 and weight[i] > 1}
        for name, node in outputs.items():
            self._line(name, node)
        return self.lines

    def _line(self, name: str, node: Node) -> str:
        """Adds the line that defines a node; without a name it gets the next one, after what it is made of."""
        before, self._used = self._used, set()
        indices = [self._fresh(size) for size in node.shape]
        body = self._text(node, indices, named=False)[0]
        self._used = before
        name = name or f"t{len(self._named) + 1}"
        self.lines.append(f"{name}{_brackets(indices)} = {body}")
        return name

    def _fresh(self, size: int) -> Index:
        """A new index over a dimension; a dimension of size 1 needs none."""
        if size == 1:
            return whole(0)
        candidates = [self.letters[size]] if size in self.letters else []
        letter = next(
            (c for c in [*candidates, *_LETTERS] if c not in self._used and (c in candidates or c not in self.letters.values())), None
        )
        if letter is None:
            letter = f"i{len(self._used)}"
        self._used.add(letter)
        self._sizes[letter] = size
        return Index(((letter, 1),))

    def _text(self, node: Node, at: Sequence[Index], named: bool = True) -> Text:
        """The element of a node at an index."""
        if named and id(node) in self._shared:
            if id(node) not in self._named:
                self._named[id(node)] = self._line("", node)
            return self._named[id(node)] + _brackets(at), _ATOM
        args = node.args
        match node.prim:
            case "input":
                return self.names[node.attrs[0]] + _brackets(at), _ATOM
            case "const":
                return _literal(node.attrs[0])
            case "iota":
                start, step = node.attrs
                index = at[0].times(step, start)
                return str(index), _ATOM if len(index.terms) + bool(index.constant) <= 1 else _SUM
            case "map":
                return self._map(node, at)
            case "select":
                return self._cases([(self._text(args[1], at), self._text(args[0], at)[0])], self._text(args[2], at))
            case "contract":
                return self._contract(node, at)
            case "reduce":
                fn, gone = node.attrs
                inner, summed = self._with_fresh(args[0], at, gone)
                sign = "∏" if fn == "prod" else fn
                return f"{sign}_{summed}({self._text(args[0], inner)[0]})", _ATOM
            case "rowwise":
                return self._rowwise(node, at)
            case "reshape":
                return self._text(args[0], self._regrouped(at, node.shape, args[0].shape))
            case "transpose":
                return self._text(args[0], [at[node.attrs[0].index(d)] for d in range(node.ndim)])
            case "slice":
                d, start, step = node.attrs
                return self._text(args[0], _replaced(at, d, at[d].times(step, start)))
            case "broadcast":
                return self._text(args[0], [whole(0) if node.shape[d] == 1 else at[d] for d in node.attrs[0]])
            case "pad":
                d, low, high, value = node.attrs
                inside = (
                    f"{low} ≤ {at[d]} < {node.shape[d] - high}"
                    if low and high
                    else f"{at[d]} ≥ {low}"
                    if low
                    else f"{at[d]} < {node.shape[d] - high}"
                )
                return self._cases([(self._text(args[0], _replaced(at, d, at[d].times(1, -low))), inside)], _literal(value))
            case "concat":
                return self._concat(node, at)
            case "one_hot":
                ids = self._text(args[0], at[:-1])[0]
                return f"[{ids} = {at[-1].times(1, node.attrs[0])}]", _ATOM
            case "gather":
                (d,) = node.attrs
                found = self._text(args[1], at)[0]
                self._sizes[found] = args[0].shape[d]
                return self._text(args[0], _replaced(at, d, Index(((found, 1),))))
        raise ValueError(f"no primitive {node.prim!r}")

    def _map(self, node: Node, at: Sequence[Index]) -> Text:
        fn = node.attrs[0]
        texts = [self._text(a, at) for a in node.args]
        if fn in ("as_real", "detach"):
            return texts[0]
        if fn == "as_bool":
            return f"[{texts[0][0]} ≠ 0]", _ATOM
        if fn == "pi":
            return "π", _ATOM
        if fn == "one_minus_power":
            base, n = node.attrs[1]
            return f"1 - {_held(_literal(base), _ATOM)}^{n}", _SUM
        if fn == "pow":
            exponent = _literal(node.attrs[1])
            if exponent[0] == "1/2":
                return f"√({texts[0][0]})", _ATOM
            base = _held(texts[0], _ATOM)
            return f"{f'({base})' if '^' in base and base[-1] != ')' else base}^{_held(exponent, _ATOM)}", _ATOM
        if fn == "mul" and (divisor := self._divisor(node.args[1], at)):
            return f"{_held(texts[0], _PRODUCT)} / {divisor}", _PRODUCT
        if fn == "add" and texts[1][0].startswith("-") and texts[1][1] >= _SUM:
            return f"{_held(texts[0], _SUM)} - {texts[1][0][1:]}", _SUM
        template = SCALARS[fn].text or fn.removeprefix("as_") + "(" + ", ".join(f"{{{i}}}" for i in range(len(texts))) + ")"
        if fn not in _PRECEDENCE:  # a call or brackets
            return template.format(*(_held(t, _SUM if template[0] == "[" else _CASES) for t in texts)), _ATOM
        level = _PRECEDENCE[fn]
        operands = [_held(texts[0], _PRODUCT if fn == "neg" else level if level else _ATOM)]
        if len(texts) > 1:
            stricter = {"sub": _PRODUCT, "div": _ATOM}.get(fn, level if level else _ATOM)
            operands.append(_held(texts[1], stricter))
        return template.format(*operands), level

    def _divisor(self, factor: Node, at: Sequence[Index]) -> str:
        """What a factor 1/n or 1/x divides by."""
        while factor.prim == "broadcast":
            at = [whole(0) if factor.shape[d] == 1 else at[d] for d in factor.attrs[0]]
            (factor,) = factor.args
        if factor.prim == "const":
            value = factor.attrs[0]
            return str(value.denominator) if isinstance(value, Fraction) and value.numerator == 1 < value.denominator else ""
        if factor.attrs[:1] != ("div",) or id(factor) in self._shared or self._text(factor.args[0], at)[0] != "1":
            return ""
        return _held(self._text(factor.args[1], at), _ATOM)

    def _contract(self, node: Node, at: Sequence[Index]) -> Text:
        terms, target = node.attrs
        index = dict(zip(target, at, strict=True))
        summed = []
        for term, x in zip(terms, node.args, strict=True):
            for label, size in zip(term, x.shape, strict=True):
                if label not in index:
                    index[label] = self._fresh(size)
                    summed += [str(index[label])] if size != 1 else []
        texts = [self._text(x, [index[i] for i in term]) for term, x in zip(terms, node.args, strict=True)]
        product = "·".join(_held(t, _PRODUCT) for t in texts)
        if not summed:
            return product, _PRODUCT if len(texts) > 1 else texts[0][1]
        return f"Σ_{_list(summed)} {product}", _SUM

    def _rowwise(self, node: Node, at: Sequence[Index]) -> Text:
        fn, d, descending = node.attrs
        (x,) = node.args
        if fn in ("argmax", "argmin"):
            inner, k = self._with_fresh(x, at, (d,))
            return f"{fn}_{k}({self._text(x, inner)[0]})", _ATOM
        k_index = self._fresh(x.shape[d])
        inner_text = self._text(x, _replaced(at, d, k_index))
        if fn == "cumsum":
            return f"Σ_{{{k_index}≤{at[d]}}} {_held(inner_text, _PRODUCT)}", _SUM
        return f"{fn}{'↓' if descending else ''}_{k_index}({inner_text[0]})[{at[d]}]", _ATOM

    def _concat(self, node: Node, at: Sequence[Index]) -> Text:
        (d,) = node.attrs
        branches = []
        start = 0
        for x in node.args:
            place = whole(0) if x.shape[d] == 1 else at[d].times(1, -start)
            start += x.shape[d]
            branches.append((self._text(x, _replaced(at, d, place)), f"{at[d]} < {start}"))
        return self._cases(branches[:-1], branches[-1][0])

    def _cases(self, branches: Sequence[tuple[Text, str]], otherwise: Text) -> Text:
        return " else ".join([*(f"{_held(t, _SUM)} if {c}" for t, c in branches), _held(otherwise, _CASES)]), _CASES

    def _with_fresh(self, x: Node, at: Sequence[Index], gone: Sequence[int]) -> tuple[list[Index], str]:
        """The index of what is reduced: new letters where dimensions are gone."""
        rest = iter(at)
        inner = [self._fresh(x.shape[d]) if d in gone else next(rest) for d in range(x.ndim)]
        return inner, _list([str(inner[d]) for d in gone if inner[d].terms] or ["1"])

    def _regrouped(self, at: Sequence[Index], new: Sequence[int], old: Sequence[int]) -> list[Index]:
        """Where an element of a view of shape `new` is in the tensor of shape `old`."""
        result: list[Index] = []
        i = j = 0
        while i < len(new) or j < len(old):
            a, b = i, j
            p = q = 1
            if i < len(new):
                p, i = new[i], i + 1
            if j < len(old):
                q, j = old[j], j + 1
            while p != q:
                if p < q:
                    p, i = p * new[i], i + 1
                else:
                    q, j = q * old[j], j + 1
            position = whole(0)
            for d in range(a, i):
                position = position + at[d].times(math.prod(new[d + 1 : i]))
            first = True  # the first digit needs no modulus: a valid position is small enough
            for d in range(b, j):
                stride = math.prod(old[d + 1 : j])
                result.append(whole(0) if old[d] == 1 else self._digit(position, stride, None if first else old[d]))
                first = first and old[d] == 1
        return result

    def _digit(self, position: Index, stride: int, size: int | None) -> Index:
        """⌊position / stride⌋ mod size."""
        if size is not None:
            period = stride * size
            rest = Index(tuple((a, c) for a, c in position.terms if c % period), position.constant % period)
            position = rest if self._within(rest, period) else self._atom(f"({position} mod {period})", period)
        high = Index(tuple((a, c // stride) for a, c in position.terms if c % stride == 0), position.constant // stride)
        low = Index(tuple((a, c) for a, c in position.terms if c % stride), position.constant % stride)
        if self._within(low, stride):
            return high
        largest = self._largest(low)
        return high + self._atom(
            f"⌊{low}/{stride}⌋" if len(low.terms) == 1 and not low.constant else f"⌊({low})/{stride}⌋",
            int(largest) // stride + 1 if largest < math.inf else 0,
        )

    def _atom(self, text: str, size: int) -> Index:
        if size:
            self._sizes[text] = size
        return Index(((text, 1),))

    def _within(self, index: Index, bound: int) -> bool:
        return all(c > 0 for _, c in index.terms) and self._largest(index) < bound

    def _largest(self, index: Index) -> float:
        return index.constant + sum(c * (self._sizes[a] - 1 if a in self._sizes else math.inf) for a, c in index.terms)


def _brackets(at: Sequence[Index]) -> str:
    return f"[{','.join(map(str, at))}]" if at else ""


def _replaced(at: Sequence[Index], d: int, index: Index) -> list[Index]:
    return [index if i == d else old for i, old in enumerate(at)]


def _list(letters: Sequence[str]) -> str:
    return letters[0] if len(letters) == 1 else "{" + ",".join(letters) + "}"


def _held(text: Text, at_least: int) -> str:
    return text[0] if text[1] >= at_least else f"({text[0]})"


def _literal(value: Any) -> Text:
    if isinstance(value, bool):
        return str(value).lower(), _ATOM
    if isinstance(value, float) and math.isinf(value):
        return ("∞", _ATOM) if value > 0 else ("-∞", _SUM)
    text = str(value) if not isinstance(value, float) or value != int(value) else str(int(value))
    if value < 0:
        return text, _SUM
    return text, _PRODUCT if isinstance(value, Fraction) and value.denominator != 1 else _ATOM
