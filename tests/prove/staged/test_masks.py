"""Masks by routing weights: what is not chosen is 0, on one rank or on many; a mask by anything else is not shown."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

import trainverify as tv
from prove.staged.alignment import aligned
from prove.staged.cutting import cut
from prove.staged.equality import shown
from prove.staged.swaps import BEFORE
from tools.campaign.agree import staged
from trainverify.domains.polynomials import Poly, Scalars, TooLarge
from trainverify.ops import OPS
from trainverify.ops.table import op
from trainverify.primitives import node as F
from trainverify.primitives.node import Node
from trainverify.prove.propose.search import Search
from trainverify.prove.staged import expressions
from trainverify.prove.staged.check import Assuming, _by_denominator, _solved
from trainverify.prove.staged.execute import Limits, check
from trainverify.prove.staged.records import Part, Stage
from trainverify.prove.staged.stages import Cutter
from trainverify.prove.staged.supports import NOWHERE, all_of, common, expression_support
from trainverify.verdicts import single, verify
from trainverify.zoo.deepseek import Config, Gate
from trainverify.zoo.parallel import Degrees, deepseek_plan, deepseek_step


def logistic(s: Scalars, x: Poly) -> Poly:
    return s.inverse(s.add(s.const(1), s.exp(s.neg(x))))


# -- laws ------------------------------------------------------------------------------------------------------------


def test_a_number_times_its_being_positive() -> None:
    """Expected: x·[x > 0] = x for x ≥ 0, and for nothing else."""
    s = Scalars()
    w, x = s.symbol("w", "nonnegative"), s.symbol("x")
    mask = s.positive(w)
    assert s.mul(w, mask) == w
    assert s.mul(s.pow(w, Fraction(1, 2)), mask) == s.pow(w, Fraction(1, 2))
    assert s.mul(x, s.positive(x)) != x
    assert s.mul(s.inverse(w), mask) != s.inverse(w)  # 1/w has no value where the mask is 0
    assert s.mul(s.symbol("v", "nonnegative"), mask) != s.symbol("v", "nonnegative")


def test_a_summand_and_its_sum() -> None:
    """Expected: a·[a + b > 0] = a if both are not negative; not with a difference."""
    s = Scalars()
    a, b, c = s.flag("a"), s.flag("b"), s.symbol("c", "positive")
    assert s.mul(a, s.positive(s.add(a, b))) == a
    assert s.mul(s.mul(a, c), s.positive(s.add(s.mul(a, c), b))) == s.mul(a, c)
    assert s.mul(a, s.positive(s.sub(a, b))) != a
    assert s.mul(a, s.positive(s.add(a, s.symbol("x")))) != a


def test_the_sign_of_a_quotient() -> None:
    """Expected: what is divided by is not 0, so it is positive if it is not negative; otherwise it stays."""
    s = Scalars()
    a, d, x = s.flag("a"), s.symbol("d", "nonnegative"), s.symbol("x")
    assert s.positive(s.mul(a, s.inverse(d))) == a
    assert s.positive(s.mul(a, s.inverse(x))) != a


def test_signs_case_by_case() -> None:
    s = Scalars()
    a, b, e = s.flag("a"), s.flag("b"), s.exp(s.symbol("x"))
    masked = s.add(s.sub(s.const(2), a), s.mul(a, e))  # 1 + e^(a·x)
    assert s.sign(masked) == "positive"
    assert s.sign(s.sub(s.const(1), a)) == "nonnegative"
    assert s.sign(s.sub(s.sub(s.const(1), a), b)) is None
    assert s.sign(s.sub(e, a)) is None


def test_elements_that_vanish_with_a_weight() -> None:
    """Expected: h·f([w > 0]·x) = h·f(x) if h is 0 where w is; not for another weight, and not before it is said."""
    s = Scalars()
    h, w, v, x = s.symbol("h"), s.symbol("w", "nonnegative"), s.symbol("v", "nonnegative"), s.symbol("x")
    first = s.mul(h, logistic(s, s.mul(s.positive(w), x)))
    assert shown(s, first, s.mul(h, logistic(s, x))) is None
    s.vanishes(h, w)
    assert shown(s, first, s.mul(h, logistic(s, x))) == "equations"
    assert shown(s, s.mul(h, logistic(s, s.mul(s.positive(v), x))), s.mul(h, logistic(s, x))) is None
    assert shown(s, logistic(s, s.mul(s.positive(w), x)), logistic(s, x)) is None


def test_nothing_is_assumed_of_what_may_have_no_value() -> None:
    """1/(x + [w > 0]) may have a value where w is 0 and 1/(x + 1) has none."""
    s = Scalars()
    w, x = s.symbol("w", "nonnegative"), s.symbol("x")
    p = s.mul(w, s.inverse(s.add(x, s.positive(w))))
    assert Assuming(s).all(p) == p
    assert Assuming(s).all(s.mul(w, logistic(s, s.mul(s.positive(w), x)))) == s.mul(w, logistic(s, x))


def test_fractions_apart() -> None:
    """Expected: fractions without a common denominator are looked at by themselves, and all of them together if that is not enough."""
    s = Scalars(max_terms=3000)
    got: Poly = {}
    want: Poly = {}
    for n in range(9):  # 1/(x + 1) − 1/(x + 2) = 1/((x + 1)·(x + 2))
        x = s.symbol(n)
        a, b = s.inverse(s.add(x, s.const(1))), s.inverse(s.add(x, s.const(2)))
        got, want = s.add(got, s.sub(a, b)), s.add(want, s.mul(a, b))
    assert len(_by_denominator(s, s.sub(got, want))) == 9
    assert shown(s, got, want) == "equations"
    assert shown(s, got, s.add(want, s.symbol(0))) is None
    with pytest.raises(TooLarge):
        _solved(s, s.sub(got, want))  # all denominators together
    few = Scalars()
    x, y = few.symbol("x"), few.symbol("y")
    a, b = few.add(x, few.const(1)), few.add(y, few.const(1))
    halves = few.add(few.mul(x, few.inverse(a)), few.mul(y, few.inverse(b)))
    whole = few.sub(few.sub(few.const(2), few.inverse(a)), few.inverse(b))
    assert shown(few, halves, whole) == "equations"
    assert shown(few, halves, few.add(whole, few.inverse(b))) is None


def test_supports() -> None:
    a, b = frozenset({1}), frozenset({2})
    assert all_of([a, b]) == {1, 2}
    assert common([a, all_of([a, b])]) == {1}
    assert common([a, None]) == a  # the other summand is 0
    assert common([a, b]) == NOWHERE
    assert expression_support("dot", (2, 1), [a, b, a]) == {1}
    assert expression_support("map", ("div", None), [a, b]) == {1}
    assert expression_support("map", ("exp", None), [a]) == NOWHERE  # e^0 is 1
    assert expression_support("map", ("add", None), [a, NOWHERE]) == NOWHERE
    assert expression_support("choose", None, [NOWHERE, a, b]) == NOWHERE


# -- programs --------------------------------------------------------------------------------------------------------


def routed(mask: str | None) -> tv.Program:
    """Σ |x·g|·silu(x·u), where only tokens with a weight are sent, or those that another token or expert has a weight for."""
    b = tv.program("routed")
    x, g, u = b.input("x", (3, 4)), b.input("g", (2, 4)), b.input("u", (2, 4))
    w = b.abs(b.linear(x, g), name="w")
    if mask is None:
        inner = b.linear(x, u, name="inner")
    else:
        dim = {"own": None, "expert": 1, "token": 0}[mask]
        of = w
        if dim is not None:
            size = (3, 2)[dim]
            of = b.concat(b.slice(w, dim=dim, start=1, stop=size), b.slice(w, dim=dim, start=0, stop=1), dim=dim, name="turned")
        chosen = b.float(b.gt(of, value=0), name="chosen")
        inner = b.einsum(chosen, x, u, spec="te,th,eh->te", name="inner")
    b.loss(b.sum(b.mul(w, b.silu(inner, name="out"), name="y")))
    return b.build()


@pytest.mark.parametrize(("mask", "proved"), [("own", True), ("expert", False), ("token", False)])
def test_only_the_own_weight_may_mask(mask: str, proved: bool) -> None:
    """Weights are never 0 on random inputs: evaluation sees no difference, all rests on the proof. The solver may find where it fails."""
    report = verify(routed(None), routed(mask), engine="smt", points=1)
    assert (report.verdict == "PROVED(reduced)") == proved, report.notes
    assert proved or report.verdict in ("REFUTED", "UNKNOWN")


@op("projected", "a user's")
def projected(x: Node, w: Node) -> Node:
    """x·w, by broadcasting: no op of the library makes it so."""
    return F.total(F.reshape(x, (x.shape[0], 1, x.shape[1])) * F.reshape(w, (1, *w.shape)), (2,))


@op("bounded", "a user's")
def bounded(x: Node) -> Node:
    """|tanh x|, which is 0 only where x is."""
    return F.call("abs", F.call("tanh", x))


@op("sent", "a user's")
def sent(y: Node, w: Node) -> Node:
    """y where w is positive, else 0."""
    return y * F.call("as_real", w > 0)


USERS = OPS.extended([projected, bounded, sent])


def routed_by_users(own: bool, mask: str | None) -> tv.Program:
    """Σ exp(|tanh(x·g)|·x·u), by operators of the library or by a user's; masked by that weight, by |x·g|, or by that of another expert."""
    b = tv.program("routed", USERS)
    x, g, u = b.input("x", (3, 4)), b.input("g", (2, 4)), b.input("u", (2, 4))
    score = b.projected(x, g, name="score") if own else b.linear(x, g, name="score")
    w = b.bounded(score, name="w") if own else b.abs(b.tanh(score), name="w")
    inner = b.projected(x, u, name="inner") if own else b.linear(x, u, name="inner")
    if mask is not None:
        size = b.abs(score, name="size")
        other = b.concat(b.slice(size, dim=1, start=1, stop=2), b.slice(size, dim=1, start=0, stop=1), dim=1, name="other")
        by = {"weight": w, "score": size, "other": other}[mask]
        inner = b.sent(inner, by, name="sent") if own else b.mul(inner, b.float(b.gt(by, value=0)), name="sent")
    b.loss(b.sum(b.exp(b.mul(w, inner, name="made"), name="out")))
    return b.build()


