"""Counts as literals at real sizes: correct plans are PROVED, or left open for a reason that is not the size; wrong ones are REFUTED."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest

import trainverify as tv

Builder = Any
Tensor = Any


def verdict(logical: tv.Program, plan: tv.Plan) -> str:
    report = tv.verify(logical, plan)
    return report.verdict


def assert_proved_or_open(logical: tv.Program, plan: tv.Plan) -> None:
    """Correct; where there is no proof, evaluation agrees."""
    report = tv.verify(logical, plan)
    assert report.verdict == "PROVED" or (report.verdict == "UNKNOWN" and "agreed on 3 random points" in report.reason), report.reason


# -- plain data parallelism: the ranks as a literal ----------------------------------------------------------------------


def plain(b: Builder, x: Tensor, w: Tensor, plan: bool) -> Tensor:
    return b.square(b.tanh(b.linear(x, w)))


def shifted(b: Builder, x: Tensor, w: Tensor, plan: bool) -> Tensor:
    """The gradient is the same on all ranks."""
    return b.add(x, b.mean(w, dim=0))


def left_open(b: Builder, x: Tensor, w: Tensor, plan: bool) -> Tensor:
    """relu; in the plan as a maximum, which no law of the algebra covers."""
    y = b.add(x, b.mean(w, dim=0))
    return b.maximum(y, b.mul(y, value=0)) if plan else b.relu(y)


Body = Callable[[Builder, Tensor, Tensor, bool], Tensor]


def data_parallel(world: int, divide: Callable[[Builder, Tensor], Tensor], body: Body = plain, rows: int = 3) -> tuple[tv.Program, tv.Plan]:
    b = tv.program("step")
    x, w = b.input("x", (world * rows, 2)), b.parameter("w", (5, 2))
    b.loss(b.mean(body(b, x, w, False), name="loss"))
    logical = tv.complete(b.build(), tv.SGD(lr=0.5))
    p = tv.plan("step", tv.Mesh(dp=world))
    with p.ranks() as r:
        x, w = r.input("x", (rows, 2), "(dp b) k"), r.parameter("w", (5, 2), "o k")
        loss = r.mean(body(r, x, w, True), name="loss.local")
        r.backward(loss)
        r.phase = "optimizer"
        r.loss(divide(r, loss))
        grad = divide(r, r.gradient(w))
        r.output(grad, "gradient", "w")
        r.update(w, r.sgd(w, grad, lr=0.5))
    return logical, p.build()


def summed(count: Any) -> Callable[[Builder, Tensor], Tensor]:
    return lambda r, x: r.div(r.all_reduce(x, group="dp"), value=count)


def averaged(r: Builder, x: Tensor) -> Tensor:
    return r.all_reduce(x, group="dp", op="avg")


def shared(count: int) -> Callable[[Builder, Tensor], Tensor]:
    return lambda r, x: r.mul(r.all_reduce(x, group="dp"), value=Fraction(1, count))


MANY = (64, 65, 8192, *(pytest.param(n, marks=pytest.mark.long) for n in (72, 96, 128)))
both = pytest.mark.parametrize("body", [plain, shifted])


@both
@pytest.mark.parametrize("world", MANY)
def test_the_ranks_as_a_literal_are_proved(world: int, body: Body) -> None:
    assert verdict(*data_parallel(world, summed(world), body)) == "PROVED"
    assert verdict(*data_parallel(world, summed(float(world)), body)) == "PROVED"
    assert verdict(*data_parallel(world, shared(world), body)) == "PROVED"


@both
@pytest.mark.parametrize("world", MANY)
@pytest.mark.parametrize("off", [-1, 1])
def test_one_rank_more_or_less_is_refuted(world: int, off: int, body: Body) -> None:
    assert verdict(*data_parallel(world, summed(world + off), body)) == "REFUTED"


@both
@pytest.mark.parametrize("world", MANY)
def test_a_collective_that_averages_is_proved(world: int, body: Body) -> None:
    assert verdict(*data_parallel(world, averaged, body)) == "PROVED"


@both
@pytest.mark.parametrize("world", MANY)
def test_divided_twice_or_not_at_all_is_refuted(world: int, body: Body) -> None:
    assert verdict(*data_parallel(world, lambda r, x: r.div(averaged(r, x), value=world), body)) == "REFUTED"
    assert verdict(*data_parallel(world, lambda r, x: r.all_reduce(x, group="dp"), body)) == "REFUTED"


@pytest.mark.parametrize("world", MANY)
def test_with_an_op_that_no_law_covers_it_is_left_open(world: int) -> None:
    for divide in (summed(world), averaged):
        report = tv.verify(*data_parallel(world, divide, left_open))
        assert report.verdict == "UNKNOWN", report.reason
        assert "agreed on 3 random points" in report.reason


@pytest.mark.parametrize("world", MANY)
def test_with_an_op_that_no_law_covers_a_wrong_count_is_refuted(world: int) -> None:
    assert verdict(*data_parallel(world, summed(world - 1), left_open)) == "REFUTED"
    assert verdict(*data_parallel(world, lambda r, x: r.div(averaged(r, x), value=2), left_open)) == "REFUTED"


# -- multiples of the rank -----------------------------------------------------------------------------------------------


def turned(world: int, chunk: int, offset: Callable[[int], int]) -> tuple[tv.Program, tv.Plan]:
    """Positions arange(chunk) + offset of the rank, in a rotation."""
    b = tv.program("turned")
    at = b.to(b.arange(stop=world * chunk), dtype="f32")
    b.loss(b.sum(b.mul(b.input("x", (world * chunk, 3)), b.unsqueeze(b.cos(b.mul(at, value=0.3)), dim=1)), name="loss"))
    p = tv.plan("turned", tv.Mesh(cp=world))
    with p.ranks() as r:
        x = r.input("x", (chunk, 3), "(cp s) k")
        at = r.to(r.add(r.arange(stop=chunk), value=r.each_rank(offset)), dtype="f32")
        r.loss(r.all_reduce(r.sum(r.mul(x, r.unsqueeze(r.cos(r.mul(at, value=0.3)), dim=1))), group="cp", name="loss"))
    return b.build(), p.build()


@pytest.mark.parametrize("chunk", [1, 2, 64])
def test_positions_of_65_ranks_are_proved(chunk: int) -> None:
    assert verdict(*turned(65, chunk, lambda i: i * chunk)) == "PROVED"


@pytest.mark.parametrize("chunk", [1, 2, 64])
def test_wrong_positions_of_65_ranks_are_refuted(chunk: int) -> None:
    assert verdict(*turned(65, chunk, lambda i: i * chunk + 1)) == "REFUTED"
    assert verdict(*turned(65, chunk, lambda i: i * (chunk + 1))) == "REFUTED"
    assert verdict(*turned(65, chunk, lambda i: i * chunk + (i == 40))) == "REFUTED"


def apart(b: Builder, queries: int, keys: int, offset: Any) -> Tensor:
    """k − q ≤ offset."""
    return b.le(b.sub(b.unsqueeze(b.arange(stop=keys), dim=0), b.unsqueeze(b.arange(stop=queries), dim=1)), value=offset)


def operator(b: Builder, queries: int, keys: int, offset: Any) -> Tensor:
    return b.create_mask(queries=queries, keys=keys, query_offset=offset)


def causal(
    world: int, chunk: int, offset: Callable[[int], int], mask: Callable[[Builder, int, int, Any], Tensor] = apart
) -> tuple[tv.Program, tv.Plan]:
    def attended(b: Builder, q: Tensor, k: Tensor, begin: Any) -> Tensor:
        scores = b.matmul(q, b.transpose(k))
        return b.sum(b.square(b.matmul(b.softmax(b.apply_mask(scores, mask(b, scores.shape[0], scores.shape[1], begin))), k)))

    b = tv.program("causal")
    total = world * chunk
    b.loss(attended(b, b.input("q", (total, 3)), b.input("k", (total, 3)), 0))
    p = tv.plan("causal", tv.Mesh(cp=world))
    with p.ranks() as r:
        q, k = r.input("q", (chunk, 3), "(cp s) h"), r.input("k", (total, 3), "s h")
        r.loss(r.all_reduce(attended(r, q, k, r.each_rank(offset)), group="cp", name="loss"))
    return b.build(), p.build()


@pytest.mark.parametrize("chunk", [1, 2])
def test_a_causal_mask_on_72_ranks_is_proved(chunk: int) -> None:
    assert verdict(*causal(72, chunk, lambda i: i * chunk, operator)) == "PROVED"
    assert verdict(*causal(72, chunk, lambda i: i * chunk)) == "PROVED"


@pytest.mark.parametrize("chunk", [1, 2])
def test_a_wrong_causal_mask_on_72_ranks_is_refuted(chunk: int) -> None:
    for mask in (apart, operator):
        assert verdict(*causal(72, chunk, lambda i: i * chunk + 1, mask)) == "REFUTED"
        assert verdict(*causal(72, chunk, lambda i: i * chunk + (i == 30), mask)) == "REFUTED"
        assert verdict(*causal(72, chunk, lambda i: 0, mask)) == "REFUTED"


def biased(own: Callable[[Builder, Tensor], Tensor]) -> tuple[tv.Program, tv.Plan]:
    """A contraction cut over 72 ranks; `own` is what a rank adds of the bias."""
    b = tv.program("bias")
    y = b.add(b.matmul(b.input("x", (2, 144)), b.input("w", (144, 3))), b.input("b", (3,)))
    b.loss(b.sum(b.square(y), name="loss"))
    p = tv.plan("bias", tv.Mesh(tp=72))
    with p.ranks() as r:
        x, w, bias = r.input("x", (2, 2), "b (tp k)"), r.input("w", (2, 3), "(tp k) o"), r.input("b", (3,), "o")
        y = r.all_reduce(r.add(r.matmul(x, w), own(r, bias)), group="tp")
        r.loss(r.sum(r.square(y), name="loss"))
    return b.build(), p.build()


def column(of: Callable[[int], float]) -> Callable[[Builder, Tensor], Tensor]:
    return lambda r, bias: r.mul(bias, value=r.each_rank(of))


def compared(home: int) -> Callable[[Builder, Tensor], Tensor]:
    def own(r: Builder, bias: Tensor) -> Tensor:
        here = r.eq(r.full(shape=(), value=r.each_rank(lambda i: i), dtype="i64"), value=home)
        return r.mul(bias, r.to(here, dtype="f32"))

    return own


@pytest.mark.parametrize("own", [column(lambda i: float(i == 5)), compared(5)], ids=["column", "rank == 5"])
def test_a_bias_on_rank_5_of_72_is_proved(own: Callable[[Builder, Tensor], Tensor]) -> None:
    assert verdict(*biased(own)) == "PROVED"


@pytest.mark.parametrize(
    "own",
    [column(lambda i: float(i in (5, 6))), column(lambda i: 2.0 * (i == 5)), column(lambda i: 0.0), compared(72)],
    ids=["two ranks", "doubled", "none", "rank == 72"],
)
def test_a_wrong_bias_is_refuted(own: Callable[[Builder, Tensor], Tensor]) -> None:
    assert verdict(*biased(own)) == "REFUTED"


# -- tokens, variances, weights over counts --------------------------------------------------------------------------------

Loss = Callable[[Builder, Tensor, Tensor], Tensor]


def tokens(loss: Loss, act: str | None = None, classes: int = 32000, rows: int = 64) -> tuple[tv.Program, tv.Plan]:
    """Cross entropy of 8 ranks' rows together, against the mean."""
    b = tv.program("tokens")
    x, t = b.input("x", (8 * rows, classes)), b.input("t", (8 * rows,), "i64", ids=classes)
    b.loss(b.cross_entropy(getattr(b, act)(x) if act else x, t, name="loss"))
    p = tv.plan("tokens", tv.Mesh(dp=8))
    with p.ranks() as r:
        x = r.input("x", (rows, classes), "(dp b) v")
        t = r.input("t", (rows,), "(dp b)", dtype="i64", ids=classes)
        r.loss(loss(r, getattr(r, act)(x) if act else x, t))
    return b.build(), p.build()


