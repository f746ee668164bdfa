"""Written from docs/building-plans.md alone: ZeRO-1 over dp, sequence parallelism over tp, input and output embedding tied."""

from __future__ import annotations

from typing import Any

import pytest

import trainverify as tv
from trainverify.build.plan import RankBuilder

ADAM = tv.AdamW(lr=0.001, weight_decay=0.1)
BATCH, SEQUENCE, WIDTH, HIDDEN, IDS = 4, 9, 6, 12, 15
DP, TP = 2, 3
FORMS = {"table": "(tp v) h", "g": "h", "up": "(tp o) h", "down": "h (tp o)"}
# a shard of a rank's part: rows where they divide among dp, else columns
SHARDS = {"table": (1, "(tp v) (dp h)"), "g": (0, "(dp h)"), "up": (0, "(tp dp o) h"), "down": (0, "(dp h) (tp o)")}


def step() -> tv.Program:
    b = tv.program("language")
    ids, labels = (b.input(n, (BATCH, SEQUENCE), dtype="i64", ids=IDS) for n in ("ids", "labels"))
    table, g = b.parameter("table", (IDS, WIDTH)), b.parameter("g", (WIDTH,))
    up, down = b.parameter("up", (HIDDEN, WIDTH)), b.parameter("down", (WIDTH, HIDDEN))
    x = b.embedding(ids, table, name="x")
    h = b.relu(b.linear(b.rms_norm(x, g, name="normed"), up, name="h"), name="a")
    y = b.add(x, b.linear(h, down, name="mlp"), name="y")
    b.loss(b.cross_entropy(b.linear(y, table, name="logits"), labels, name="loss"))
    return tv.complete(b.build(), ADAM)


def loss_of(r: RankBuilder, logits: Any, labels: Any) -> Any:
    """The mean over this rank's rows; each tensor-parallel rank has the logits of its own ids."""
    own = IDS // TP
    peak = r.detach(r.amax(logits, dim=-1, keepdim=True, name="peak.own"), name="peak.part")
    shifted = r.sub(logits, r.all_reduce(peak, group="tp", op="max", backward="none", name="peak"), name="shifted")
    hit = r.float(r.one_hot(labels, num_classes=own, start=r.each(lambda at: at["tp"] * own), name="hit"), name="hit.float")
    target = r.sum(r.mul(shifted, hit, name="target.masked"), dim=-1, name="target.part")
    weight = r.sum(r.exp(shifted, name="exponentials"), dim=-1, name="weight.part")
    target, weight = (r.all_reduce(v, group="tp", backward="identity", name=n) for v, n in ((target, "target"), (weight, "weight")))
    return r.mean(r.sub(r.log(weight, name="weight.log"), target, name="losses"), name="loss.local")


def plan(wrong: str = "") -> tv.Plan:
    p = tv.plan("language", tv.Mesh(dp=DP, tp=TP))
    with p.ranks() as r:
        ids, labels = (r.input(n, (BATCH // DP, SEQUENCE), "(dp b) s", dtype="i64", ids=IDS) for n in ("ids", "labels"))
        table, g = r.parameter("table", (IDS // TP, WIDTH), FORMS["table"]), r.parameter("g", (WIDTH,), FORMS["g"])
        up, down = r.parameter("up", (HIDDEN // TP, WIDTH), FORMS["up"]), r.parameter("down", (WIDTH, HIDDEN // TP), FORMS["down"])
        part = r.embedding(ids, table, start=r.each(lambda at: at["tp"] * (IDS // TP)), name="x.part")
        x = r.reduce_scatter(part, group="tp", dim=1, backward="all_gather", name="x.own")
        normed = r.all_gather(r.rms_norm(x, g, name="normed.own"), group="tp", dim=1, backward="reduce_scatter", name="normed")
        a = r.relu(r.linear(normed, up, name="h"), name="a")
        mlp = r.reduce_scatter(r.linear(a, down, name="mlp.part"), group="tp", dim=1, backward="all_gather", name="mlp.own")
        backward = "slice" if wrong == "shares of the gradient of y" else "reduce_scatter"
        y = r.all_gather(r.add(x, mlp, name="y.own"), group="tp", dim=1, backward=backward, name="y")
        if wrong == "embedding not tied":
            other = r.detach(table, name="table.detached")
        loss = loss_of(r, r.linear(y, other if wrong == "embedding not tied" else table, name="logits"), labels)
        r.backward(loss)
        r.loss(r.all_reduce(loss, group="dp", op="avg", name="loss"))
        for w in (table, g, up, down):
            grad = r.gradient(w)
            if w is g and wrong != "norm not summed over tp":  # each rank has seen a part of the tokens only
                grad = r.all_reduce(grad, group="tp", name="g.grad.tp")
            dim, form = SHARDS[w.name]
            op = "sum" if wrong == "summed, not averaged" and w is down else "avg"
            shard = r.reduce_scatter(grad, group="dp", dim=dim, op=op, name=f"{w.name}.grad.own")
            r.output(shard, "gradient", w.name, form=form)
            own = r.own_block(w, group="dp", dim=dim, backward="none", name=f"{w.name}.own")
            new = r.optimizer(ADAM, w, shard, shard=own, form=form)
            r.update(w, r.all_gather(new, group="dp", dim=dim, name=f"{w.name}.whole"))
    return p.build()


def test_plan_is_proved() -> None:
    report = tv.verify(step(), plan())
    assert report.verdict == "PROVED", report.reason


WRONG = {
    "norm not summed over tp": "g.grad",
    "summed, not averaged": "down.grad.own",
    "embedding not tied": "table",
    "shares of the gradient of y": "y.own.grad",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_twin_is_refuted(wrong: str) -> None:
    report = tv.verify(step(), plan(wrong))
    assert report.verdict == "REFUTED", report.reason
    assert report.place is not None
    assert report.place.tensor.startswith(WRONG[wrong])
