"""Wrong plans that no random point shows, and wrong claims: stages must not show them. What is hidden is multiplied by 0 on all points."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache

import pytest

import trainverify as tv
from prove.staged.showing import shown
from tools.campaign.agree import staged
from trainverify.build.program import ProgramBuilder
from trainverify.build.tape import Tensor
from trainverify.graph.lineage import Part, Parts, Run
from trainverify.graph.obligations import obligations
from trainverify.graph.plan import Plan, units
from trainverify.graph.program import Program
from trainverify.ops import OPS
from trainverify.ops.moe import best
from trainverify.ops.table import OpDef, OpTable, op
from trainverify.primitives import node as F
from trainverify.primitives.node import Node
from trainverify.prove.propose.search import Search
from trainverify.prove.staged import expressions, isomorphic
from trainverify.prove.staged.canonical import Canonical
from trainverify.prove.staged.execute import Limits
from trainverify.prove.staged.ledger import StagedProof
from trainverify.prove.staged.stages import IN_FULL, How
from trainverify.prove.staged_proof import proposed, prove
from trainverify.verdicts import related, single, verify
from verdicts.changes import Change, attrs, replaced

Hidden = Callable[[ProgramBuilder, bool], Tensor]


# -- conditions --------------------------------------------------------------------------------------------------------


def floored(divides: bool) -> Program:
    """The logical program divides by t, which is never 0; s is t on all points, and may be 0."""
    b = tv.program("floored")
    x, w, z = b.input("x", (4,)), b.input("w", (3,)), b.input("z", (3,))
    s = b.sum(b.mul(x, x, name="xx"), name="s")
    t = b.clamp(b.clamp(s, min=1e-9, name="u"), min=1e-10, name="t")
    b.output(b.sum(b.div(z, t, name="y"), name="ys"), "metric", "ys")
    b.loss(b.sum(b.div(b.mul(w, s, name="ws"), s, name="again") if divides else w, name="loss"))
    return b.build()


def test_what_is_not_0_rests_on_what_is_said_to_be_equal() -> None:
    """Expected: w·s/s is not w where s may be 0, although the logical program divides by what looks like s."""
    assert shown(floored(False), floored(False)) == {"loss", "metric ys"}
    assert shown(floored(False), floored(True)) == {"metric ys"}
    assert verify(floored(False), floored(True), engine="smt", points=1).verdict == "UNKNOWN"


def elements(wanted: int, taken: int) -> Program:
    """One element of v is divided by, and this or the other one is added where m is large; w and m never are."""
    b = tv.program("elements")
    x, y, z = (b.input(n, (2,)) for n in "xyz")
    k, w, m = (b.input(n, (3,)) for n in "kwm")
    v = b.mul(x, y, name="v")
    b.output(b.sum(b.div(z, v, name="zv"), name="zvs"), "metric", "zvs")
    p = b.select(v, dim=0, index=wanted, name="p")
    q = p if taken == wanted else b.select(v, dim=0, index=taken, name="q")
    large = [b.to(b.gt(t, value=1e6), dtype="f32") for t in (m, w)]
    r = b.where(b.gt(m, value=0.0), b.div(k, p, name="kp"), b.add(w, b.mul(large[0], q), name="wq"), name="r")
    b.loss(b.sum(b.add(r, b.mul(large[1], q), name="more"), name="loss"))
    return b.build()


@pytest.mark.parametrize("wanted", [0, 1])
def test_a_scalar_is_the_element_that_it_is(wanted: int) -> None:
    """Expected: one element of a vector that is known not to be 0 is not the first one."""
    assert shown(elements(wanted, wanted), elements(wanted, wanted)) == {"loss", "metric zvs"}
    assert shown(elements(wanted, wanted), elements(wanted, 1 - wanted)) == {"metric zvs"}


def scaled(by: str | None) -> Program:
    """w, or w·p + w − w·p, with a scalar p that need not have a value."""
    b = tv.program("scaled")
    x, w = b.input("x", (3,)), b.input("w", (3,))
    if by is not None:
        s = b.sum(b.square(x, name="xx"), name="s")
        if by == "infinite":
            s = b.where(b.gt(s, value=1e6, name="c"), b.full(shape=(), value=math.inf, name="inf"), s, name="s.or.inf")
        p = b.div(b.sum(x, name="xs"), s, name="p") if by == "divided" else b.add(s, value=1.0, name="p")
        wp = b.mul(w, p, name="wp")
        w = b.sub(b.add(wp, w, name="more"), wp, name="less")
    b.loss(b.sum(w, name="loss"))
    return b.build()


@pytest.mark.parametrize(("by", "right"), [("plain", True), ("divided", False), ("infinite", False)])
def test_scalars_of_the_plan_have_values(by: str, right: bool) -> None:
    """Expected: a name of a scalar says nothing of what it is divided by."""
    assert shown(scaled(None), scaled(by)) == ({"loss"} if right else set())
    expected = {"plain": "PROVED(reduced)", "divided": "UNKNOWN", "infinite": "REFUTED"}[by]  # the last by a point with large inputs
    assert verify(scaled(None), scaled(by), engine="smt", points=1).verdict == expected


def with_nothing(b: ProgramBuilder, w: Tensor, m: Tensor, s: Tensor, right: bool) -> Program:
    """Σ e^s and Σ w²; to a wrong w, where m is large, s − s is added."""
    b.output(b.sum(b.exp(s, name="e"), name="es"), "metric", "es")
    if not right:
        zeros = b.full(shape=(3,), value=0.0, name="zeros")
        w = b.add(w, b.where(b.gt(m, value=1e6), b.sub(s, s, name="nothing"), zeros, name="chosen"), name="again")
    b.loss(b.sum(b.mul(w, w, name="ww"), name="loss"))
    return b.build()


def below(right: bool) -> Program:
    """w, and where m is large s − s: of s the last element is −∞, the others are numbers."""
    b = tv.program("below")
    bias = b.pad(b.full(shape=(2,), value=0.5, name="half"), pads=(0, 1), value=-math.inf, name="bias")
    w, m, s = b.input("w", (3,)), b.input("m", (3,)), b.add(b.input("x", (3,)), bias, name="s")
    return with_nothing(b, w, m, s, right)


def test_one_element_may_be_infinite() -> None:
    """Expected: what is shown of elements that are numbers is not said of one that is not."""
    assert shown(below(True), below(True)) == {"loss", "metric es"}
    assert "loss" not in shown(below(True), below(False))


def now_and_then(right: bool) -> Program:
    """The same where the last element of s is −∞ on no point: it looks like the others."""
    b = tv.program("now and then")
    w, m, x, z, y, k = (b.input(n, (size,)) for n, size in zip("wmxzyk", (3, 3, 3, 2, 1, 1), strict=True))
    never = b.where(b.gt(k, value=1e6), b.full(shape=(1,), value=-math.inf), y, name="never")
    s = b.add(x, b.concat(z, never, dim=0, name="t"), name="s")
    return with_nothing(b, w, m, s, right)


def test_what_looks_alike_may_be_infinite() -> None:
    """Expected: an element that may be −∞ is no number because another one is, of which the same is to be shown."""
    assert shown(now_and_then(True), now_and_then(True)) == {"loss", "metric es"}
    assert shown(now_and_then(True), now_and_then(False)) == {"metric es"}


def quotients(used: Collection[int], right: bool) -> Program:
    """Twice the first row of w/x, and z + y where z > 0; of some, all of w/x is used. Or 0 times u over the second row of x, too."""
    b = tv.program("quotients")
    zeros = b.full(shape=(3,), value=0.0)
    found = []
    for n in range(2):
        w, x = b.input(f"w{n}", (2, 3)), b.input(f"x{n}", (2, 3))
        z, y, u = (b.input(f"{t}{n}", (3,)) for t in "zyu")
        mask = b.to(b.gt(z, value=0.0), dtype="f32")
        if n in used or right:
            q = b.div(w, x, name=f"q{n}")
        if n in used:
            b.output(b.sum(q, name=f"all{n}"), "metric", f"all{n}")
        if right:
            r = b.add(b.select(q, dim=0, index=0), b.mul(mask, b.add(z, y)), name=f"r{n}")
        else:
            first, second = (b.select(x, dim=0, index=i) for i in range(2))
            own = b.div(b.add(b.select(w, dim=0, index=0), b.mul(b.mul(mask, z), first)), first)
            r = b.add(b.add(own, b.mul(mask, y)), b.mul(zeros, b.div(u, second)), name=f"r{n}")
        found.append(b.sum(r, name=f"rs{n}"))
        b.output(found[-1], "metric", f"r{n}")
    b.loss(b.add(*found, name="loss"))
    return b.build()


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_quotients_that_are_used_say_nothing_of_others(used: Collection[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected: the plan needs that the second row of x is not 0, which it is not where all quotients are used, and only there."""
    monkeypatch.setattr(expressions, "SMALL_STAGE", 0)  # common parts are looked for in small stages too
    expected = {f"metric {name}{n}" for n in used for name in ("all", "r")} | ({"loss"} if len(used) == 2 else set())
    assert shown(quotients(used, True), quotients(used, False)) == expected


