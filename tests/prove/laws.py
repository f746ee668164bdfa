"""The laws that the kernel applies, as data: name, statement, side condition, and a way to check each at random points.

`build` makes a random instance: the form that the kernel makes of it, and what it has to be, computed from the values of
its parts by the definition of the operation alone. Nothing here is used by the prover; tests evaluate both sides.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from prove.evaluate_forms import Balls, Evaluator, Number
from trainverify.axes.structure import Axes
from trainverify.prove.algebra.flat import Flat, Frame
from trainverify.prove.algebra.grids import Grids
from trainverify.prove.algebra.kernel import Kernel
from trainverify.prove.algebra.masked import MaskedSums
from trainverify.prove.algebra.terms import Index, Poly, constant, scale, tidy

P, Q = -1, -2  # the free variables of an instance
SIZES: Final[dict[Index, int]] = {P: 2, Q: 3}
V0, V1 = 2, 3  # the digits of labels

At = Mapping[Index, int]
Meaning = Callable[[At], Number]
Instance = tuple[Poly, Meaning]


class World:
    """A kernel, a few inputs, and values for them."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.kernel = Kernel()
        self.elements: dict[tuple[str, tuple[int, ...]], Number] = {}
        self.balls = Balls()
        ranges = {"x": (-8, 8), "y": (-8, 8), "p": (1, 8), "n": (0, 8), "m": (0, 1), "d": (1, 8)}
        for name, (low, high) in ranges.items():
            for at in itertools.product(range(V0), range(V1)):
                value = self.rng.randint(low, high)
                self.elements[name, at] = self.balls.of(value if name == "m" else Fraction(value, 8))
        for i in range(V0):
            self.elements["id", (i,)] = self.balls.of(self.rng.choice([-100, *range(V0 * V1)]))

    def _input(self, name: str, i: Index, j: Index, **flags: bool) -> Poly:
        return self.kernel.input(name, (V0, V1), (i, j), **flags)

    def x(self, i: Index = P, j: Index = Q) -> Poly:
        return self._input("x", i, j)

    def y(self, i: Index = P, j: Index = Q) -> Poly:
        return self._input("y", i, j)

    def positive(self, i: Index = P, j: Index = Q) -> Poly:
        return self._input("p", i, j, positive=True, nonnegative=True)

    def nonnegative(self, i: Index = P, j: Index = Q) -> Poly:
        return self._input("n", i, j, nonnegative=True)

    def divisor(self, i: Index = P, j: Index = Q) -> Poly:
        """Not zero, which the kernel is not told."""
        return self._input("d", i, j, nonnegative=True)

    def mask(self, i: Index = P, j: Index = Q) -> Poly:
        return self._input("m", i, j, indicator=True, nonnegative=True)

    def digit(self, which: int, at: Index, i: Index = P) -> Poly:
        return self.kernel.digit("id", (V0,), (i,), which, 2, (V0, V1)[which], at)

    def valid(self, i: Index = P) -> Poly:
        return self.kernel.valid("id", (V0,), (i,))

    def index(self, size: int) -> Index:
        """A variable of this size, or a constant."""
        free = {V0: P, V1: Q}[size]
        return self.rng.choice([free, free, self.rng.randrange(size)])

    def term(self) -> Poly:
        made = self.rng.choice([self.x, self.y, self.positive, self.nonnegative, self.mask])
        return made(self.index(V0), self.index(V1))

    def poly(self, terms: int = 3) -> Poly:
        """A random polynomial."""
        total: Poly = {}
        for _ in range(self.rng.randint(1, terms)):
            product = constant(Fraction(self.rng.choice([-3, -2, -1, 1, 2, 3]), self.rng.choice([1, 2])))
            for _ in range(self.rng.randint(1, 3)):
                product = self.kernel.times(product, self.term())
            total = self.kernel.add(total, product)
        return total

    def above(self) -> Poly:
        """A random polynomial whose values are positive."""
        k = self.kernel
        return k.add(k.times(self.positive(), k.add(k.times(self.x(), self.x()), constant(1))), constant(Fraction(1, 3)))

    # -- values --------------------------------------------------------------------------------------------------------

    def value(self, p: Poly, at: At) -> Number:
        return Evaluator(self.kernel.atoms, self.elements, {"id": (V0, V1)}, self.balls).value(p, at)

    def total(self, p: Poly, over: Mapping[Index, int], at: At) -> Number:
        """Σ by its definition."""
        result = self.balls.of(0)
        for choice in itertools.product(*(range(s) for s in over.values())):
            result = result + self.value(p, {**at, **dict(zip(over, choice, strict=True))})
        return result


