"""What stands for something else is the same: tensors of several ranks, tensors that an op makes on the way, sums in another order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from prove.staged.cutting import llama, random_pair
from prove.staged.mistakes import MISTAKES
from tools.campaign.agree import staged
from trainverify.domains.element import Element
from trainverify.domains.numeric import NUMERIC
from trainverify.domains.polynomials import Scalars
from trainverify.evaluate.compare import Suspect
from trainverify.evaluate.small import Step
from trainverify.graph.obligations import obligations
from trainverify.graph.plan import Plan, units
from trainverify.graph.program import Op, Program
from trainverify.ops import OPS
from trainverify.primitives import node as F
from trainverify.prove.propose.points import PointRun, _rounding
from trainverify.prove.propose.proposal import Proposal
from trainverify.prove.staged.graphs import LOGICAL
from trainverify.prove.staged.inner import Inner
from trainverify.prove.staged.terms import Term, Terms, value
from trainverify.prove.staged_proof import proposed
from trainverify.verdicts import related
from verdicts.mlp import logical as mlp
from verdicts.mlp import plan as mlp_plan
from zoo.parallel.resnet import base as resnet

Pair = tuple[Program, Plan]


def wrong(name: str) -> Callable[[], Pair]:
    return lambda: (mlp(), MISTAKES[name][1](mlp_plan()))


def proposal_of(logical: Program, plan: Plan) -> Proposal:
    parts = units(plan)
    wanted, _ = obligations(logical, plan, parts)
    return proposed(related(logical, plan, OPS, parts, wanted), wanted, plan.lineage)


@pytest.mark.parametrize("programs", [llama, resnet, *map(random_pair, (3, 9)), *map(wrong, MISTAKES)])
def test_tensors_that_stand_for_others_have_their_values(programs: Callable[[], Pair]) -> None:
    """In plans that are right and in those where one rank does something else."""
    a = proposal_of(*programs())
    merged = [p for p in (*a.graph.makers, *a.elements.sources) if a.graph.first(p) != p]
    assert merged
    for p in merged:
        first = a.graph.first(p)
        assert a.graph.first(first) == first
        mine, its = a.values.of(p), a.values.of(first)
        assert (mine is None) == (its is None)
        if mine is not None and its is not None:
            assert np.allclose(mine, its, rtol=1e-9, atol=1e-12), (p, first)
    assert all(a.graph.first(i) == i for p in a.graph.order for i in a.graph.makers[p].inputs if i is not None)


@pytest.mark.parametrize("programs", [llama, resnet, random_pair(3)])
def test_pieces_of_logical_ops_make_what_the_ops_make(programs: Callable[[], Pair]) -> None:
    a = proposal_of(*programs())
    values = a.values.runs[0].logical
    calls = {id(c): c for p, c in a.graph.makers.items() if p[0] == LOGICAL}.values()
    for call in calls:
        made = NUMERIC.run(call.nodes or (), [None if i is None else values[i[2]] for i in call.inputs])
        for (_, _, name), v in zip(call.outputs, made, strict=True):
            assert np.allclose(v, values[name], rtol=1e-9, atol=1e-12), call.text
    split = [c for c in calls if len(c.inputs) > 0 and c.text.startswith("bn1.out, ") and len(c.outputs) == 1]
    assert bool(split) == (programs is resnet)
    if split:  # the output of a batch norm is made of its mean and variance, and not of all elements once more
        (out,) = [c for c in split if c.outputs[0][2] == "bn1.out"]
        assert {"bn1.mean", "bn1.var"} <= {i[2] for i in out.inputs if i is not None}


def test_pieces_come_after_those_that_they_use() -> None:
    """An op of one tensor twice: what it makes on the way to the first output is the second one, made of the other input."""
    first, second = F.input_(0, (2,), "real"), F.input_(1, (2,), "real")
    nodes = (F.call("exp", F.call("tanh", second)), F.call("tanh", first))
    op = Op("both", ("x", "x"), ("a", "b"), ())
    pieces = Inner().pieces(Step(op, 0, (0,), ("x", "x"), ("a", "b"), nodes, None))  # type: ignore[arg-type]
    assert [(p.outputs, {i for i in p.inputs if i is not None}) for p in pieces] == [(("b",), {"x"}), (("a",), {"b"})]


def test_synchronised_batch_norms_are_shown() -> None:
    proof = staged(*resnet())
    assert not proof.failed


def goal(terms: Terms, got: Term, want: Term) -> Term:
    return terms.make("goal", None, [got, want])


def test_an_element_may_be_any_of_the_summands() -> None:
    t = Terms()
    x = [t.make("leaf", (0, k)) for k in range(4)]
    total = t.make("dot", (1,) * 4, x)
    goals = [goal(t, t.make("map", ("div", None, "NoneType"), [own, total]), own) for own in x]
    assert len({t.canonical(g)[0] for g in goals}) == 4
    assert len({t.arranged(g)[0] for g in goals}) == 1
    other = goal(t, t.make("map", ("div", None, "NoneType"), [x[0], total]), x[1])
    assert t.arranged(other)[0] not in {t.arranged(g)[0] for g in goals}


def test_other_products_are_another_sum() -> None:
    """x0·y0 + x1·y1 is not x0·y1 + x1·y0, and nothing is said of one that holds for the other."""
    t = Terms()
    x0, x1, y0, y1 = (t.make("leaf", (n, k)) for n in (0, 1) for k in (0, 1))
    straight = t.make("dot", (2, 2), [x0, y0, x1, y1])
    turned = t.make("dot", (2, 2), [x1, y1, x0, y0])
    crossed = t.make("dot", (2, 2), [x0, y1, x1, y0])
    right, wrong = t.arranged(goal(t, straight, turned))[0], t.arranged(goal(t, straight, crossed))[0]
    assert right.args[0] is right.args[1]
    assert right is not wrong
    assert wrong.args[0] is not wrong.args[1]


def test_arranged_sums_have_the_same_values() -> None:
    t = Terms()
    rng = np.random.default_rng(0)
    known: list[Term] = [t.make("leaf", (0, k)) for k in range(6)]
    for _ in range(60):
        lengths = tuple(int(n) for n in rng.integers(1, 3, size=rng.integers(1, 4)))
        picked = [known[int(k)] for k in rng.integers(max(0, len(known) - 8), len(known), size=sum(lengths))]
        known.append(t.make("dot", lengths, picked))
    scalars = Scalars(10**6)
    symbols = {(0, k): scalars.symbol(k, None) for k in range(6)}
    for term in known[6:16]:
        made, leaves = t.arranged(term)
        mine = value(made, lambda k, leaves=leaves: symbols[leaves[k]], Element(scalars))  # type: ignore[misc]
        assert mine == value(term, symbols.__getitem__, Element(scalars))  # type: ignore[arg-type]


def test_rounding_is_small_beside_the_whole_tensor() -> None:
    """What a rank holds may be nothing but elements that should be 0; what is off by more is wrong."""
    logical, plan = mlp(), mlp_plan()
    parts = units(plan)
    wanted, _ = obligations(logical, plan, parts)
    a = proposed(related(logical, plan, OPS, parts, wanted), wanted, plan.lineage)
    o = next(o for o in wanted if o.output.role == "gradient")
    h = o.holdings[0]
    at = Suspect(o, h.layout, h.ranks[0], 1.0)
    small, run = a.small, a.values.runs[0]
    assert _rounding(small, at, run)
    assert not _rounding(small, replace(at, distance=np.inf), run)
    off = {**run.logical, o.output.tensor: run.logical[o.output.tensor] * (1 + 1e-9)}
    assert not _rounding(small, at, PointRun(off, run.plan))
