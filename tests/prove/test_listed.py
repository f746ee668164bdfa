"""Small plans over listed axes: forms mean what they say, no wrong plan is proved, cuts by 2 here and by 3 there are no obstacle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest

import trainverify as tv
from prove.meaning import check_plan, check_program, system_of
from prove.operators import all_samples, one_op
from prove.random_programs import random_program
from prove.some_listed import some
from prove.wrong_plans import CASES
from trainverify.axes.listed import ListedAxes, Sealed
from trainverify.axes.structure import Axes, Axis
from trainverify.graph.lineage import Partial, Reduction, layout
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.prove.algebra.grids import Grids
from trainverify.prove.algebra.kernel import Kernel
from trainverify.prove.algebra.terms import Poly, Unsupported, scale
from trainverify.prove.listed import engine
from trainverify.prove.listed.claims import BlockClaim
from trainverify.prove.listed.engine import ListedProver, prove
from trainverify.prove.listed.forms import ListedForms
from trainverify.prove.listed.opened import Opened
from trainverify.prove.propose.pieces import pieces
from trainverify.verdicts import single, verify
from trainverify.zoo.llama import Config
from trainverify.zoo.parallel import Degrees, llama_plan, llama_step

# -- forms mean what they say -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_random_programs_over_axes_listed_at_random(share: float) -> None:
    tensors = without = 0
    for seed in range(1000, 1040):
        found = check_program(random_program(seed), seed, list_some=some(seed, share))
        assert not found.wrong, (seed, found.wrong)
        tensors += found.tensors
        without += len(found.without)
    assert without < tensors / 3


@pytest.mark.parametrize("part", range(4))
def test_every_operator_with_everything_listed(part: int) -> None:
    with_form = 0
    for name, i, sample, grad in list(all_samples())[part::4]:
        made = one_op(name, sample, i, grad)
        if made is not None:
            found = check_program(made[0], i, made[1], list_some=some(i, 0.7))
            assert not found.wrong, found.wrong
            with_form += found.tensors
    assert with_form > 100


def test_ranks_of_a_llama_plan() -> None:
    config = Config(layers=1, hidden=4, heads=2, kv_heads=2, ffn=2, vocabulary=4, sequence=2)
    config, how = replace(config, batch=4), Degrees(dp=2, tp=2, microbatches=2)
    found = check_plan(llama_step(config), llama_plan(config, how), 0, listed=True)
    assert found.tensors > 300
    assert not found.wrong, found.wrong


# -- wrong plans ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_wrong_plan_is_not_proved(name: str) -> None:
    logical, plan = CASES[name]()
    system, wanted = system_of(logical, single(plan) if isinstance(plan, Program) else plan)
    assert prove(system, wanted, pieces).proved == [], name


def two_and_three(slip: str = "") -> tuple[Program, Plan]:
    """12 columns, cut by 2 for the activation, by 3 for the norm, joined and cut again; `slip` is a mistake."""
    b = tv.program("l")
    x, w = b.input("x", (5, 12)), b.input("w", (12,))
    y = b.softmax(b.mul(b.tanh(x), w), dim=-1)
    b.loss(b.sum(b.mul(y, b.input("v", (5, 12))), name="loss"))
    p = tv.plan("p", tv.Mesh(tp=2, ep=3))
    with p.ranks() as r:
        x = r.input("x", (5, 6), "b (tp k)")
        w, v = r.input("w", (4,), "(ep k)"), r.input("v", (5, 4), "b (ep k)")
        whole = r.all_gather(r.tanh(x), group=r.group_of("tp"), dim=1)
        start = r.each(lambda at: 4 * ((at["ep"] + (slip == "slice")) % 3))
        mine = r.slice(whole, dim=1, start=start, stop=r.each(lambda at: 4 * ((at["ep"] + (slip == "slice")) % 3) + 4))
        z = r.mul(mine, w)
        top = r.amax(z, dim=-1, keepdim=True)
        top = top if slip == "maximum" else r.all_reduce(top, group=r.group_of("ep"), op="max")
        e = r.exp(r.sub(z, top))
        total = r.all_reduce(r.sum(e, dim=-1, keepdim=True), group=r.group_of("tp" if slip == "group" else "ep"))
        part = r.sum(r.mul(r.div(e, total), v))
        r.loss(r.all_reduce(part, group=r.group_of("ep"), name="loss"))
    return b.build(), p.build()


def test_cut_by_two_here_and_by_three_there_is_proved() -> None:
    logical, plan = two_and_three()
    report = verify(logical, plan)
    assert report.verdict == "PROVED", report.reason
    assert {s.engine for s in report.obligations} == {"algebra, listed"}
    assert {s.scope for s in report.obligations} == {"full size"}


@pytest.mark.parametrize("slip", ["slice", "maximum", "group"])
def test_cut_by_two_here_and_by_three_there_with_a_mistake_is_refuted(slip: str) -> None:
    logical, plan = two_and_three(slip)
    system, wanted = system_of(logical, plan)
    assert prove(system, wanted, pieces).proved == []
    report = verify(logical, plan)
    assert report.verdict == "REFUTED", report.reason
    assert report.difference is not None
    assert report.difference.obligation.output.tensor == "loss"


def vocabulary(start: int = 4, causal: int = 0) -> tuple[Program, Plan]:
    """A table of 12 rows cut by 3, targets one-hot over classes cut by 2, and a causal mask over 6 positions cut by 3."""
    b = tv.program("l")
    ids, table = b.input("ids", (6,), dtype="i64", ids=12), b.parameter("table", (12, 4))
    h = b.embedding(ids, table)
    q = b.reshape(h, shape=(1, 1, 6, 4))
    mixed = b.attention(q, q, q, is_causal=True)[0]
    b.loss(b.sum(b.square(b.reshape(mixed, shape=(6, 4))), name="loss"))
    p = tv.plan("p", tv.Mesh(tp=3, dp=2))
    with p.ranks() as r:
        ids, table = r.input("ids", (6,), "t", dtype="i64", ids=12), r.parameter("table", (4, 4), "(tp v) k")
        h = r.embedding(ids, table, start=r.each(lambda at: start * at["tp"]))
        h = r.all_reduce(h, group=r.group_of("tp"))
        q = r.reshape(h, shape=(1, 1, 6, 4))
        first = r.each(lambda at: 2 * at["tp"])
        mine = r.slice(q, dim=2, start=first, stop=r.each(lambda at: 2 * at["tp"] + 2))
        mixed = r.attention(mine, q, q, is_causal=True, query_offset=r.each(lambda at: 2 * at["tp"] + causal))[0]
        half = r.each(lambda at: 2 * at["dp"])
        part = r.slice(mixed, dim=3, start=half, stop=r.each(lambda at: 2 * at["dp"] + 2))
        r.loss(r.all_reduce(r.all_reduce(r.sum(r.square(part)), group=r.group_of("tp")), group=r.group_of("dp"), name="loss"))
    return b.build(), p.build()


def test_labels_and_masks_are_listed() -> None:
    logical, plan = vocabulary()
    system, wanted = system_of(logical, plan)
    proof = prove(system, wanted, pieces)
    assert not proof.failed, proof.failed


@pytest.mark.parametrize("wrong", [{"start": 3}, {"causal": 1}, {"causal": 2}])
def test_a_wrong_row_or_mask_is_not_proved(wrong: dict[str, int]) -> None:
    system, wanted = system_of(*vocabulary(**wrong))
    assert prove(system, wanted, pieces).proved == []


def shares(op: Reduction = "sum", times: int = 1) -> tuple[Program, Plan]:
    """A claim about summands on three ranks."""
    b = tv.program("l")
    b.loss(b.sum(b.sum(b.input("x", (6, 4)), dim=0, name="y"), name="loss"))
    p = tv.plan("p", tv.Mesh(dp=3))
    with p.ranks() as r:
        mine = r.mul(r.sum(r.input("x", (2, 4), "(dp b) k"), dim=0), value=times, name="mine")
        y = r.mul(r.all_reduce(mine, group=r.group_of("dp")), value=Fraction(1, times))
        r.loss(r.sum(y, name="loss"))
    made = p.build()
    return b.build(), replace(made, lineage=(*made.lineage, layout("y", {"dp": Partial(op)}, "mine")))


@pytest.mark.parametrize(("op", "times"), [("sum", 1), ("avg", 3)])
def test_a_claim_about_summands_is_proved_rank_by_rank(op: Reduction, times: int) -> None:
    system, wanted = system_of(*shares(op, times))
    assert not prove(system, wanted, pieces).failed


@pytest.mark.parametrize(("op", "times"), [("sum", 3), ("avg", 1), ("sum", 2)])
def test_a_wrong_claim_about_summands_is_not_proved(op: Reduction, times: int) -> None:
    system, wanted = system_of(*shares(op, times))
    assert [o.output.role for o in prove(system, wanted, pieces).proved] == ["loss"]


# -- parts ------------------------------------------------------------------------------------------------------------


def test_guesses_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block of the plan is said to be the wanted one: what is not so is not shown."""
    logical, plan = two_and_three("maximum")
    system, wanted = system_of(logical, plan)

    class Liar:
        """Of every logical tensor the first blocks."""

        def __init__(self, grid):  # type: ignore[no-untyped-def]
            self.grid = grid
            self.blocks: list[BlockClaim] = []

        def add(self, name, dims, values=None):  # type: ignore[no-untyped-def]
            grid, number = self.grid(dims), len({c.tensor for c in self.blocks})
            for k in list(grid.blocks())[:3]:
                self.blocks.append(BlockClaim((), number, k, Fraction(1), tuple(range(len(grid.active(k))))))
            return number

        def steps(self, op, nodes):  # type: ignore[no-untyped-def]
            return []

        def of(self, rank, tensor, dims, blocks):  # type: ignore[no-untyped-def]
            for key in blocks:
                size = len(self.grid(dims).active(key))
                yield from (replace(c, block=key) for c in self.blocks if len(c.order) == size)

    monkeypatch.setattr(engine, "LOST", 10**9)
    made = ListedProver(system.listed(), lambda system, grid: Liar(grid))
    assert made.prove(wanted).proved == []
    assert made._spoken