@dataclass(frozen=True)
class Law:
    name: str
    statement: str
    condition: str
    build: Callable[[World], Instance]


LAWS: Final[dict[str, Law]] = {}


def law(name: str, statement: str, condition: str = "none") -> Callable[[Callable[[World], Instance]], Callable[[World], Instance]]:
    def keep(build: Callable[[World], Instance]) -> Callable[[World], Instance]:
        LAWS[name] = Law(name, statement, condition, build)
        return build

    return keep


# -- ring ------------------------------------------------------------------------------------------------------------


@law("ring", "products distribute over sums, equal terms and equal factors join", "exact rational coefficients")
def _ring(w: World) -> Instance:
    p, q, r = w.poly(), w.poly(), w.poly()
    made = w.kernel.times(w.kernel.add(p, scale(q, -2)), r)
    return made, lambda at: (w.value(p, at) - 2 * w.value(q, at)) * w.value(r, at)


@law("substitution", "a form with variables replaced is the form at those indices", "all at once; factors that meet join")
def _substitution(w: World) -> Instance:
    k = w.kernel
    p = k.add(w.poly(), k.times(k.delta(V1, Q, -3), w.x(P, -3)))
    to = w.rng.choice([{-3: Q}, {-3: 1}, {-3: Q, Q: 2}, {-3: 0, Q: 0}])
    return k.substitute(p, to), lambda at: w.value(p, {**{v: at.get(i, i) for v, i in {-3: Q, **to}.items()}, **_rest(at, to)})


def _rest(at: At, to: Mapping[Index, Index]) -> dict[Index, int]:
    return {v: i for v, i in at.items() if v not in to}


@law("cut", "a sum under a short name is the sum", "equal variables share a slot, different ones do not")
def _cut(w: World) -> Instance:
    p = w.kernel.add(w.poly(), w.x(), scale(w.y(), 2))
    return w.kernel.single(p), lambda at: w.value(p, at)


@law("content", "p = coefficient · common factors · primitive part", "an indicator leaves only if every term has it")
def _content(w: World) -> Instance:
    k = w.kernel
    p = k.times(k.add(w.x(), w.poly()), k.times(w.mask(), w.positive()))
    if not p:
        return p, lambda at: w.balls.of(0)
    c, common, primitive = k.content(p)
    return k.times(k.monomial(common, c), primitive), lambda at: w.value(p, at)


@law("content under a name", "content · prim is one name; prim alone is that name over the content", "the content is positive")
def _named_content(w: World) -> Instance:
    k = w.kernel
    prim = k.add(w.x(), scale(w.y(), 2))
    k.single(k.times(k.power(w.positive(), Fraction(w.rng.choice([-3, -2, 4]), 2)), scale(prim, -3)))  # names it
    other = w.rng.choice([w.mask(), w.x(), w.positive(), w.nonnegative(), constant(2)])
    return k.single(k.times(other, prim)), lambda at: w.value(other, at) * w.value(prim, at)


@law(
    "divisor under a name",
    "prim over d is one name; prim alone is that name times d",
    "d cannot be negative, and that it is not zero is noted",
)
def _named_divisor(w: World) -> Instance:
    k = w.kernel
    prim = k.add(w.x(), scale(w.y(), 2))
    k.single(k.times(k.power(w.divisor(), w.rng.choice([-3, -2, -1])), scale(prim, -3)))  # names it
    other = w.rng.choice([w.mask(), w.x(), w.divisor(), k.power(w.divisor(), -2), w.nonnegative(), constant(2)])
    return k.single(k.times(other, prim)), lambda at: w.value(other, at) * w.value(prim, at)


@law("flat", "a sum of cuts is the sum of their terms", "the cut stands with power 1")
def _flat(w: World) -> Instance:
    k = w.kernel
    p = k.add(k.times(w.positive(), k.single(k.add(w.x(), w.poly()))), w.y())
    return k.flat(p), lambda at: w.value(p, at)


# -- sums ------------------------------------------------------------------------------------------------------------


@law("sum linear", "Σ (a + c·b) = Σ a + c·Σ b; factors without the variable leave; components separate; an unused variable counts its size")
def _sum(w: World) -> Instance:
    k = w.kernel
    a, b = k.bound(), k.bound()
    p = k.add(k.times(w.x(P, b), w.y(a, b)), k.times(w.x(a, Q), w.poly()), w.positive(a, b), w.poly())
    over = {a: V0, b: V1}
    return k.sum(p, over), lambda at: w.total(p, over, at)


