"""Elements that are 0 whatever the inputs are: they have one name in both programs, and only if it can be shown."""

from __future__ import annotations

import numpy as np
import pytest

import trainverify as tv
from prove.staged.cutting import cut, cut_once, llama
from tools.campaign.agree import staged
from trainverify.prove.propose.search import Search
from trainverify.prove.propose.zeros import Known, Leaf, TermTree
from trainverify.prove.staged.graphs import LOGICAL, NOTHING
from trainverify.verdicts import verify
from trainverify.zoo.gpt import Config
from trainverify.zoo.parallel import Degrees, gpt_plan, gpt_step

REAL = ("real", None)


@pytest.fixture(scope="module")
def of_llama() -> Search:
    return cut_once(llama)[0]


def zeros(engine: Search, name: str) -> np.ndarray:
    a = engine.ledger.elements
    return engine.ledger.claims.same[a.ids[name]] == NOTHING


def test_a_query_that_sees_one_key_has_no_gradient(of_llama: Search) -> None:
    """Expected: the first row of every head, and no other."""
    found = zeros(of_llama, "layers.0.attention.q.turned.grad")
    assert found.ndim == 4
    assert found[:, :, 0].all()
    assert not found[:, :, 1:].any()
    assert not zeros(of_llama, "layers.0.attention.k.turned.grad").any()


def test_zeros_are_claims(of_llama: Search) -> None:
    """Expected: a stage shows them, and what uses them names it."""
    place = (LOGICAL, 0, "layers.0.attention.q.turned.grad")
    claim = of_llama.ledger.claims.tensors[place]
    assert (claim.ids == NOTHING).any()
    stage = of_llama.ledger.cutter.stage(of_llama.ledger.cutter.goal_of(claim))
    assert stage.logical.calls
    used = [s for s in of_llama.stages.values() if place in s.uses]
    assert used


def test_a_key_bias_has_no_gradient() -> None:
    """Expected: proved, and of the biases of queries, keys and values only those of keys are 0."""
    config = Config(1, 4, 2, 10, sequence=3, batch=4)
    logical, plan = gpt_step(config), gpt_plan(config, Degrees(dp=2, normalise="loss"))
    engine, _ = cut(logical, plan)
    found = zeros(engine, "h.0.attn.c_attn.bias.grad").reshape(3, -1)
    assert found[1].all()
    assert not found[[0, 2]].any()
    assert not staged(logical, plan).failed


def test_a_shard_of_key_biases() -> None:
    """Expected: proved; the middle one of three ranks holds biases of keys, and no others."""
    config = Config(1, 6, 2, 10, sequence=3, batch=3)
    assert not staged(gpt_step(config), gpt_plan(config, Degrees(dp=3, zero=2, shards="chunk"))).failed


def cancelled() -> tv.Program:
    """c·x·(x + w) − (x·x + x·w), where c is 3 in the first half, and 1 in the second: that is rounding."""
    b = tv.program("cancelled")
    x, w = b.input("x", (8,)), b.input("w", (8,))
    c = b.concat(b.full(shape=(4,), value=3.0), b.full(shape=(4,), value=1.0), dim=0, name="c")
    d = b.sub(b.mul(b.mul(c, x), b.add(x, w)), b.add(b.mul(x, x), b.mul(x, w)), name="d")
    b.loss(b.sum(b.mul(d, w, name="dw"), name="loss"))
    return b.build()


def cancelled_plan(tiny: float) -> tv.Plan:
    """On two ranks: the second one has what is rounding, and adds a number."""
    p = tv.plan("cancelled", tv.Mesh(dp=2))
    with p.ranks() as r:
        x, w = (r.input(n, (4,), "(dp n)") for n in "xw")
        half = r.concat(r.full(shape=(4,), value=1.5), r.full(shape=(4,), value=0.5), dim=0, name="half")
        c = r.reduce_scatter(half, dim=0, group="dp", name="c")
        d = r.sub(r.mul(r.mul(c, x), r.add(x, w)), r.add(r.mul(x, x), r.mul(x, w)), name="d")
        part = r.sum(r.mul(r.add(d, value=tiny, name="d.more"), w, name="dw"), name="loss.part")
        r.loss(r.all_reduce(part, group="dp", name="loss"))
    return p.build()


@pytest.mark.parametrize("tiny", [0.0, 1e-14])
def test_what_is_rounding_beside_other_ranks_is_nothing_only_if_it_is_shown(tiny: float) -> None:
    """Expected: both are named so, and the plan is proved only if nothing is added."""
    plan = cancelled_plan(tiny)
    engine, _ = cut(cancelled(), plan)
    assert (engine.ledger.claims.tensors[0, 1, "d.more"].ids == NOTHING).all()
    assert bool(staged(cancelled(), plan).failed) == (tiny > 0)


def test_terms(of_llama: Search) -> None:
    """Expected: x − x is 0, x − y is not unless both are one element, and max(x, 0) is not, though it may be 0 on all random points."""
    make = of_llama.ledger.elements.graph.terms.make
    x, y, zero = make("leaf", 0), make("leaf", 1), make("real", 0)
    minus = make("map", ("sub", None, "NoneType"), [x, y])
    largest = make("map", ("max", None, "NoneType"), [x, zero])
    seen = Known()
    assert seen.zero(TermTree(minus, (Leaf(5, REAL), Leaf(5, REAL))))
    assert not seen.zero(TermTree(minus, (Leaf(5, REAL), Leaf(6, REAL))))
    assert seen.zero(TermTree(minus, (Leaf(NOTHING, REAL), Leaf(NOTHING, REAL))))
    assert not seen.zero(TermTree(largest, (Leaf(5, REAL),)))
    assert seen.zero(TermTree(minus, (TermTree(minus, (Leaf(1, REAL), Leaf(2, REAL))), TermTree(minus, (Leaf(1, REAL), Leaf(2, REAL))))))
    assert not seen.zero(
        TermTree(minus, (TermTree(minus, (Leaf(1, REAL), Leaf(2, REAL))), TermTree(minus, (Leaf(2, REAL), Leaf(1, REAL)))))
    )


def dead(factor: float) -> tv.Program:
    """relu(x − 100)·w, which is 0 on all random points."""
    b = tv.program("dead")
    x, w = b.input("x", (3, 2)), b.input("w", (3, 2))
    b.loss(b.sum(b.mul(b.mul(b.relu(b.add(x, value=-100.0, name="low"), name="r"), w, name="y"), value=factor, name="z")))
    return b.build()


def test_what_is_zero_on_all_points_only_is_not_named_so() -> None:
    """Expected: twice of it is not it, though both are 0 wherever it was looked at."""
    assert verify(dead(1.0), dead(1.0), engine="smt", points=1).verdict == "PROVED(reduced)"
    assert verify(dead(1.0), dead(2.0), engine="smt", points=1).verdict in ("UNKNOWN", "REFUTED")
