"""Plans that are wrong where something is 0, negative or masked, and right elsewhere; each with inputs at which it is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from prove.infinite import Body, again, by_roots, three, weight
from trainverify.build.program import ProgramBuilder
from trainverify.build.tape import Tensor
from trainverify.graph.program import Program

FAR: Final = 1e6  # no random point is as far


@dataclass(frozen=True)
class Wrong:
    """A plan, and inputs at which it differs from the logical program; those that are not named are 1, or False."""

    body: Body
    at: Mapping[str, npt.ArrayLike]

    @property
    def name(self) -> str:
        return self.body.__name__

    def inputs(self, program: Program) -> dict[str, Any]:
        return {n: filled(program.tensors[n].kind, program.tensors[n].shape, self.at.get(n)) for n in program.sources}


def filled(kind: str, shape: Sequence[int], value: npt.ArrayLike | None) -> Any:
    dtype = {"real": np.float64, "int": np.int64, "bool": np.bool_}[kind]
    return np.full(shape, kind == "real" if value is None else value, dtype=dtype)


def far(b: ProgramBuilder, name: str = "x") -> Tensor:
    """Negative at no random point."""
    return b.add(b.input("far", (3,)), value=FAR, name=name)


def small(b: ProgramBuilder, x: Tensor) -> Tensor:
    """exp(−1/x²), which is 0 where x is; at random points it is near 1."""
    return b.exp(b.mul(b.pow(x, exponent=-2, name="p"), value=-1e-6, name="np"), name="e")


def peak(b: ProgramBuilder) -> Tensor:
    """The largest of a row of which some are masked: −∞ if all are."""
    row, mask = b.input("s", (3, 40)), b.input("k", (3, 40), dtype="bool")
    return b.amax(b.masked_fill(row, mask, value=float("-inf"), name="a"), dim=1, name="peak")


def beside(b: ProgramBuilder, right: bool, r: Tensor, w: Tensor, x: Tensor) -> Tensor:
    """r + w, or r + w·x/x."""
    return b.add(r, w if right else again(b, w, x), name="sum")


def without(b: ProgramBuilder, right: bool, r: Tensor, w: Tensor, x: Tensor) -> Tensor:
    """r + w, or r + w + x − x."""
    return b.add(r, w if right else b.add(w, b.sub(x, x, name="nothing"), name="wn"), name="sum")


def by_squares(b: ProgramBuilder, right: bool, v: Tensor, x: Tensor, k: str = "") -> Tensor:
    """v/x, or v·x/x²."""
    if right:
        return b.div(v, x, name=f"q{k}")
    return b.div(b.mul(v, x, name=f"vx{k}"), b.mul(x, x, name=f"xx{k}"), name=f"q{k}")


def by_difference(b: ProgramBuilder, right: bool, v: Tensor, x: Tensor, s: Tensor, k: str = "") -> Tensor:
    """v/x, or (v + s)/x − s/x."""
    if right:
        return b.div(v, x, name=f"q{k}")
    return b.sub(b.div(b.add(v, s, name=f"vs{k}"), x, name=f"a{k}"), b.div(s, x, name=f"b{k}"), name=f"q{k}")


def as_numbers(b: ProgramBuilder, x: Tensor) -> Tensor:
    return b.to(x, dtype="f32", name="numbers")


def first_again(b: ProgramBuilder, right: bool, v: Tensor, x: Tensor) -> Tensor:
    """v·x/x in the logical program, v in the plan."""
    return again(b, v, x) if right else v


def at_most(b: ProgramBuilder, right: bool) -> Tensor:
    """v·x/x ≤ 1 is not so where x is 0."""
    v, w, x, y = three(b, *"vwxy")
    return b.where(b.le(first_again(b, right, v, x), value=1.0, name="c"), w, y, name="r")


def more_than(b: ProgramBuilder, right: bool) -> Tensor:
    """v·x/x > 1 is not so where x is 0."""
    v, w, x, y = three(b, *"vwxy")
    return b.where(b.gt(first_again(b, right, v, x), value=1.0, name="c"), w, y, name="r")


def equal_to_itself(b: ProgramBuilder, right: bool) -> Tensor:
    """v/x = v/x is not so where both are 0."""
    v, w, x, y = three(b, *"vwxy")
    q = b.div(v, x, name="q")
    return b.where(b.eq(q, q, name="c"), w, y, name="r") if right else w


def equal_again(b: ProgramBuilder, right: bool) -> Tensor:
    """v·x/x = v is not so where x is 0."""
    v, w, x, y = three(b, *"vwxy")
    return b.where(b.eq(again(b, v, x), v, name="c"), w, y, name="r") if right else w


def truth_again(b: ProgramBuilder, right: bool) -> Tensor:
    """0 is false, but 0·0/0 is true."""
    v, w, x, y = three(b, *"vwxy")
    return b.where(b.to(first_again(b, right, v, x), dtype="bool", name="c"), w, y, name="r")


def positive_part(b: ProgramBuilder, right: bool) -> Tensor:
    """What is positive of m·x/x is m, but 0 where x is."""
    (x,) = three(b, "x")
    m = weight(b)
    q = again(b, m, x)
    return b.where(b.gt(q, value=0.0, name="c"), q, b.full(shape=(3,), value=0.0, name="zeros"), name="r") if right else m


def place_of_the_largest(b: ProgramBuilder, right: bool) -> Tensor:
    """What is no number is larger than all others."""
    v, w, x = three(b, *"vwx")
    at = b.argmax(first_again(b, right, v, x), dim=0, name="at")
    return b.mul(as_numbers(b, b.one_hot(at, num_classes=3, name="hot")), w, name="r")


def smallest_of_a_row(b: ProgramBuilder, right: bool) -> Tensor:
    """What is no number is sorted last."""
    v, x = three(b, *"vx")
    row, _ = b.sort(first_again(b, right, v, x), dim=0, name=("row", "ids"))
    return b.slice(row, dim=0, start=0, stop=1, name="r")


def sign_of_a_product(b: ProgramBuilder, right: bool) -> Tensor:
    """exp(−1/x²)·y > 0 is not so where x is 0; y > 0 may be."""
    v, w, x, y = three(b, *"vwxy")
    return b.where(b.gt(b.mul(small(b, x), y, name="q") if right else y, value=0.0, name="c"), w, v, name="r")


def square_of_a_root(b: ProgramBuilder, right: bool) -> Tensor:
    """√x·√x ≤ 1 is not so where x is negative."""
    w, y = three(b, *"wy")
    x = far(b)
    root = b.sqrt(x, name="root")
    return b.where(b.le(b.mul(root, root, name="q") if right else x, value=1.0, name="c"), w, y, name="r")


def root_of_a_product(b: ProgramBuilder, right: bool) -> Tensor:
    """√(exp(−1/x²)·y) is 0 where x is, whatever y is."""
    w, x = three(b, *"wx")
    y = far(b, "y")
    if not right:
        return by_roots(b, w, y)
    r = b.sqrt(b.mul(small(b, x), y, name="q"), name="root")
    return b.add(b.mul(w, y, name="wy"), b.sub(r, r, name="nothing"), name="sum")


def divided_by_a_peak(b: ProgramBuilder, right: bool) -> Tensor:
    """v/−∞ is 0."""
    v, w = three(b, *"vw")
    top = peak(b)
    return without(b, right, b.div(v, top, name="r"), w, top)


def inverse_of_a_peak(b: ProgramBuilder, right: bool) -> Tensor:
    """1/−∞ is 0."""
    (w,) = three(b, "w")
    top = peak(b)
    return without(b, right, b.pow(top, exponent=-1, name="r"), w, top)


def truth_of_a_peak(b: ProgramBuilder, right: bool) -> Tensor:
    """−∞ is true."""
    v, w = three(b, *"vw")
    top = peak(b)
    return without(b, right, b.where(b.to(top, dtype="bool", name="c"), v, w, name="r"), w, top)


def exponential_of_a_peak(b: ProgramBuilder, right: bool) -> Tensor:
    """exp(−∞·y) is 0."""
    (w,) = three(b, "w")
    y = b.input("y", (3,), domain="positive")
    top = peak(b)
    return without(b, right, b.exp(b.mul(top, y, name="q"), name="r"), w, top)


def root_of_an_inverse(b: ProgramBuilder, right: bool) -> Tensor:
    """(1/m)^(−1/2) is 0 where m is."""
    (w,) = three(b, "w")
    m = weight(b)
    return beside(b, right, b.rsqrt(b.pow(m, exponent=-1, name="q"), name="r"), w, m)


def norm_of_an_inverse(b: ProgramBuilder, right: bool) -> Tensor:
    """1/√(1/m + 1) is 0 where m is."""
    (w,) = three(b, "w")
    m = weight(b)
    return beside(b, right, b.rsqrt(b.add(b.pow(m, exponent=-1, name="q"), value=1.0, name="q1"), name="r"), w, m)


def root_of_an_inverse_square(b: ProgramBuilder, right: bool) -> Tensor:
    """(1/x²)^(−1/2) is |x|."""
    w, x = three(b, *"wx")
    return beside(b, right, b.rsqrt(b.pow(x, exponent=-2, name="q"), name="r"), w, x)


def root_by_logarithms(b: ProgramBuilder, right: bool) -> Tensor:
    """exp(−log(1/m)/2) is √m."""
    (w,) = three(b, "w")
    m = weight(b)
    log = b.log(b.pow(m, exponent=-1, name="q"), name="log")
    return beside(b, right, b.exp(b.mul(log, value=-0.5, name="half"), name="r"), w, m)


def root_of_an_inverse_of_any(b: ProgramBuilder, right: bool) -> Tensor:
    """v/(1 + √(1/x)) is 0 where x is."""
    v, w = three(b, *"vw")
    x = far(b)
    root = b.sqrt(b.pow(x, exponent=-1, name="q"), name="root")
    return beside(b, right, b.div(v, b.add(root, value=1.0, name="d"), name="r"), w, x)


def no_rows(b: ProgramBuilder, right: bool) -> Tensor:
    """No row is divided by x."""
    w, x = three(b, *"wx")
    b.output(b.div(b.input("rows", (0, 3)), x, name="none"), "metric", "none")
    return w if right else again(b, w, x)


def no_rows_of_a_quotient(b: ProgramBuilder, right: bool) -> Tensor:
    """Of w/x no row is made."""
    w, x = three(b, *"wx")
    b.output(b.expand(b.div(w, x, name="q"), shape=(0, 3), name="none"), "metric", "none")
    return w if right else again(b, w, x)


def no_rows_beside_others(b: ProgramBuilder, right: bool) -> Tensor:
    """tanh(v/x) is 1 where x is 0, and none of the rows is divided by x."""
    v, x = three(b, *"vx")
    rows = b.input("rows", (2, 3))
    none = b.div(b.slice(rows, dim=0, start=0, stop=0, name="none"), x, name="divided")
    whole = b.sum(b.concat(none, rows, dim=0, name="all"), name="whole")
    return b.add(b.tanh(by_squares(b, right, v, x), name="t"), whole, name="sum")


def times_root(b: ProgramBuilder, x: Tensor, root: Tensor, k: str) -> Tensor:
    return b.mul(b.mul(x, root, name=f"{k}.once"), root, name=f"{k}.twice")


def beside_a_root(b: ProgramBuilder, right: bool, saw: Callable[[Tensor], Tensor]) -> Tensor:
    """(what was seen of √x + w)·x, or (that + z)·√x·√x − z·√x·√x."""
    w, z = three(b, *"wz")
    x = far(b)
    root = b.sqrt(x, name="root")
    seen = saw(root)
    if right:
        return b.mul(b.add(seen, w, name="r"), x, name="out")
    r = b.add(seen, b.add(w, z, name="wz"), name="r")
    return b.sub(times_root(b, r, root, "r"), times_root(b, z, root, "z"), name="out")


def comparison_of_a_root(b: ProgramBuilder, right: bool) -> Tensor:
    """√x > 1 is not so where x is negative."""
    return beside_a_root(b, right, lambda root: as_numbers(b, b.gt(root, value=1.0, name="c")))


def root_to_the_power_of_nothing(b: ProgramBuilder, right: bool) -> Tensor:
    """Anything to the power of 0 is 1."""
    return beside_a_root(b, right, lambda root: b.pow(root, exponent=0, name="one"))


def place_of_a_root(b: ProgramBuilder, right: bool) -> Tensor:
    """A row has a largest element also if they are no numbers."""
    return beside_a_root(b, right, lambda root: as_numbers(b, b.one_hot(b.argmax(root, dim=0, name="at"), num_classes=3, name="hot")))


def truth_of_a_root(b: ProgramBuilder, right: bool) -> Tensor:
    """What is no number is true."""
    return beside_a_root(b, right, lambda root: as_numbers(b, b.to(root, dtype="bool", name="c")))


def choice_by_a_root(b: ProgramBuilder, right: bool) -> Tensor:
    """One of two, by √x > 1, times x."""
    v, w, z = three(b, *"vwz")
    x = far(b)
    root = b.sqrt(x, name="root")
    c = b.gt(root, value=1.0, name="c")
    if right:
        return b.mul(b.where(c, v, w, name="r"), x, name="out")
    r = b.where(c, b.add(v, z, name="vz"), b.add(w, z, name="wz"), name="r")
    return b.sub(times_root(b, r, root, "r"), times_root(b, z, root, "z"), name="out")


def exponential_again(b: ProgramBuilder, right: bool) -> Tensor:
    """exp(−1/x²) is 0 where x is."""
    w, x = three(b, *"wx")
    e = small(b, x)
    return beside(b, right, e, w, e)


def exponential_of_a_logarithm_again(b: ProgramBuilder, right: bool) -> Tensor:
    """exp(log m) is 0 where m is."""
    (w,) = three(b, "w")
    e = b.exp(b.log(weight(b), name="logm"), name="e")
    return beside(b, right, e, w, e)


def weighted_again(b: ProgramBuilder, right: bool) -> Tensor:
    """exp(s + log m) is 0 where m is."""
    s, w = three(b, *"sw")
    e = b.exp(b.add(s, b.log(weight(b), name="logm"), name="a"), name="e")
    return beside(b, right, e, w, e)


def divided_by_infinity_again(b: ProgramBuilder, right: bool) -> Tensor:
    """1/exp(1/x²) is 0 where x is."""
    w, x = three(b, *"wx")
    large = b.exp(b.mul(b.pow(x, exponent=-2, name="p"), value=1e-6, name="pp"), name="large")
    d = b.div(b.full(shape=(3,), value=1.0, name="one"), large, name="d")
    return beside(b, right, d, w, d)


def there_and_back_by_logarithms(b: ProgramBuilder, right: bool) -> Tensor:
    """exp(log e − log e) is no number where e is 0."""
    w, x = three(b, *"wx")
    e = small(b, x)
    if not right:
        log = b.log(e, name="log")
        w = b.mul(w, b.exp(b.sub(log, log, name="nothing"), name="one"), name="w1")
    return b.add(e, w, name="sum")


def softmax_again(b: ProgramBuilder, right: bool) -> Tensor:
    """softmax(s + log m) is 0 where m is."""
    s, w = b.input("s", (2, 3)), b.input("w", (2, 3))
    m = b.input("m", (2, 3), domain="nonnegative")
    p = b.softmax(b.add(s, b.log(m, name="logm"), name="a"), dim=-1, name="p")
    return beside(b, right, p, w, p)


def sigmoid_again(b: ProgramBuilder, right: bool) -> Tensor:
    """sigmoid(log m) is 0 where m is."""
    (w,) = three(b, "w")
    t = b.sigmoid(b.log(weight(b), name="logm"), name="t")
    return beside(b, right, t, w, t)


def norm_again(b: ProgramBuilder, right: bool) -> Tensor:
    """1/√(1/x² + 1) is 0 where x is."""
    w, x = three(b, *"wx")
    d = b.rsqrt(b.add(b.pow(x, exponent=-2, name="q"), value=1.0, name="q1"), name="d")
    return beside(b, right, d, w, d)


def divided_sum(b: ProgramBuilder, right: bool, n: int) -> Tensor:
    """(a + … + z)/log m where y > 0, or a/(log m + log m − log m) + … there."""
    log = b.log(weight(b), name="log")
    terms = three(b, *(f"a{i}" for i in range(n)))
    if right:
        total = terms[0]
        for i, x in enumerate(terms[1:]):
            total = b.add(total, x, name=f"s{i}")
        total = b.div(total, log, name="q")
    else:
        log = b.sub(b.add(log, log, name="log2"), log, name="log3")
        *rest, total = [b.div(x, log, name=f"q{i}") for i, x in enumerate(terms)]
        for i, x in enumerate(reversed(rest)):
            total = b.add(total, x, name=f"s{i}")
    (y,) = three(b, "y")
    return b.mul(total, as_numbers(b, b.gt(y, value=0.0, name="c")), name="out")


def few_divided_by_a_logarithm(b: ProgramBuilder, right: bool) -> Tensor:
    """(a + b + c)/log m is 0 where m is."""
    return divided_sum(b, right, 3)


def many_divided_by_a_logarithm(b: ProgramBuilder, right: bool) -> Tensor:
    """The same of 120 terms."""
    return divided_sum(b, right, 120)


def summed(b: ProgramBuilder, terms: Sequence[Tensor]) -> Tensor:
    """In pairs."""
    depth = 0
    while len(terms) > 1:
        pairs = [b.add(x, y, name=f"s{depth}.{i}") for i, (x, y) in enumerate(zip(terms[::2], terms[1::2], strict=False))]
        terms = [*pairs, *terms[2 * len(pairs) :]]
        depth += 1
    return terms[0]


def shuffled(terms: Sequence[Tensor]) -> list[Tensor]:
    """In another order; there are not 7, 14, … of them."""
    return [terms[i * 7 % len(terms)] for i in range(len(terms))]


def sum_there_and_back(b: ProgramBuilder, right: bool, n: int) -> Tensor:
    """exp((a + … + z)·log m) is 0 where m is, but log m + log m − log m is no number. The plan has the terms in another order."""
    log = b.log(weight(b), name="log")
    terms = three(b, *(f"a{i}" for i in range(n)))
    if not right:
        log = b.sub(b.add(log, log, name="log2"), log, name="log3")
        terms = shuffled(terms)
    return b.exp(b.mul(log, summed(b, terms), name="q"), name="e")


def product_there_and_back(b: ProgramBuilder, right: bool) -> Tensor:
    """exp(u·log m) is 0 where m is."""
    return sum_there_and_back(b, right, 1)


def large_product_there_and_back(b: ProgramBuilder, right: bool) -> Tensor:
    """The same with a sum of 503 terms."""
    return sum_there_and_back(b, right, 503)


def beside_many_finite_ones(b: ProgramBuilder, right: bool) -> Tensor:
    """Eight quotients that must be finite, and one inside a tanh that need not be."""
    s, t = three(b, *"st")
    total = b.tanh(by_squares(b, right, s, t), name="t")
    for i in range(8):
        v, x = three(b, f"v{i}", f"x{i}")
        total = b.add(by_squares(b, right, v, x, str(i)), total, name=f"t{i}")
    return total


def beside_many_differences(b: ProgramBuilder, right: bool) -> Tensor:
    """The same by differences of quotients, which are no numbers where x is 0."""
    s, v, x = three(b, *"svx")
    total = b.tanh(by_difference(b, right, v, x, s), name="t")
    for i in range(8):
        v, x = three(b, f"v{i}", f"x{i}")
        total = b.add(by_difference(b, right, v, x, s, str(i)), total, name=f"t{i}")
    return total


def sum_in_a_tanh(b: ProgramBuilder, right: bool) -> Tensor:
    """tanh((a + … + z)/x) is 1 where x is 0, but a/x + … + z/x may be ∞ − ∞. The plan has the terms in another order."""
    (x,) = three(b, "x")
    terms = three(b, *(f"a{i}" for i in range(11)))
    if right:
        return b.tanh(b.div(summed(b, terms), x, name="q"), name="r")
    return b.tanh(summed(b, [b.div(a, x, name=f"q{i}") for i, a in enumerate(shuffled(terms))]), name="r")


def scaled(b: ProgramBuilder, right: bool, last: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """k/p or w, + z/p + what is last, or all of it times x, over x; what is last is made of x and y, times x in the plan."""
    k, p, w, x, y, z = three(b, *"kpwxyz")
    if not right:
        k, w, z = [b.mul(t, x, name=f"{n}x") for n, t in zip("kwz", (k, w, z), strict=True)]
    r = b.where(b.gt(y, value=0.0, name="c"), b.div(k, p, name="kp"), w, name="r")
    total = b.add(b.add(r, b.div(z, p, name="zp"), name="rz"), last(x, y), name="total")
    return total if right else b.div(total, x, name="out")


def solver_and_a_divisor(b: ProgramBuilder, right: bool) -> Tensor:
    """v/(y + exp(1/x)) is 0 where x is."""
    (v,) = three(b, "v")

    def last(x: Tensor, y: Tensor) -> Tensor:
        d = b.add(y, b.exp(b.pow(x, exponent=-1, name="q"), name="t"), name="d")
        return b.div(v if right else b.mul(v, x, name="vx"), d, name="last")

    return scaled(b, right, last)


def solver_and_a_bounded_divisor(b: ProgramBuilder, right: bool) -> Tensor:
    """v/(y + tanh(1/x)) has a value where x is 0."""
    (v,) = three(b, "v")

    def last(x: Tensor, y: Tensor) -> Tensor:
        d = b.add(y, b.tanh(b.pow(x, exponent=-1, name="q"), name="t"), name="d")
        return b.div(v if right else b.mul(v, x, name="vx"), d, name="last")

    return scaled(b, right, last)


def solver_and_a_root(b: ProgramBuilder, right: bool) -> Tensor:
    """√(u + tanh(1/x²)) has a value where x is 0."""
    u = b.input("u", (3,), domain="positive")

    def last(x: Tensor, _: Tensor) -> Tensor:
        d = b.add(b.tanh(b.pow(x, exponent=-2, name="q"), name="t"), u, name="d")
        if right:
            return b.sqrt(d, name="last")
        f = b.pow(d, exponent=0.25, name="f")
        return b.mul(b.mul(f, x, name="fx"), f, name="last")

    return scaled(b, right, last)


def sum_of_peaks(b: ProgramBuilder) -> Tensor:
    """Σ of the largest of rows, three times: −∞ if a row is masked."""
    t = b.sum(peak(b), dim=0, keepdim=True, name="whole")
    return b.expand(t, shape=(3,), name="t3")


def low(b: ProgramBuilder, n: int = 40) -> Tensor:
    """The smallest of a row of which some are masked: −∞ if one is."""
    row, mask = b.input("s", (3, n)), b.lt(b.add(b.input("far", (3, n)), value=FAR, name="fars"), value=0.0, name="k")
    return b.amin(b.masked_fill(row, mask, value=float("-inf"), name="a"), dim=1, name="low")


def gone(b: ProgramBuilder, r: Tensor, x: Tensor, k: str) -> Tensor:
    """r + x − x."""
    return b.add(r, b.sub(x, x, name=f"{k}.nothing"), name=f"{k}.sum")


def peak_less_itself(b: ProgramBuilder, right: bool) -> Tensor:
    """peak − peak ≤ 1 is not so where all of the row is masked."""
    w, y = three(b, *"wy")
    t = peak(b)
    if not right:
        return w
    return b.where(b.le(b.sub(t, t, name="d"), value=1.0, name="c"), w, y, name="r")


def peak_times_nothing(b: ProgramBuilder, right: bool) -> Tensor:
    """0·peak ≤ 1 is not so there either."""
    w, y = three(b, *"wy")
    t = peak(b)
    if not right:
        return w
    return b.where(b.le(b.mul(t, value=0.0, name="d"), value=1.0, name="c"), w, y, name="r")


def exponentials_below_their_peak(b: ProgramBuilder, right: bool) -> Tensor:
    """Σ exp(a − peak) is itself, but where it is no number."""
    w, y = three(b, *"wy")
    row, mask = b.input("s", (3, 4)), b.input("k", (3, 4), dtype="bool")
    if not right:
        return w
    a = b.masked_fill(row, mask, value=float("-inf"), name="a")
    t = b.amax(a, dim=1, keepdim=True, name="t")
    e = b.sum(b.exp(b.sub(a, t, name="d"), name="e"), dim=1, name="es")
    return b.where(b.eq(e, e, name="c"), w, y, name="r")


def truth_of_peak_less_itself(b: ProgramBuilder, right: bool) -> Tensor:
    """What is no number is true."""
    w, y = three(b, *"wy")
    t = peak(b)
    if not right:
        return y
    return b.where(b.to(b.sub(t, t, name="d"), dtype="bool", name="c"), w, y, name="r")


def there_and_back_from_a_peak(b: ProgramBuilder, right: bool) -> Tensor:
    """y + peak − peak is y, but where all of the row is masked."""
    w, y = three(b, *"wy")
    t = peak(b)
    d = b.sub(b.add(y, t, name="yt"), t, name="d") if right else y
    return b.where(b.le(d, value=1.0, name="c"), w, b.mul(w, value=2.0, name="w2"), name="r")


def product_of_exponentials(b: ProgramBuilder, right: bool) -> Tensor:
    """exp(Σ peaks)·y > 0 is not so where a row is masked."""
    v, w, y = three(b, *"vwy")
    t = b.sum(peak(b), dim=0, keepdim=True, name="whole")
    q = b.mul(b.exp(b.expand(t, shape=(3,), name="t3"), name="e"), y, name="q") if right else y
    return b.where(b.gt(q, value=0.0, name="c"), w, v, name="r")


def place_of_peaks(b: ProgramBuilder, right: bool) -> Tensor:
    """argmax(v + peak − peak)."""
    v, w = three(b, *"vw")
    t = peak(b)
    q = b.sub(b.add(v, t, name="vt"), t, name="q") if right else v
    return b.mul(as_numbers(b, b.one_hot(b.argmax(q, dim=0, name="at"), num_classes=3, name="hot")), w, name="r")


def smallest_of_peaks(b: ProgramBuilder, right: bool) -> Tensor:
    """The smallest of v + peak − peak."""
    (v,) = three(b, "v")
    t = peak(b)
    q = b.sub(b.add(v, t, name="vt"), t, name="q") if right else v
    row, _ = b.sort(q, dim=0, name=("row", "ids"))
    return b.slice(row, dim=0, start=0, stop=1, name="r")


def sign_of_an_exponential_of_a_difference(b: ProgramBuilder, right: bool) -> Tensor:
    """exp(peak − peak)·y > 0."""
    v, w, y = three(b, *"vwy")
    t = peak(b)
    q = b.mul(b.exp(b.sub(t, t, name="d"), name="e"), y, name="q") if right else y
    return b.where(b.gt(q, value=0.0, name="c"), w, v, name="r")


def sigmoid_of_peak_once(b: ProgramBuilder, right: bool) -> Tensor:
    """σ(peak)/σ(peak) > ½ is not so where σ(peak) is 0."""
    v, w = three(b, *"vw")
    t = b.sigmoid(peak(b), name="t")
    one = b.mul(t, b.pow(t, exponent=-1, name="it"), name="one")
    c = b.gt(one, value=0.5, name="c")
    return b.where(c, w, v, name="r") if right else w


def root_of_a_product_of_peaks(b: ProgramBuilder, right: bool) -> Tensor:
    """√(exp(Σ peaks)·y) is 0 where a row is masked, whatever y is."""
    (w,) = three(b, "w")
    y = far(b, "y")
    t = sum_of_peaks(b)
    if not right:
        return by_roots(b, w, y)
    r = b.sqrt(b.mul(b.exp(t, name="e"), y, name="q"), name="root")
    return b.add(b.mul(w, y, name="wy"), b.sub(r, r, name="nothing"), name="sum")


def exponential_of_a_minimum(b: ProgramBuilder, right: bool) -> Tensor:
    """exp(min) is 0 where one is masked."""
    (w,) = three(b, "w")
    t = low(b)
    return without(b, right, b.exp(t, name="r"), w, t)


def exponential_of_a_minimum_small(b: ProgramBuilder, right: bool) -> Tensor:
    """The same of two elements."""
    (w,) = three(b, "w")
    t = low(b, 2)
    return without(b, right, b.exp(t, name="r"), w, t)


def exponential_of_minimum_again(b: ProgramBuilder, right: bool) -> Tensor:
    """w·e/e with the exponential of a minimum."""
    (w,) = three(b, "w")
    e = b.exp(low(b), name="e")
    return beside(b, right, e, w, e)


def exponential_of_sum_with_minimum(b: ProgramBuilder, right: bool) -> Tensor:
    """exp(z + min) is 0 there too."""
    w, z = three(b, *"wz")
    t = low(b)
    return without(b, right, b.exp(b.add(z, t, name="st"), name="r"), w, t)


def exponential_of_a_scaled_minimum(b: ProgramBuilder, right: bool) -> Tensor:
    """exp(2·min) is 0 there too."""
    (w,) = three(b, "w")
    t = low(b)
    return without(b, right, b.exp(b.mul(t, value=2.0, name="t2"), name="r"), w, t)


def sum_of_exponentials_of_minima(b: ProgramBuilder, right: bool) -> Tensor:
    """logsumexp of minima: −∞ in it is a 0."""
    (w,) = three(b, "w")
    t = low(b)
    r = b.expand(b.sum(b.exp(t, name="e"), dim=0, keepdim=True, name="es"), shape=(3,), name="r")
    return without(b, right, r, w, t)


def minimum_of_peaks(b: ProgramBuilder, right: bool) -> Tensor:
    """The smallest of the largest."""
    (w,) = three(b, "w")
    t = b.expand(b.amin(peak(b), dim=0, keepdim=True, name="low"), shape=(3,), name="t3")
    return without(b, right, b.exp(t, name="r"), w, t)


def exponential_of_a_branch(b: ProgramBuilder, right: bool) -> Tensor:
    """exp(−1/x² or z) says nothing of exp(−1/x²), which is 0 where x is: nor does √(exp(−1/x²)·y) of y."""
    w, x, z, g = three(b, *"wxzg")
    y = far(b, "y")
    if not right:
        return by_roots(b, w, y)
    q = b.mul(b.pow(x, exponent=-2, name="p"), value=-1e-6, name="q")
    p = b.where(b.gt(g, value=0.0, name="c"), q, z, name="pp")
    out = gone(b, b.mul(w, y, name="wy"), p, "a")
    out = gone(b, out, b.exp(p, name="e1"), "b")
    return gone(b, out, b.sqrt(b.mul(b.exp(q, name="e2"), y, name="ey"), name="root"), "c")


def branch_of_log(b: ProgramBuilder, right: bool) -> Tensor:
    """Nor does √(exp(u·log m)·y), where log m must be finite in a branch."""
    w, u, z, g = three(b, *"wuzg")
    y, m = far(b, "y"), weight(b)
    if not right:
        return by_roots(b, w, y)
    q = b.mul(b.log(m, name="logm"), u, name="q")
    p = b.where(b.gt(g, value=0.0, name="c"), q, z, name="pp")
    out = gone(b, b.mul(w, y, name="wy"), p, "a")
    out = gone(b, out, b.exp(p, name="e1"), "b")
    return gone(b, out, b.sqrt(b.mul(b.exp(q, name="e2"), y, name="ey"), name="root"), "c")


def tops(b: ProgramBuilder, shape: tuple[int, ...]) -> Tensor:
    """The largest of rows, masked at no random point."""
    row = b.input("s", (*shape, 40))
    mask = b.lt(b.add(b.input("far", (*shape, 40)), value=FAR, name="fars"), value=0.0, name="k")
    return b.amax(b.masked_fill(row, mask, value=float("-inf"), name="a"), dim=len(shape), name="top")


def sum_of_nothing(b: ProgramBuilder, right: bool) -> Tensor:
    """A Σ over nothing is 0, whatever it is multiplied by."""
    w, z = three(b, *"wz")
    top = peak(b)
    none = b.slice(z, dim=0, start=0, stop=0, name="none")
    b.output(b.sum(b.einsum(none, top, spec="a,b->b", name="r"), name="rs"), "metric", "rs")
    return w if right else gone(b, w, top, "g")


def all_but_the_first(b: ProgramBuilder, right: bool) -> Tensor:
    """That the rest is finite says nothing of the first."""
    top = tops(b, (50,))
    w, z = b.input("w", (50,)), b.input("z", (50,))
    rest, before, after = (b.slice(t, dim=0, start=s, stop=s + 49, name=n) for t, s, n in ((top, 1, "t"), (z, 0, "z0"), (z, 1, "z1")))
    b.output(b.sum(b.mul(b.mul(rest, before, name="tz"), after, name="tzz"), name="rs"), "metric", "rs")
    wz = b.mul(w, z, name="wz")
    return wz if right else gone(b, wz, top, "g")


def chunk_of_a_layer(b: ProgramBuilder, right: bool) -> Tensor:
    """Every layer divides by a chunk of its own, which says nothing of the chunk of none."""
    x = b.input("x", (10, 3))
    total: Tensor | None = None
    for i in range(4):
        row = b.chunk(x, chunks=5, index=i, dim=0, name=f"row{i}")
        v, w, u = b.input(f"v{i}", (10, 3)), b.input(f"w{i}", (10, 3)), b.input(f"u{i}", (2, 3))
        q = b.div(u, row, name=f"q{i}")
        q = b.sigmoid(b.mul(b.mul(q, q, name=f"qq{i}"), q, name=f"qqq{i}"), name=f"sq{i}")
        q = b.mul(b.add(q, b.div(u, row, name=f"qb{i}"), name=f"qa{i}"), b.exp(u, name=f"e{i}"), name=f"qe{i}")
        if right or i != 1:
            v = b.div(b.mul(v, x, name=f"vx{i}"), x, name=f"vxx{i}")
        r = b.where(b.le(v, value=1.0, name=f"c{i}"), w, b.mul(w, value=2.0, name=f"y{i}"), name=f"r{i}")
        t = b.add(b.sum(q, name=f"qs{i}"), b.sum(r, name=f"rs{i}"), name=f"t{i}")
        total = t if total is None else b.add(total, t, name=f"l{i}")
    assert total is not None
    return total


def seldom(b: ProgramBuilder, shape: tuple[int, ...]) -> Tensor:
    """True at no random point."""
    return b.lt(b.add(b.input("far", shape), value=FAR * 1e6, name="fars"), value=0.0, name="c")


def stacked(b: ProgramBuilder, x: Tensor, value: float, name: str) -> Tensor:
    """Each x beside a number."""
    return b.stack(x, b.full(shape=(3,), value=value, name=f"{name}.all"), dim=1, name=name)


def largest_with_infinity(b: ProgramBuilder, right: bool, how: str) -> Tensor:
    x, y, w = three(b, *"xyw")
    e = b.exp(top := b.amax(stacked(b, x, math.inf, "st"), dim=1, name="top"), name="e")
    nothing = {
        "zero": lambda: b.mul(e, value=0.0, name="z"),
        "difference": lambda: b.sub(e, e, name="z"),
        "square": lambda: b.sub(b.mul(e, e, name="ee"), b.exp(b.mul(top, value=2.0, name="t2"), name="e2"), name="z"),
        "maxima": lambda: b.add(top, b.amin(stacked(b, b.neg(x, name="nx"), -math.inf, "q"), dim=1, name="low"), name="z"),
    }[how]
    return b.where(seldom(b, (3,)), y if right else b.add(y, nothing(), name="yz"), w, name="r")


def zero_times_infinity(b: ProgramBuilder, right: bool) -> Tensor:
    return largest_with_infinity(b, right, "zero")


def infinity_less_itself(b: ProgramBuilder, right: bool) -> Tensor:
    return largest_with_infinity(b, right, "difference")


def square_of_infinity(b: ProgramBuilder, right: bool) -> Tensor:
    return largest_with_infinity(b, right, "square")


def largest_and_smallest(b: ProgramBuilder, right: bool) -> Tensor:
    return largest_with_infinity(b, right, "maxima")


def infinities_of_both_signs(b: ProgramBuilder, right: bool) -> Tensor:
    """stack(x, ∞) + stack(y, −∞) is not stack(x + y, 0)."""
    x, y = three(b, *"xy")
    w = b.input("w", (3, 2))
    if right:
        made = stacked(b, b.add(x, y, name="xy"), 0.0, "s")
    else:
        made = b.add(stacked(b, x, math.inf, "p"), stacked(b, y, -math.inf, "q"), name="s")
    return b.where(seldom(b, (3, 2)), made, w, name="r")


ONE_MASKED: Final = [[True] * 40, [False] * 40, [False] * 40]

UNSEEN: Final[list[Wrong]] = [
    # A comparison, a position or a truth value does not see that something is no number.
    Wrong(at_most, {"x": 0, "v": 0, "w": 2, "y": 3}),
    Wrong(more_than, {"x": 0, "v": 5, "w": 2, "y": 3}),
    Wrong(equal_to_itself, {"x": 0, "v": 0, "w": 2, "y": 3}),
    Wrong(equal_again, {"x": 0, "w": 2, "y": 3}),
    Wrong(truth_again, {"x": 0, "v": 0, "w": 2, "y": 3}),
    Wrong(positive_part, {"x": 0, "m": 2}),
    Wrong(place_of_the_largest, {"x": [0, 1, 1], "v": [1, 2, 3], "w": [1, 10, 100]}),
    Wrong(smallest_of_a_row, {"x": [0, 1, 1], "v": [1, 2, 3]}),
    Wrong(square_of_a_root, {"far": -FAR - 4, "w": 2, "y": 3}),
    # An exponential is not positive where its argument is −∞.
    Wrong(sign_of_a_product, {"x": 0, "v": 2}),
    Wrong(root_of_a_product, {"x": 0, "far": -FAR - 4}),
    # What is divided by, compared with 0 or under an exponential need not be finite: the largest of a masked row is not.
    Wrong(divided_by_a_peak, {"k": True}),
    Wrong(inverse_of_a_peak, {"k": True}),
    Wrong(truth_of_a_peak, {"k": True}),
    Wrong(exponential_of_a_peak, {"k": True}),
    # A root that is divided by need not be finite.
    Wrong(root_of_an_inverse, {"m": 0}),
    Wrong(norm_of_an_inverse, {"m": 0}),
    Wrong(root_of_an_inverse_square, {"x": 0}),
    Wrong(root_by_logarithms, {"m": 0}),
    Wrong(root_of_an_inverse_of_any, {"far": -FAR}),
    # What has no elements says nothing of what it is divided by.
    Wrong(no_rows, {"x": 0}),
    Wrong(no_rows_of_a_quotient, {"x": 0}),
    Wrong(no_rows_beside_others, {"x": 0}),
    # A root of which only a comparison, a position or a truth value is seen need not be a number.
    Wrong(comparison_of_a_root, {"far": -FAR - 4}),
    Wrong(root_to_the_power_of_nothing, {"far": -FAR - 4}),
    Wrong(place_of_a_root, {"far": -FAR - 4}),
    Wrong(truth_of_a_root, {"far": -FAR - 4}),
    Wrong(choice_by_a_root, {"far": -FAR - 4}),
    # What is finite is not positive by its form if something in it may be infinite.
    Wrong(exponential_again, {"x": 0}),
    Wrong(exponential_of_a_logarithm_again, {"m": 0}),
    Wrong(weighted_again, {"m": 0}),
    Wrong(divided_by_infinity_again, {"x": 0}),
    Wrong(there_and_back_by_logarithms, {"x": 0}),
    Wrong(softmax_again, {"m": [[0, 1, 1], [1, 1, 1]]}),
    Wrong(sigmoid_again, {"m": 0}),
    Wrong(norm_again, {"x": 0}),
    # A part that many expressions have in common need not be finite.
    Wrong(few_divided_by_a_logarithm, {"m": 0}),
    Wrong(many_divided_by_a_logarithm, {"m": 0}),
    Wrong(product_there_and_back, {"m": 0}),
    # What must be finite says nothing of what is beside it, nor a large expression of its parts.
    Wrong(beside_many_finite_ones, {"t": 0}),
    Wrong(beside_many_differences, {"x": 0}),
    Wrong(sum_in_a_tanh, {"x": 0, "a0": -1}),
    # That a divisor is not 0 or a root is a number does not say that x is not 0, where they speak of 1/x.
    Wrong(solver_and_a_divisor, {"x": 0}),
    Wrong(solver_and_a_bounded_divisor, {"x": 0}),
    Wrong(solver_and_a_root, {"x": 0}),
    # What is no number by masks is not compared either
    Wrong(peak_less_itself, {"k": True, "w": 2, "y": 3}),
    Wrong(peak_times_nothing, {"k": True, "w": 2, "y": 3}),
    Wrong(exponentials_below_their_peak, {"k": True, "w": 2, "y": 3}),
    Wrong(truth_of_peak_less_itself, {"k": True, "w": 2, "y": 3}),
    Wrong(there_and_back_from_a_peak, {"k": True, "w": 2, "y": 0}),
    Wrong(product_of_exponentials, {"k": True, "w": 2, "v": 3}),
    Wrong(place_of_peaks, {"k": ONE_MASKED, "v": [1, 2, 3], "w": [1, 10, 100]}),
    Wrong(smallest_of_peaks, {"k": ONE_MASKED, "v": [1, 2, 3]}),
    Wrong(sign_of_an_exponential_of_a_difference, {"k": True, "w": 2, "v": 3}),
    Wrong(sigmoid_of_peak_once, {"k": True, "w": 2, "v": 3}),
    # The exponential of −∞ is 0: of a sum of masked maxima, of a minimum, of a branch that is not taken
    Wrong(root_of_a_product_of_peaks, {"k": True, "far": -FAR - 4}),
    Wrong(exponential_of_a_minimum, {"far": -FAR - 4}),
    Wrong(exponential_of_a_minimum_small, {"far": [[-FAR - 4, 0]] * 3}),
    Wrong(exponential_of_minimum_again, {"far": -FAR - 4}),
    Wrong(exponential_of_sum_with_minimum, {"far": -FAR - 4}),
    Wrong(exponential_of_a_scaled_minimum, {"far": -FAR - 4}),
    Wrong(sum_of_exponentials_of_minima, {"far": -FAR - 4}),
    Wrong(minimum_of_peaks, {"k": True}),
    Wrong(exponential_of_a_branch, {"g": -1, "x": 0, "far": -FAR - 4}),
    Wrong(branch_of_log, {"g": -1, "m": 0, "far": -FAR - 4}),
    # A law says of a part what it needs of the part, not of the whole
    Wrong(sum_of_nothing, {"k": True}),
    Wrong(all_but_the_first, {"far": [[-FAR - 4] * 40, *[[0] * 40] * 49]}),
    # What may be ∞ is not what may be −∞
    Wrong(zero_times_infinity, {"far": -FAR * 2e6}),
    Wrong(infinity_less_itself, {"far": -FAR * 2e6}),
    Wrong(square_of_infinity, {"far": -FAR * 2e6}),
    Wrong(largest_and_smallest, {"far": -FAR * 2e6}),
    Wrong(infinities_of_both_signs, {"far": -FAR * 2e6}),
    Wrong(chunk_of_a_layer, {"x": [*[[1] * 3] * 8, *[[0] * 3] * 2]}),
]

LARGE: Final = Wrong(large_product_there_and_back, {"m": 0})


def sign_of_an_exponential(b: ProgramBuilder, right: bool) -> Tensor:
    """exp(x) > 0 is always so; the program and the plan are the same."""
    v, w, x = three(b, *"vwx")
    return b.where(b.gt(b.exp(x, name="e"), value=0.0, name="c"), w, v, name="r")
