"""Masked attention as it is written: an operator, fills with −∞, additive masks, comparisons and triangles, each against each."""

from __future__ import annotations

from typing import Any, Final

import pytest

import trainverify as tv
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.graph.rebuilt import Rebuilt

POSITIONS, HEADS, WIDTH = 4096, 32, 64


def mask(b: Any, how: str, more: int, length: int = POSITIONS) -> Any:
    rows, columns = b.unsqueeze(b.arange(stop=length), dim=1), b.unsqueeze(b.arange(stop=length), dim=0)
    match how:
        case "ge":
            return b.ge(b.add(rows, value=more) if more else rows, columns)
        case "le":
            return b.le(b.sub(columns, rows), value=more)
    return b.to(b.tril(b.full(shape=(length, length), value=1.0), diagonal=more), dtype="bool")


def attended(b: Any, q: Any, k: Any, v: Any, how: str, more: int = 0) -> Any:
    if how == "operator":
        return b.attention(q, k, v, is_causal=True)[0]
    scores = b.mul(b.matmul(q, b.transpose(k, dim0=-2, dim1=-1)), value=WIDTH**-0.5)
    kind, _, by = how.partition(" ")
    length = q.shape[-2]
    match kind:
        case "fill":
            scores = b.masked_fill(scores, b.logical_not(mask(b, by, more, length)), value=float("-inf"))
        case "where":
            scores = b.where(mask(b, by, more, length), scores, b.full(shape=(), value=float("-inf")))
        case "add":
            nothing = b.full(shape=(length, length), value=0.0)
            scores = b.add(scores, b.masked_fill(nothing, b.logical_not(mask(b, by, more, length)), value=float("-inf")))
        case _:
            scores = b.add(scores, b.triu(b.full(shape=(length, length), value=float("-inf")), diagonal=1 + more))
    return b.matmul(b.softmax(scores, dim=-1), v)


def attention(how: str, length: int = POSITIONS) -> Program:
    b = tv.program("attention")
    q, k, v = (b.input(n, (2, HEADS, length, WIDTH)) for n in "qkv")
    b.loss(b.sum(b.square(attended(b, q, k, v, how)), name="loss"))
    return b.build()


def attention_on_two(how: str, more: int = 0, length: int = POSITIONS) -> Plan:
    p = tv.plan("attention", tv.Mesh(tp=2))
    with p.ranks() as r:
        q, k, v = (r.input(n, (2, HEADS // 2, length, WIDTH), "b (tp h) s d") for n in "qkv")
        r.loss(r.all_reduce(r.sum(r.square(attended(r, q, k, v, how, more))), group="tp", name="loss"))
    return p.build()


SPELLINGS: Final = ["operator", "fill ge", "fill tril", "fill le", "where ge", "add ge", "add tril", "triu"]


@pytest.mark.parametrize("plan", SPELLINGS)
@pytest.mark.parametrize("logical", SPELLINGS)
def test_spellings_of_masked_attention_meet(logical: str, plan: str) -> None:
    assert tv.verify(attention(logical), attention_on_two(plan), points=1).verdict == "PROVED"


@pytest.mark.parametrize("plan", SPELLINGS[1:])
@pytest.mark.parametrize("logical", ["operator", "fill ge"])
def test_a_mask_that_is_off_by_one_is_refuted(logical: str, plan: str) -> None:
    """At full size, position by position: half of the positions of the right ones are 2 s instead of 18."""
    report = tv.verify(attention(logical, POSITIONS // 2), attention_on_two(plan, 1, POSITIONS // 2), points=1)
    assert report.verdict == "REFUTED"
    assert "position by position" in report.notes[0]


def test_rows_of_which_nothing_may_be_seen() -> None:
    """A softmax over a row that is all masked is no number. So is one that subtracts the maximum: equal. One that is 0 there is not."""

    def weights(b: Any, x: Any, m: Any, how: str) -> Any:
        s = b.masked_fill(x, m, value=float("-inf"))
        if how == "softmax":
            return b.softmax(s, dim=-1)
        e = b.exp(s) if how == "plain" else b.exp(b.sub(s, b.amax(s, dim=-1, keepdim=True)))
        total = b.sum(e, dim=-1, keepdim=True)
        if how != "guarded":
            return b.div(e, total)
        return b.where(b.gt(total, value=0.0), b.div(e, total), b.full(shape=(), value=0.0))

    def program(how: str) -> Program:
        b = tv.program("rows")
        b.loss(b.sum(b.square(weights(b, b.input("x", (12, 40)), b.input("m", (12, 40), dtype="bool"), how)), name="loss"))
        return b.build()

    for how in ("softmax", "plain", "shifted"):
        assert tv.verify(program(how), program(how), points=1).verdict == "PROVED", how
    assert tv.verify(program("plain"), program("shifted"), points=1).verdict == "PROVED"
    assert tv.verify(program("guarded"), program("shifted"), points=1).verdict != "PROVED"


CHUNKS: Final = 4


def ring(wrong: str = "", length: int = POSITIONS) -> Plan:
    """Every rank has a chunk of the queries, and meets those of keys and values one after the other; −∞ where keys come later."""
    p = tv.plan("ring", tv.Mesh(cp=CHUNKS))
    size = length // CHUNKS
    for rank in range(CHUNKS):
        with p.ranks(cp=rank) as r:
            q, k, v = (r.input(n, (2, HEADS, size, WIDTH), "b h (cp s) d") for n in "qkv")
            keys, values = (r.all_gather(t, group="cp", dim=2) for t in (k, v))
            top: Any = None
            for step in range(CHUNKS):
                low = (rank - step) % CHUNKS * size
                its_keys, its_values = (r.slice(t, dim=2, start=low, stop=low + size) for t in (keys, values))
                scores = r.mul(r.matmul(q, r.transpose(its_keys, dim0=-2, dim1=-1)), value=WIDTH**-0.5)
                rows, columns = r.arange(start=rank * size, stop=(rank + 1) * size), r.arange(start=low, stop=low + size)
                later = (r.ge if wrong == "itself" else r.gt)(r.unsqueeze(columns, dim=0), r.unsqueeze(rows, dim=1))
                scores = r.masked_fill(scores, later, value=float("-inf"))
                peak = r.amax(scores, dim=-1, keepdim=True)
                new = peak if top is None else r.maximum(top, peak)
                e = r.exp(r.sub(scores, new))
                part, mixed = r.sum(e, dim=-1, keepdim=True), r.matmul(e, its_values)
                if top is None:
                    total, out = part, mixed
                else:
                    less = r.exp(r.sub(top, new))
                    total = r.add(total if wrong == "not rescaled" else r.mul(total, less), part)
                    out = r.add(r.mul(out, less), mixed)
                top = new
            r.loss(r.all_reduce(r.sum(r.square(r.div(out, total))), group="cp", name="loss"))
    return p.build()


def test_a_causal_ring_with_masks() -> None:
    """Expected: PROVED; REFUTED if a query does not see its own key, or one sum is not rescaled."""
    logical = attention("fill ge")
    assert tv.verify(logical, ring()).verdict == "PROVED"
    for wrong in ("itself", "not rescaled"):
        also = [Rebuilt("positions=8", lambda wrong=wrong: (attention("fill ge", 8), ring(wrong, 8)))]
        assert tv.verify(logical, ring(wrong), also=also).verdict == "REFUTED"