def test_too_many_blocks_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    system, wanted = system_of(*two_and_three())
    monkeypatch.setattr(engine, "BLOCKS", 50)
    proof = prove(system, wanted, pieces)
    assert not proof.proved
    assert set(proof.failed) == set(wanted)
    assert all("too many to list" in why for why in proof.failed.values())


def matrices() -> tuple[Kernel, Callable[..., Poly]]:
    k = Kernel()

    def x(name: str, *idx: int) -> Poly:
        return k.input(name, tuple(4 for _ in idx), idx)

    return k, x


def test_sums_are_written_out() -> None:
    k, x = matrices()
    a, b, f = x("a", -1, -9), x("b", -1, -9), x("f", -9)
    whole = k.sum(k.times(f, k.single(k.add(a, b))), {-9: 4})
    parts = k.add(k.sum(k.times(f, a), {-9: 4}), k.sum(k.times(f, b), {-9: 4}))
    assert Opened(k).vanishes(k.add(whole, scale(parts, -1)))
    assert not Opened(k).vanishes(k.add(whole, scale(parts, -2)))


def test_squares_of_sums_are_not_sums_of_squares() -> None:
    k, x = matrices()
    a, b = x("a", -1), x("b", -1)
    square = k.power(k.single(k.add(a, b)), 2)
    assert not Opened(k).vanishes(k.add(square, scale(k.add(k.power(a, 2), k.power(b, 2)), -1)))
    cross = k.add(k.power(a, 2), k.power(b, 2), scale(k.times(a, b), 2))
    assert Opened(k).vanishes(k.add(square, scale(cross, -1)))


