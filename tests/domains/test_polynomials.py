"""Scalars of the element domain: what must be equal is, and what must not be is not."""

from __future__ import annotations

from fractions import Fraction

import pytest
import z3

from prove.staged.equality import shown
from trainverify.domains.polynomials import Choice, Poly, Scalars, Unsupported
from trainverify.prove.staged.check import equal
from trainverify.prove.staged.solver import Z3, _Query

HALF = Fraction(1, 2)


def test_ring() -> None:
    s = Scalars()
    x, y = s.symbol("x"), s.symbol("y")
    square = s.mul(s.add(x, y), s.add(x, y))
    assert shown(s, square, s.add(s.add(s.mul(x, x), s.mul(y, y)), s.scale(s.mul(x, y), s.const(2)[0]))) == "normal form"
    assert shown(s, square, s.add(s.mul(x, x), s.mul(y, y))) is None


def test_fractions_with_common_denominators() -> None:
    s = Scalars()
    a, b, c = s.symbol("a"), s.symbol("b"), s.symbol("c")
    whole = s.add(a, b)
    parts = s.add(s.mul(a, s.inverse(whole)), s.mul(b, s.inverse(whole)))
    assert shown(s, parts, s.const(1)) == "equations"
    assert shown(s, s.mul(a, s.inverse(whole)), s.mul(a, s.inverse(s.add(a, c)))) is None
    assert s.needs  # division is a condition, for whoever needs it


def test_root_of_a_square_keeps_the_sign() -> None:
    s = Scalars()
    x = s.symbol("x")
    assert shown(s, s.pow(s.mul(x, x), HALF), x, ask=True) is None
    p = s.symbol("p", "positive")
    assert shown(s, s.pow(s.mul(p, p), HALF), p) == "normal form"
    root = s.pow(s.add(s.mul(x, x), s.const(1)), HALF)
    assert shown(s, s.mul(root, root), s.add(s.mul(x, x), s.const(1))) == "normal form"
    assert shown(s, s.pow(s.const(12), HALF), s.scale(s.pow(s.const(3), HALF), s.const(2)[0])) == "normal form"
    with pytest.raises(Unsupported):
        s.pow(s.const(-2), HALF)


def test_softmax_does_not_depend_on_the_shift() -> None:
    s = Scalars()
    xs = [s.symbol(i) for i in range(3)]

    def softmax(shift: Poly) -> Poly:
        e = [s.exp(s.sub(x, shift)) for x in xs]
        return s.mul(e[0], s.inverse(s.add(s.add(e[0], e[1]), e[2])))

    assert shown(s, softmax(s.max(xs)), softmax({})) is not None
    assert shown(s, s.exp(s.sub(xs[0], s.max(xs))), s.exp(xs[0])) is None
    assert not s.needs  # a sum of exponentials is positive


def test_maxima_flatten_and_scale_by_nothing() -> None:
    s = Scalars()
    x, y, z = (s.symbol(n) for n in "xyz")
    assert shown(s, s.max([s.max([x, y]), z]), s.max([x, s.max([z, y])])) == "normal form"
    assert shown(s, s.max([s.neg(x), s.neg(y)]), s.neg(s.max([x, y])), ask=True) is None


def test_one_hot_of_a_choice() -> None:
    s = Scalars()
    i, j = s.choice(Choice("i", (0, 1, 2, -100))), s.choice(Choice("j", (0, 1, 2, -100)))
    hits = [s.tabulate(lambda v, k=k: v == k, [i]) for k in range(3)]
    assert not s.mul(hits[0], hits[1])
    assert s.mul(hits[2], hits[2]) == hits[2]
    total = s.add(s.add(hits[0], hits[1]), hits[2])
    assert total == s.tabulate(lambda v: v != -100, [i])
    assert total != s.const(1)  # an ignored label has no class
    assert s.tabulate(lambda a, b: a == b, [i, i]) == s.const(1)
    assert s.tabulate(lambda a, b: a == b, [i, j]) != s.const(1)
    with pytest.raises(Unsupported):
        s.tabulate(lambda v: v, [s.symbol("x")])


def test_exp_of_a_masked_number() -> None:
    s = Scalars()
    m, x = s.flag("m"), s.symbol("x")
    masked = s.exp(s.mul(m, x))
    assert masked == s.add(s.sub(s.const(1), m), s.mul(m, s.exp(x)))


def test_positive_depends_on_the_sign_of_what_is_divided_out() -> None:
    s = Scalars()
    x, p = s.symbol("x"), s.symbol("p", "positive")
    assert s.positive(s.mul(p, x)) == s.positive(x)
    assert s.positive(s.mul(x, x)) != s.positive(x)
    assert s.positive(s.neg(x)) != s.sub(s.const(1), s.positive(x))  # both fail at 0


def test_the_solver_finds_what_forms_do_not() -> None:
    s = Scalars()
    x, y = s.symbol("x"), s.symbol("y")
    relu = s.mul(s.positive(x), x)
    assert shown(s, relu, s.max([x, {}])) is None
    assert shown(s, relu, s.max([x, {}]), ask=True) == "solver"
    assert shown(s, relu, s.max([y, {}]), ask=True) is None


@pytest.mark.parametrize(("first", "second"), [(66, 2), (128, 64)])
def test_roots_of_different_numbers(first: int, second: int) -> None:
    """Expected: not shown, whichever roots they are, and a power that is too high is no question."""
    s = Scalars()
    x, y = s.symbol("x", "positive"), s.symbol("y", "positive")
    assert shown(s, s.pow(x, Fraction(1, first)), s.pow(y, Fraction(1, second)), ask=True) is None
    assert Z3(5).zero(s, s.sub(s.pow(x, Fraction(1, 10**9)), y), s.needs).status == "error"


def test_a_model_says_where_it_fails() -> None:
    s = Scalars()
    x, y = s.symbol("x"), s.symbol("y")
    checked = equal(s, s.mul(x, y), s.mul(x, x), (), Z3(5))
    assert checked.how is None
    a, b = checked.model["x"], checked.model["y"]
    assert a * b != a * a


def test_contradictory_conditions_show_nothing() -> None:
    s = Scalars()
    x, y = s.symbol("x"), s.symbol("y")
    given = [("positive", frozenset(x.items())), ("positive", frozenset(s.scale(x, s.const(-1)[0]).items()))]
    checked = equal(s, x, y, given, Z3(5))
    assert checked.how is None
    assert "contradict" in checked.reason


def test_conditions_that_may_contradict_each_other_show_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The solver finds no case where it fails, and cannot say whether there is any case at all."""
    answers = iter([z3.unsat, z3.unknown])
    monkeypatch.setattr(_Query, "_check", lambda self: next(answers))
    s = Scalars()
    x = s.symbol("x")
    answer = Z3(5).zero(s, x, [("nonzero", frozenset(x.items()))])
    assert answer.status == "unknown"
    assert "contradict" in answer.reason