def over_count(count: Any) -> Loss:
    return lambda r, x, t: r.all_reduce(r.div(r.cross_entropy(x, t, reduction="sum"), value=count), group="dp", name="loss")


def mean_of_means(r: Builder, x: Tensor, t: Tensor) -> Tensor:
    return r.all_reduce(r.mean(r.cross_entropy(x, t, reduction="none")), group="dp", op="avg", name="loss")


@pytest.mark.parametrize("act", [None, "relu"])
@pytest.mark.parametrize("loss", [over_count(512), over_count(512.0), over_count(Fraction(512)), mean_of_means])
def test_tokens_as_a_literal_are_proved(loss: Loss, act: str | None) -> None:
    found = verdict(*tokens(loss, act))
    assert found == "PROVED" if act is None else found in ("PROVED", "UNKNOWN")  # behind a relu the algebra leaves it open; never REFUTED


@pytest.mark.parametrize(("loss", "expected"), [(over_count(512), "PROVED"), (mean_of_means, "PROVED"), (over_count(511), "REFUTED")])
def test_stages_that_miscount_contradict_nobody(loss: Loss, expected: str) -> None:
    """At the sizes of stages 512, or the 1/64 of a mean, is not the number of tokens: they see a difference in what is right."""
    assert tv.verify(*tokens(loss), engine="both").verdict == expected