Alone = Callable[[ProgramBuilder, bool], Tensor]


def again(b: ProgramBuilder, w: Tensor, x: Tensor) -> Tensor:
    return b.div(b.mul(w, x, name="w.x"), x, name="again")


def masked_quotient(b: ProgramBuilder, right: bool) -> Tensor:
    """w/x where x is not 0: chosen, or times a mask, which is 0·∞ where x is 0."""
    x, w = b.input("x", (3,)), b.input("w", (3,))
    c, q = b.ne(x, value=0.0, name="c"), b.div(w, x, name="q")
    return b.where(c, q, b.full(shape=(3,), value=0.0), name="r") if right else b.mul(b.to(c, dtype="f32", name="m"), q, name="r")


def quotient_in_a_branch(b: ProgramBuilder, right: bool) -> Tensor:
    """x cancels in a branch that may not be taken; the plan needs that it is not 0 elsewhere."""
    x, w, m, v = (b.input(n, (3,)) for n in "xwmv")
    if not right:
        return b.add(w, again(b, v, x), name="r")
    return b.add(b.where(b.gt(m, value=1e6), again(b, w, x), w, name="w.again"), v, name="r")


def scalar_in_a_branch(b: ProgramBuilder, right: bool) -> Tensor:
    """Nothing says that a sum is not 0 that is divided by in a branch."""
    x, w, m, v = (b.input(n, (3,)) for n in "xwmv")
    s = b.sum(x, name="s")
    y = b.where(b.gt(m, value=1e6), b.div(w, s, name="q"), v, name="y")
    return b.add(y, w if right else again(b, w, s), name="r")


def scalar_in_vain(b: ProgramBuilder, right: bool) -> Tensor:
    """Nor one that is divided by for nobody."""
    x, w = b.input("x", (3,)), b.input("w", (3,))
    s = b.sum(x, name="s")
    b.div(w, s, name="unused")
    return w if right else again(b, w, s)


