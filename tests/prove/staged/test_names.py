"""Elements of equal values: names that are only guessed from them are no proof, and do not stand in the way of one."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest

import trainverify as tv
from nnscaler.plans import tree
from prove.staged.alignment import aligned
from tools.campaign.agree import staged
from trainverify.bench.stages import BASE
from trainverify.nnscaler import Trainer, parse
from trainverify.nnscaler.judge import ratio
from trainverify.nnscaler.plan import plan as translated
from trainverify.nnscaler.plan import program as translated_program
from trainverify.ops import OPS
from trainverify.prove.propose.search import Depth, Search, Tries
from trainverify.prove.propose.table import MISSING, Table
from trainverify.prove.staged.graphs import LOGICAL, NOTHING, Place
from trainverify.prove.staged.ledger import without_circles
from trainverify.prove.staged.stages import Cutter
from trainverify.verdicts import verify
from trainverify.zoo import gpt
from trainverify.zoo.parallel import Degrees, gpt_plan, gpt_step, llama_plan, llama_step
from verdicts.changes import attrs
from zoo.parallel.mistakes import skipped

VOCABULARY, WIDTHS = 2, (3, 7, 5, 9, 4, 11, 6)
TOKENS = (4, 3, 5, 3)  # enough that some ids are equal on a few random points
WEIGHTS = {"table": (VOCABULARY, WIDTHS[0]), **{f"w{n}": (WIDTHS[n + 1], WIDTHS[n]) for n in range(len(WIDTHS) - 1)}}


def forward(b, ids, weights, flat=False):
    """The loss is a sum: all rows of the gradients of the last layers coincide, and others do where tokens do."""
    x = b.embedding(ids, weights[0], name="x")
    x = b.reshape(x, shape=(math.prod(ids.shape), WIDTHS[0]), name="x.flat") if flat else x
    for n, w in enumerate(weights[1:]):
        x = b.linear(x, w, name=f"y{n}")
        x = b.silu(x, name=f"a{n}") if n < 3 else x
    return b.sum(x, name="sum")


def logical() -> tv.Program:
    b = tv.program("tokens")
    ids = b.input("ids", TOKENS, "i64", ids=VOCABULARY)
    b.loss(forward(b, ids, [b.parameter(n, shape) for n, shape in WEIGHTS.items()]))
    return tv.complete(b.build(), tv.SGD(lr=0.1))


def plan(exchanged: str = "") -> tv.Plan:
    """The batch over dp, its tokens in one row; the first two rows of one gradient may be exchanged."""
    p = tv.plan("tokens", tv.Mesh(dp=2))
    with p.ranks() as r:
        ids = r.input("ids", (TOKENS[0] // 2, *TOKENS[1:]), "(dp b) s t u", dtype="i64", ids=VOCABULARY)
        weights = [r.parameter(n, shape, "o k") for n, shape in WEIGHTS.items()]
        loss = forward(r, ids, weights, flat=True)
        r.backward(loss)
        r.loss(r.all_reduce(loss, group="dp", name="loss"))
        for w in weights:
            grad = r.all_reduce(r.gradient(w), group="dp", name=f"{w.name}.grad.dp")
            if w.name == exchanged:
                cuts = [(1, 2), (0, 1), (2, w.shape[0])][: 2 + (w.shape[0] > 2)]
                rows = [r.slice(grad, dim=0, start=a, stop=b, name=f"{w.name}.rows{a}") for a, b in cuts]
                grad = r.concat(*rows, dim=0, name=f"{w.name}.grad.turned")
            r.output(grad, "gradient", w.name)
            r.update(w, r.sgd(w, grad, lr=0.1, name=f"{w.name}.new"))
    return p.build()


def test_rows_that_coincide_are_proved() -> None:
    report = verify(logical(), plan(), engine="smt", points=1)
    assert report.verdict == "PROVED(reduced)", report.notes
    assert {o.status for o in report.obligations} == {"proved"}


@pytest.mark.parametrize("name", ["table", "w0", "w3"])
def test_rows_that_are_exchanged_are_refuted(name: str) -> None:
    report = verify(logical(), plan(name), engine="smt", points=1)
    assert report.verdict == "REFUTED", report.notes
    assert report.difference is not None
    assert str(report.difference.obligation) == f"gradient of {name}"
    assert report.place is not None
    assert report.place.tensor == f"{name}.rows1"  # of the two that are exchanged, the first in the program


def test_rounding_is_no_mistake() -> None:
    """On small inputs some gradients of attention are rounding only; a plan is taken for wrong if it is off on all points."""
    config, how = replace(BASE, layers=1, batch=8), Degrees(dp=2)
    step, made = llama_step(config), llama_plan(config, how)
    alignment = aligned(step, made)
    assert not alignment.wrong
    name = "layers.0.attention.k.turned.grad"
    first = alignment.elements.start[name]
    own = alignment.graph.shape((0, 0, "mb0/" + name))
    assert alignment.claims[0, 0, "mb0/" + name].ids.tolist() == list(range(first, first + math.prod(own)))
    for missing in ("layers.0.attention.wk.grad.dp", "layers.0.ffn_norm.grad.dp"):
        assert aligned(step, skipped("pp0", missing)(made)).wrong, missing


def test_zeros_have_one_name() -> None:
    """Positions that no token has: their gradient is 0 on both sides, with the number of tokens as a factor and without."""
    config = gpt.Config(layers=1, hidden=12, heads=6, ffn=10, vocabulary=14, sequence=10, context=11, batch=3)
    step, made = gpt_step(config), gpt_plan(config, Degrees())
    alignment = aligned(step, made)
    assert set(alignment.claims[0, 0, "wpe.grad"].ids.tolist()[4:]) == {NOTHING}
    assert verify(step, made, engine="smt", points=1).verdict == "PROVED(reduced)"
    wrong = verify(step, attrs("pp0", "wpe.grad", start=1, stop=11)(made), engine="smt", points=1)
    assert (wrong.verdict, wrong.place and wrong.place.tensor) == ("REFUTED", "wpe.grad")


def test_names_that_agree_by_chance_do_not_stay_in_the_way() -> None:
    """Where a unit is off for most rows, a sum over rows is one row's: such names are given up, and what used them starts anew."""
    logical, plan = parse(tree("mlp4b_v08_single"), "logical"), parse(tree("mlp4b_v08_dp2pp2tp1nm4_zero"), "plan")
    made = translated(plan, OPS, Trainer())
    proof = staged(translated_program(logical, OPS, Trainer(), ratio(logical, plan, made)), made.plan)
    assert proof.failed == {}


