"""Documents of unequal lengths in one row: attention within each, on every rank or one document on each rank."""

from __future__ import annotations

import pytest

import trainverify as tv
from prove.meaning import system_of
from trainverify.build.plan import RankBuilder
from trainverify.build.program import ProgramBuilder
from trainverify.build.tape import Tensor
from trainverify.graph.lineage import Part, Parts, Run
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.prove.algebra.engine import Prover
from trainverify.verdicts import verify

WIDTH, HEADS, VOCABULARY = 1024, 8, 32000
WEIGHTS = ("wq", "wk", "wv", "wo")
LENGTHS = (1023, 2048, 1025)


def attend(b: ProgramBuilder | RankBuilder, x: Tensor, w: list[Tensor], lengths: tuple[int, ...], heads: int) -> Tensor:
    """Causal attention of x [rows, positions, width] within documents one after the other."""

    def split(t: Tensor) -> Tensor:
        return b.transpose(b.view(t, shape=(*t.shape[:2], heads, WIDTH // HEADS)), dim0=1, dim1=2)

    q, k, v = (split(b.linear(x, u)) for u in w[:3])
    found, start = [], 0
    for n in lengths:
        found.append(b.attention(*(b.slice(t, dim=2, start=start, stop=start + n) for t in (q, k, v)), is_causal=True)[0])
        start += n
    y = b.concat(*found, dim=2, name="y")
    return b.linear(b.view(b.transpose(y, dim0=1, dim1=2), shape=(*x.shape[:2], heads * WIDTH // HEADS)), w[3], name="o")


def model(rows: int, lengths: tuple[int, ...]) -> Program:
    b = tv.program("packed")
    x = b.input("x", (rows, sum(lengths), WIDTH))
    labels = b.input("labels", (rows, sum(lengths)), "i64", ids=VOCABULARY, ignore=-100)
    h = attend(b, x, [b.parameter(n, (WIDTH, WIDTH)) for n in WEIGHTS], lengths, HEADS)
    b.loss(b.cross_entropy(b.linear(h, b.parameter("u", (VOCABULARY, WIDTH))), labels, name="loss"))
    return tv.complete(b.build(), tv.SGD(lr=0.1))


def finish(r: RankBuilder, logits: Tensor, labels: Tensor, w: list[Tensor], group: str, own_count: bool = False) -> None:
    count = r.sum(r.float(r.ne(labels, value=-100)), name="count.part")
    count = count if own_count else r.all_reduce(count, group=group, backward=None, name="count")
    loss = r.div(r.cross_entropy(logits, labels, reduction="sum", name="loss.sum"), count, name="loss.share")
    r.backward(loss)
    r.loss(r.all_reduce(loss, group=group, name="loss"))
    for v in w:
        grad = r.all_reduce(r.gradient(v), group=group, name=f"{v.name}.total")
        r.output(grad, "gradient", v.name)
        r.update(v, r.sgd(v, grad, lr=0.1, name=f"{v.name}.new"))


def by_heads(lengths: tuple[int, ...]) -> Plan:
    """dp = 3, tp = 2: every rank has all documents of its rows."""
    p = tv.plan("packed", tv.Mesh(dp=3, tp=2))
    with p.ranks() as r:
        x = r.input("x", (2, sum(lengths), WIDTH), "(dp b) s d")
        labels = r.input("labels", (2, sum(lengths)), "(dp b) s", dtype="i64", ids=VOCABULARY, ignore=-100)
        w = [r.parameter(n, (WIDTH // 2, WIDTH), "(tp o) d") for n in WEIGHTS[:3]] + [r.parameter("wo", (WIDTH, WIDTH // 2), "o (tp d)")]
        o = attend(r, r.copy(x, "tp", name="x.tp"), w, lengths, HEADS // 2)
        u = r.parameter("u", (VOCABULARY, WIDTH), "o d")
        finish(r, r.linear(r.all_reduce(o, group="tp", backward="identity", name="o.sum"), u), labels, [*w, u], "dp")
    return p.build()


def by_document(lengths: tuple[int, ...], own_count: bool = False, split: int = 0) -> Plan:
    """A document on each rank. `split` is where a rank attends within two halves instead."""
    p = tv.plan("packed", tv.Mesh(dp=len(lengths)))
    for rank, n in enumerate(lengths):
        start = sum(lengths[:rank])
        with p.ranks(rank) as r:
            x = r.input("x", (1, n, WIDTH), Parts(((rank, (Part((0, 0, 0), (Run(0, 1), Run(start, n), Run(0, WIDTH))),)),)))
            whose = Parts(((rank, (Part((0, 0), (Run(0, 1), Run(start, n))),)),))
            labels = r.input("labels", (1, n), whose, dtype="i64", ids=VOCABULARY, ignore=-100)
            w = [r.parameter(v, (WIDTH, WIDTH), "o d") for v in WEIGHTS]
            u = r.parameter("u", (VOCABULARY, WIDTH), "o d")
            o = attend(r, x, w, (split, n - split) if split and rank == 1 else (n,), HEADS)
            finish(r, r.linear(o, u), labels, [*w, u], "dp", own_count)
    return p.build()


@pytest.mark.parametrize("lengths", [(1023, 2048), LENGTHS, (1023, 2048, 1023)])
def test_unequal_documents_are_proved(lengths: tuple[int, ...]) -> None:
    for logical, plan in ((model(6, lengths), by_heads(lengths)), (model(1, lengths), by_document(lengths))):
        report = verify(logical, plan)
        assert report.verdict == "PROVED", report
        assert {(o.engine, o.scope) for o in report.obligations} == {("algebra", "full size")}


@pytest.mark.parametrize("lengths", [(1023, 2047, 1026), (2048, 1023, 1025), (1023, 3073)])
def test_other_documents_are_not_proved(lengths: tuple[int, ...]) -> None:
    """By the algebra alone: at these sizes evaluation takes long."""
    assert unproved(model(6, LENGTHS), by_heads(lengths)) == 11


def test_other_documents_on_a_rank_are_not_proved() -> None:
    assert unproved(model(1, LENGTHS), by_document(LENGTHS, split=1024)) == 11
    assert unproved(model(1, LENGTHS), by_document(LENGTHS)) == 0
    assert verify(model(1, LENGTHS), by_document(LENGTHS, own_count=True)).verdict == "REFUTED"


def unproved(logical: Program, plan: Plan) -> int:
    system, wanted = system_of(logical, plan)
    return len(Prover(system).prove(wanted).failed)
