"""What the builders say to a mistake, short reprs, and methods that the page on building plans shows: each with a wrong plan."""

from __future__ import annotations

import pydoc
from collections.abc import Callable
from typing import Any

import pytest

import trainverify as tv
from trainverify.build.plan import RankBuilder
from trainverify.build.tape import BuildError
from trainverify.explain.place import Place
from trainverify.ops.table import OpError

ROWS, K, OUT = 6, 10, 4


def model(optimizer: tv.SGD | tv.AdamW, dtype: str = "f32") -> tv.Program:
    b = tv.program("model")
    x, w = b.input("x", (ROWS, K), dtype=dtype), b.parameter("w", (OUT, K), dtype=dtype)
    b.loss(b.mean(b.square(b.linear(x, w, name="y"), name="sq"), name="loss"))
    return tv.complete(b.build(), optimizer, master=dtype != "f32")


def planned(finish: Callable[[RankBuilder, Any], None], dtype: str = "f32") -> tv.Plan:
    """Rows over dp; how the gradient becomes an update is up to `finish`."""
    p = tv.plan("plan", tv.Mesh(dp=2))
    with p.ranks() as r:
        x, w = r.input("x", (ROWS // 2, K), "(dp b) k", dtype=dtype), r.parameter("w", (OUT, K), "o k", dtype=dtype)
        loss = r.mean(r.square(r.linear(x, w, name="y"), name="sq"), name="loss.local")
        r.backward(loss)
        r.loss(r.all_reduce(loss, group="dp", op="avg", name="loss"))
        finish(r, w)
    return p.build()


ADAM, SGD = tv.AdamW(lr=0.01, step=3), tv.SGD(lr=0.1, momentum=0.9)


def whole(how: tv.SGD | tv.AdamW, op: str = "avg") -> Callable[[RankBuilder, Any], None]:
    def finish(r: RankBuilder, w: Any) -> None:
        grad = r.all_reduce(r.gradient(w), group="dp", op=op, name="w.grad.mean")
        r.output(grad, "gradient", "w")
        r.optimizer(how, w, grad)

    return finish


def sharded(how: tv.SGD | tv.AdamW, dim: int = 0, master: bool = False) -> Callable[[RankBuilder, Any], None]:
    """ZeRO-1: each rank updates its own rows (wrongly: columns that are called rows)."""

    def finish(r: RankBuilder, w: Any) -> None:
        grad = r.reduce_scatter(r.gradient(w), group="dp", dim=0, op="avg", name="w.grad.shard")
        r.output(grad, "gradient", "w", form="(dp o) k")
        own = r.own_block(w, group="dp", dim=0, backward="none", name="w.shard") if dim == 0 else r.slice(w, dim=0, start=0, stop=OUT // 2)
        new = r.optimizer(how, w, grad, shard=own, form="(dp o) k", master=master)
        r.update(w, r.all_gather(new, group="dp", dim=0, name="w.whole"))

    return finish


STEPS = {
    "whole, AdamW": (whole(ADAM), ADAM, "f32", "PROVED"),
    "whole, SGD": (whole(SGD), SGD, "f32", "PROVED"),
    "the sum": (whole(SGD, "sum"), SGD, "f32", "REFUTED"),
    "another step number": (whole(tv.AdamW(lr=0.01, step=2)), ADAM, "f32", "REFUTED"),
    "ZeRO-1": (sharded(ADAM), ADAM, "f32", "PROVED"),
    "ZeRO-1, the first rows on every rank": (sharded(ADAM, dim=1), ADAM, "f32", "REFUTED"),
    "ZeRO-1, f32 copies": (sharded(ADAM, master=True), ADAM, "bf16", "PROVED"),
}


@pytest.mark.parametrize("name", STEPS)
def test_optimizer(name: str) -> None:
    finish, how, dtype, verdict = STEPS[name]
    assert tv.verify(model(how, dtype), planned(finish, dtype)).verdict == verdict


@pytest.mark.parametrize(("backward", "op", "verdict"), [("reduce_scatter avg", "mean", "PROVED"), ("reduce_scatter", "mean", "REFUTED")])
def test_average_as_backward(backward: str, op: str, verdict: str) -> None:
    """FSDP: the gather's backward averages the losses' gradients over the ranks."""
    p = tv.plan("plan", tv.Mesh(dp=2))
    with p.ranks() as r:
        x, w = r.input("x", (ROWS // 2, K), "(dp b) k"), r.parameter("w", (OUT // 2, K), "(dp o) k")
        full = r.all_gather(w, group="dp", dim=0, backward=backward, name="w.full")
        loss = r.mean(r.square(r.linear(x, full, name="y"), name="sq"), name="loss.local")
        r.backward(loss)
        r.loss(r.all_reduce(loss, group="dp", op="avg", name="loss"))
        r.output(r.gradient(w), "gradient", "w")
        r.optimizer(SGD, w, r.gradient(w))
    report = tv.verify(model(SGD), p.build())
    assert report.verdict == verdict


@pytest.mark.parametrize(("backward", "verdict"), [("all_gather", "PROVED"), ("slice.grad", "REFUTED"), ("none", "REFUTED")])
def test_own_block(backward: str, verdict: str) -> None:
    """Each rank continues with its own rows; the gradient of what all of them have is the gradient of all rows."""
    b = tv.program("model")
    x, w = b.input("x", (ROWS, K)), b.parameter("w", (K,))
    b.loss(b.sum(b.square(b.mul(x, w, name="y"), name="sq"), name="loss"))
    p = tv.plan("plan", tv.Mesh(tp=3))
    with p.ranks() as r:
        x, w = r.input("x", (ROWS, K), "b k"), r.parameter("w", (K,), "k")
        rows = r.own_block(r.mul(x, w, name="y"), group="tp", dim=0, backward=backward, name="y.rows")
        loss = r.sum(r.square(rows, name="sq"), name="loss.local")
        r.backward(loss)
        r.loss(r.all_reduce(loss, group="tp", name="loss"))
        grad = r.gradient(w) if backward != "none" else r.mul(w, value=0)
        r.output(grad, "gradient", "w")
    assert tv.verify(tv.complete(b.build()), p.build()).verdict == verdict


def test_mean_of_the_copies() -> None:
    """`copy` averages where every rank computes the same loss."""
    b = tv.program("model")
    x, w = b.input("x", (ROWS, K)), b.parameter("w", (OUT, K))
    b.loss(b.mean(b.square(b.linear(x, w, name="y"), name="sq"), name="loss"))
    for op, verdict in (("avg", "PROVED"), ("sum", "REFUTED")):
        p = tv.plan("plan", tv.Mesh(tp=3))
        with p.ranks() as r:
            x, w = r.input("x", (ROWS, K), "b k"), r.parameter("w", (OUT, K), "o k")
            loss = r.mean(r.square(r.linear(x, r.copy(w, "tp", op=op), name="y"), name="sq"), name="loss")
            r.backward(loss)
            r.loss(loss)
            r.output(r.gradient(w), "gradient", "w")
        assert tv.verify(tv.complete(b.build()), p.build()).verdict == verdict


# -- what is said -----------------------------------------------------------------------------------------------------------


def _said(r: RankBuilder, x: Any, w: Any) -> dict[str, Callable[[], object]]:
    return {
        "add: 2 is no tensor; a number is given by name: value=2": lambda: r.add(x, 2),
        "linear: 'w' is no tensor; everything but tensors is given by name": lambda: r.linear(x, "w"),
        "an op with several results returns a tuple; take one of it": lambda: r.relu((x, w)),
        "all_reduce needs group=…: a mesh axis (dp, tp), several, or a group of the plan": lambda: r.all_reduce(x),
        "mesh(dp=2, tp=3) has no axis 'pd' and the plan no such group": lambda: r.all_reduce(x, group="pd"),
        "all_gather: no backward 'avg'; choose one of identity": lambda: r.all_gather(x, group="dp", backward="avg"),
        "matmul(x: f32[3,10], w: f32[4,10]): contract: sizes 10 and 4": lambda: r.matmul(x, w),
        "t: 'i64' is no layout; a plan's tensors have name, shape, layout, and dtype='i64' by name": lambda: r.input("t", (3,), "i64"),
        "t: a shape is a tuple of sizes, not 3": lambda: r.input("t", 3, "b"),  # type: ignore[arg-type]
        "there is a tensor 'x' already": lambda: r.input("x", (3,), "b"),
        "'w' has no gradient: no backward(...) before this line reached it": lambda: r.gradient(w),
        "does not divide among 3 ranks": lambda: r.own_block(x, group="tp", dim=1),
        "own_block: no backward 'identity'": lambda: r.own_block(x, group="tp", dim=0, backward="identity"),
        "optimizer: 'x' is no parameter of these ranks": lambda: r.optimizer(SGD, x, x),
        "optimizer: gradient x: f32[3,10] of w: f32[4,10]": lambda: r.optimizer(SGD, w, x),
        "say both what it is (shard=…) and how it lives (form=…)": lambda: r.optimizer(SGD, w, w, form="(dp o) k"),
        "lies between the loss and a parameter and does not name its backward: give it backward=…": lambda: r.backward(
            r.sum(r.all_reduce(r.linear(x, w), group="dp"))
        ),
    }


@pytest.mark.parametrize("message", _said(*[None] * 3))  # type: ignore[arg-type]
def test_message(message: str) -> None:
    with tv.plan("plan", tv.Mesh(dp=2, tp=3)).ranks() as r:
        x, w = r.input("x", (3, K), "(dp b) k"), r.parameter("w", (OUT, K), "o k")
        with pytest.raises((BuildError, OpError)) as caught:
            _said(r, x, w)[message]()
        assert message in str(caught.value)


def test_operator_of_nearly_that_name() -> None:
    with pytest.raises(AttributeError, match="no operator 'linaer'; did you mean linear"):
        tv.program("model").linaer()


def test_layout_in_a_program() -> None:
    with pytest.raises(BuildError, match=r"'\(dp b\) k' is no dtype .*; only inputs of a plan have a layout"):
        tv.program("model").input("x", (3, 5), "(dp b) k")


def test_reprs_are_short() -> None:
    logical, plan = model(ADAM), planned(whole(ADAM))
    assert repr(logical) == f"<program model: {len(logical.ops)} ops, 5 outputs>"
    assert repr(plan) == f"<plan plan on mesh(dp=2): 1 programs, {len(plan.templates[0].program.ops)} ops>"
    assert repr(tv.Mesh(dp=2, tp=3)) == "Mesh(dp=2, tp=3)"
    assert repr(tv.program("m").input("x", (3, 5))) == "<x: f32[3,5]>"
    for name in tv.__all__:
        text = pydoc.render_doc(getattr(tv, name))
        assert len(text) < 5000, name
        assert max(map(len, text.splitlines())) < 400, name


def test_one_of_several_gradients_is_named() -> None:
    """A tied weight has a gradient for each use: the report says by which."""
    with tv.plan("plan", tv.Mesh(tp=2)).ranks() as r:
        x, w = r.input("x", (ROWS, K), "b k"), r.parameter("w", (K, K), "o k")
        h = r.tanh(r.linear(x, w, name="first"), name="h")
        r.backward(r.sum(r.square(r.linear(h, w, name="second"), name="sq"), name="loss"))
    found = {o: Place("w", None, 0, o, op, "").named for op in r.ops for o in op.outputs if o.startswith("w.grad")}
    assert found == {
        "w.grad": "w.grad",
        "w.grad.1": "w.grad.1 (the gradient of w by first)",
        "w.grad.2": "w.grad.2 (the gradient of w, summed up)",
    }
