"""Numbered expressions: what is shown with common parts as symbols is also shown in full, and no part that is not a number is a symbol."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

import pytest

import trainverify as tv
from prove.staged.cutting import cut, cut_once, llama, random_pair
from prove.staged.swaps import BEFORE, swapped
from trainverify.prove.definedness import BELOW, FINITE, WILD, expression_state
from trainverify.prove.propose.search import Search
from trainverify.prove.staged import expressions
from trainverify.prove.staged.execute import check
from trainverify.prove.staged.expressions import Expressions
from trainverify.prove.staged.records import Short, Stage
from trainverify.prove.staged.signs import expression_sign, tensors
from trainverify.prove.staged.stages import Cutter, NoStage
from trainverify.verdicts import single, verify


def both_ways(engine: Search, stage: Stage, most: int = 3) -> Iterator[tuple[bool, bool]]:
    """Whether elements are shown with common parts as symbols, and in full."""
    made = replace(stage, **BEFORE)
    try:
        Cutter(engine.ledger.elements, engine.ledger.claims)._number(made)
    except NoStage:
        return
    for n in list(made.short)[:most]:
        yield check(made, n, engine.ledger.elements).proved, check(replace(made, short={}), n, engine.ledger.elements).proved


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expressions, "SMALL_STAGE", 0)


@pytest.fixture(scope="module")
def of_llama() -> tuple[Search, list[Stage]]:
    """One stage of each form."""
    engine, stages = cut_once(llama)
    return engine, list({engine.ledger.cutter._canonical.form(s): s for s in stages}.values())


@pytest.mark.parametrize("seeds", [(), (3, 6), (8, 9)])
def test_shown_with_common_parts_is_shown_in_full(seeds: tuple[int, ...], of_llama: tuple[Search, list[Stage]]) -> None:
    found: list[tuple[bool, bool]] = []
    for engine, stages in [cut(*random_pair(seed)()) for seed in seeds] or [of_llama]:
        forms = {engine.ledger.cutter._canonical.form(s): s for s in stages}
        found += [pair for stage in forms.values() for pair in both_ways(engine, stage, most=1 if not seeds else 3)]
    assert sum(short for short, _ in found) >= 20
    assert not [pair for pair in found if pair == (True, False)]


def test_a_stage_with_elements_exchanged_is_not_shown(of_llama: tuple[Search, list[Stage]]) -> None:
    """Expected: never shown, unless in full too (an element that does not matter there)."""
    engine, stages = of_llama
    found: list[tuple[bool, bool]] = []
    for stage in stages:
        for place, (ids, _) in list(stage.plan.leaves.items())[:1]:
            if len(ids) > 1 and ids[0] != ids[1]:
                found += both_ways(engine, replace(stage, plan=swapped(stage.plan, place)), most=2)
    assert len(found) >= 50
    assert not [pair for pair in found if pair == (True, False)]
    assert sum(not short for short, _ in found) > len(found) // 3


def test_common_parts_are_numbers(monkeypatch: pytest.MonkeyPatch, of_llama: tuple[Search, list[Stage]]) -> None:
    """Attention with a mask: −∞ and what is made of it is never a symbol, its exponential may be one, and may be 0."""
    engine, stages = of_llama
    seen = []
    doubtful: list[int] = []
    chosen: set[int] = set()
    shorts = Expressions._shorts

    def noted(self, pairs, factor, stops, assumed):  # type: ignore[no-untyped-def]
        seen.append([(self.keys[c], [self.states[a] for a in self.keys[c][2]], self.states[c], self.signs[c]) for c in stops])
        branches = self._parts(a for op, _, args in self.keys if op == "choose" for a in args[1:])
        doubtful.extend(c for c in stops & branches if self.partial[c])
        chosen.update(branches)
        return shorts(self, pairs, factor, stops, assumed)

    monkeypatch.setattr(Expressions, "_shorts", noted)
    for stage in stages:
        Cutter(engine.ledger.elements, engine.ledger.claims)._number(replace(stage, **BEFORE))
    every = [part for parts in seen for part in parts]
    assert len(every) > 20
    assert all(state == FINITE for _, _, state, _ in every)
    exponentials = [(args, sign) for (op, info, _), args, _, sign in every if op == "map" and info[0] == "exp"]
    assert chosen
    assert not doubtful  # what divides in a branch that may not be taken
    assert all((sign == "positive") == (args == [FINITE]) for args, sign in exponentials)


def test_what_is_a_number() -> None:
    infinity = float("inf")
    assert expression_state("real", -infinity, ()) == BELOW
    assert expression_state("real", infinity, ()) == expression_state("real", "nan", ()) == WILD
    assert expression_state("map", ("add",), (BELOW, FINITE)) == BELOW
    assert expression_state("map", ("sub",), (BELOW, BELOW)) == expression_state("map", ("sub",), (FINITE, BELOW)) == WILD
    assert expression_state("map", ("mul",), (BELOW, FINITE)) == WILD
    assert expression_state("map", ("neg",), (BELOW,)) == WILD
    assert expression_state("map", ("div",), (BELOW, FINITE)) == WILD  # scores that are scaled after they are masked
    assert expression_state("map", ("exp",), (BELOW,)) == FINITE
    assert expression_state("map", ("exp",), (WILD,)) == WILD
    assert expression_state("reduce", "max", (BELOW, FINITE)) == FINITE
    assert expression_state("reduce", "min", (BELOW, FINITE)) == WILD
    assert expression_state("dot", (2,), (BELOW, FINITE)) == WILD


def test_signs_of_expressions() -> None:
    assert expression_sign("map", ("exp", None), [None], [FINITE], [0]) == "positive"
    assert expression_sign("map", ("exp", None), [None], [BELOW], [0]) == "nonnegative"
    assert expression_sign("dot", (2,), [None, None], [FINITE] * 2, [5, 5]) == "nonnegative"  # a square
    assert expression_sign("dot", (2,), [None, None], [FINITE] * 2, [5, 6]) is None
    assert expression_sign("dot", (1, 1), ["positive", "nonnegative"], [FINITE] * 2, [5, 6]) == "positive"
    assert expression_sign("dot", (1, 1), ["positive", None], [FINITE] * 2, [5, 6]) is None
    assert expression_sign("map", ("sub", None), ["positive", "positive"], [FINITE] * 2, [5, 6]) is None
    assert expression_sign("real", 0, [], [], []) == "nonnegative"
    picked = ("pick", "real", [None, "positive", "positive"], [FINITE] * 3, [5, 6, 7])
    assert expression_sign(*picked) == "nonnegative"  # 0 outside
    assert expression_sign(*picked, inside=True) == "positive"
    assert expression_sign("pick", "real", [None, "positive", None], [FINITE] * 3, [5, 6, 7], inside=True) is None


def masked(mask: bool, divided: bool = False, scaled: bool = False) -> tuple[tv.Program, tv.Plan]:
    """y = e^s·w, some elements of s masked, perhaps scaled after it; the plan may multiply by e^s once more and divide by it."""
    b = tv.program("masked")
    s, w = b.input("s", (4, 5)), b.parameter("w", (4, 5))
    keep = b.input("keep", (4, 5), "bool")
    t = b.apply_mask(s, keep, name="t") if mask else s
    e = b.exp(b.div(t, value=2.0, name="u") if scaled else t, name="e")
    b.loss(b.sum(b.mul(e, w, name="y"), name="sum"))
    p = tv.plan("masked", tv.Mesh(dp=2))
    with p.ranks() as r:
        s, w = r.input("s", (2, 5), "(dp a) b"), r.parameter("w", (2, 5), "(dp a) b")
        keep = r.input("keep", (2, 5), "(dp a) b", dtype="bool")
        t = r.apply_mask(s, keep, name="t") if mask else s
        e = r.exp(r.div(t, value=2.0, name="u") if scaled else t, name="e")
        y = r.mul(e, w, name="y")
        if divided:
            y = r.div(r.mul(y, e, name="more"), e, name="less")
        share = r.sum(y, name="share")
        r.backward(share)
        r.loss(r.all_reduce(share, group="dp", name="sum"))
        r.output(r.gradient(w), "gradient", "w")
        r.update(w, r.sgd(w, r.gradient(w), lr=0.1, name="w.new"))
    return tv.complete(b.build(), tv.SGD(lr=0.1)), p.build()


@pytest.mark.parametrize(("mask", "sign"), [(True, "nonnegative"), (False, "positive")])
def test_the_exponential_of_a_masked_element_may_be_zero(mask: bool, sign: str) -> None:
    for scaled in (False, True):
        engine, _ = cut(*masked(mask, scaled=scaled))
        assert tensors(engine.ledger.small).tensors["e"].sign == sign


def test_what_is_looked_up_outside_is_zero() -> None:
    """Expected: the largest of positive numbers are positive, but not what is looked up anywhere."""
    b = tv.program("places")
    p = b.input("p", (2, 5), domain="positive")
    there, _ = b.topk(p, k=3, name=("there", "ids"))
    maybe = b.take_along_dim(p, b.input("x", (2, 3), dtype="i64", ids=7), dim=1, name="maybe")
    b.loss(b.sum(b.mul(there, maybe, name="both"), name="loss"))
    engine, _ = cut(b.build(), single(b.build()))
    signs = tensors(engine.ledger.small).tensors
    assert signs["there"].sign == "positive"
    assert signs["maybe"].sign == "nonnegative"


def test_dividing_by_what_may_be_zero() -> None:
    """Expected: proved without a mask, refuted with one, where 0/0 stands for 0."""
    assert verify(*masked(False, True), engine="smt").verdict == "PROVED(reduced)"
    assert verify(*masked(True, True), engine="smt").verdict == "REFUTED"
    assert verify(*masked(True), engine="smt").verdict == "PROVED(reduced)"


@pytest.mark.parametrize(("nonzero", "reason"), [((), "a condition inside a choice"), ((1,), "a condition inside a choice"), ((2,), "")])
def test_what_is_divided_by_in_a_branch_may_be_0(nonzero: tuple[int, ...], reason: str, of_llama: tuple[Search, list[Stage]]) -> None:
    """A gradient of labels that may be ignored, times the number of those that are not: shown if another stage shows that this is not 0."""
    engine, (stage, *_) = of_llama
    make = engine.ledger.elements.graph.terms.make
    flag, x, t, nothing = (*(make("leaf", k) for k in range(3)), make("real", Fraction(0)))
    want = make("choose", None, [flag, make("map", ("div", None, "NoneType"), [x, t]), nothing])
    goal = make("goal", None, [make("choose", None, [flag, x, nothing]), t, want])
    kinds = (("bool", None), ("real", None), ("real", None))
    result = check(replace(stage, short={0: Short(goal, kinds, (), nonzero, False, False)}), 0, engine.ledger.elements)
    assert (result.proved, result.reason) == (not reason, reason)


def test_counts_are_one_expression_however_they_are_shared(of_llama: tuple[Search, list[Stage]]) -> None:
    """Expected: in any order and in groups; not if one is counted twice, nor one more, nor if something is a factor."""
    engine, stages = of_llama
    e = Expressions(stages[0], engine.ledger.elements)
    flags = [e.number(("map", ("as_real", None, "NoneType"), (e.number(("symbol", i, ())),))) for i in range(4)]
    a, b, c, d = flags

    def total(*args: int, each: int = 1) -> int:
        return e.simple(("dot", (each,) * (len(args) // each), args))

    whole = total(a, b, c, d)
    assert total(total(c, a), total(d, b)) == whole
    assert total(total(total(b), d), total(c), a) == whole
    assert total(total(a, b), total(c, d), a) != whole
    assert total(total(a, b), total(b, c)) != total(total(a, b), c)
    assert total(a, b, c) != whole
    assert total(a, b, c, d, each=2) != whole