@law("sum of sum", "Σ Σ = Σ, also through a cut", "power 1")
def _sum_of_sum(w: World) -> Instance:
    k = w.kernel
    a, b = k.bound(), k.bound()
    inner = k.single(k.add(k.sum(k.times(w.x(a, b), w.y(P, b)), {b: V1}), w.x(a, Q)))
    return k.sum(inner, {a: V0}), lambda at: w.total(inner, {a: V0}, at)


@law("inner sum", "Σ_i f(i)·(Σ_j g(i,j)) = Σ_ij f(i)·g(i,j)", "power 1; the logical program has the outcome, or it stays")
def _inner_sum(w: World) -> Instance:
    k = w.kernel
    a, b = k.bound(), k.bound()
    product = k.times(w.x(a, b), w.y(P, b))
    if w.rng.random() < 0.8:
        k.sum(k.times(product, w.positive(a, Q)), {a: V0, b: V1})
    k.named = len(k.atoms)
    p = k.times(k.sum(product, {b: V1}), w.positive(a, Q))
    return k.sum(p, {a: V0}), lambda at: w.total(p, {a: V0}, at)


@law(
    "sum of a name",
    "Σ_i f(i)·c(i) = Σ_i f(i)·a(i) + Σ_i f(i)·b(i) for a sum c = a + b under a name",
    "power 1; only if the logical program has the outcome",
)
def _sum_of_name(w: World) -> Instance:
    k = w.kernel
    a = k.bound()
    terms = [w.x(a, Q), k.times(w.y(a, Q), w.nonnegative(P, Q))]
    if w.rng.random() < 0.8:
        for t in terms:
            k.sum(k.times(w.positive(a, 1), t), {a: V0})
    k.named = len(k.atoms)
    p = k.times(k.single(k.add(terms[0], scale(terms[1], -2))), w.positive(a, 1))
    return k.sum(p, {a: V0}), lambda at: w.total(p, {a: V0}, at)


@law(
    "shares of a sum",
    "Σ_i f(i)·(g(i,0) + g(i,2)) + Σ_i f(i)·g(i,1) = Σ_i f(i)·(Σ_c g(i,c))",
    "every constant once, equal coefficients; only if the logical program has the outcome",
)
def _shares(w: World) -> Instance:
    k = w.kernel
    a, c = k.bound(), k.bound()
    k.sum(k.times(w.y(a, Q), k.sum(w.x(a, c), {c: V1})), {a: V0})  # what the logical program has
    k.named, k.keep_constants = len(k.atoms), False
    chosen = w.rng.choice([[(0, 1), (2, 2)], [(0, 2), (1, 1)], [(0, 1), (1, 2)], [(1, 2), (0, 0)]])  # some twice, or never
    p: Poly = {}
    for several in chosen:
        p = k.add(p, k.sum(k.times(w.y(a, Q), k.single(k.add(*(w.x(a, n) for n in dict.fromkeys(several))))), {a: V0}))
    return k.settle(p), lambda at: w.value(p, at)


@law(
    "gathered sum",
    "a·Σ_i f(i)·g(i) + b·Σ_i f(i)·h(i) = Σ_i f(i)·c(i) for a sum c = a·g + b·h of the logical program",
    "all terms of c, their coefficients in proportion; the logical program has that Σ",
)
def _gathered_sum(w: World) -> Instance:
    k = w.kernel
    a = k.bound()
    terms = [w.x(a, Q), scale(k.times(w.y(a, Q), w.y(a, Q)), -2)]
    k.sum(k.times(w.positive(a, 1), k.single(k.add(*terms))), {a: V0})  # what the logical program has
    k.named, k.keep_constants = len(k.atoms), False
    scales = w.rng.choice([(3, 3), (3, 2), (1, 1), (-1, 1)])
    outside = w.rng.choice([constant(1), w.nonnegative()])
    p = k.add(*(k.times(scale(outside, c), k.sum(k.times(w.positive(a, 1), t), {a: V0})) for c, t in zip(scales, terms, strict=True)))
    return k.settle(p), lambda at: w.value(p, at)


@law(
    "nested sum",
    "Σ_ij f(i)·g(i,j)·h(i,j) = Σ_i f(i)·(Σ_j g(i,j)·h(i,j))",
    "f does not depend on j; only if the logical program has the outcome",
)
def _nested_sum(w: World) -> Instance:
    k = w.kernel
    a, b = k.bound(), k.bound()
    product = k.times(w.x(a, b), k.times(w.y(a, b), w.nonnegative(P, b)))
    if w.rng.random() < 0.8:
        k.sum(k.times(w.positive(a, Q), k.sum(product, {b: V1})), {a: V0})  # what the logical program has
    k.named = len(k.atoms)
    p = k.times(product, w.rng.choice([w.positive(a, Q), w.positive(a, b)]))
    return k.sum(p, {a: V0, b: V1}), lambda at: w.total(p, {a: V0, b: V1}, at)