def test_rows_have_their_own_names() -> None:
    """What is made alike from the same tokens, not what happens to have the same value."""
    alignment = aligned(logical(), plan())
    for row in (0, 1):
        for name in ("x", "y0", "a0", "y1", "a1", "y2", "a2", "y3", "y1.grad", "y0.grad", "x.grad"):
            ids = alignment.elements.ids[name].reshape(2, -1)[row]
            claim = alignment.claims[0, row, name]
            assert claim.factor.plain
            assert claim.ids.tolist() == alignment.table.same[ids].tolist(), (row, name)


# -- several tensors with the same elements ------------------------------------------------------------------------------

A, B, C = ((LOGICAL, 0, name) for name in "abc")


def cutter(dropped: Place | None = None, doubtful: str = "") -> Cutter:
    """a, b and c have two elements each, with the values of a; some may have no value."""
    same = np.array([0, 1, 0, 1, 0, 1])
    elements = SimpleNamespace(graph=None, owner=list("aabbcc"), doubtful=set(doubtful))
    return Cutter(elements, SimpleNamespace(same=same, dropped={dropped}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dropped", "ids", "meant", "needed"),
    [
        (None, [2, 3], [0, 1], {B}),
        (None, [0, 1], [0, 1], set()),  # the first ones are themselves
        (None, [3, 4, 0], [1, 0, 0], {B, C}),
        (B, [2, 3], [2, 3], set()),  # nothing is said of b any more
        (B, [4, 5], [0, 1], {C}),  # and c does not need it
        (B, [3, 4, 0], [3, 0, 0], {C}),
        (C, [3, 4, 0], [1, 4, 0], {B}),
    ],
)
def test_equals_are_used_with_their_claims_only(dropped: Place | None, ids: list[int], meant: list[int], needed: set[Place]) -> None:
    uses: set[Place] = set()
    made = cutter(dropped)
    assert made._equals(np.array(ids), uses).tolist() == meant
    assert uses == needed
    assert made.claims.same.tolist() == [0, 1, 0, 1, 0, 1]


def test_what_may_have_no_value_is_no_name_for_others() -> None:
    """Expected: b and c are a only if a has a value; whether they have one themselves does not matter."""
    for doubtful, meant, needed in (("a", [2, 3, 4, 5], set()), ("bc", [0, 1, 0, 1], {B, C})):
        uses: set[Place] = set()
        assert cutter(None, doubtful)._equals(np.array([2, 3, 4, 5]), uses).tolist() == meant
        assert uses == needed


def test_a_claim_that_is_dropped_takes_what_used_it_along() -> None:
    """b = a and c = a; a goal uses both. When b is given up the goal is cut again, and c stays as it is."""
    made = cutter()
    engine = Search.__new__(Search)
    stages = {B: _stage(), C: _stage(), 0: _stage(B, C), 1: _stage(C), 2: _stage(C)}
    engine.ledger = SimpleNamespace(claims=made.claims, stages=stages)  # type: ignore[assignment]
    used: dict[Place | int, set[Place]] = {B: set(), C: set(), 0: {B, C}, 1: {C}, 2: {B, C}, 3: {B}}
    level = {0: 1, 1: 1, 2: 2, 3: 3}
    engine.tries = {node: Tries(Depth(level.get(node, 0)), of) for node, of in used.items()}  # type: ignore[call-overload]
    engine.broken = {3: "further back it did not hold either"}
    again: set[Place | int] = set()
    engine._drop(B, again)
    assert again == {0, 2, 3}  # also what went further back because of it
    assert set(engine.stages) == {C, 1}
    assert {node for node, tries in engine.tries.items() if tries.depth.level} == {1}
    assert engine.broken == {}
    uses: set[Place] = set()
    assert made._equals(np.array([2, 4]), uses).tolist() == [2, 0]
    assert uses == {C}


@pytest.mark.parametrize(("shown", "valid"), [({B, C, 0}, {B, C, 0}), ({C, 0}, {C}), ({B, C}, {B, C})])
def test_what_rests_on_an_equality_counts_once_that_is_shown(shown: set[Place | int], valid: set[Place | int]) -> None:
    stages = {B: _stage(), C: _stage(), 0: _stage(B, C)}
    assert without_circles({n: s for n, s in stages.items() if n in shown}) == valid  # type: ignore[misc]


def test_equalities_that_rest_on_each_other_do_not_count() -> None:
    assert without_circles({B: _stage(C), C: _stage(B), 0: _stage(B)}) == set()  # type: ignore[dict-item]


def _stage(*uses: Place) -> SimpleNamespace:
    return SimpleNamespace(uses=frozenset(uses))


def halved(times: float, squared: bool = False) -> tuple[tv.Program, tv.Plan]:
    """Every rank has half of the weights' sum with themselves; or a plan that takes squares for multiples."""
    b = tv.program("halves")
    x, w = b.input("x", (4, 6)), b.parameter("w", (3, 6))
    b.loss(b.sum(b.square(b.linear(x, w, name="y"), name="z"), name="sum"))
    p = tv.plan("halves", tv.Mesh(dp=2))
    with p.ranks() as r:
        x, w = r.input("x", (2, 6), "(dp a) k"), r.parameter("w", (3, 6), "o k")
        half = r.mul(w, w, name="w.squared") if squared else r.mul(w, value=times, name="w.half")
        share = r.sum(
            r.square(r.linear(x, r.all_reduce(half, group="dp", backward="all_reduce", name="w.sum"), name="y"), name="z"), name="share"
        )
        r.backward(share)
        r.loss(r.all_reduce(share, group="dp", name="sum"))
        grad = r.all_reduce(r.gradient(w), group="dp", name="w.grad.dp")
        r.output(grad, "gradient", "w")
        r.update(w, r.sgd(w, grad, lr=0.1, name="w.new"))
    return tv.complete(b.build(), tv.SGD(lr=0.1)), p.build()


def test_a_multiple_by_a_number_has_that_number_as_its_factor() -> None:
    """Expected: proved; refuted with another number, and with a square, which no scalar is a factor of."""
    alignment = aligned(*halved(0.5))
    claim = alignment.claims[0, 0, "w.half"]
    assert (claim.factor.number, claim.factor.element) == (Fraction(1, 2), None)
    assert verify(*halved(0.5), engine="smt").verdict == "PROVED(reduced)"
    assert verify(*halved(0.25), engine="smt").verdict == "REFUTED"
    alignment = aligned(*halved(0.5, squared=True))
    assert (0, 0, "w.squared") not in alignment.claims or alignment.claims[0, 0, "w.squared"].factor.element is None
    assert verify(*halved(0.5, squared=True), engine="smt").verdict == "REFUTED"


def test_a_value_that_several_tensors_have_is_no_name() -> None:
    """Expected: the one in a tensor that has all the others; where they are of several, none."""
    rng = np.random.default_rng(3)
    values = rng.uniform(1, 2, (4, 6))
    values[:, 2] = values[:, 4] = values[:, 0]
    table = Table(values, np.ones(6, dtype=bool), np.ones((4, 6)), np.array([0, 0, 1, 1, 2, 2]), 4)
    assert table.find(values[:, [0, 1]]).tolist() == [0, 1]
    assert table.find(values[:, [0, 3]]).tolist() == [2, 3]
    assert table.find(values[:, [0, 3, 5]]).tolist() == [MISSING, 3, 5]
    assert table.find(values[:, [1, 3, 5]]).tolist() == [1, 3, 5]