def granted_elsewhere(b: ProgramBuilder, right: bool) -> Tensor:
    """Some elements of s are divided by whatever m is: the others may still be 0."""
    s, w, m, v = (b.input(n, (3,)) for n in "swmv")
    first = b.slice(s, dim=0, start=0, stop=1, name="first")
    sure = b.div(b.slice(w, dim=0, start=0, stop=1, name="w.first"), first, name="sure")
    y = b.where(b.gt(m, value=1e6), b.div(w, s, name="q"), v, name="y")
    return b.add(b.add(y, sure, name="both"), w if right else again(b, w, s), name="r")


def beside_in_vain(b: ProgramBuilder, right: bool) -> Tensor:
    """An op beside that divides by s for nobody."""
    s, w, m, v = (b.input(n, (3,)) for n in "swmv")
    b.div(v, s, name="unused")
    return b.where(b.gt(m, value=1e6), w if right else again(b, w, s), v, name="y")


def looked_up(b: ProgramBuilder, right: bool) -> Tensor:
    """Some quotients are looked up: the others need not have values."""
    x, w, v, at = *(b.input(n, (4,)) for n in "xwv"), b.input("at", (4,), "i64", ids=4)
    q = b.index_select(b.div(v, x, name="v.x"), at, dim=0, name="q")
    return b.add(q, w if right else again(b, w, x), name="r")


def looked_up_by_products(b: ProgramBuilder, right: bool) -> Tensor:
    """All of them times 0 or 1, which is 0·∞ for some that are not looked up."""
    x, v, at = *(b.input(n, (4,)) for n in "xv"), b.input("at", (3,), "i64", ids=4)
    q = b.div(v, x, name="q")
    if right:
        return b.index_select(q, at, dim=0, name="r")
    return b.matmul(b.to(b.one_hot(at, num_classes=4), dtype="f32"), q, name="r")


def under_a_branch(b: ProgramBuilder, right: bool) -> Tensor:
    """What is divided by is not 0, and is 1/x in one case: x may be 0 in the other."""
    x, y, z, w = (b.input(n, (3,)) for n in "xyzw")
    under = b.where(b.input("m", (3,), dtype="bool"), b.div(b.full(shape=(3,), value=1.0), x), y, name="under")
    return b.add(b.div(z, under, name="q"), w if right else again(b, w, x), name="r")


def scalar_under_a_branch(b: ProgramBuilder, right: bool) -> Tensor:
    """The same of scalars, which are written out."""
    x, y, z, w = b.input("x", ()), b.input("y", ()), b.input("z", (3,)), b.input("w", (3,))
    under = b.where(b.input("m", (), dtype="bool"), b.div(b.full(shape=(), value=1.0), x), y, name="under")
    return b.add(b.div(z, under, name="q"), w if right else again(b, w, x), name="r")


def first_in_vain(b: ProgramBuilder, right: bool) -> Tensor:
    """What is made in vain has the values of what is used, and no value where s is 0."""
    w, v, s = (b.input(n, (3,)) for n in "wvs")
    u, t = again(b, b.mul(w, v, name="w.v"), s), b.mul(v, w, name="t")
    return b.tanh(t if right else u, name="r")


def first_in_a_branch(b: ProgramBuilder, right: bool) -> Tensor:
    """The same, where it is used in a branch."""
    k, w, v, s = (b.input(n, (3,)) for n in "kwvs")
    u, t = again(b, b.mul(w, v, name="w.v"), s), b.mul(v, w, name="t")
    return b.add(b.where(b.gt(k, value=1e6), u, k, name="chosen"), b.tanh(t if right else u), name="r")


ALONE = (
    first_in_vain,
    first_in_a_branch,
    under_a_branch,
    scalar_under_a_branch,
    masked_quotient,
    quotient_in_a_branch,
    scalar_in_a_branch,
    scalar_in_vain,
    granted_elsewhere,
    beside_in_vain,
    looked_up,
    looked_up_by_products,
)