def test_a_sum_within_a_sum_keeps_its_variables_apart() -> None:
    k, x = matrices()
    inner = k.sum(k.times(x("g", -1, -9), x("h", -9)), {-9: 4})  # Σ_j g[i,j]·h[j]
    whole = k.sum(k.times(x("h", -1), inner), {-1: 4})  # Σ_i h[i]·Σ_j g[i,j]·h[j]
    diagonal = k.sum(k.times(x("h", -1), k.times(x("g", -1, -1), x("h", -1))), {-1: 4})
    assert not Opened(k).vanishes(k.add(whole, scale(diagonal, -1)))


def listed_forms() -> ListedForms:
    return ListedForms(Kernel(), ListedAxes())


def test_maxima_of_several_values() -> None:
    forms = listed_forms()
    k = forms.kernel
    a, b, c = (k.input(n, (), ()) for n in "abc")
    assert forms._largest([a, forms._largest([b, c])]) == forms._largest([forms._largest([c, a]), b])
    assert forms._largest([a, b]) != forms._largest([a, b, c])
    assert forms._largest([a, a]) == a
    assert forms._largest([a, {}]) != a


def test_a_maximum_of_masked_pieces_only_is_not_taken() -> None:
    forms = listed_forms()
    k = forms.kernel
    mask = k.input("mask", (4,), (-1,), indicator=True, nonnegative=True)
    masked = k.add(k.input("s", (4,), (-1,)), k.fn("log_indicator", mask))
    other = k.add(k.input("t", (4,), (-1,)), k.fn("log_indicator", mask))
    with pytest.raises(Unsupported):
        forms._largest([masked, other])
    assert forms._largest([masked, k.input("t", (4,), (-1,))])


def test_where_two_factorisations_differ_the_digits_between_are_listed() -> None:
    axes = ListedAxes()
    left, right = [Axis(4), Axis(6)], [Axis(6), Axis(4)]
    axes.align(left, right)
    assert [(a.size, axes.listed(a)) for a in axes.leaves(left)] == [(2, False), (2, True), (3, True), (2, False)]
    assert [(a.size, axes.listed(a)) for a in axes.leaves(right)] == [(2, False), (3, True), (2, True), (2, False)]
    assert axes.leaves(left)[0] is axes.leaves(right)[0]
    assert axes.leaves(left)[3] is axes.leaves(right)[3]
    assert not axes.clashes


def test_pieces_of_an_axis_share_its_fast_digits() -> None:
    axes, whole = ListedAxes(), Axis(24)
    piece = axes.piece(whole, 8, 12)
    assert [(a.size, axes.listed(a)) for a in axes.leaves([whole])] == [(3, True), (2, True), (4, False)]
    assert [(a.size, axes.listed(a)) for a in axes.leaves([piece])] == [(3, True), (4, False)]
    assert axes.leaves([piece])[1] is axes.leaves([whole])[2]
    axes.sealed = True
    with pytest.raises(Sealed):
        axes.piece(whole, 2, 3)


def test_grids_do_not_mix_up_axes_that_are_gone() -> None:
    axes = Axes()
    grids = Grids(axes)
    atoms = [Axis(n) for n in range(2, 30)]
    for n in range(2000):
        made = axes.product([atoms[n % 28], atoms[(n * 7 + 3) % 28]])
        assert [leaf.axis.size for leaf in grids.of([made]).leaves] == [a.size for a in axes.leaves([made])]
