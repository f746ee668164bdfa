"""Tensors without elements: a rank whose chunk is empty, a batch without rows. A sum of nothing is 0."""

from __future__ import annotations

import pytest

import trainverify as tv
from trainverify.graph.lineage import Shard
from trainverify.ops.table import OpError
from trainverify.prove.attempt import Engine

ENGINES: tuple[Engine, ...] = ("algebra", "smt")
PROVED = {"algebra": "PROVED", "smt": "PROVED(reduced)"}


def model(rows: int, features: int = 7) -> tv.Program:
    b = tv.program("model")
    x, w = b.input("x", (rows, 5)), b.parameter("w", (features, 5))
    b.loss(b.sum(b.square(b.linear(x, w, name="y"), name="sq"), name="loss"))
    return tv.complete(b.build(), tv.SGD(lr=0.5))


def chunk(size: int, among: int, index: int) -> int:
    """As torch.chunk cuts: 5 among 4 are 2, 2, 1, 0."""
    each = -(-size // among)
    return max(0, min(size, (index + 1) * each) - index * each)


def rows_cut(rows: int, dp: int, op: str = "sum") -> tv.Plan:
    p = tv.plan("plan", tv.Mesh(dp=dp))
    for d in range(dp):
        with p.ranks(dp=d) as r:
            x, w = r.input("x", (chunk(rows, dp, d), 5), {"dp": Shard(0)}), r.parameter("w", (7, 5), {})
            loss = r.sum(r.square(r.linear(x, w, name="y"), name="sq"), name="loss.local")
            r.backward(loss)
            r.loss(r.all_reduce(loss, group="dp", name="loss"))
            grad = r.all_reduce(r.gradient(w), group="dp", op=op, name="w.grad.sum")
            r.output(grad, "gradient", "w")
            r.update(w, r.sgd(w, grad, lr=0.5, name="w.new"))
    return p.build()


def features_cut(features: int, tp: int, lr: float = 0.5) -> tv.Plan:
    p = tv.plan("plan", tv.Mesh(tp=tp))
    for d in range(tp):
        with p.ranks(tp=d) as r:
            x, w = r.input("x", (3, 5), {}), r.parameter("w", (chunk(features, tp, d), 5), {"tp": Shard(0)})
            loss = r.sum(r.square(r.linear(x, w, name="y"), name="sq"), name="loss.local")
            r.backward(loss)
            r.loss(r.all_reduce(loss, group="tp", name="loss"))
            r.output(r.gradient(w), "gradient", "w")
            r.update(w, r.sgd(w, r.gradient(w), lr=lr, name="w.new"))
    return p.build()


def one_program(local: int, form: str) -> tv.Plan:
    p = tv.plan("plan", tv.Mesh(dp=3))
    with p.ranks() as r:
        x, w = r.input("x", (local, 5), form), r.parameter("w", (7, 5), "o k")
        loss = r.sum(r.square(r.linear(x, w, name="y"), name="sq"), name="loss.local")
        r.backward(loss)
        r.loss(r.all_reduce(loss, group="dp", name="loss"))
        grad = r.all_reduce(r.gradient(w), group="dp", name="w.grad.sum")
        r.output(grad, "gradient", "w")
        r.update(w, r.sgd(w, grad, lr=0.5, name="w.new"))
    return p.build()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("rows", "dp"), [(5, 4), (1, 3), (2, 4), (0, 3)])
def test_ranks_without_rows(rows: int, dp: int, engine: Engine) -> None:
    assert tv.verify(model(rows), rows_cut(rows, dp), engine=engine).verdict == PROVED[engine]
    report = tv.verify(model(rows), rows_cut(rows, dp, "avg"), engine=engine)
    if rows:
        said = "gradient of w differs on rank 0; first wrong tensor: w.grad.sum on rank 0"
        assert (report.verdict, report.reason) == ("REFUTED", said)
    else:  # the average of zeros is their sum
        assert report.verdict == PROVED[engine]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("features", "tp"), [(5, 4), (1, 3)])
def test_ranks_without_features(features: int, tp: int, engine: Engine) -> None:
    logical = model(3, features)
    assert tv.verify(logical, features_cut(features, tp), engine=engine).verdict == PROVED[engine]
    report = tv.verify(logical, features_cut(features, tp, 0.25), engine=engine)
    assert (report.verdict, report.reason.partition(";")[0]) == ("REFUTED", "updated parameter w differs on rank 0")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("form", ["(dp b) k", "(2 dp b) k", "b k"])
def test_patterns_of_nothing(form: str, engine: Engine) -> None:
    assert tv.verify(model(0), one_program(0, form), engine=engine).verdict == PROVED[engine]


def test_a_pattern_of_nothing_that_is_left_open() -> None:
    """Positions of a slow digit that has none are not told apart; there is a verdict all the same."""
    assert tv.verify(model(0), one_program(0, "(b dp) k")).verdict == "UNKNOWN"


@pytest.mark.parametrize(("rows", "local", "piece"), [(6, 0, 2), (0, 2, 0)])
def test_nothing_of_something(rows: int, local: int, piece: int) -> None:
    (finding,) = tv.verify(model(rows), one_program(local, "(dp b) k")).findings
    assert finding.code == "TV303"
    assert finding.message.endswith(f"rank 0 holds a piece [{piece}, 5], but 'x' is f32[{local},5]")


def alone(name: str, first: tuple[int, ...], *more: tuple[int, ...], **attrs: object) -> tv.Program:
    """The squares of an op's results, added up."""
    b = tv.program(name)
    given = [b.parameter(f"w{n}", shape) for n, shape in enumerate((first, *more))]
    (made, *_) = b.emit(name, given, attrs)
    b.loss(b.sum(b.square(b.float(made)), name="loss"))
    return tv.complete(b.build(), tv.SGD(lr=0.5))


PROGRAMS = {
    "norm": lambda: alone("norm", (3, 0), dim=1),
    "moe_route": lambda: alone("moe_route", (3, 0), (4, 0), top_k=2),
    "repeat_interleave": lambda: alone("repeat_interleave", (0, 2), repeats=2, dim=0),
    "reshape": lambda: alone("reshape", (0, 6), shape=(2, 0, 3)),
    "apply_rotary_emb": lambda: alone("apply_rotary_emb", (3, 0), (3, 0), (3, 0)),
    "sort": lambda: alone("sort", (3, 0)),
    "layer_norm": lambda: alone("layer_norm", (0, 4), (4,), (4,)),
    "concat": lambda: alone("concat", (0, 4), (3, 4)),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_ops_on_nothing(name: str, engine: Engine) -> None:
    program = PROGRAMS[name]()
    assert tv.verify(program, program, engine=engine).verdict in ("PROVED", PROVED[engine], "UNKNOWN")


def test_a_mean_of_nothing_is_no_number() -> None:
    with pytest.raises(OpError, match="a mean of nothing"):
        alone("mean", (0, 3))
