"""Ring attention by stages alone: softmax merged block by block, and gradients from what the forward pass kept of it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

import trainverify as tv
from prove.staged.cutting import cut, shown
from prove.staged.equality import shown as how
from prove.staged.swaps import BEFORE, swapped
from tools.campaign.agree import staged
from trainverify.domains.polynomials import Poly, Scalars
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.prove.propose.search import Search
from trainverify.prove.staged import expressions
from trainverify.prove.staged.execute import Limits, check
from trainverify.prove.staged.records import Stage
from trainverify.prove.staged.stages import IN_FULL, Cutter
from trainverify.verdicts import verify
from trainverify.zoo.llama import Config
from trainverify.zoo.parallel import Degrees, llama_plan, llama_step

CONFIG = Config(layers=1, hidden=8, heads=4, kv_heads=2, ffn=6, vocabulary=14, sequence=8, batch=2)
HOW = Degrees(cp=2, cp_kind="ring")
QUICK = Limits(seconds=2.0, terms=20_000, solver_seconds=0.1)


def ring() -> tuple[Program, Plan]:
    return llama_step(CONFIG), llama_plan(CONFIG, HOW)


@cache
def of_ring() -> tuple[Search, list[Stage]]:
    return cut(*ring())


# -- laws ------------------------------------------------------------------------------------------------------------


def test_the_exponential_of_a_logarithm() -> None:
    """Expected: a sum of exponentials is undone, and cancels without being multiplied out; powers and other sums are told apart."""
    s = Scalars()
    a, b, c, x = (s.exp(s.symbol(n)) for n in "abcx")
    first, second = s.add(a, b), s.add(a, c)
    again = s.exp(s.log(first))
    assert len(again) == 1
    assert s.mul(again, s.inverse(first)) == s.const(1)
    assert s.exp(s.neg(s.log(first))) == s.inverse(first)
    assert how(s, again, first) == "equations"
    assert how(s, s.mul(again, x), s.add(s.mul(a, x), s.mul(b, x))) == "equations"
    assert how(s, s.exp(s.scale(s.log(first), s.const(2)[0])), s.mul(first, first)) is not None
    assert how(s, s.exp(again), s.exp(first)) == "normal form"
    assert how(s, s.max([again, x]), s.max([first, x])) == "normal form"
    for wrong in (second, s.mul(first, first), s.inverse(first), s.add(first, s.const(1))):
        assert how(s, again, wrong) is None
    assert not s.needs


def test_the_exponential_of_a_logarithm_of_what_may_be_negative() -> None:
    """Expected: nothing is said of it, also where it is not negative but may be 0; what it needs stays a condition."""
    for sign in (None, "nonnegative"):
        s = Scalars()
        x = s.symbol("x", sign)
        assert how(s, s.exp(s.log(x)), x) is None
        assert s.needs


def test_blocks_of_a_softmax() -> None:
    """Expected: two results with their logsumexps make the whole, whatever they are shifted by; not with the sums of one of them."""
    s = Scalars()
    scores, values = [s.symbol(("s", n)) for n in range(6)], [s.symbol(("v", n)) for n in range(6)]

    def mixed(which: range) -> tuple[Poly, Poly]:
        total: Poly = {}
        sums: Poly = {}
        for n in which:
            e = s.exp(scores[n])
            sums = s.add(sums, e)
            total = s.add(total, s.mul(e, values[n]))
        return s.mul(total, s.inverse(sums)), s.log(sums)

    (one, first), (two, second), (whole, together) = mixed(range(2)), mixed(range(2, 6)), mixed(range(6))
    peak = s.max([first, second])
    keep, take = s.exp(s.sub(first, peak)), s.exp(s.sub(second, peak))
    merged = s.mul(s.add(s.mul(one, keep), s.mul(two, take)), s.inverse(s.add(keep, take)))
    assert how(s, merged, whole) == "normal form"
    assert how(s, s.add(peak, s.log(s.add(keep, take))), together) == "normal form"
    assert how(s, s.mul(s.add(one, s.mul(two, take)), s.inverse(s.add(keep, take))), whole) is None  # not rescaled
    assert how(s, s.mul(s.add(s.mul(one, keep), s.mul(two, take)), s.inverse(keep)), whole) is None


# -- plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cp", [2, 3])
def test_rings_are_proved(cp: int) -> None:
    config = replace(CONFIG, sequence=4 * cp)
    proof = staged(llama_step(config), llama_plan(config, replace(HOW, cp=cp)))
    assert not proof.failed, proof.failed


def test_what_was_kept_is_what_the_logical_program_says() -> None:
    """Expected: gradients rest on the claims about what was kept, and are shown by its logical definition; another element of it is not."""
    engine, stages = of_ring()
    found = [s for s in stages if s.defined]
    assert {name for s in found for name in s.defined} >= {f"layers.0.attention.{n}" for n in ("mixed", "logsumexp")}
    a = engine.ledger.elements
    wrong = 0
    for stage in {engine.ledger.cutter._canonical.form(s): s for s in found}.values():
        assert all(check(stage, n, a).proved for _, n in stage.tasks)
        for place, (ids, _) in stage.plan.leaves.items():
            if a.owner[int(ids[0])] in stage.defined and ids[0] != ids[1]:
                assert place in stage.uses
                if wrong > 5:  # enough of them
                    continue
                other = replace(stage, plan=swapped(stage.plan, place), **BEFORE)
                Cutter(a, engine.ledger.claims)._number(other, IN_FULL)
                wrong += not all(check(other, n, a, QUICK).proved for _, n in other.tasks[:1])
    assert wrong > 5


def test_definitions_speak_of_what_both_sides_speak_of() -> None:
    engine, stages = of_ring()
    for stage in stages:
        known = set(engine.ledger.elements.owners(ids for ids, _ in stage.logical.leaves.values()))
        assert known.isdisjoint(stage.defined)
        for part in stage.defined.values():
            assert set(engine.ledger.elements.owners(ids for ids, _ in part.leaves.values())) <= known


def test_forms_of_a_ring_change_nothing() -> None:
    """Expected: what the first stage of a form has to show is what each of them has; definitions are part of it."""
    engine, stages = of_ring()
    form = engine.ledger.cutter._canonical.form

    def alone(stage: Stage) -> object:
        made = replace(stage, **BEFORE)
        Cutter(engine.ledger.elements, engine.ledger.claims)._number(made)
        return shown(made)

    for stage in stages:
        assert alone(stage) == shown(stage), stage.described(engine.ledger.elements.graph)
    stage = next(s for s in stages if s.defined)
    changes = [replace(stage, defined={})]
    for name, part in stage.defined.items():
        changes += [replace(stage, defined={**stage.defined, name: swapped(part, place)}) for place in part.leaves]
    changes += [replace(stage, plan=swapped(stage.plan, p)) for p in stage.plan.leaves]
    same = [s for s in changes if form(s) == form(stage)]  # in what is not needed
    assert len(same) < len(changes) // 2
    assert all(alone(s) == shown(stage) for s in same)


# -- programs that agree on all random inputs ------------------------------------------------------------------------


def kept(clipped: bool) -> tuple[tv.Program, tv.Program]:
    """The gradient of a softmax from its logsumexp, which may be cut off where it never is on random inputs."""

    def program(other: bool) -> tv.Program:
        b = tv.program("kept")
        x, v = b.input("x", (3, 4)), b.input("v", (3, 4))
        total = b.logsumexp(x, dim=1, keepdim=True, name="total")
        if other:
            if clipped:
                total = b.maximum(total, b.full(shape=(3, 1), value=-1000.0), name="clipped")
            weights = b.exp(b.sub(x, total), name="weights")
        else:
            weights = b.softmax(x, dim=1, name="weights")
        b.loss(b.add(b.sum(b.mul(weights, v)), b.sum(total)))
        return b.build()

    return program(False), program(True)


@pytest.mark.parametrize("clipped", [False, True])
def test_what_was_kept_and_changed(clipped: bool) -> None:
    """Expected: not proved if it is not what was kept for all inputs."""
    assert (verify(*kept(clipped), engine="smt", points=1).verdict == "PROVED(reduced)") == (not clipped)


def undone(positive: bool) -> tuple[tv.Program, tv.Program]:
    """Σ|x|·v, by another way with e^log|x|, which has no value where x is 0; or all of that of |x| + 1."""

    def program(other: bool) -> tv.Program:
        b = tv.program("undone")
        x, v = b.input("x", (3, 4)), b.input("v", (3, 4))
        w = b.abs(x, name="w")
        w = b.add(w, value=1.0, name="more") if positive else w
        b.loss(b.sum(b.mul(b.exp(b.log(w, name="log"), name="exp") if other else w, v)))
        return b.build()

    return program(False), program(True)


@pytest.mark.parametrize("positive", [False, True])
def test_a_logarithm_is_undone_only_where_it_has_a_value(positive: bool) -> None:
    assert (verify(*undone(positive), engine="smt", points=1).verdict == "PROVED(reduced)") == positive


def picked(positive: bool) -> tuple[tv.Program, tv.Program]:
    """Row 1 of a/d, by another way as 0·(a₀/d₀) + 1·(a₁/d₁), which has no value where d₀ is 0, unless d is an exponential."""

    def program(other: bool) -> tv.Program:
        b = tv.program("picked")
        a, x = b.input("a", (2, 3)), b.input("x", (2, 3))
        d = b.exp(x, name="d") if positive else b.abs(x, name="d")
        if other:
            hot = b.float(b.one_hot(b.arange(start=0, stop=2), num_classes=2))
            own = b.slice(b.einsum(hot, b.div(a, d, name="out"), spec="tc,th->ch", name="all"), dim=0, start=1, stop=2)
        else:
            own = b.div(b.slice(a, dim=0, start=1, stop=2), b.slice(d, dim=0, start=1, stop=2), name="own")
        b.loss(b.add(b.sum(own), b.sum(d)))
        return b.build()

    return program(False), program(True)


@pytest.mark.parametrize("few", [0, 300])
@pytest.mark.parametrize("positive", [False, True])
def test_nothing_times_what_may_have_no_value(positive: bool, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected: 0·x is 0 only if x has a value."""
    monkeypatch.setattr(expressions, "SMALL_STAGE", few)
    assert (verify(*picked(positive), engine="smt", points=1).verdict == "PROVED(reduced)") == positive
