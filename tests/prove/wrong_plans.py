"""Plans that are wrong in ways that a prover may overlook."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import trainverify as tv
from trainverify.build.plan import RankBuilder
from trainverify.graph.lineage import layout
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.verdicts import single

Case = Callable[[], tuple[Program, Plan]]
CASES: dict[str, Case] = {}


def wrong(make: Case) -> Case:
    CASES[make.__name__] = make
    return make


# -- folding ranks ---------------------------------------------------------------------------------------------------


@wrong
def a_local_tensor_holds_another_logical_one_on_the_second_rank() -> tuple[Program, Plan]:
    b = tv.program("l")
    x, w = b.input("x", (4, 3)), b.input("w0", (3,))
    b.input("w1", (3,))
    b.loss(b.sum(b.mul(x, w), name="loss"))
    p = tv.plan("p", tv.Mesh(dp=2))
    with p.ranks() as r:
        x = r.input("x", (2, 3), "(dp b) k")
        w = r._source(r._inputs, "w", (3,), "f32", None)
        r.loss(r.all_reduce(r.sum(r.mul(x, w)), group="dp", name="loss"))
    made = p.build()
    held = (layout("w0", "k", "w", {"dp": 0}), layout("w1", "k", "w", {"dp": 1}))
    return b.build(), replace(made, lineage=(*made.lineage, *held))


@wrong
def halves_of_the_batch_declared_rank_by_rank() -> tuple[Program, Plan]:
    b = tv.program("l")
    x = b.input("x", (4, 3))
    b.loss(b.mul(b.sum(b.slice(x, dim=0, start=0, stop=2)), value=2.0, name="loss"))
    p = tv.plan("p", tv.Mesh(dp=2))
    with p.ranks() as r:
        x = r._source(r._inputs, "x", (2, 3), "f32", None)
        r.loss(r.all_reduce(r.sum(x), group="dp", name="loss"))
    held = tuple(layout("x", "(h b) k", "x", {"dp": i}, {"h": (i, 2)}) for i in range(2))
    return b.build(), replace(p.build(), lineage=held)


@wrong
def one_of_two_groups_in_another_order() -> tuple[Program, Plan]:
    b = tv.program("l")
    b.loss(b.sum(b.mul(b.input("x", (4, 6)), b.input("w", (4, 6))), name="loss"))
    p = tv.plan("p", tv.Mesh(dp=2, tp=2))
    p.group("g0", (0, 1))
    p.group("g1", (3, 2))
    with p.ranks() as r:
        x, w = r.input("x", (2, 3), "(dp b) (tp k)"), r.input("w", (2, 6), "(dp b) k")
        whole = r.all_gather(x, group=r.each_rank(lambda k: "g0" if k < 2 else "g1", "g"), dim=1)
        r.loss(r.all_reduce(r.sum(r.mul(whole, w)), group="dp", name="loss"))
    return b.build(), p.build()


@wrong
def groups_along_one_axis_here_and_another_there() -> tuple[Program, Plan]:
    b = tv.program("l")
    s = b.sum(b.input("x", (2, 2, 2, 3)), dim=1)
    b.loss(b.sum(b.mul(s, s), name="loss"))
    p = tv.plan("p", tv.Mesh(a=2, b=2, c=2))
    with p.ranks() as r:
        x = r.input("x", (1, 1, 1, 3), "a b c k")
        group = r.each_rank(lambda k: p.mesh_group(k, ("b",) if p.mesh.coordinates(k)["a"] == 0 else ("c",)), "g")
        s = r.all_reduce(x, group=group)
        r.loss(r.all_reduce(r.sum(r.mul(s, s)), group=("a", "c"), name="loss"))
    return b.build(), p.build()


@wrong
def one_group_sums_and_another_averages() -> tuple[Program, Plan]:
    b = tv.program("l")
    y = b.sum(b.input("x", (2, 2, 3)), dim=1)
    b.loss(b.sum(b.mul(y, y), name="loss"))
    p = tv.plan("p", tv.Mesh(dp=2, tp=2))
    with p.ranks() as r:
        x = r.input("x", (1, 1, 3), "dp tp k")
        s = r.all_reduce(x, group="tp", op=r.each_rank(lambda k: "sum" if k < 2 else "avg", "op"))
        r.loss(r.all_reduce(r.sum(r.mul(s, s)), group="dp", name="loss"))
    return b.build(), p.build()


def _unlike_stages(group: Callable[[RankBuilder], object]) -> tuple[Program, Plan]:
    """Ranks y=0 take elements 0, 1, 3 and add what ranks y=1 hold, which is wrong; y=0 does not fold over x, y=1 alone would."""
    b = tv.program("l")
    a = b.input("a", (5,))
    b.input("c", (3,))
    first, second, last = (b.sum(b.slice(a, dim=0, start=n, stop=n + 1)) for n in (0, 1, 3))
    b.loss(b.add(b.add(first, second), last, name="loss"))
    p = tv.plan("p", tv.Mesh(x=3, y=2))
    for n in range(3):
        p.group(f"back.{n}", (2 * n + 1, 2 * n))
    with p.ranks(y=0) as r:
        a = r.input("a", (5,), "k")
        start, stop = (r.each(lambda at, n=n: (0, 1, 3)[at["x"]] + n) for n in range(2))
        added = r.all_reduce(r.sum(r.slice(a, dim=0, start=start, stop=stop)), group=group(r))
        r.loss(r.all_reduce(added, group="x", name="loss"))
    with p.ranks(y=1) as r:
        r.all_reduce(r.sum(r.input("c", (1,), "(x k)")), group=group(r))
    return b.build(), p.build()


@wrong
def a_group_of_ranks_that_do_not_fold_and_one_that_does() -> tuple[Program, Plan]:
    return _unlike_stages(lambda r: "y")


@wrong
def the_same_with_groups_in_another_order() -> tuple[Program, Plan]:
    return _unlike_stages(lambda r: r.each_rank(lambda k: f"back.{k // 2}", "back"))


# -- definedness: the plan has no number where the logical program has one ---------------------------------------------


def masked(change: Callable[[tv.ProgramBuilder, dict[str, tv.Tensor]], tv.Tensor]) -> Program:
    """Σ of a function of x, y, z and a mask."""
    b = tv.program("l")
    t = {n: b.input(n, (2, 3)) for n in "xyz"} | {"m": b.input("m", (2, 3), dtype="bool")}
    b.loss(b.sum(change(b, t), name="loss"))
    return b.build()


def against(
    logical: Callable[[tv.ProgramBuilder, dict[str, tv.Tensor]], tv.Tensor],
    plan: Callable[[tv.ProgramBuilder, dict[str, tv.Tensor]], tv.Tensor],
) -> tuple[Program, Plan]:
    return masked(logical), single(masked(plan))


@wrong
def divides_by_another_element() -> tuple[Program, Plan]:
    def make(more: bool) -> Program:
        b = tv.program("l")
        x, a = b.input("x", (2,)), b.input("a", (1,))
        y = b.div(a, b.slice(x, dim=0, start=0, stop=1))
        other = b.slice(x, dim=0, start=1, stop=2)
        b.loss(b.sum(b.mul(y, b.div(other, other)) if more else y, name="loss"))
        return b.build()

    return make(False), single(make(True))


@wrong
def infinity_minus_infinity() -> tuple[Program, Plan]:
    def bad(b, t):
        s = b.apply_mask(t["x"], t["m"])
        return b.add(t["y"], b.sub(s, s))

    return against(lambda b, t: t["y"], bad)


@wrong
def zero_times_infinity() -> tuple[Program, Plan]:
    return against(lambda b, t: t["y"], lambda b, t: b.add(t["y"], b.mul(b.apply_mask(t["x"], t["m"]), value=0.0)))


@wrong
def infinity_deep_in_a_sum_times_something() -> tuple[Program, Plan]:
    def bad(b, t):
        s = b.add(b.apply_mask(t["x"], t["m"]), t["z"])
        u = b.mul(b.add(s, t["y"]), t["z"])
        return b.add(t["y"], b.sub(u, u))

    return against(lambda b, t: t["y"], bad)


@wrong
def shifted_by_the_maximum_of_a_row_that_may_be_masked() -> tuple[Program, Plan]:
    def bad(b, t):
        s = b.apply_mask(t["x"], t["m"])
        shift = b.amax(s, dim=1, keepdim=True)
        return b.mul(b.exp(b.sub(s, shift)), b.exp(shift))

    return against(lambda b, t: b.exp(b.apply_mask(t["x"], t["m"])), bad)


@wrong
def roots_of_factors() -> tuple[Program, Plan]:
    """√(x·y) is there where both are negative; √x − √x is not."""

    def root(b, x):
        return b.pow(x, exponent=0.5)

    def bad(b, t):
        return b.add(root(b, b.mul(t["x"], t["y"])), b.sub(root(b, t["x"]), root(b, t["x"])))

    return against(lambda b, t: root(b, b.mul(t["x"], t["y"])), bad)


@wrong
def log_of_factors() -> tuple[Program, Plan]:
    def bad(b, t):
        return b.add(b.log(b.mul(t["x"], t["y"])), b.sub(b.log(t["x"]), b.log(t["x"])))

    return against(lambda b, t: b.log(b.mul(t["x"], t["y"])), bad)


@wrong
def a_mask_as_divisor() -> tuple[Program, Plan]:
    def bad(b, t):
        m = b.to(t["m"], dtype="f32")
        return b.mul(t["y"], b.div(m, m))

    return against(lambda b, t: t["y"], bad)


@wrong
def square_root_of_a_square_is_no_inverse() -> tuple[Program, Plan]:
    return against(lambda b, t: b.div(t["y"], t["x"]), lambda b, t: b.mul(t["y"], b.pow(b.mul(t["x"], t["x"]), exponent=-0.5)))


@wrong
def a_rank_without_valid_tokens() -> tuple[Program, Plan]:
    """The mean over local tokens, weighted by their share, is not a number on a rank that has none."""
    b = tv.program("l")
    x, i = b.input("x", (4,)), b.input("i", (4,), dtype="i64", ids=5, ignore=-100)
    v = b.to(b.ne(i, value=-100), dtype="f32")
    b.loss(b.div(b.sum(b.mul(x, v)), b.sum(v), name="loss"))
    p = tv.plan("p", tv.Mesh(dp=2))
    with p.ranks() as r:
        x, i = r.input("x", (2,), "(dp b)"), r.input("i", (2,), "(dp b)", dtype="i64", ids=5, ignore=-100)
        v = r.to(r.ne(i, value=-100), dtype="f32")
        mine = r.sum(v)
        mean = r.div(r.sum(r.mul(x, v)), mine)
        share = r.div(mine, r.all_reduce(mine, group="dp"))
        r.loss(r.all_reduce(r.mul(mean, share), group="dp", name="loss"))
    return b.build(), p.build()


# -- integers --------------------------------------------------------------------------------------------------------


@wrong
def diagonal_of_a_one_hot() -> tuple[Program, Plan]:
    def make(count: bool) -> Program:
        b = tv.program("l")
        i, x = b.input("i", (3,), dtype="i64", ids=3), b.input("x", ())
        hot = b.to(b.one_hot(i, num_classes=3), dtype="f32")
        eye = b.to(b.one_hot(b.arange(stop=3), num_classes=3), dtype="f32")
        b.loss(b.sum(b.mul(x, b.sum(b.mul(hot, eye))) if count else x, name="loss"))
        return b.build()

    return make(False), single(make(True))


@wrong
def a_value_to_ignore_that_is_an_id() -> tuple[Program, Plan]:
    def make(hot: bool) -> Program:
        b = tv.program("l")
        i, x = b.input("i", (3,), dtype="i64", ids=3, ignore=1), b.input("x", (3,))
        known = b.sum(b.to(b.one_hot(i, num_classes=3), dtype="f32"), dim=1) if hot else b.to(b.ne(i, value=1), dtype="f32")
        b.loss(b.sum(b.mul(x, known), name="loss"))
        return b.build()

    return make(False), single(make(True))


@wrong
def all_labels_count_although_some_are_ignored() -> tuple[Program, Plan]:
    def make(hot: bool) -> Program:
        b = tv.program("l")
        i, x = b.input("i", (3,), dtype="i64", ids=4, ignore=-100), b.input("x", (3,))
        known = b.sum(b.to(b.one_hot(i, num_classes=4), dtype="f32"), dim=1)
        b.loss(b.sum(b.mul(x, known) if hot else x, name="loss"))
        return b.build()

    return make(False), single(make(True))


@wrong
def positions_in_a_row_of_another_order() -> tuple[Program, Plan]:
    def make(turned: bool) -> Program:
        b = tv.program("l")
        x, w = b.input("x", (2, 3)), b.input("w", (6,))
        row = b.reshape(b.transpose(x) if turned else x, shape=(6,))
        b.loss(b.sum(b.mul(b.to(b.argsort(row), dtype="f32"), w), name="loss"))
        return b.build()

    return make(False), single(make(True))


@wrong
def padding_of_another_value_on_one_rank() -> tuple[Program, Plan]:
    b = tv.program("l")
    x = b.input("x", (2, 2, 2))
    b.loss(b.sum(b.mul(x, x), name="loss"))
    p = tv.plan("p", tv.Mesh(tp=2))
    with p.ranks() as r:
        y = r.pad(r.input("x", (1, 2, 2), "tp k j"), pads=(0, 1), value=r.each(lambda at: 5 * at["tp"]))
        r.loss(r.all_reduce(r.sum(r.mul(y, y)), group="tp", name="loss"))
    return b.build(), p.build()


@wrong
def inputs_named_like_markers() -> tuple[Program, Plan]:
    """max(p, q) is a function of marked arguments; an input must not pass for a mark."""

    def make(other: bool) -> Program:
        b = tv.program("l")
        p, q = b.input("argument 0", ()), b.input("argument 1", ())
        one = b.mul(p, value=1.0)
        two = b.mul(q, value=1.0)
        b.loss(b.maximum(b.mul(two, value=0.5), b.mul(one, value=1.5), name="loss") if other else b.maximum(two, one, name="loss"))
        return b.build()

    return make(False), single(make(True))
