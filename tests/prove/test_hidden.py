"""Wrong plans that no random point shows: the algebra, its lists too, must not show them, evaluation aside.

What is wrong is behind a condition that random inputs do not meet, or has no value at points that are never drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest

import trainverify as tv
from prove.hidden import (
    HIDDEN,
    Body,
    again,
    deep,
    made,
    masked,
    rows,
    squared,
    three,
    zeros,
)
from prove.meaning import system_of
from prove.showing import shown
from trainverify.axes.system import System
from trainverify.build.plan import RankBuilder
from trainverify.build.program import ProgramBuilder
from trainverify.build.tape import Tensor
from trainverify.graph.communication import Communication, schedule
from trainverify.graph.obligations import obligations
from trainverify.graph.plan import Plan, units
from trainverify.graph.program import Program
from trainverify.ops import OPS
from trainverify.ops.table import op
from trainverify.primitives import node as F
from trainverify.primitives.node import Node
from trainverify.prove.algebra.engine import prove, prove_again
from trainverify.prove.algebra.kernel import Kernel
from trainverify.prove.algebra.terms import scale
from trainverify.verdicts import related, single, verify

# -- what the logical program need not have is not assumed -------------------------------------------------------------


# -- infinities ----------------------------------------------------------------------------------------------------------


PEAKS: dict[str, Callable[[ProgramBuilder, Tensor], Tensor]] = {
    # has a value where all of a row is masked
    "exp": lambda b, x: b.exp(x),
    "gt": lambda b, x: b.to(b.gt(x, value=-1e6), dtype="f32"),
    "eq": lambda b, x: b.to(b.eq(x, value=0.0), dtype="f32"),
    "maximum": lambda b, x: b.maximum(x, zeros(b, 2)),
    "relu": lambda b, x: b.relu(x),
    "clamp": lambda b, x: b.clamp(x, min=-1.0),
    "where": lambda b, x: b.where(b.gt(b.input("q", (2,)), value=1e6), x, zeros(b, 2)),
    "tanh": lambda b, x: b.tanh(x),
    "sort": lambda b, x: b.exp(b.sort(x, dim=0)[0]),
    "argmax": lambda b, x: b.to(b.argmax(x, dim=0), dtype="f32"),
    "amax": lambda b, x: b.exp(b.amax(x, dim=0)),
}


@pytest.mark.parametrize("use", PEAKS)
@pytest.mark.parametrize("wrong", ["difference", "quotient", "logarithm", "inverse"])
def test_a_maximum_of_masked_values_may_be_infinite(use: str, wrong: str) -> None:
    """Expected: not shown. Where a row is masked the logical program has a value, and the plan has −∞ + ∞, 0/0 or log 0."""

    def body(b: ProgramBuilder, right: bool) -> Tensor:
        w, peak = b.input("w", (2,)), b.amax(masked(b), dim=1, name="peak")
        b.output(b.sum(PEAKS[use](b, peak), name="us"), "metric", "us")
        if right:
            return w
        if wrong == "difference":
            return b.add(w, b.sub(peak, peak, name="nothing"), name="again")
        e = b.exp(peak, name="e")
        if wrong == "inverse":
            return b.add(w, b.sub(e, b.exp(b.log(e), name="e.again"), name="nothing"), name="again")
        return again(b, w, e) if wrong == "quotient" else b.add(w, b.sub(b.log(e), b.log(e), name="nothing"), name="again")

    assert "loss" in shown(made(body, True), made(body, True))
    assert "loss" not in shown(made(body, True), made(body, False))


def test_one_over_the_exponential_of_minus_infinity_is_a_need() -> None:
    """Expected: exp(max) needs nothing, exp(−max) and a logarithm of exp(max) need that the maximum is finite."""
    k = Kernel()
    v = k.bound()
    peak = k.maximum(
        k.add(k.input("x", (3,), [v]), k.fn("log_indicator", k.input("m", (3,), [v], indicator=True, nonnegative=True))), {v: 3}
    )
    e = k.exp(peak)
    assert not k.needs
    k.exp(scale(peak, -1))
    assert {what for what, _, _ in k.needs} == {"finite"}
    k.needs.clear()
    k.log(e)
    (need,) = k.needs
    assert need[0] == "positive"
    assert not k.certain(need)
    assert k.certain(need, [("finite", next(iter(peak))[0][0], ())])


def test_a_choice_is_not_0_as_a_whole() -> None:
    """Expected: 1/t for t = y or z needs t, neither y nor z, and nothing if both are positive."""
    k = Kernel()
    x, y, z = (k.input(n, (3,), [-1]) for n in "xyz")
    p, q = (k.input(n, (3,), [-1], positive=True, nonnegative=True) for n in "pq")
    c = k.indicator_of("gt0", x)
    k.power(k.add(k.times(c, p), q, scale(k.times(c, q), -1)), -1)
    assert not k.needs
    k.power(k.add(k.times(c, y), z, scale(k.times(c, z), -1)), -1)
    ((what, uid, _),) = k.needs
    assert (what, k.atoms[uid].kind) == ("nonzero", "cut")


def test_integers_divide_by_what_is_not_0() -> None:
    """Expected: not shown. q − q is 0 only where q has a value."""

    @op("quotient", "hidden")
    def quotient(x: Node, y: Node) -> Node:
        """x // y."""
        return F.call("floordiv", x, y)

    ops = OPS.extended([quotient])

    def body(right: bool) -> Program:
        b = tv.program("hidden", ops)
        x, y, w = b.input("x", (3,), dtype="i64"), b.input("y", (3,), dtype="i64"), b.input("w", (3,))
        q = b.to(b.quotient(x, y), dtype="f32", name="q")
        b.loss(b.sum(w if right else b.add(w, b.sub(q, q, name="nothing"), name="again"), name="loss"))
        return b.build()

    plan = single(body(False))
    wanted, _ = obligations(body(True), plan, units(plan))
    assert not prove(related(body(True), plan, ops, units(plan), wanted), wanted).proved


