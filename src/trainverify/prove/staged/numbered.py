"""Numbers for expressions over symbols: one expression, one number, however often it occurs; and facts about each.

Nothing is rewritten, except that terms multiplied by the number 0 are left out, and that counts have one order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

from trainverify.prove.definedness import FACTS, FINITE, MAY_FAIL, POSITIONS, Sign, expression_state, is_real, is_zero
from trainverify.prove.staged.elements import Elements
from trainverify.prove.staged.signs import expression_sign
from trainverify.prove.staged.supports import NOWHERE, Support, expression_support
from trainverify.prove.staged.terms import looks_up, products

Key = tuple[str, Any, tuple[int, ...]]  # op, info, numbers of arguments


class Numbered:
    """Expressions, each made of earlier ones."""

    def __init__(self, elements: Elements, one_product: bool):
        self.elements = elements
        self.keys: list[Key] = []
        self.picks: list[bool] = []  # whether it says which elements are looked up
        self.partial: list[bool] = []  # whether something in it divides, or takes a root or logarithm
        self.total: list[bool] = []  # whether nothing in it divides, or takes a root or logarithm, unless of what is positive
        self.states: list[int] = []
        self.signs: list[Sign] = []
        self.real: list[bool] = []  # whether it is known to be a real number, not an integer or a truth value
        self._one_product = one_product  # whether products have one form
        self._numbers: dict[Key, int] = {}
        self._literals: dict[Fraction | int, int] = {}
        self._supports: dict[int, Support] = {}
        self._counts: set[int] = set()  # sums of truth values
        self.zero = self.literal(0)

    def number(self, key: Key) -> int:
        if self._one_product and key[0] == "map" and key[1][0] == "mul":
            key = ("dot", (2,), key[2])
        found = self._numbers.setdefault(key, len(self.keys))
        if found == len(self.keys):
            self.keys.append(key)
            self.picks.append(looks_up(key[0], key[1], [self.picks[a] for a in key[2]]))
        return found

    def simple(self, key: Key) -> int:
        """The number of an expression without what is multiplied by the number 0, if that surely has a value."""
        op, info, args = key
        if op == "dot" and args and self._counts_or_counted(args) and info.count(1) == len(info):
            return self._count(args)
        if self.zero not in args or op not in ("dot", "map"):
            return self.number(key)
        if op == "map":
            vanishes = is_zero(info[0], [a == self.zero for a in args])
            vanishes = vanishes and (info[0] not in MAY_FAIL or self.signs_of(args[-1]) == "positive")
            return self.zero if vanishes and self.sure(args) else self.number(key)
        every = [[args[k] for k in product] for product in products(info)]
        left = [product for product in every if self.zero not in product or not self.sure(product)]
        return self.number(("dot", tuple(map(len, left)), tuple([x for product in left for x in product]))) if left else self.zero

    def _counts_or_counted(self, args: tuple[int, ...]) -> bool:
        """Whether all of these are truth values as numbers, or sums of such."""
        return all(a in self._counts or (self.keys[a][0] == "map" and self.keys[a][1][0] == "as_real") for a in args)

    def _count(self, args: tuple[int, ...]) -> int:
        """How many of these are true: one expression, however ranks share the counting."""
        flat = sorted(x for a in args for x in (self.keys[a][2] if a in self._counts else (a,)))
        found = self.number(("dot", (1,) * len(flat), tuple(flat)))
        self._counts.add(found)
        return found

    def signs_of(self, number: int) -> Sign:
        self.describe()
        return self.signs[number]

    def sure(self, numbers: Iterable[int]) -> bool:
        """Whether expressions are real numbers, whatever the symbols in them are."""
        self.describe()
        return all(self.total[n] and self.states[n] == FINITE for n in numbers)

    def describe(self) -> None:
        """What is known of all numbers so far."""
        partial, states, signs, real, total = self.partial, self.states, self.signs, self.real, self.total
        for op, info, args in self.keys[len(states) :]:
            if op == "symbol":
                kind, domain = self.elements.symbol_kind(info)
                signed = domain is not None and domain[0] in ("positive", "nonnegative")
                real.append(kind == "real")
                signs.append(domain[0] if signed else None)
                partial.append(False)
                total.append(True)
                states.append(self.elements.state(info))
                continue
            inner = [states[a] for a in args]
            real.append(_is_real(op, info, [real[a] for a in args]))
            sign = expression_sign(op, info, [signs[a] for a in args], inner, args, self._there(op, args))
            infinite = op == "map" and FACTS[info[0]].fades and not all(total[a] for a in args)
            signs.append("nonnegative" if infinite and sign == "positive" else sign)
            may_fail = op == "map" and info[0] in MAY_FAIL
            partial.append(may_fail or any(partial[a] for a in args))
            total.append(not (may_fail and signs[args[-1]] != "positive") and all(total[a] for a in args))
            states.append(expression_state(op, info, inner))

    def _there(self, op: str, args: Sequence[int]) -> bool:
        """Whether something is looked up by a position in a row that is no longer than what it is looked up in."""
        if op != "pick":
            return False
        op, info, row = self.keys[args[0]]
        return op == "row" and info[0] in POSITIONS and len(row) < len(args)

    def support(self, number: int) -> Support:
        """The symbols with which an expression vanishes."""
        found = self._supports.get(number)
        if number not in self._supports:
            op, info, args = self.keys[number]
            if op == "symbol":
                found = self.elements.supports.get(info, NOWHERE) | {info}
            else:
                found = expression_support(op, info, [self.support(a) for a in args])
            self._supports[number] = found
        return found

    def literal(self, value: Fraction | int) -> int:
        found = self._literals.get(value)
        if found is None:
            found = self._literals[value] = self.number(("real", Fraction(value), ()))
        return found

    def is_mask(self, key: Key) -> bool:
        """Whether an expression is 1 where something is positive, else 0."""
        op, info, args = key
        if op != "map" or info[0] != "as_real":
            return False
        op, info, args = self.keys[args[0]]
        return op == "map" and info[0] == "lt" and self.keys[args[0]][:2] == ("real", 0)


def _is_real(op: str, info: Any, args: Sequence[bool]) -> bool:
    match op:
        case "real" | "hit" | "constant":
            return True
        case "map":
            return is_real(info[0], args)
        case "dot":
            return any(args)
        case "reduce":
            return all(args)
        case "choose":
            return all(args[1:])
        case "pick":
            return bool(info == "real")
    return False