@pytest.mark.parametrize("act", [None, "relu"])
@pytest.mark.parametrize("count", [511, 513.0, 64, 4096, Fraction(1024)])
def test_wrong_token_counts_are_refuted(count: Any, act: str | None) -> None:
    assert verdict(*tokens(over_count(count), act)) == "REFUTED"


def variance(rows: int, count: int, less: int) -> tuple[tv.Program, tv.Plan]:
    b = tv.program("variance")
    b.loss(b.sum(b.mul(b.var(b.input("x", (rows, 3)), dim=0), b.input("v", (3,))), name="loss"))
    p = tv.plan("variance", tv.Mesh(dp=2))
    with p.ranks() as r:
        x, v = r.input("x", (rows // 2, 3), "(dp b) k"), r.input("v", (3,), "k")
        mean = r.div(r.all_reduce(r.sum(x, dim=0), group="dp"), value=count)
        squares = r.all_reduce(r.sum(r.square(r.sub(x, mean)), dim=0), group="dp")
        r.loss(r.sum(r.mul(r.div(squares, value=less), v), name="loss"))
    return b.build(), p.build()


@pytest.mark.parametrize("rows", [4096, 30000, 3 << 20])
def test_a_variance_over_one_less_is_proved(rows: int) -> None:
    assert verdict(*variance(rows, rows, rows - 1)) == "PROVED"


@pytest.mark.parametrize("rows", [4096, 30000, 3 << 20])
def test_a_variance_over_another_count_is_refuted(rows: int) -> None:
    assert verdict(*variance(rows, rows, rows)) == "REFUTED"
    assert verdict(*variance(rows, rows // 2, rows - 1)) == "REFUTED"


def weighted(there: Any, here: Any, rows: int = 30000, mean: bool = False) -> tuple[tv.Program, tv.Plan]:
    b = tv.program("weighted")
    x = b.tanh(b.input("x", (rows, 3)))
    b.loss(b.mul(b.mean(b.sum(x, dim=1)) if mean else b.sum(x), value=there, name="loss"))
    p = tv.plan("weighted", tv.Mesh(dp=8))
    with p.ranks() as r:
        x = r.tanh(r.input("x", (rows // 8, 3), "(dp b) k"))
        r.loss(r.all_reduce(r.mul(r.sum(x), value=here), group="dp", name="loss"))
    return b.build(), p.build()


def test_a_weight_over_a_count_is_proved() -> None:
    assert verdict(*weighted(0.3 / 30000, 0.3 / 30000)) == "PROVED"
    assert verdict(*weighted(Fraction(3, 10), Fraction(3, 300000), mean=True)) == "PROVED"


def test_a_rounded_weight_over_a_count_is_literal_rounding() -> None:
    report = tv.verify(*weighted(0.7, 0.7 / 30000, mean=True))
    assert report.verdict == "UNKNOWN", report.reason


@pytest.mark.parametrize("count", [29999, 3750, 60000, 1])
def test_a_weight_over_another_count_is_refuted(count: int) -> None:
    assert verdict(*weighted(0.3 / 30000, 0.3 / count)) == "REFUTED"
    assert verdict(*weighted(0.3, 0.3 / count, mean=True)) == "REFUTED"


def vocabulary(shift: int, last: int, rows: int) -> tuple[tv.Program, tv.Plan]:
    """32000 rows of embeddings on 4 ranks: ids shifted, clamped, and masked."""
    b = tv.program("vocabulary")
    i, w, v = b.input("ids", (6,), "i64", ids=32000), b.input("w", (32000, 3)), b.input("v", (6, 3))
    b.loss(b.sum(b.mul(b.embedding(i, w), v), name="loss"))
    p = tv.plan("vocabulary", tv.Mesh(tp=4))
    with p.ranks() as r:
        i, w = r.input("ids", (6,), "n", dtype="i64", ids=32000), r.input("w", (8000, 3), "(tp v) h")
        v = r.input("v", (6, 3), "n h")
        own = r.sub(i, value=r.each(lambda at: shift * at["tp"]))
        mine = r.logical_and(r.ge(own, value=0), r.lt(own, value=rows))
        found = r.mul(r.embedding(r.clamp(own, min=0, max=last), w), r.unsqueeze(r.to(mine, dtype="f32"), dim=1))
        r.loss(r.sum(r.mul(r.all_reduce(found, group="tp"), v), name="loss"))
    return b.build(), p.build()


def test_shifted_and_clamped_ids_are_not_refuted() -> None:
    assert_proved_or_open(*vocabulary(8000, 7999, 8000))


@pytest.mark.parametrize(("shift", "last", "rows"), [(8001, 7999, 8000), (7999, 7999, 8000), (16000, 7999, 8000), (8000, 7999, 32000)])
def test_wrongly_shifted_ids_are_refuted(shift: int, last: int, rows: int) -> None:
    assert verdict(*vocabulary(shift, last, rows)) == "REFUTED"