@law("regrouped", "Σ_i f(i)·(Σ_j g(i,j)·h(j)) = Σ_j h(j)·(Σ_i f(i)·g(i,j))", "only if the logical program has the result")
def _regrouped(w: World) -> Instance:
    k = w.kernel
    a, b = k.bound(), k.bound()
    k.sum(k.times(w.y(P, b), k.sum(k.times(w.x(a, b), w.positive(a, Q)), {a: V0})), {b: V1})  # what the logical program has
    inner = k.sum(k.times(w.x(a, b), w.y(P, b)), {b: V1})
    k.named = len(k.atoms)
    p = k.times(inner, w.positive(a, w.rng.choice([Q, 1])))
    return k.sum(p, {a: V0}), lambda at: w.total(p, {a: V0}, at)


@law("symmetric factors", "a product in a Σ has one form whatever the order of equal factors", "ties are searched, never guessed")
def _symmetric(w: World) -> Instance:
    k = w.kernel
    a, b = k.bound(), k.bound()
    factors = [w.x(P, b), w.x(a, b), w.x(a, Q), w.x(a, b)]
    w.rng.shuffle(factors)
    p = constant(1)
    for f in factors:
        p = k.times(p, f)
    return k.sum(p, {a: V0, b: V1}), lambda at: w.total(p, {a: V0, b: V1}, at)


@law("equality", "δ(i,j)·f(i) = δ(i,j)·f(j); δ(c,c′) = 0; δ² = δ")
def _equality(w: World) -> Instance:
    k = w.kernel
    c = w.rng.randrange(V1)
    p = k.add(w.poly(), k.times(w.x(), w.y()))
    made = k.times(k.delta(V1, Q, c), k.times(k.delta(V1, c, Q), p))
    return made, lambda at: w.value(p, at) if at[Q] == c else w.balls.of(0)


@law("sum of equality", "Σ_i δ(i,j)·f(i) = f(j)", "i runs over the whole axis of the δ")
def _sum_of_equality(w: World) -> Instance:
    k = w.kernel
    b = k.bound()
    j = w.rng.choice([Q, 1])
    p = k.times(w.x(P, b), w.y(w.index(V0), b))
    return k.sum(k.times(k.delta(V1, b, j), p), {b: V1}), lambda at: w.value(p, {**at, b: at.get(j, j)})


@law(
    "collapse",
    "n equal terms that differ by the constants 0 … n−1 in the same places are a Σ, or f(v) for δ(v,c)·f(c)",
    "all n constants, equal coefficients, all places of size n",
)
def _collapse(w: World) -> Instance:
    k = w.kernel
    c = Fraction(w.rng.choice([1, -2, 3]), 2)
    by = w.rng.choice(["sum", "delta", "both"])
    terms: list[Poly] = [w.poly()]
    for n in range(V1):
        f = k.times(w.x(P, n), w.y(w.rng.choice([0, 0, P]) if by == "both" else 1, n))
        terms.append(scale(k.times(k.delta(V1, Q, n), f) if by == "delta" else f, c))
    p = k.add(*terms)
    return k.collapse(p), lambda at: w.value(p, at)


# -- integers --------------------------------------------------------------------------------------------------------


@law("digit sum", "Σ_d D(id)[d] = valid(id)", "d is nothing but the digit; an ignored label is not valid")
def _digit_sum(w: World) -> Instance:
    k = w.kernel
    a, b = k.bound(), k.bound()
    p = k.times(k.times(w.digit(0, a), w.digit(1, b)), w.rng.choice([constant(1), w.x(a, b), w.x(a, Q), w.y(P, b)]))
    return k.sum(p, {a: V0, b: V1}), lambda at: w.total(p, {a: V0, b: V1}, at)


@law("digit diagonal", "Σ_d D(id[d])[d] stays a Σ", "d occurs in the label's index")
def _digit_diagonal(w: World) -> Instance:
    k = w.kernel
    a = k.bound()
    p = k.times(w.digit(0, a, a), w.rng.choice([constant(1), w.x(a, Q)]))
    return k.sum(p, {a: V0}), lambda at: w.total(p, {a: V0}, at)