def layers(divided: Collection[int], right: bool) -> Program:
    """Layers that are alike but for what is done with their quotients: they are in branches, but for some."""
    b = tv.program("layers")
    total, m = b.input("w", (3,)), b.input("m", (3,))
    made = []
    for n in range(6):
        x, y = b.input(f"x{n}", (3,)), b.input(f"y{n}", (3,))
        q = b.div(y, x)
        for _ in range(5):
            q = b.sin(b.mul(b.add(q, y), y))  # of ∞ there is none
        made.append((x, y, q))
    for n, (_, y, q) in enumerate(made):
        total = b.add(total, b.mul(q, y) if n in divided else b.where(b.gt(m, value=1e6), q, y))
    b.loss(b.sum(total if right else again(b, total, made[3][0]), name="loss"))
    return b.build()


@pytest.mark.parametrize("divided", [(0, 5), (1, 5), range(6)])
def test_layers_that_need_their_quotients_say_nothing_of_others(divided: Collection[int]) -> None:
    """Expected: shown only if all layers need their quotients: another may have a 0 where its own is not taken."""
    assert shown(layers(divided, True), layers(divided, False)) == ({"loss"} if 3 in divided else set())


def signs(divided: Collection[int], right: bool) -> Program:
    """Whether y/x or z is positive in every layer, in one of them whether y or z·x is; some layers are divided by x besides."""
    b = tv.program("signs")
    total, m = b.input("w", (3,)), b.input("m", (3,))
    c = b.gt(m, value=1e6, name="c")
    found = []
    for n in range(6):
        x, (y, z) = b.input(f"x{n}", (3,), domain="nonnegative"), three(b, f"y{n}", f"z{n}")
        found.append((x, y, b.where(c, b.div(y, x), z) if right or n != 3 else b.where(c, y, b.mul(z, x))))
    for n in divided:
        total = b.add(total, b.div(found[n][1], found[n][0]))
    made = [deep(b, b.mul(b.to(b.gt(t, value=0.0), dtype="f32"), y), y) for _, y, t in found]
    for t in made:
        total = b.add(total, t)
    b.loss(b.sum(total, name="loss"))
    return b.build()


