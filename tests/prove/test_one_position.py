"""Context parallelism with one position on every rank: a local sum over queries has one term, and is no Σ."""

from __future__ import annotations

import pytest

import trainverify as tv
from trainverify.build.plan import RankBuilder
from trainverify.build.program import ProgramBuilder
from trainverify.build.tape import Tensor
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.verdicts import verify

BATCH, WIDTH, HEADS = 6, 1024, 8
WEIGHTS = ("wq", "wk", "wv", "wo")
Value = object


def attend(b: ProgramBuilder | RankBuilder, x: Tensor, keys: Tensor, w: list[Tensor], offset: Value) -> Tensor:
    """Causal attention of queries from an offset on."""

    def split(t: Tensor) -> Tensor:
        return b.transpose(b.view(t, shape=(*t.shape[:2], HEADS, WIDTH // HEADS)), dim0=1, dim1=2)

    q, k, v = split(b.linear(x, w[0], name="q")), split(b.linear(keys, w[1], name="k")), split(b.linear(keys, w[2], name="v"))
    y, _ = b.attention(q, k, v, is_causal=True, query_offset=offset, name=("y", "y.logsumexp"))
    return b.linear(b.view(b.transpose(y, dim0=1, dim1=2), shape=x.shape), w[3], name="o")


def model(length: int) -> Program:
    b = tv.program("attention")
    x, t = b.input("x", (BATCH, length, WIDTH)), b.input("t", (BATCH, length, WIDTH))
    e = b.sub(attend(b, x, x, [b.parameter(n, (WIDTH, WIDTH)) for n in WEIGHTS], 0), t)
    b.loss(b.sum(b.mul(e, e), name="loss"))
    return tv.complete(b.build(), tv.SGD(lr=0.1))


def plan(length: int, cp: int, later: int = 0, forgotten: str = "") -> Plan:
    p = tv.plan("attention", tv.Mesh(dp=2, cp=cp))
    size = length // cp
    with p.ranks() as r:
        x, t = (r.input(n, (BATCH // 2, size, WIDTH), "(dp b) (cp s) d") for n in "xt")
        w = [r.parameter(n, (WIDTH, WIDTH), "o d") for n in WEIGHTS]
        keys = r.all_gather(x, group="cp", dim=1, backward="reduce_scatter", name="keys")
        e = r.sub(attend(r, x, keys, w, r.each(lambda at: (at["cp"] + later) % cp * size)), t)
        loss = r.sum(r.mul(e, e), name="loss.part")
        r.backward(loss)
        r.loss(r.all_reduce(loss, group=("dp", "cp"), name="loss"))
        for v in w:
            grad = r.all_reduce(r.gradient(v), group=("dp",) if v.name == forgotten else ("dp", "cp"), name=f"{v.name}.total")
            r.output(grad, "gradient", v.name)
            r.update(v, r.sgd(v, grad, lr=0.1, name=f"{v.name}.new"))
    return p.build()


@pytest.mark.parametrize(("length", "cp"), [(4, 4), (8, 4), (16, 16), (64, 64)])
def test_one_position_per_rank_is_proved(length: int, cp: int) -> None:
    report = verify(model(length), plan(length, cp))
    assert report.verdict == "PROVED", report
    assert {(o.engine, o.scope) for o in report.obligations} == {("algebra", "full size")}


@pytest.mark.parametrize("wrong", [{"later": 1}, {"forgotten": "wk"}, {"forgotten": "wv"}])
def test_wrong_plans_are_refuted(wrong: dict[str, object]) -> None:
    report = verify(model(8), plan(8, 8, **wrong))
    assert report.verdict == "REFUTED", report