@law("digit valid", "D(id)[d]·valid(id) = D(id)[d]; indicators are idempotent", "the same label")
def _digit_valid(w: World) -> Instance:
    k = w.kernel
    d, v, x = w.digit(1, w.index(V1)), w.valid(), w.poly()
    made = k.times(k.times(k.times(d, v), k.times(d, w.mask())), k.times(x, w.mask()))
    return made, lambda at: w.value(d, at) * w.value(v, at) * w.value(w.mask(), at) * w.value(x, at)


PIECES: Final = ("@from 0 2,2 id", "@from 4 2 id")  # of the range of labels


@law(
    "label pieces",
    "Σ_p valid(id in p) = valid(id); valid(id)·Σ_v D(id in p)[v]·f(v) is that Σ, also under a name",
    "the pieces are the whole range; the same label, and a digit in every term",
)
def _label_pieces(w: World) -> Instance:
    k = w.kernel
    a, b = k.bound(), k.bound()
    k.cut_labels("id", PIECES)
    i, n = w.index(V0), w.rng.choice([constant(1), w.valid(0)])
    digits = [
        k.digit(PIECES[0], (V0,), (i,), 0, 2, 2, a),
        k.digit(PIECES[0], (V0,), (i,), 1, 2, 2, b),
        k.digit(PIECES[1], (V0,), (i,), 0, 1, 2, a),
    ]
    first = k.sum(k.times(k.times(digits[0], digits[1]), w.rng.choice([constant(1), w.x(a, Q)])), {a: 2, b: 2})
    second = k.sum(k.times(digits[2], w.rng.choice([constant(1), w.y(a, Q)])), {a: 2})
    both = k.add(first, second)
    made = k.times(w.valid(i), k.times(n, k.single(both) if both and w.rng.random() < 0.5 else both))
    return made, lambda at: w.value(w.valid(i), at) * w.value(n, at) * (w.value(first, at) + w.value(second, at))


def causal(w: World, a: Index, b: Index, p: Index = P, q: Index = Q) -> Poly:
    """1 where position (a, b) is not after (p, q)."""
    k = w.kernel
    after = k.add(scale(k.iota(V0, a), V1), k.iota(V1, b), scale(k.iota(V0, p), -V1), scale(k.iota(V1, q), -1))
    return k.single(k.add(constant(1), scale(k.indicator_of("gt0", after), -1)), indicator=True)


def triangle(w: World, b: Index, q: Index = Q) -> Poly:
    k = w.kernel
    after = k.add(k.iota(V1, b), scale(k.iota(V1, q), -1))
    return k.single(k.add(constant(1), scale(k.indicator_of("gt0", after), -1)), indicator=True)


def summed(w: World, a: Index, b: Index, p: Index = P) -> Poly:
    """What row (p, q) adds up over positions (a, b)."""
    k = w.kernel
    return k.times(w.x(a, b), k.exp(k.times(w.y(a, b), w.nonnegative(p, Q))))


@law(
    "causal blocks",
    "Σ_{n,t} [n·T + t ≤ c·T + q]·f(n,t) = Σ_{n<c} Σ_t f(n,t) + Σ_t [t ≤ q]·f(c,t)",
    "all blocks, equal coefficients, the mask of fast digits in block c and nowhere else",
)
def _causal_blocks(w: World) -> Instance:
    k = w.kernel
    a, b = k.bound(), k.bound()
    k.sum(k.times(causal(w, a, b), summed(w, a, b)), {a: V0, b: V1})
    k.named, k.keep_constants = len(k.atoms), False
    masked = MaskedSums(k)
    c, factor = w.rng.randrange(V0), k.times(w.nonnegative(1, Q), constant(Fraction(w.rng.choice([1, -2]), 3)))
    p = k.sum(k.times(triangle(w, b), summed(w, c, b, c)), {b: V1})
    for n in range(c):
        p = k.add(p, k.sum(summed(w, n, b, c), {b: V1}))
    p = k.add(k.times(p, factor), w.poly())
    return masked.whole(p), lambda at: w.value(p, at)


# -- functions -------------------------------------------------------------------------------------------------------


@law("exp of sum", "exp(Σ cᵢ·mᵢ) = Π exp(mᵢ)^cᵢ", "every term is finite")
def _exp(w: World) -> Instance:
    p = w.kernel.add(w.poly(), w.kernel.single(w.kernel.add(w.x(), w.y())))
    return w.kernel.exp(p), lambda at: w.value(p, at).exp()


@law("exp of log", "exp(c·log x) = x^c", "log x is defined")
def _exp_log(w: World) -> Instance:
    k = w.kernel
    p, c = w.above(), w.rng.choice([Fraction(1), Fraction(-1), Fraction(2), Fraction(1, 2)])
    inner = k.add(scale(k.log(p), c), w.x())
    return k.exp(inner), lambda at: w.balls.power(w.value(p, at), tidy(c)) * w.value(w.x(), at).exp()