@pytest.mark.parametrize(("mask", "proved"), [("weight", True), ("score", True), ("other", False)])
@pytest.mark.parametrize("own", [False, True])
def test_operators_of_users_are_masked_like_ours(own: bool, mask: str, proved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected: |tanh s| is 0 where s is, whoever wrote the operator; not where another expert's s is 0, which no random input shows."""
    monkeypatch.setattr(expressions, "SMALL_STAGE", 0)
    report = verify(routed_by_users(False, None), routed_by_users(own, mask), engine="smt", points=1, ops=USERS)
    assert (report.verdict == "PROVED(reduced)") == proved, report.notes
    assert proved or report.verdict in ("REFUTED", "UNKNOWN")


def divided(mask: bool) -> tv.Program:
    """Σ |x·g|·x·u / e^(x·v), where what is divided and what it is divided by may be masked: 0/0 where there is no weight."""
    b = tv.program("divided")
    x, g, u, v = b.input("x", (3, 4)), b.input("g", (2, 4)), b.input("u", (2, 4)), b.input("v", (2, 4))
    w = b.abs(b.linear(x, g), name="w")
    top, below = b.linear(x, u, name="top"), b.exp(b.linear(x, v), name="below")
    if mask:
        chosen = b.float(b.gt(w, value=0), name="chosen")
        top, below = b.mul(chosen, top, name="top.sent"), b.mul(chosen, below, name="below.sent")
    b.loss(b.sum(b.mul(w, b.div(top, below, name="out"), name="y")))
    return b.build()


@pytest.mark.parametrize("few", [0, 300])
def test_a_mask_is_not_divided_out(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected: not proved. It agrees on all random inputs, and has no value where a weight is 0."""
    monkeypatch.setattr(expressions, "SMALL_STAGE", few)
    assert verify(divided(False), divided(False), engine="smt", points=1).verdict == "PROVED(reduced)"
    assert verify(divided(False), divided(True), engine="smt", points=1).verdict == "UNKNOWN"


def normalized(by: str | None) -> tv.Program:
    """Row 1 of |x|/Σ|x|; by another way 0·((|x₀| + p₀)/d₀) + 1·((|x₁| + p₁)/d₁) − p₁/d₁, where d is Σ|x| or something else in row 0."""
    b = tv.program("normalized")
    x, y, p, c = b.input("x", (2, 3)), b.input("y", (1, 1)), b.input("p", (2, 3)), b.input("c", (1, 3))
    w = b.abs(x, name="w")
    sums = b.sum(w, dim=1, keepdim=True, name="sums")
    out = b.div(b.mul(w, b.float(b.gt(w, value=0))), sums, name="out")
    other = b.slice(out, dim=0, start=0, stop=1)
    if by is None:
        own = b.slice(out, dim=0, start=1, stop=2)
    else:
        under = sums if by == "sums" else b.concat(y, b.slice(sums, dim=0, start=1, stop=2), dim=0, name="under")
        both = b.div(b.add(b.mul(w, b.float(b.gt(w, value=0))), p, name="raised"), under, name="both")
        hot = b.float(b.one_hot(b.arange(start=0, stop=2), num_classes=2))
        own = b.slice(b.einsum(hot, both, spec="tc,th->ch", name="picked"), dim=0, start=1, stop=2)
        own = b.sub(own, b.slice(b.div(p, under, name="rest"), dim=0, start=1, stop=2), name="own")
    b.loss(b.add(b.sum(b.mul(own, c)), b.sum(other)))
    return b.build()


@pytest.mark.parametrize(("by", "verdict"), [("sums", "PROVED(reduced)"), ("y", "UNKNOWN")])
def test_what_the_logical_program_divides_by_elsewhere_is_not_zero(by: str, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected: 0·(x/y) is 0 if the logical program divides by y for another element, and has no value for some y if it does not."""
    monkeypatch.setattr(expressions, "SMALL_STAGE", 0)
    assert verify(normalized(None), normalized(by), engine="smt", points=1).verdict == verdict
    engine, _ = cut(normalized(None), single(normalized(by)))
    engine._rounds(engine._open())
    assert ((0, 0, "own") in engine.ledger.claims.dropped) == (verdict == "UNKNOWN")  # not only where both elements are wanted


def weighed(mask: str | None, wide: bool = False, spread: bool = False) -> tv.Program:
    """exp(weight · (t·u + t·v)) with a mask before the weight; weights are not negative, a wide one is a sum of two."""
    b = tv.program("weighed")
    x, g, h, z = (b.input(n, s) for n, s in (("x", (2, 3)), ("g", (3, 3)), ("h", (3, 3)), ("z", (2, 3))))
    t, u, v = (b.input(n, (2, 3)) for n in "tuv")
    a, other = b.abs(b.linear(x, g), name="a"), b.abs(b.linear(x, h), name="other")
    weight = b.add(a, other, name="weight") if wide else a
    rest = b.add(b.mul(t, u), b.mul(t, v)) if spread else b.mul(t, b.add(u, v))
    made = b.mul(weight, rest, name="made")
    if mask is not None:
        by = {"own": a, "both": b.mul(a, other), "positive": b.mul(b.exp(z), a)}[mask]
        made = b.mul(b.float(b.gt(by, value=0)), made, name="masked")
    b.loss(b.sum(b.exp(made, name="out")))
    return b.build()


@pytest.mark.parametrize("large", [0, 3000])
@pytest.mark.parametrize("few", [0, 300])
def test_a_mask_is_left_out_only_of_what_vanishes_with_it(few: int, large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected: [a > 0] and [eᶻ·a > 0] are no matter to a·x; [a·b > 0] is where b is 0, and [a > 0] is to (a + b)·x where a is 0. No random
    input tells these from each other. Taken apart or not."""
    monkeypatch.setattr(expressions, "SMALL_STAGE", few)
    monkeypatch.setattr(expressions, "LARGE", large)
    for mask, wide, verdict in (("own", False, "PROVED(reduced)"), ("both", False, "UNKNOWN"), ("own", True, "UNKNOWN")):
        assert verify(weighed(None, wide), weighed(mask, wide, spread=True), engine="smt", points=1).verdict == verdict, (mask, wide)
    if few == 0:
        assert verify(weighed(None), weighed("positive", spread=True), engine="smt", points=1).verdict == "PROVED(reduced)"


@pytest.mark.parametrize("few", [0, 300])
def test_what_has_no_value_stays_when_it_is_multiplied_by_zero(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected: 0·(|x₀|/y) + 1·|x₁| has no value where y is 0, so it is not proved to be |x₁|."""
    monkeypatch.setattr(expressions, "SMALL_STAGE", few)

    def picked(divides: bool) -> tv.Program:
        b = tv.program("picked")
        x, y = b.input("x", (2, 3)), b.input("y", (1, 3))
        w = b.abs(x, name="w")
        z = b.mul(w, b.float(b.gt(w, value=0)), name="z")
        if divides:
            first, second = b.slice(z, dim=0, start=0, stop=1), b.slice(z, dim=0, start=1, stop=2)
            hot = b.float(b.one_hot(b.arange(start=0, stop=2), num_classes=2))
            z = b.einsum(hot, b.concat(b.div(first, y), second, dim=0, name="ratio"), spec="tc,th->ch", name="picked")
        b.loss(b.sum(b.slice(z, dim=0, start=1, stop=2)))
        return b.build()

    assert verify(picked(False), picked(False), engine="smt", points=1).verdict == "PROVED(reduced)"
    assert verify(picked(False), picked(True), engine="smt", points=1).verdict == "UNKNOWN"


GATE = Gate(6, 2, "sigmoid", normalize=True, scale=2.5, groups=3, top_groups=2, group_score="top2", bias=True)
CONFIG = Config(1, 0, 6, 2, 6, 4, 1, GATE, 10, sequence=3, q_rank=4, kv_rank=4, head=4, rotary=2, value=3, batch=4)


@pytest.fixture(scope="module")
def of_experts() -> tuple[tv.Program, tv.Plan]:
    return deepseek_step(CONFIG), deepseek_plan(CONFIG, Degrees(dp=2, ep=2, normalise="loss"))


def test_experts_on_two_ranks_are_proved(of_experts: tuple[tv.Program, tv.Plan]) -> None:
    """Expected: all of it, with groups that are masked by −∞ before the choice, and the router's gradient."""
    proof = staged(*of_experts)
    assert not proof.failed, proof.failed


MASKED = ("moe.combined", "moe.up.grad", "moe.silu.grad", "moe.gate.grad", "gate_proj.grad", "down_proj.grad", "moe.input.rows.grad")


def test_weights_exchanged(of_experts: tuple[tv.Program, tv.Plan]) -> None:
    """Expected: a stage in which two experts of the rank get their tokens by each other's weights is not shown, without that it is."""
    engine, stages = cut(*of_experts)
    found = []
    for stage in {engine.ledger.cutter._canonical.form(s): s for s in stages}.values():
        _, rank, name = stage.goal.terms[0].place
        if name.endswith(MASKED):
            found.append((shows(engine, stage), shows(engine, replace(stage, plan=exchanged(engine, stage.plan, 3 * rank)))))
    assert found == [(True, False)] * 14


def exchanged(engine: Search, part: Part, first: int) -> Part:
    """The weights that the plan compares, of two experts of the first token exchanged."""
    leaves = dict(part.leaves)
    for place in [i for c in part.calls if engine.ledger.elements.compares(c) for i in c.inputs if i in part.leaves]:
        ids, factor = leaves[place]
        ids = ids.copy()
        ids[[first, first + 1]] = ids[[first + 1, first]]
        leaves[place] = ids, factor
    return replace(part, leaves=leaves)


def shows(engine: Search, stage: Stage) -> bool:
    """Whether all elements of a stage are shown."""
    made = replace(stage, **BEFORE)
    Cutter(engine.ledger.elements, engine.ledger.claims)._number(made)
    return all(check(made, n, engine.ledger.elements, Limits(seconds=2.0, solver_seconds=0.3)).proved for _, n in made.tasks)


def counted(chosen: int | None) -> tv.Program:
    """Weights of chosen experts times how many a token chooses, as a number or counted."""
    b = tv.program("counted")
    weights = b.moe_gate(b.input("logits", (4, 6)), top_k=2, scoring="sigmoid", name="weights")
    total = b.sum(weights, dim=1, name="total")
    count = b.sum(b.float(b.gt(weights, value=0)), dim=1, name="count")
    b.loss(b.sum(b.mul(total, count) if chosen is None else b.mul(total, value=chosen)))
    return b.build()


def test_points_with_everything_chosen_tell_no_plan_wrong() -> None:
    """Expected: two of six are chosen, which a plan may rest on: as if all were, it is off, and that is no difference."""
    proposal = aligned(counted(None), single(counted(2)))
    assert not proposal.wrong
    assert len(proposal.values.runs) == len(proposal.values.ordinary)
    assert verify(counted(None), counted(2), engine="smt", points=1).verdict != "REFUTED"
    assert verify(counted(None), counted(3), engine="smt", points=1).verdict == "REFUTED"
