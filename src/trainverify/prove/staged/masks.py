"""Expressions with masks outside: routing weights, by which a plan sends tokens and the logical program multiplies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainverify.prove.definedness import FACTS, FINITE, MAY_FAIL, is_zero
from trainverify.prove.staged.numbered import Numbered
from trainverify.prove.staged.supports import NOWHERE, expression_support
from trainverify.prove.staged.terms import products


class Masks:
    """Expressions with masks outside: what is 0 wherever a mask is 0, is the mask times what it is where the mask is 1.

    A mask is whether something is positive, as a number. Only what has a value also where the mask is 0, with the mask in it and without,
    is taken out of it, and only what always has a value is left out where it is multiplied by 0.
    """

    def __init__(self, expressions: Numbered, always: set[int], divided: set[tuple[Any, int]]):
        self.e = expressions
        partial = [self.e.keys[n] for n in always if self._may_fail(n)]
        self._granted = {(info, args[-1]) for _, info, args in partial} | divided  # what the logical program divides by, and takes roots of
        self.assumed = bool(self._granted)
        self._defined: list[bool] = []
        self._plain: list[bool] = []  # whether there is nothing to take out of it, nor to leave out
        self._known: dict[int, tuple[int, int | None, bool]] = {}
        self._outside: dict[int, int] = {}
        self._zeros: dict[tuple[int, int], bool] = {}

    def outside(self, number: int) -> int:
        """The same, with masks as far outside as they can be."""
        found = self._outside.get(number)
        if found is None:
            inner, mask, zero = self._split(number)
            if mask is None:
                found = inner
            elif zero and self._total(number, inner):
                found = inner if self._implied(mask, inner) else self._make("map", ("mul", None, "NoneType"), [mask, inner])
            else:
                op, info, args = self.e.keys[number]
                simpler = number if mask == number else self._make(op, info, [self._known_number(a) for a in args])
                if simpler != number:
                    found = self.outside(simpler)
                else:
                    found = number if mask == number else self._make(op, info, [self.outside(a) for a in args])
            self._outside[number] = found
        return found

    def _implied(self, mask: int, number: int) -> bool:
        """Whether an expression is 0 anyway wherever a mask is: what is compared is not negative, so it is 0 there, and so is one of its
        factors; each of them makes the expression 0, or is never 0 itself."""
        self.e.describe()
        (compared,) = self.e.keys[mask][2]
        y = self.e.keys[compared][2][1]
        if self.e.signs[y] not in ("nonnegative", "positive") or self.e.states[y] != FINITE:
            return False
        return all(self._vanishes(number, factor) for factor in self._factors(y))

    def _factors(self, number: int) -> list[int]:
        """Expressions one of which is 0 where this is; none that is always positive."""
        op, info, args = self.e.keys[number]
        if self.e.signs[number] == "positive" and self.e.states[number] == FINITE:
            return []
        factors = range(len(args)) if op == "dot" and len(info) == 1 else FACTS[info[0]].factors if op == "map" else ()
        return [f for k in factors for f in self._factors(args[k])] if factors else [number]

    def _vanishes(self, number: int, factor: int) -> bool:
        """Whether an expression is 0 wherever another one is, by having it as a factor."""
        key = (number, factor)
        found = self._zeros.get(key)
        if found is None:
            found = self._zeros[key] = number == factor or self._vanishing(number, factor)
        return found

    def _vanishing(self, number: int, factor: int) -> bool:
        op, info, args = self.e.keys[number]
        match op:
            case "real":
                return bool(info == 0)
            case _ if factor > number:  # parts have smaller numbers
                return False
            case "dot":
                every = [[args[k] for k in product] for product in products(info)]
                return all(factor in p or any(self._vanishes(a, factor) for a in p) for p in every)
            case "map":
                return is_zero(info[0], (self._vanishes(a, factor) for a in args))
        return False

    def _split(self, number: int) -> tuple[int, int | None, bool]:
        """What an expression is where the only mask in it is 1, that mask, and whether it is 0 where that is 0."""
        found = self._known.get(number)
        if found is None:
            found = self._known[number] = self._look(number)
        return found

    def _look(self, number: int) -> tuple[int, int | None, bool]:
        op, info, args = self.e.keys[number]
        if not args or op == "row" or self._nothing_to_do(number):
            return number, None, False
        if self.e.is_mask(self.e.keys[number]):
            return self.e.literal(1), number, True
        plain = self._make(op, info, [self._known_number(a) for a in args])
        if plain != number:
            return self._split(plain)
        parts = [self._split(a) for a in args]
        masks = {m for _, m, _ in parts if m is not None}
        if len(masks) != 1:
            return self._make(op, info, [self.outside(a) for a in args]), None, False
        (mask,) = masks
        known = [frozenset((mask,)) if zero else None if m is None and self._is_zero(inner) else NOWHERE for inner, m, zero in parts]
        support = expression_support(op, info, known)
        return self._make(op, info, [inner for inner, _, _ in parts]), mask, support is None or mask in support

    def _nothing_to_do(self, number: int) -> bool:
        e = self.e
        known = (e.literal(0), e.literal(1))
        for n in range(len(self._plain), number + 1):
            op, info, args = key = e.keys[n]
            plain = all(self._plain[a] for a in args)
            if op == "dot":
                plain = plain and known[0] not in args and known[1] not in args
            elif plain and args and op in ("hit", "map"):
                plain = not e.is_mask(key) and self._constant(op, info, args) is None
            self._plain.append(plain)
        return self._plain[number]

    def _constant(self, op: str, info: Any, args: Sequence[int]) -> int | None:
        """Which position something known is at, and the same number as an integer or a real one; None for everything else."""
        kind, value, _ = self.e.keys[args[0]]
        if op == "hit" and kind == "int":
            return self.e.literal(1 if value == info else 0)
        if op == "map" and info[0] == "as_real" and kind in ("int", "bool"):
            return self.e.literal(value)
        if op == "map" and info[0] == "as_int" and kind == "real" and value in (0, 1):
            return self.e.number(("int", int(value), ()))
        return None

    def _known_number(self, number: int) -> int:
        """A number that an expression without symbols is, if it can be said; else the expression."""
        op, info, args = self.e.keys[number]
        return (
            self._make(op, info, [self._known_number(args[0])])
            if op == "hit" or (op == "map" and info[0] in ("as_real", "as_int"))
            else number
        )

    def _is_zero(self, number: int) -> bool:
        return self.e.keys[number][:2] == ("real", 0)

    def _may_fail(self, number: int) -> bool:
        op, info, _ = self.e.keys[number]
        return op == "map" and info[0] in MAY_FAIL

    def _total(self, *numbers: int) -> bool:
        """Whether expressions have values wherever the logical program is defined, for any values of masks."""
        self.e.describe()
        for n in range(len(self._defined), max(numbers) + 1):
            _, info, args = self.e.keys[n]
            fails = self._may_fail(n) and self.e.signs[args[-1]] != "positive" and (info, args[-1]) not in self._granted
            self._defined.append(not fails and all(self._defined[a] for a in args))
        return all(self._defined[n] and self.e.states[n] == FINITE for n in numbers)

    def _make(self, op: str, info: Any, args: Sequence[int]) -> int:
        e, one, zero = self.e, self.e.literal(1), self.e.literal(0)
        if op == "map" and info[0] == "mul":
            op, info = "dot", (2,)
        if op != "dot":
            known = self._constant(op, info, args)
            return e.number((op, info, tuple(args))) if known is None else known
        if one not in args and zero not in args:
            return args[0] if info == (1,) else e.number((op, info, tuple(args)))
        every = [[args[k] for k in product] for product in products(info)]
        left = [[f for f in factors if f != one] or [one] for factors in every if zero not in factors or not self._total(*factors)]
        if not left:
            return zero
        if len(left) == 1 and len(left[0]) == 1:
            return left[0][0]
        return e.number(("dot", tuple(map(len, left)), tuple([f for factors in left for f in factors])))