@law("exp of mask", "exp(s + log mask) = mask·exp(s)", "the mask's log has a positive factor and stands alone")
def _exp_mask(w: World) -> Instance:
    k = w.kernel
    s = k.add(w.x(), k.fn("log_indicator", w.mask()))
    return k.exp(s), lambda at: w.value(w.mask(), at) * w.value(w.x(), at).exp()


@law("log of product", "log(exp(m)^p·X·Y) = p·m + log X + log Y", "X and Y are known to be positive; otherwise their product is a need")
def _log(w: World) -> Instance:
    k = w.kernel
    p = k.times(k.times(k.exp(w.x()), w.positive()), w.above())
    p = scale(p, Fraction(w.rng.choice([1, 2, 3]), 2))
    return k.log(p), lambda at: w.value(p, at).log()


@law("integer power", "(c·Π x)^n = c^n·Π x^n; (x^a)^b = x^(a·b)", "for n < 0 every factor is a need, and none is an indicator")
def _power(w: World) -> Instance:
    k = w.kernel
    n = w.rng.choice([2, 3, -1, -2])
    p = k.times(w.positive(), k.add(w.above(), w.positive()))
    p = scale(k.times(p, w.x()), -3) if n > 0 else scale(p, -3)
    return k.power(p, n), lambda at: w.balls.power(w.value(p, at), n)


@law("fractional power", "(X·Y)^e = X^e·Y^e", "only factors known to be positive leave; the others stay wrapped")
def _root(w: World) -> Instance:
    k = w.kernel
    e = Fraction(w.rng.choice([1, -1, 3, 2]), w.rng.choice([2, 3]))
    p = scale(k.times(k.times(w.positive(), w.above()), k.times(w.above(), w.above())), Fraction(w.rng.choice([1, 2, 8, 12]), 5))
    return k.power(p, e), lambda at: w.balls.power(w.value(p, at), e)


@law("root of a square", "(x²)^e is wrapped; (√y)² = y", "x^(2e) would lose the sign of x")
def _square(w: World) -> Instance:
    k = w.kernel
    e = Fraction(1, 2)
    p = k.times(w.x(), w.x())
    root = k.power(p, e)
    kind = w.rng.randrange(3)
    made = (root, k.times(root, root), k.times(root, w.x()))[kind]

    def meaning(at: At) -> Number:
        x = w.value(w.x(), at)
        return abs(x) if kind == 0 else x * x if kind == 1 else abs(x) * x

    return made, meaning


@law("condition", "p > 0 does not depend on positive factors of p", "a factor of unknown sign stays; so does the sign of the coefficient")
def _condition(w: World) -> Instance:
    k = w.kernel
    base = k.times(w.x(), k.add(w.y(), constant(Fraction(1, 3))))
    p = scale(k.times(base, w.positive()), w.rng.choice([-2, 3]))
    if w.rng.random() < 0.5:  # what is divided by is not zero
        p = k.times(p, k.power(k.single(k.add(w.nonnegative(), k.times(w.positive(), w.positive()))), -1))
    return k.indicator_of("gt0", p), lambda at: w.balls.of(int(bool(w.value(p, at) > 0)))


@law("implied condition", "[x·y > 0]·x·y = x·y", "x and y are nonnegative, and all factors of the condition are there")
def _implied(w: World) -> Instance:
    k = w.kernel
    n, m = w.nonnegative(), w.nonnegative(w.index(V0), w.index(V1))
    condition = k.indicator_of("gt0", w.rng.choice([n, k.times(n, m)]))
    rest = w.rng.choice([k.times(n, m), k.times(k.times(n, n), w.x()), k.times(m, w.y()), k.times(k.times(n, m), k.power(w.above(), -1))])
    return k.times(condition, rest), lambda at: w.value(condition, at) * w.value(rest, at)