@pytest.mark.parametrize("divided", [(0, 1, 2, 4, 5), range(6)])
def test_what_a_layer_rests_on_is_asked_of_the_next(divided: Collection[int]) -> None:
    """Expected: shown only if all layers need that their x is not 0."""
    assert shown(signs(divided, True), signs(divided, False)) == ({"loss"} if 3 in divided else set())


def test_rows_that_are_divided_say_nothing_of_another() -> None:
    """Expected: a name for all rows, made while layers are worked out, is not used of a row that may be divided by 0."""
    assert shown(rows(True), rows(True)) == {"loss"}
    assert shown(rows(True), rows(False)) == set()


def in_layers(divided: Collection[int], right: bool, vain: bool) -> Program:
    """Layers that add x/d and y/d, in vain; in some layers both are used besides. What is squared is x + y of the third layer."""
    b = tv.program("in layers")
    total = b.input("w", (3,))
    found = [(*three(b, f"x{n}", f"y{n}"), b.input(f"d{n}", (3,), domain="nonnegative")) for n in range(5)]
    over = {n: (b.div(x, d), b.div(y, d)) for n, (x, y, d) in enumerate(found) if vain or n in divided}
    for n in divided:
        total = b.add(total, b.mul(*over[n]))
    if vain:
        last, *others = [deep(b, b.add(*over[n]), y) for n, (_, y, _) in enumerate(found)]
        for t in others:
            last = b.mul(last, t)
    b.loss(b.sum(b.add(total, squared(b, right, *found[2])), name="loss"))
    return b.build()


@pytest.mark.parametrize("divided", [(0,), (0, 1), (0, 2)])
def test_a_layer_that_does_not_fit_leaves_no_names(divided: Collection[int]) -> None:
    """Expected: x + y is no name over d in a layer in which d may be 0."""
    logical = in_layers(divided, True, True)
    assert shown(logical, in_layers(divided, True, False)) == {"loss"}
    assert shown(logical, in_layers(divided, False, False)) == ({"loss"} if 2 in divided else set())


# -- names ---------------------------------------------------------------------------------------------------------------


def called(n: int, right: bool) -> Program:
    """What ids choose, or what the largest of a row chooses, whose digits have a name of their own."""
    b = tv.program("called")
    x, v, ids = b.input("x", (3, 4)), b.input("v", (3, 4)), b.input(f"@{n}", (3,), dtype="i64", ids=4)
    largest, chosen = (b.to(b.one_hot(at, num_classes=4), dtype="f32") for at in (b.argmax(x, dim=1, name="at"), ids))
    b.output(b.sum(b.mul(largest, v), name="first"), "metric", "first")
    b.loss(b.sum(b.mul(chosen if right else largest, v), name="loss"))
    return b.build()


def test_an_input_may_be_called_like_a_choice() -> None:
    assert not any("loss" in shown(called(n, True), called(n, False)) for n in range(8))


def labels(name: str, right: bool) -> Program:
    """In every layer whether a label is one of the ids: all are, but those of one layer, which may be ignored."""
    b = tv.program("labels")
    total, found = b.input("w", (3,)), []
    for n in range(6):
        ids = b.input(f"{name}{n}", (3,), dtype="i64", ids=4, ignore=-100 if n == 3 else None)
        found.append((b.to(b.one_hot(ids, num_classes=4), dtype="f32"), b.input(f"y{n}", (3,))))
    ones = b.full(shape=(3,), value=1.0)
    made = [deep(b, b.mul(ones if n == 3 and not right else b.sum(hot, dim=1), y), y) for n, (hot, y) in enumerate(found)]
    for t in made:
        total = b.add(total, t)
    b.loss(b.sum(total, name="loss"))
    return b.build()


