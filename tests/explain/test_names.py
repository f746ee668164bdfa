"""The planted tensor is named also where the plan has no other micro-batch or layer to compare with: REFUTED, with the repair in words."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import trainverify as tv
from trainverify.explain.siblings import renumbered
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.verdicts import verify

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import mlp

ROWS, WIDTH, RANKS = 9, 4, 3


def logical() -> Program:
    """Every block of rows with the one before it, a layer with bias, and how often each of five numbers occurs."""
    b = tv.program("small")
    x, ids = b.input("x", (ROWS, WIDTH)), b.input("ids", (ROWS,), "i64", ids=5)
    w, bias = b.input("w", (5, WIDTH)), b.input("bias", (5,))
    size = ROWS // RANKS
    before = b.concat(b.slice(x, dim=0, start=ROWS - size, stop=ROWS), b.slice(x, dim=0, start=0, stop=ROWS - size), dim=0, name="before")
    y = b.linear(b.add(x, b.mul(b.silu(x, name="s"), before, name="m"), name="joined"), w, bias, name="y")
    hot = b.float(b.one_hot(ids, num_classes=5, name="hot"), name="hot.float")
    b.loss(b.sum(b.mul(b.silu(y, name="z"), hot, name="picked"), name="loss"))
    return b.build()


def plan(step: int = 1, with_bias: bool = True, start: int = 0, twice: bool = False, late: bool = False, left: bool = False) -> Plan:
    p = tv.plan("small", tv.Mesh(cp=RANKS))
    size = ROWS // RANKS
    with p.ranks() as r:
        x, ids = r.input("x", (size, WIDTH), "(cp b) k"), r.input("ids", (size,), "(cp b)", dtype="i64", ids=5)
        w, bias = r.input("w", (5, WIDTH), "o k"), r.input("bias", (5,), "o")
        r.send(x, r.each(lambda at: (at["cp"] + step) % RANKS), batch="ring")
        before = r.recv((size, WIDTH), r.each(lambda at: (at["cp"] - step) % RANKS), batch="ring", name="before")
        m = r.mul(r.silu(x, name="s"), before, name="m")
        m = r.identity(m, name="joined") if left else r.add(x, m, name="joined")
        y = r.linear(m, w, bias, name="y") if with_bias else r.linear(m, w, name="y")
        hot = r.float(r.one_hot(ids, num_classes=5, start=start, name="hot"), name="hot.float")
        total = r.sum(r.mul(r.silu(y, name="z"), hot, name="picked"), name="part")
        total = total if late else r.all_reduce(total, group="cp", name="total")
        total = r.all_reduce(total, group="cp", name="total.again") if twice else total
        r.loss(total)
    return p.build()


BUGS = {
    # bug: (the wrong tensor, what is said of it, the plan)
    "from the rank after": ("before", "from another rank than the one 2 further along cp", plan(step=2)),
    "no bias": ("y", "linear without bias", plan(with_bias=False)),
    "numbers from one on": ("hot", "where the logical program has no start", plan(start=1)),
    "nothing added": ("joined", "identity without x", plan(left=True)),
    "added up twice": ("total.again", "is one too many", plan(twice=True)),
    "not added up": ("part", "its sum over cp is needed", plan(late=True)),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_tensor_is_named(bug: str) -> None:
    tensor, text, wrong = BUGS[bug]
    report = verify(logical(), wrong, points=1)
    assert report.verdict == "REFUTED", report.reason
    assert report.place is not None
    assert report.place.tensor == tensor
    assert text in report.place.cause
    assert "the whole plan agrees" in report.place.cause


def test_a_share_is_named_where_it_begins() -> None:
    """REFUTED: a sum over tp is missing in the backward pass of every micro-batch, and adding up the weight's gradient would do as well."""
    report = verify(mlp.logical(), mlp.plan(forgotten=True), points=1)
    assert report.verdict == "REFUTED", report.reason
    assert report.place is not None
    assert report.place.tensor == "z0.grad"
    assert "its sum over tp is needed" in report.place.cause


def test_what_the_bugs_are_planted_into_agrees() -> None:
    report = verify(logical(), plan(), points=1)
    assert {o.status for o in report.obligations} <= {"agreed", "proved"}, report.reason


@pytest.mark.parametrize(
    ("sibling", "tensor", "given", "meant"),
    [
        ("mb1/layers.1.q", "mb0/layers.1.q", "mb1/layers.1.normed", "mb0/layers.1.normed"),
        ("mb1/layers.1.q", "mb0/layers.1.q", "layers.1.wq", "layers.1.wq"),  # a layer is no micro-batch
        ("mb1/layers.1.q", "mb1/layers.2.q", "layers.1.wq", "layers.2.wq"),
        ("h1.grad", "h0.grad", "a1.grad", "a0.grad"),  # names without a common word: by place
        ("mb1/y", "mb0/y", "w", "w"),
    ],
)
def test_what_a_tensor_is_to_its_sibling(sibling: str, tensor: str, given: str, meant: str) -> None:
    assert renumbered(sibling, tensor, given) == meant