@law(
    "cases",
    "f(p) = I·f(p where I = 1) + (1 − I)·f(p where I = 0) for exp, powers and functions of any number",
    "what f(p) needs is a need of p, not of the two cases",
)
def _cases(w: World) -> Instance:
    k = w.kernel
    condition = w.rng.choice([k.indicator_of("gt0", k.add(w.x(), constant(Fraction(1, 7)))), w.mask(), w.digit(0, w.index(V0))])
    name = w.rng.choice([None, "tanh", "erf", "sin", "cos", "abs"])
    if name is not None:
        q = k.add(k.times(condition, w.poly()), w.rng.choice([{}, w.y(), k.times(w.mask(), w.x())]))
        return k.applied(name, q), lambda at: w.balls.apply(name, [w.value(q, at)], None)
    p = k.add(k.times(condition, w.above()), w.positive(), k.times(condition, k.exp(k.times(condition, w.y()))))
    e = w.rng.choice([-1, -2, Fraction(1, 2), "exp"])
    if e == "exp":
        q = scale(k.times(condition, k.times(w.x(), w.y())), w.rng.choice([1, -2]))
        return k.exp(k.add(q, w.x())), lambda at: (w.value(q, at) + w.value(w.x(), at)).exp()
    return k.power(p, e), lambda at: w.balls.power(w.value(p, at), e)  # type: ignore[arg-type]


@law("masked condition", "[I·p > 0] = I·[p > 0]; [I·p = 0] = 1 − I + I·[p = 0]", "I is 0 or 1, and a factor of every term")
def _masked_condition(w: World) -> Instance:
    k = w.kernel
    mask = w.rng.choice([w.mask(), w.digit(1, w.index(V1)), w.valid()])
    p = k.times(scale(mask, w.rng.choice([1, -2])), k.add(w.x(), w.rng.choice([{}, constant(Fraction(1, 7))])))
    name = w.rng.choice(["gt0", "ge0", "eq0"])

    def meaning(at: At) -> Number:
        value = w.value(p, at)
        return w.balls.of(int({"gt0": value > 0, "ge0": value >= 0, "eq0": value == 0}[name]))

    return k.indicator_of(name, p), meaning


@law(
    "opened name",
    "p = content · c for a sum c of the logical program, if p is c with the sums in it opened",
    "the content of c is positive",
)
def _opened_name(w: World) -> Instance:
    k = w.kernel
    root, mask = k.power(w.positive(), Fraction(-1, 2)), w.mask()
    inner = k.single(k.add(constant(1), k.fn("erf", w.x())))
    k.single(k.add(k.times(root, w.y()), inner))
    k.named = len(k.atoms)
    case = k.add(constant(1), k.times(mask, k.fn("erf", w.x())))
    q = k.add(k.times(root, w.y()), k.single(case))
    p = k.times(mask, w.rng.choice([w.x(), w.nonnegative(), constant(-3)]))
    return k.joint(p, k.single(q)), lambda at: w.value(p, at) * w.value(q, at)


@law("maximum", "max of max is one max; variables that do not occur do not matter", "no factor is taken out, whatever its sign")
def _maximum(w: World) -> Instance:
    k = w.kernel
    a, b = k.bound(), k.bound()
    c = w.rng.choice([1, -2])
    p = scale(k.times(w.x(a, b), w.y(P, b)), c)
    inner = k.maximum(p, {a: V0})
    made = k.maximum(inner, {b: V1, k.bound(): 5})

    def meaning(at: At) -> Number:
        points = itertools.product(range(V0), range(V1))
        return w.balls.largest([w.value(p, {**at, a: i, b: j}) for i, j in points])

    return made, meaning


@law(
    "cancelled",
    "a·Σ_i f(i)·c(i) + … = 0, if it is 0 with the sums c in all Σ opened; N⁻¹·a·x + N⁻¹·b·x = x for a sum N = a + b",
    "all terms are there; nothing is noted on the way",
)
def _cancelled(w: World) -> Instance:
    """What a shift under exponentials gets of a softmax: Σ_i e(i)·(g(i)/N − Σ_j e(j)·g(j)/N²) with N = Σ e, or something like that."""
    k = w.kernel
    a, b = k.bound(), k.bound()
    e, g = w.rng.choice([w.positive, w.divisor]), w.x
    other = w.rng.choice([g, g, w.y])
    total = k.sum(e(P, a), {a: V1})
    inverse = k.power(total, -1)
    mixed = k.sum(k.times(e(P, b), other(P, b)), {b: V1})
    k.named = w.rng.choice([0, len(k.atoms)])
    part = k.single(k.add(g(P, a), scale(k.times(inverse, mixed), -w.rng.choice([1, 1, 2]))))
    p = k.add(k.sum(k.times(e(P, a), part), {a: V1}), w.rng.choice([{}, {}, scale(mixed, -1), mixed]))
    return k.settle(p), lambda at: w.value(p, at)