@pytest.mark.parametrize("name", ["label", "@"])  # choices by sorting, which are always in range, are called like that
def test_layers_whose_labels_are_in_range_say_nothing_of_others(name: str) -> None:
    assert shown(labels(name, True), labels(name, True)) == {"loss"}
    assert shown(labels(name, True), labels(name, False)) == set()


# -- buckets -------------------------------------------------------------------------------------------------------------


def in_one_dimension(logical: Program, plan: Plan) -> set[str]:
    """What is shown with tensors written in one dimension and cut anywhere."""
    parts = units(plan)
    wanted, _ = obligations(logical, plan, parts)
    talk = Communication(plan, parts, OPS)
    system = System(logical, plan, OPS, talk, schedule(talk), flat=True).collect(wanted)
    return {str(o) for o in prove_again(system, wanted, prove(system, wanted)).proved}


def root_of_a_piece(b: ProgramBuilder, right: bool) -> Tensor:
    """Four of six elements are positive, by their roots; the plan divides by all."""
    x, w = b.input("x", (2, 3)), b.input("w", (2, 3))
    piece = b.slice(b.reshape(x, shape=(6,)), dim=0, start=0, stop=4, name="piece")
    b.output(b.sum(b.rsqrt(piece, name="roots"), name="rs"), "metric", "rs")
    return w if right else again(b, w, x)


def test_a_piece_of_a_bucket_says_nothing_of_the_rest() -> None:
    logical, wrong = made(root_of_a_piece, True), made(root_of_a_piece, False)
    assert in_one_dimension(logical, single(wrong)) == set()


# -- axes that do not align ----------------------------------------------------------------------------------------------