@pytest.mark.parametrize("few", [0, expressions.SMALL_STAGE])
@pytest.mark.parametrize("alone", ALONE)
def test_what_need_not_have_a_value_says_nothing(alone: Alone, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected: the program against itself is shown, the wrong plan is not; nor with common parts as symbols."""
    monkeypatch.setattr(expressions, "SMALL_STAGE", few)

    def made(right: bool) -> Program:
        b = tv.program("alone")
        b.loss(b.sum(alone(b, right), name="loss"))
        return b.build()

    assert shown(made(True), made(True)) == {"loss"}
    assert shown(made(True), made(False)) == set()


def by_stages(logical: Program, plan: Program, ops: OpTable) -> set[str]:
    """What stages show of a plan on one device with ops of its own."""
    right, wrong = logical, single(plan)
    wanted, _ = obligations(right, wrong, units(wrong))
    return {str(o) for o in prove(related(right, wrong, ops, units(wrong), wanted), wanted, wrong.lineage).proved}


@op("branch_and_quotient", "hidden")
def branch_and_quotient(x: Node, w: Node, v: Node, m: Node) -> Node:
    """v·w/x where m is true, else v²; and w/x·(v + w)."""
    return F.concat([F.select(m, w / x, v) * v, w / x * (v + w)], 0)


@op("product_and_quotient", "hidden")
def product_and_quotient(x: Node, w: Node, v: Node, m: Node) -> Node:
    """The same, by a mask: 0·∞ where x is 0 and m is false."""
    q = w / x
    return F.concat([(v + F.cast(m, "real") * (q - v)) * v, q * v + q * w], 0)


@op("mask_and_quotient", "hidden")
def mask_and_quotient(x: Node, w: Node, v: Node, m: Node) -> Node:
    """v + w where w is positive, else 0; and w/x·(v + w)."""
    return F.concat([F.cast(w > 0, "real") * (w + v), w / x * (v + w)], 0)


@op("nothing_and_quotient", "hidden")
def nothing_and_quotient(x: Node, w: Node, v: Node, m: Node) -> Node:
    """The same, and 0·v/x."""
    mask = F.cast(w > 0, "real")
    return F.concat([mask * w + mask * v + F.full(0, v.shape) * (v / x), w / x * v + w / x * w], 0)


def _largest(x: Node, w: Node) -> Node:
    return F.one_hot(F.rowwise("argmax", w / x, 0), x.shape[0])


@op("sum_and_position", "hidden")
def sum_and_position(x: Node, w: Node, v: Node, m: Node) -> Node:
    """v·(v + w); and v + w where w/x is largest."""
    return F.concat([v * (v + w), _largest(x, w) * (v + w)], 0)


@op("nothing_and_position", "hidden")
def nothing_and_position(x: Node, w: Node, v: Node, m: Node) -> Node:
    """The same, and 0 times whether w/x is largest."""
    return F.concat([v * v + v * w + F.full(0, v.shape) * _largest(x, w), _largest(x, w) * v + _largest(x, w) * w], 0)


PAIRS = (
    (branch_and_quotient, product_and_quotient),
    (mask_and_quotient, nothing_and_quotient),
    (sum_and_position, nothing_and_position),
)


@pytest.mark.parametrize("few", [0, expressions.SMALL_STAGE])
@pytest.mark.parametrize("pair", PAIRS)
def test_elements_that_are_sliced_away_say_nothing_of_others(pair: tuple[OpDef, OpDef], few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected: the plan divides by x also for the elements that are used; the logical program does for those that nobody uses."""
    monkeypatch.setattr(expressions, "SMALL_STAGE", few)

    def made(which: int) -> Program:
        b = tv.program("pair", OPS.extended(pair))
        x, w, v = (b.input(n, (3,)) for n in "xwv")
        both = getattr(b, pair[which].name)(x, w, v, b.input("m", (3,), dtype="bool"), name="both")
        b.loss(b.sum(b.slice(both, dim=0, start=0, stop=3), name="loss"))
        return b.build()

    assert by_stages(made(0), made(0), OPS.extended(pair)) == {"loss"}
    assert by_stages(made(0), made(1), OPS.extended(pair)) == set()


@op("under_both", "hidden")
def under_both(s: Node, t: Node) -> Node:
    """1/(s·t)."""
    return 1 / (s * t)


@op("sum_and_positive", "hidden")
def sum_and_positive(v: Node, s: Node, t: Node) -> Node:
    """v + s, and t where that is positive."""
    return F.concat([v + s, F.cast(t > 0, "real") * t], 0)


@op("sum_again_and_t", "hidden")
def sum_again_and_t(v: Node, s: Node, t: Node) -> Node:
    """v·s/s + s, and t."""
    return F.concat([v * s / s + s, t], 0)


VANISHING = OPS.extended([under_both, sum_and_positive, sum_again_and_t])


def vanishing(used: Collection[int], right: bool) -> Program:
    """Layers with s = t·a, where t is compared with 0. Some divide by s·t."""
    b = tv.program("vanishing", VANISHING)
    for n in range(3):
        x, a, v = (b.input(f"{k}{n}", (3,)) for k in "xav")
        t = b.square(x, name=f"t{n}")
        s = b.mul(t, a, name=f"s{n}")
        q = b.under_both(s, t, name=f"q{n}")
        if n in used:
            b.output(b.sum(q, name=f"qs{n}"), "metric", f"q{n}")
        y = (b.sum_and_positive if right else b.sum_again_and_t)(v, s, t, name=f"y{n}")
        b.output(b.sum(y, name=f"ys{n}"), "metric", f"y{n}")
    b.loss(b.sum(y, name="loss"))
    return b.build()


@pytest.mark.parametrize("few", [0, expressions.SMALL_STAGE])
@pytest.mark.parametrize("used", [(0,), (2,), (0, 1, 2)])
def test_what_an_element_vanishes_with_is_granted_to_no_other(used: Collection[int], few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected: s is not 0 in layers that divide by s·t; others, whose elements look alike, may divide by 0 in the plan alone."""
    monkeypatch.setattr(expressions, "SMALL_STAGE", few)
    expected = {f"metric {name}{n}" for n in used for name in "qy"} | ({"loss"} if 2 in used else set())
    assert by_stages(vanishing(used, True), vanishing(used, False), VANISHING) == expected


@op("kept_quotient", "hidden")
def kept_quotient(x: Node, s: Node) -> tuple[Node, Node]:
    """x·s + x, and x/s."""
    return x * s + x, x / s


OWN = OPS.extended([kept_quotient])


def layers(divided: Collection[int], plain: Collection[int]) -> Program:
    """Layers that are alike but for whether their quotients are used; to some x/s − x·(1/s) is added where m is true."""
    b = tv.program("layers", OWN)
    total, m = b.input("w", (3,)), b.input("m", (3,), dtype="bool")
    for n in range(3):
        x, s = b.input(f"x{n}", (3,)), b.input(f"s{n}", (3,))
        y, q = b.kept_quotient(x, s, name=(f"y{n}", f"q{n}"))
        if n not in plain:
            under = b.div(b.full(shape=(3,), value=1.0), s, name=f"under{n}")
            nothing = b.sub(b.div(x, s, name=f"x.s{n}"), b.mul(x, under, name=f"x.under{n}"), name=f"nothing{n}")
            chosen = b.where(m, nothing, b.full(shape=(3,), value=0.0), name=f"chosen{n}")
            y = b.add(b.add(b.mul(x, s, name=f"xs{n}"), x, name=f"xsx{n}"), chosen, name=f"y{n}.own")
        total = b.add(total, b.tanh(y, name=f"t{n}"), name=f"total{n}")
        if n in divided:
            total = b.add(total, b.mul(q, q, name=f"qq{n}"), name=f"more{n}")
    b.loss(b.sum(total, name="loss"))
    return b.build()


@pytest.mark.parametrize("few", [0, expressions.SMALL_STAGE])
@pytest.mark.parametrize("divided", [(0,), (2,), (0, 2), (0, 1, 2)])
def test_layers_whose_quotients_are_used_say_nothing_of_others(divided: Collection[int], few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected: shown only if all layers need their quotients: another one may divide by 0 in the plan alone."""
    monkeypatch.setattr(expressions, "SMALL_STAGE", few)
    logical, plan = layers(divided, range(3)), single(layers(divided, ()))
    wanted, _ = obligations(logical, plan, units(plan))
    proof = prove(related(logical, plan, OWN, units(plan), wanted), wanted, plan.lineage)
    assert bool(proof.failed) == (len(divided) < 3)


@pytest.mark.parametrize(("divided", "alike"), [((0, 1), False), ((0, 1, 2), True), ((), True)])
def test_stages_are_alike_only_if_they_may_assume_the_same(divided: Collection[int], alike: bool) -> None:
    """Expected: the same form for two layers of which both quotients are used, or neither."""
    logical, plan = layers(divided, range(3)), single(layers(divided, ()))
    wanted, _ = obligations(logical, plan, units(plan))
    proposal = proposed(related(logical, plan, OWN, units(plan), wanted), wanted, plan.lineage)
    elements, cutter = proposal.elements, Search(proposal, wanted).ledger.cutter
    cutter.claims.dropped |= {p for p in proposal.claims if not p[2].endswith(".own")}  # down to the inputs
    stages = [cutter.stage(cutter.goal_of(proposal.claims[0, 0, f"y{n}.own"]), How(with_facts=True)) for n in (1, 2)]
    assert [bool(elements.divisors.of(s)) for s in stages] == [1 in divided, 2 in divided]
    for form in (Canonical(elements).form, Canonical(elements).by_elements):
        first, second = map(form, stages)
        assert (first == second) == alike
    goals = [cutter.goal_of(proposal.claims[0, 0, f"y{n}.own"]) for n in (1, 2)]
    first, second = ([key for key, _ in cutter.stage(g, How(with_facts=True, way=IN_FULL)).tasks] for g in goals)  # elements as they are
    assert (first == second) == alike


# -- values ------------------------------------------------------------------------------------------------------------


def padded(b: ProgramBuilder, right: bool) -> Tensor:
    """Whether e is positive: not where it is the exponential of −∞."""
    e = b.exp(b.pad(b.input("x", (2,)), pads=(0, 1), value=-math.inf, name="pad"), name="e")
    b.output(b.sum(e, name="es"), "metric", "es")
    if right:
        return b.to(b.gt(e, value=0.0, name="positive"), dtype="f32", name="one")
    return b.add(b.sub(e, e, name="nothing"), b.full(shape=(3,), value=1.0, name="ones"), name="one")


def infinite(b: ProgramBuilder, right: bool) -> Tensor:
    """The same where the plan knows the elements that are numbers, and the logical program has −∞ beside them."""
    bias = b.pad(b.full(shape=(2,), value=0.5, name="half"), pads=(0, 1), value=-math.inf, name="bias")
    s = b.add(b.input("x", (3,)), bias, name="s")
    q = b.slice(s, dim=0, start=0, stop=2, name="q")
    b.output(b.sum(q, name="qs"), "metric", "qs")
    if right:
        return b.to(b.gt(b.exp(s, name="e"), value=0.0, name="positive"), dtype="f32", name="one")
    return b.add(b.full(shape=(3,), value=1.0, name="ones"), b.sum(b.sub(q, q, name="nothing"), name="zero"), name="one")


def cubed(b: ProgramBuilder, right: bool) -> Tensor:
    """A cube, its exponent a fraction, is negative where the number is."""
    y = b.pow(b.input("x", (3,)), exponent=Fraction(3), name="y")
    b.output(b.sum(y, name="ys"), "metric", "ys")
    return b.clamp(y, min=0.0, name="relu") if right else y


def rooted(b: ProgramBuilder, right: bool) -> Tensor:
    """The 64th root of one number, or the 128th of another."""
    x, y = (b.input(n, (3,), domain="positive") for n in "xy")
    return b.pow(y, exponent=1 / 64, name="root") if right else b.sqrt(b.pow(x, exponent=1 / 64, name="64"), name="root")


def divided(b: ProgramBuilder, right: bool) -> Tensor:
    """x, or x·y/y where y may be 0."""
    x, y = b.input("x", (3,)), b.input("y", (3,))
    return x if right else b.div(b.mul(x, y, name="xy"), y, name="x.again")


def chosen(b: ProgramBuilder, right: bool) -> Tensor:
    """x·y/y only where y is not negative: it may be 0 there."""
    x, y = b.input("x", (3,)), b.input("y", (3,))
    return x if right else b.where(b.ge(y, value=0.0, name="c"), b.div(b.mul(x, y, name="xy"), y, name="d"), x, name="x.again")


def masked(b: ProgramBuilder, right: bool) -> Tensor:
    """x² by its being positive, or by the sum of all squares but its own being so."""
    x = b.square(b.input("x", (3,)), name="xx")
    if right:
        return b.mul(b.to(b.gt(x, value=0.0, name="c"), dtype="f32", name="mask"), x, name="masked")
    others = b.sub(b.sum(x, name="all"), x, name="others")
    return b.mul(b.to(b.gt(others, value=0.0, name="c"), dtype="f32", name="mask"), x, name="masked")


def logarithm(b: ProgramBuilder, right: bool) -> Tensor:
    """x², or the exponential of its logarithm, which has no value at 0."""
    x = b.square(b.input("x", (3,)), name="xx")
    return x if right else b.exp(b.log(x, name="log"), name="exp")


def sorted_(b: ProgramBuilder, right: bool) -> Tensor:
    """The position of the largest number, or of the smallest."""
    x = b.input("x", (3,))
    at = b.argmax(x, dim=0, name="at") if right else b.argmin(x, dim=0, name="at")
    return b.to(b.one_hot(at, num_classes=3, name="hit"), dtype="f32", name="there")


def dropped(b: ProgramBuilder, right: bool) -> Tensor:
    return b.dropout(b.input("x", (3,)), p=0.5, key=7, offset=0 if right else 3, name="kept")


def step(hidden: Hidden, right: bool) -> Program:
    """m, and where that is large something else besides: on no point."""
    b = tv.program("hidden")
    m = b.input("m", (3,))
    large = b.to(b.gt(m, value=1e6, name="large"), dtype="f32", name="gate")
    r = b.add(m, b.mul(large, hidden(b, right), name="behind"), name="r")
    b.update(b.state("old", (3,)), r)
    b.loss(b.sum(r, name="loss"))
    return b.build()


@pytest.mark.parametrize("few", [expressions.SMALL_STAGE, 0])  # with 0, common parts are looked for in small stages too
@pytest.mark.parametrize("hidden", [padded, infinite, cubed, rooted, divided, chosen, masked, logarithm, sorted_, dropped])
def test_what_no_point_shows_is_not_shown(hidden: Hidden, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expressions, "SMALL_STAGE", few)
    assert shown(step(hidden, True), step(hidden, True)) >= {"loss", "updated state old"}
    assert set(step(hidden, True).sources) == set(step(hidden, False).sources)
    assert shown(step(hidden, True), step(hidden, False)).isdisjoint(("loss", "updated state old"))


def other_case(right: bool) -> Program:
    """y where x² is not positive, which is where it is 0; or nothing."""
    b = tv.program("other case")
    x, v, y = (b.input(n, (3,)) for n in "xvy")
    mask = b.to(b.gt(b.square(x, name="xx"), value=0.0), dtype="f32", name="mask")
    cases = b.to(b.one_hot(b.to(mask, dtype="i64"), num_classes=2), dtype="f32", name="cases")
    masked, other = b.mul(mask, v, name="masked"), b.select(cases, dim=1, index=0, name="other")
    b.loss(b.sum(b.add(masked, b.mul(other, y, name="y.other")) if right else masked, name="loss"))
    return b.build()


@pytest.mark.parametrize("few", [expressions.SMALL_STAGE, 0])
def test_what_is_0_where_a_mask_is_1_is_not_0_everywhere(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expressions, "SMALL_STAGE", few)
    assert shown(other_case(True), other_case(True)) == {"loss"}
    assert shown(other_case(True), other_case(False)) == set()


# -- sizes -------------------------------------------------------------------------------------------------------------


def gated(b: ProgramBuilder, hidden: Tensor) -> Program:
    """m, and where that is large something else besides: on no point, however large."""
    m = b.input("m", hidden.shape)
    b.loss(b.sum(b.add(m, b.mul(b.to(b.gt(m, value=1e6), dtype="f32"), hidden)), name="loss"))
    return b.build()


def drops(size: int, cuts: Sequence[int] = (), origins: Sequence[int] = ()) -> Program:
    """A dropout of a row, or of its pieces, each of which is said to begin somewhere."""
    b = tv.program("drops")
    x = b.input("x", (size,))
    if not cuts:
        return gated(b, b.dropout(x, p=0.5, key=7))
    pieces = []
    for start, stop, origin in zip(cuts, [*cuts[1:], size], origins, strict=True):
        own = b.slice(x, dim=0, start=start, stop=stop)
        pieces.append(b.dropout(own, p=0.5, key=7, origin=(origin,), logical_shape=(size,)))
    return gated(b, b.concat(*pieces, dim=0))


@pytest.mark.parametrize(
    ("size", "cuts", "wrong"),
    [(18, (0, 16), (0, 3)), (18, (0, 16, 17), (0, 3, 17)), (40, (0, 16, 32), (0, 16, 24))],  # wrong: where pieces begin once the first is 3
)
def test_where_pieces_begin_is_not_a_matter_of_scale(size: int, cuts: tuple[int, ...], wrong: tuple[int, ...]) -> None:
    """Expected: a dropout of pieces is shown if they begin where they do at full size, not if they seem to once all is smaller."""
    assert shown(drops(size), drops(size, cuts, cuts)) == {"loss"}
    assert shown(drops(size), drops(size, cuts, wrong)) == set()


def row_of_drops(origin: int | None) -> Program:
    """The fourth row of a dropout, or the dropout of that row, which is said to begin somewhere."""
    b = tv.program("row of drops")
    x = b.input("x", (16,))
    whole = b.dropout(x, p=0.5, key=7) if origin is None else x
    row = b.select(b.reshape(whole, shape=(8, 2)), dim=0, index=3)
    return gated(b, row if origin is None else b.dropout(row, p=0.5, key=7, origin=(origin,), logical_shape=(16,)))


def test_where_a_row_begins_is_not_a_matter_of_scale() -> None:
    assert [shown(row_of_drops(None), row_of_drops(at)) for at in (6, 4)] == [{"loss"}, set()]


def whole_step() -> Program:
    """One step of a parameter."""
    b = tv.program("whole")
    x, w = b.input("x", (64,)), b.parameter("w", (64,))
    b.loss(b.sum(b.mul(w, x), name="loss"))
    b.output(x, "gradient", "w")
    b.update(w, b.sub(w, x, name="w.new"))
    return b.build()


def padded_step(filled: float) -> Plan:
    """The same in a larger buffer, whose padding, in two parts, is changed by something."""
    p = tv.plan("padded", tv.Mesh(dp=2))
    parts = (Part((0,), (Run(0, 64),)), *(Part((at,), (Run(0, n),), padding=True) for at, n in ((64, 2), (66, 30))))
    with p.ranks() as r:
        x, w = r.input("x", (64,), "n"), r.parameter("w", (96,), Parts(((0, parts), (1, parts))))
        r.loss(r.sum(r.mul(r.slice(w, dim=0, start=0, stop=64), x), name="loss"))
        g = r.concat(x, r.full(shape=(32,), value=filled), dim=0, name="g")
        r.output(g, "gradient", "w")
        r.update(w, r.sub(w, g, name="w.new"))
    return p.build()


def test_padding_in_parts_is_zero_after_the_step() -> None:
    """Expected: padding that ends where nothing else does is looked at all the same."""
    found = [{str(o) for o in staged(whole_step(), padded_step(filled)).proved} for filled in (0.0, 1.0)]
    assert found[0] == {"loss", "gradient of w", "updated parameter w"}
    assert "updated parameter w" not in found[1]


# -- wrong claims ------------------------------------------------------------------------------------------------------

IMAGES, CHANNELS, RANKS = 6, 2, 2
QUICKLY = Limits(seconds=0.5, solver_seconds=0.1)


def norm() -> Program:
    b = tv.program("norm")
    x, t = b.input("x", (IMAGES, CHANNELS)), b.input("t", (IMAGES, CHANNELS))
    h = b.mul(x, b.parameter("k", (CHANNELS,)), name="h")
    mean, var = b.state("rm", (CHANNELS,)), b.state("rv", (CHANNELS,), domain="nonnegative")
    y, _, _, *new = b.batch_norm(h, None, None, mean, var, momentum=0.25, name=["y", "mean", "var", "rm.new", "rv.new"])
    b.update(mean, new[0])
    b.update(var, new[1])
    b.loss(b.sum(b.mul(y, t, name="yt"), name="loss"))
    return tv.complete(b.build())


@cache
def norm_plan() -> Plan:
    p = tv.plan("norm", tv.Mesh(dp=RANKS))
    with p.ranks() as r:
        x, t = (r.input(n, (IMAGES // RANKS, CHANNELS), "(dp b) c") for n in "xt")
        k = r.parameter("k", (CHANNELS,), "c")
        h = r.mul(x, k, name="h")
        mean = r.div(total(r, h, "sum"), value=IMAGES, name="mean")
        centred = r.sub(h, mean, name="centred")
        squares = total(r, r.square(centred, name="squares.own"), "squares")
        root = r.rsqrt(r.add(r.div(squares, value=IMAGES, name="var"), value=1e-5, name="var.eps"), name="root")
        part = r.sum(r.mul(r.mul(centred, root, name="y"), t, name="yt"), name="loss.part")
        for name, new in (("rm", mean), ("rv", r.div(squares, value=IMAGES - 1, name="unbiased"))):
            old = r.state(name, (CHANNELS,), "c", domain="nonnegative" if name == "rv" else None)
            now = r.mul(r.detach(new, name=f"{name}.now"), value=0.25, name=f"{name}.share")
            r.update(old, r.add(r.mul(old, value=0.75, name=f"{name}.kept"), now, name=f"{name}.new"))
        r.backward(part)
        r.output(r.all_reduce(r.gradient(k), group="dp", name="k.grad.dp"), "gradient", "k")
        r.loss(r.all_reduce(part, group="dp", name="loss"))
    return p.build()


def total(r, x: Tensor, name: str) -> Tensor:  # type: ignore[no-untyped-def]
    return r.all_reduce(r.sum(x, dim=0, name=f"{name}.part"), group="dp", backward="all_reduce", name=name)  # type: ignore[no-any-return]


def own_only(output: str) -> Change:
    return replaced("all", output, lambda op: replace(op, name="identity", attrs=()))


GRADIENT = "gradient of k"
NORMS: dict[str, tuple[Change, str]] = {
    # mistake: (the change, an obligation that it breaks)
    "mean of own images": (own_only("sum"), "updated state rm"),
    "variance of own images": (own_only("squares"), "updated state rv"),
    "divided by the number of own images": (attrs("all", "var", value=IMAGES // RANKS), "loss"),
    "unbiased by the number of own images": (attrs("all", "unbiased", value=IMAGES // RANKS - 1), "updated state rv"),
    "biased": (attrs("all", "unbiased", value=IMAGES), "updated state rv"),
    "gradient of the mean of own images": (own_only("sum.part.grad"), GRADIENT),
    "gradient of the variance of own images": (own_only("squares.part.grad"), GRADIENT),
    "gradient of own images": (own_only("k.grad.dp"), GRADIENT),
}


def forced(logical: Program, right: Plan, wrong: Plan, names: Collection[str]) -> StagedProof:
    """Stages of a wrong plan for some obligations, with the claims of the right one, as if all points agreed."""
    found = []
    for plan in (right, wrong):
        parts = units(plan)
        wanted, _ = obligations(logical, plan, parts)
        found.append(proposed(related(logical, plan, OPS, parts, wanted), wanted, plan.lineage))
    good, a = found
    known = {p: good.claims.get(good.graph.first(p)) for p in a.graph.order}
    a.claims = {p: replace(c, place=p) for p, c in known.items() if c is not None}
    a.scalars = good.scalars
    a.values.agrees = lambda goal: True  # type: ignore[method-assign]
    return Search(a, [o for o in wanted if str(o) in names], limits=QUICKLY).run()


def test_the_norm_is_shown_with_claims_of_its_own() -> None:
    names = {broken for _, broken in NORMS.values()}
    assert {str(o) for o in forced(norm(), norm_plan(), norm_plan(), names).proved} == names


@pytest.mark.parametrize("mistake", NORMS)
def test_a_wrong_synchronised_batch_norm_is_refuted_and_never_shown(mistake: str) -> None:
    change, broken = NORMS[mistake]
    wrong = change(norm_plan())
    assert wrong != norm_plan()
    proof = forced(norm(), norm_plan(), wrong, {broken})
    assert [str(o) for o in proof.failed] == [broken]
    assert not proof.proved
    assert verify(norm(), wrong, engine="smt", points=1).verdict == "REFUTED"


# -- counts ------------------------------------------------------------------------------------------------------------


def counted(least: float, last: int | None) -> Program:
    """How many of a row are large, beside the counts up to each of them; or what the counts say up to one of them."""
    b = tv.program("counted")
    x = b.exp(b.matmul(b.input("x", (3, 5)), b.input("w", (5, 5)), name="xw"), name="e")
    chosen, again = (b.float(b.gt(x, value=least, name=f"large{n}"), name=f"chosen{n}") for n in range(2))
    count = b.cumsum(again, dim=1, name="count")
    b.output(b.sum(b.mul(count, x, name="weighed"), name="all"), "metric", "all")
    load = b.sum(chosen, dim=1, name="load") if last is None else b.reshape(b.slice(count, dim=1, start=last, stop=last + 1), shape=(3,))
    b.loss(b.sum(b.mul(load, value=0.2, name="part"), name="loss"))
    return b.build()


@pytest.mark.parametrize(("least", "last", "proved"), [(1.0, 4, True), (1e30, 4, True), (1.0, 3, False), (1e30, 3, False)])
def test_counts_up_to_the_last_are_the_sum(least: float, last: int, proved: bool) -> None:
    """Expected: the last count is the sum over all, and no other one is, although none is ever large."""
    assert ("loss" in shown(counted(least, None), counted(least, last))) == proved


# -- elements that differ in names only ----------------------------------------------------------------------------------


@op("looked_up_beside", "hidden")
def looked_up_beside(x: Node, w: Node, v: Node, at: Node) -> Node:
    """Of every row of w/x one element, times v; and all of the first row."""
    q = w / x
    first = F.take(q, 0, 0, 1) * (F.take(w, 0, 0, 1) + F.take(x, 0, 0, 1))
    return F.concat([F.gather(q, at, 1) * v, F.reshape(F.total(first, [1]), (1, 1))], 0)


@op("products_beside", "hidden")
def products_beside(x: Node, w: Node, v: Node, at: Node) -> Node:
    """The same, with all elements times 0 or 1."""
    q = w / x
    first = F.take(q, 0, 0, 1)
    first = first * F.take(w, 0, 0, 1) + first * F.take(x, 0, 0, 1)
    chosen = F.contract("n i k, n k -> n i", F.one_hot(at, x.shape[1]), q)
    return F.concat([chosen * v, F.reshape(F.total(first, [1]), (1, 1))], 0)


def test_what_must_have_a_value_for_one_element_need_not_for_those_like_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected: all of the first row is divided by, of the others what is looked up."""
    monkeypatch.setattr(expressions, "SMALL_STAGE", 0)
    monkeypatch.setattr(isomorphic, "FEWEST", 0)
    monkeypatch.setattr(isomorphic, "ELEMENTS", 1)
    own = OPS.extended([looked_up_beside, products_beside])

    def made(right: bool) -> Program:
        b = tv.program("beside", own)
        x, w, v, at = b.input("x", (8, 4)), b.input("w", (8, 4)), b.input("v", (8, 1)), b.input("at", (8, 1), "i64", ids=4)
        b.loss(b.sum((b.looked_up_beside if right else b.products_beside)(x, w, v, at, name="r"), name="loss"))
        return b.build()

    assert by_stages(made(True), made(True), own) == {"loss"}
    assert by_stages(made(True), made(False), own) == set()


@op("at_the_largest", "hidden")
def at_the_largest(v: Node, p: Node, x: Node, *, longer: bool, again: bool) -> Node:
    """v + w, or v·w/w + w, where w is p at the position of the largest element of x; or of x and one that is hardly ever the largest."""
    row = F.concat([x, F.reshape(0.001 - F.total(x * x, [0]), (1,))], 0) if longer else x
    w = F.gather(p, best(row, 1), 0)
    return (v * w / w if again else v) + w


PLACES = OPS.extended([at_the_largest])


def at_places(longer: bool, again: bool) -> Program:
    b = tv.program("places", PLACES)
    p, x = b.input("p", (5,), domain="positive"), b.input("x", (5,))
    b.loss(b.sum(b.at_the_largest(b.input("v", (1,)), p, x, longer=longer, again=again, name="y"), name="loss"))
    return b.build()


@pytest.mark.parametrize("few", [0, expressions.SMALL_STAGE])
@pytest.mark.parametrize(("longer", "expected"), [(False, {"loss"}), (True, set())])
def test_what_is_looked_up_outside_of_a_row_is_zero(longer: bool, expected: set[str], few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected: positions among five elements are positions in p, so w is positive; of those among six, one is not."""
    monkeypatch.setattr(expressions, "SMALL_STAGE", few)
    assert by_stages(at_places(longer, False), at_places(longer, True), PLACES) == expected