@law(
    "peaks", "Σ_i [f(i) = max f] is positive", "f is a number; the Σ is over all that the maximum is over, or over parts with their maxima"
)
def _peaks(w: World) -> Instance:
    k = w.kernel
    a, b, c = k.bound(), k.bound(), k.bound()
    inner = w.rng.choice([w.x(a, b), k.maximum(w.x(a, c), {c: V1})])
    count = k.sum(k.indicator_of("eq0", k.add(k.maximum(w.x(a, b), {a: V0, b: V1}), scale(inner, -1))), {a: V0, b: V1})
    return k.times(w.y(), k.power(count, -1)), lambda at: w.value(w.y(), at) / w.value(count, at)


@law("row", "a function of a row depends on the order of its positions", "digits of the row keep their order, slow first")
def _row(w: World) -> Instance:
    k = w.kernel
    a, b = k.bound(), k.bound()
    p = w.rng.choice([k.add(w.x(a, b), w.y(P, 0)), k.add(w.y(a, b), w.x(P, Q))])
    over = w.rng.choice([{a: V0, b: V1}, {b: V1, a: V0}])
    made = k.row("row argmax 0", p, over)

    def meaning(at: At) -> Number:
        values = [w.value(p, {**at, **dict(zip(over, c, strict=True))}) for c in itertools.product(*(range(s) for s in over.values()))]
        best = 0
        for n, v in enumerate(values):
            if bool(v > values[best]) and not bool(v.overlaps(values[best])):
                best = n
        return w.balls.of(best)

    return made, meaning


def piece(w: World, flat: Flat, p: Poly, start: int, length: int, at: Index) -> Poly:
    """The elements start … start + length − 1 of a form over P and Q, written in one dimension."""
    frame = Frame((V0, V1), start, length)
    digits = flat.coordinates(frame, at)
    return flat.said(w.kernel.substitute(p, dict(zip((P, Q), digits, strict=True))), digits, frame, at)


def flats(w: World) -> Flat:
    return Flat(w.kernel, Grids(Axes()))


@law("buckets", "f(x, y) at the digits of δ + p = f(x at those digits, y at those digits)", "both have the same sizes and the same δ")
def _buckets(w: World) -> Instance:
    k, flat = w.kernel, flats(w)
    start = w.rng.randrange(V0 * V1 - V1 + 1)
    f, g = k.add(w.x(), w.y()), w.above()
    made = flat.through(lambda ps: k.multiply(ps[0], k.power(ps[1], -1)), [piece(w, flat, p, start, V1, Q) for p in (f, g)])

    def meaning(at: At) -> Number:
        i, j = divmod(start + at[Q], V1)
        return w.value(f, {P: i, Q: j}) / w.value(g, {P: i, Q: j})

    return made, meaning


@law("regions", "Σ over the positions a … b − 1, plus Σ over b … c − 1, is Σ over a … c − 1", "of the same form, and nothing between them")
def _regions(w: World) -> Instance:
    k, flat = w.kernel, flats(w)
    f = k.add(k.times(w.x(), w.y()), w.positive())
    ends = sorted({0, V0 * V1, *(w.rng.randrange(1, V0 * V1) for _ in range(2))})
    kept = w.rng.choice([list(itertools.pairwise(ends)), list(itertools.pairwise(ends))[1:]])
    total: Poly = {}
    for a, b in kept:
        at = k.bound()
        total = k.add(total, flat.sum(piece(w, flat, f, a, b - a, at), {at: b - a}, True))

    def meaning(at: At) -> Number:
        places = [divmod(n, V1) for a, b in kept for n in range(a, b)]
        return sum((w.value(f, {P: i, Q: j}) for i, j in places), w.balls.of(0))

    return flat.joined(total), meaning


@law(
    "shifts",
    "Σ_p [t = δ + p]·f(δ + p)·g(p) = f(t)·Σ_p [t = δ + p]·g(p)",
    "the same δ; an inverse leaves the Σ only if it is positive everywhere",
)
def _shifts(w: World) -> Instance:
    k, flat = w.kernel, flats(w)
    length = V0 * V1 - 1
    start, other = w.rng.randrange(2), w.rng.randrange(2)
    f, g, h = w.rng.choice([w.x(), k.power(w.positive(), -1)]), k.power(w.divisor(), -1), w.poly()
    at = k.bound()
    p = k.times(piece(w, flat, k.times(f, g), start, length, at), piece(w, flat, h, other, length, at))

    def meaning(here: At) -> Number:
        n = here[P] * V1 + here[Q] - start
        if not 0 <= n < length:
            return w.balls.of(0)
        i, j = divmod(other + n, V1)
        return w.value(f, here) * w.value(g, here) * w.value(h, {P: i, Q: j})

    return flat.put_back(p, Frame((V0, V1), start, length), [P, Q], at), meaning