def of_rows(b: ProgramBuilder | RankBuilder, x: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    """A number that depends on how a row is cut."""
    return b.sum(b.tanh(b.sum(b.reshape(x, shape=shape), dim=1)), name=name)


def cut_layers(right: bool) -> Program:
    """Every layer takes five elements of its row; one row is cut otherwise elsewhere, and other five have the same digits there."""
    b = tv.program("cut")
    total, found = b.input("w", ()), [(b.input(f"x{n}", (30,)), b.input(f"y{n}", (5,))) for n in range(6)]
    for n, shape in ((4, (2, 3, 5)), (3, (3, 2, 5))):
        total = b.add(total, of_rows(b, found[n][0], shape, f"cut{n}"))
    made = []
    for n, (x, y) in enumerate(found):
        start, stop = (15, 30) if right or n != 3 else (10, 20)
        piece = b.slice(b.slice(x, dim=0, start=start, stop=stop), dim=0, start=5, stop=10)
        made.append(deep(b, b.mul(piece, y), y))
    for t in made:
        total = b.add(total, b.sum(t))
    b.loss(total)
    return b.build()


def test_a_layer_whose_row_is_cut_otherwise_is_not_like_the_others() -> None:
    assert shown(cut_layers(True), cut_layers(True)) == {"loss"}
    assert shown(cut_layers(True), cut_layers(False)) == set()


def rows_of_six() -> Program:
    """Two rows that are cut into two and into three, and the fourth element of the second."""
    b = tv.program("rows of six")
    x, y = b.input("x", (6,)), b.input("y", (6,))
    b.output(of_rows(b, x, (2, 3), "xs"), "metric", "xs")
    b.output(of_rows(b, y, (3, 2), "ys"), "metric", "ys")
    b.loss(b.tanh(b.select(y, dim=0, index=3), name="loss"))
    return b.build()


def on_six_ranks(reports: int) -> Plan:
    """An element on every rank; one of them reports its own."""
    p = tv.plan("on six ranks", tv.Mesh(tp=6))
    for n in range(6):
        with p.ranks(tp=n) as r:
            x, y = r.input("x", (1,), "(tp)"), r.input("y", (1,), "(tp)")
            r.output(of_rows(r, r.all_gather(x, group="tp", name="x.all"), (2, 3), "xs"), "metric", "xs")
            r.output(of_rows(r, r.all_gather(y, group="tp", name="y.all"), (3, 2), "ys"), "metric", "ys")
            if n == reports:
                r.loss(r.tanh(r.reshape(y, shape=()), name="loss"))
    return p.build()


@pytest.mark.parametrize("rank", [3, 4])
def test_a_rank_holds_the_element_of_its_number(rank: int) -> None:
    """Expected: digits of a rank are those of the row that it holds an element of, not those of another row."""
    system, wanted = system_of(rows_of_six(), on_six_ranks(rank))
    found = {str(o) for o in prove_again(system, wanted, prove(system, wanted)).proved}
    assert ("loss" in found) == (rank == 3)


# ------------------------------------------------------------------------------------------------------------------------


def other_difference(b: ProgramBuilder, right: bool) -> Tensor:
    """1/(x − y) is ∞ where 1/−(y − x) is −∞."""
    v, x, y = three(b, *"vxy")
    d = b.sub(x, y, name="d") if right else b.neg(b.sub(y, x, name="dyx"), name="d")
    return b.tanh(b.div(v, d, name="q"), name="r")


@pytest.mark.parametrize("body", HIDDEN)
def test_what_no_point_shows_is_not_shown(body: Body) -> None:
    """Expected: the wrong plan's loss is not shown, and it is no PROVED."""
    logical, wrong = made(body, True), made(body, False)
    assert set(logical.sources) == set(wrong.sources)
    assert "loss" not in shown(logical, wrong)
    assert verify(logical, wrong, points=1).verdict != "PROVED"


def test_a_zero_of_the_other_sign() -> None:
    """Expected: not shown. Of which sign the zero is, no form says, so it is not shown against itself either."""
    assert "loss" not in shown(made(other_difference, True), made(other_difference, False))


# -- what stays shown ----------------------------------------------------------------------------------------------------


def by_a_choice(b: ProgramBuilder) -> Tensor:
    x, y, z, v = three(b, "x", "y", "z", "v")
    return b.div(v, b.where(b.gt(x, value=0.0), y, z, name="yz"), name="r")


def by_a_floor(b: ProgramBuilder) -> Tensor:
    x, v = three(b, "x", "v")
    return b.div(v, b.sqrt(b.clamp(b.sum(x, name="s"), min=1e-9, name="floor"), name="root"), name="r")


def by_halves(b: ProgramBuilder) -> Tensor:
    """All of the quotients are used, piece by piece."""
    x, w = b.input("x", (4, 3)), b.input("w", (4, 3))
    r = b.div(w, x, name="r")
    return b.mul(b.slice(r, dim=0, start=0, stop=2), b.slice(r, dim=0, start=2, stop=4), name="r2")


def of_a_square(b: ProgramBuilder) -> Tensor:
    (x,) = three(b, "x")
    return b.log(b.mul(x, x, name="xx"), name="log")


def of_a_peak(b: ProgramBuilder) -> Tensor:
    return b.exp(b.amax(masked(b), dim=1, name="peak"), name="e")


@pytest.mark.parametrize("body", [by_a_choice, by_a_floor, by_halves, of_a_square, of_a_peak])
def test_the_same_is_shown(body: Callable[[ProgramBuilder], Tensor]) -> None:
    """Expected: shown, as both programs need the same."""
    program = made(lambda b, _: body(b), True)
    assert shown(program, program) == {"loss"}


def in_vain(b: ProgramBuilder, used: bool) -> Tensor:
    """Both programs divide by x in vain; the plan then does so where it matters."""
    x, w = three(b, "x", "w")
    b.div(b.mul(w, x, name="unused.wx"), x, name="unused")
    return again(b, w, x) if used else w


def test_what_a_plan_makes_in_vain_says_nothing() -> None:
    """Expected: a quotient that nobody uses is no obstacle, and none that is used is let through by it."""
    logical = made(in_vain, False)
    assert shown(logical, logical) == {"loss"}
    assert shown(made(lambda b, _: three(b, "x", "w")[1], False), logical) == {"loss"}
    assert shown(logical, made(in_vain, True)) == set()
