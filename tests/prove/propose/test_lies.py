"""Proposals that lie: claims of another plan, claims of other elements, ops that need not have a value, stages in each other's places.

Expected: nothing that is wrong is shown, whatever is proposed; the same claims are enough for the plan that they are true of.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

import trainverify as tv
from trainverify.graph.obligations import obligations
from trainverify.graph.plan import Plan, units
from trainverify.graph.program import Program
from trainverify.ops import OPS
from trainverify.prove.propose.proposal import Proposal
from trainverify.prove.propose.search import Search
from trainverify.prove.staged.claims import Claim, Claims
from trainverify.prove.staged.execute import Limits
from trainverify.prove.staged.graphs import LOGICAL
from trainverify.prove.staged.stages import fact
from trainverify.prove.staged_proof import proposed
from trainverify.verdicts import related, single

QUICKLY = Limits(seconds=0.5, terms=2000, solver_seconds=0.1)


WRONG = {
    "no sum over ranks": ("identity", 1.0),
    "the average over ranks": ("avg", 1.0),
    "a share is half": ("sum", 0.5),
}


def logical() -> Program:
    b = tv.program("rows")
    x, w = b.input("x", (4, 2)), b.parameter("w", (3, 2))
    b.loss(b.sum(b.square(b.linear(x, w, name="y"), name="z"), name="loss"))
    return b.build()


def plan(op: str = "sum", times: float = 1.0) -> Plan:
    p = tv.plan("rows", tv.Mesh(dp=2))
    with p.ranks() as r:
        x, w = r.input("x", (2, 2), "(dp a) k"), r.parameter("w", (3, 2), "o k")
        part = r.mul(r.sum(r.square(r.linear(x, w, name="y"), name="z"), name="part"), value=times, name="share")
        r.loss(r.identity(part, name="loss") if op == "identity" else r.all_reduce(part, group="dp", op=op, name="loss"))
    return p.build()


def proposal_of(program: Program, made: Plan) -> tuple[Proposal, Callable[[], Search]]:
    """What is proposed, and a search that finds all points to agree."""
    parts = units(made)
    wanted, _ = obligations(program, made, parts)
    found = proposed(related(program, made, OPS, parts, wanted), wanted, made.lineage)
    found.values.agrees = lambda goal: True  # type: ignore[method-assign]
    return found, lambda: Search(found, wanted, limits=QUICKLY)


def shown(search: Search) -> tuple[int, int]:
    """How many obligations are proved, and how many are not."""
    proof = search.run()
    assert search.ledger.proved(search.wanted) == proof.proved
    return len(proof.proved), len(proof.failed)


def test_true_claims_are_enough() -> None:
    _, search = proposal_of(logical(), plan())
    assert shown(search())[1] == 0


@pytest.mark.parametrize("mistake", WRONG)
def test_claims_of_the_right_plan_do_not_help_a_wrong_one(mistake: str) -> None:
    good, _ = proposal_of(logical(), plan())
    found, search = proposal_of(logical(), plan(*WRONG[mistake]))
    claims = {p: good.claims.get(good.graph.first(p)) for p in found.graph.order}
    found.claims = {p: replace(c, place=p) for p, c in claims.items() if c is not None}
    found.claims |= {p: Claim(p, found.elements.ids["loss"].reshape(-1)) for p in found.graph.order if p[2] in ("loss", "share")}
    found.scalars = good.scalars
    assert shown(search()) == (0, 1)


@pytest.mark.parametrize("mistake", WRONG)
@pytest.mark.parametrize("seed", range(3))
def test_claims_of_other_elements_show_nothing_wrong(mistake: str, seed: int) -> None:
    """All claims are about elements that were drawn at random, and every element of the logical program is claimed to be another."""
    rng = np.random.default_rng(seed)
    found, search = proposal_of(logical(), plan(*WRONG[mistake]))
    for place in found.graph.order:
        if found.graph.kind(place) == "real":
            found.claims[place] = Claim(place, rng.integers(-1, found.elements.count, math.prod(found.graph.shape(place))))
    assert shown(search()) == (0, 1)


def test_a_claim_of_another_size_is_none() -> None:
    found, _ = proposal_of(logical(), plan())
    place = next(p for p, c in found.claims.items() if len(c.ids) > 1)
    with pytest.raises(ValueError, match="not a claim"):
        Claims(found.elements, {place: replace(found.claims[place], ids=found.claims[place].ids[1:])}, {})


def divided(needed: bool, plans: bool) -> Program:
    """x/n, in a branch or, if needed, in any case; and x, which the plan makes as x·n/n."""
    b = tv.program("divided")
    x, c, n = b.input("x", (5,)), b.input("c", (5,)), b.input("n", ())
    quotient = b.div(x, n, name="quotient")
    zeros = b.mul(x, value=0.0, name="zeros")
    b.output(quotient if needed else b.where(b.lt(c, value=0.5, name="less"), quotient, zeros, name="branch"), "metric", "other")
    again = b.div(b.mul(x, n, name="times"), n, name="again") if plans else b.mul(x, value=1.0, name="again")
    b.loss(b.sum(again, name="loss"))
    return b.build()


@pytest.mark.parametrize("needed", [True, False])
def test_what_need_not_have_a_value_says_nothing(needed: bool) -> None:
    """Every logical op is proposed as one that divides by n. Expected: of one in a branch nothing follows."""
    found, search = proposal_of(divided(needed, False), single(divided(needed, True)))
    outputs = [(LOGICAL, 0, o) for s in found.small.logical_steps for o in s.outputs]
    found.values.divides_by = lambda place: outputs  # type: ignore[method-assign]
    made = search()
    assert (shown(made)[1] == 0) == needed


def test_a_stage_in_the_place_of_another_does_not_count() -> None:
    _, search = proposal_of(logical(), plan())
    made = search()
    made.run()
    ledger = made.ledger
    goal = ledger.goals_of[made.wanted[0]][0]
    claim = next(n for n in ledger.valid() if isinstance(n, tuple))
    ledger.stages[goal] = ledger.stages[claim]
    ledger.stages[fact(0)] = ledger.stages[claim]
    assert ledger.valid().isdisjoint({goal, fact(0)})
    assert ledger.proved(made.wanted) == []
