"""The case study of the TrainVerify paper (appendix B.1) in full: attention under context parallelism, micro-batches, loss per token."""

from __future__ import annotations

import trainverify as tv
from trainverify.bugs.case import Pair, case
from trainverify.bugs.step import Builder, finish, update
from trainverify.build.plan import RankBuilder
from trainverify.build.tape import Tensor
from trainverify.explain.cause import Cause
from trainverify.graph.program import Program

DP, CP, MICRO, ROWS, LENGTH, HEADS, WIDTH, IDS = 2, 2, 2, 4, 6, 3, 2, 7
IGNORED = -100


def heads(b: Builder, x: Tensor, w: Tensor, name: str) -> Tensor:
    """Projected, as [rows, heads, positions, width]."""
    rows, length, _ = x.shape
    split = b.reshape(b.linear(x, w, name=name), shape=(rows, length, HEADS, WIDTH), name=f"{name}.split")
    made: Tensor = b.transpose(split, dim0=1, dim1=2, name=f"{name}.heads")
    return made


def mixed(b: Builder, y: Tensor, head: Tensor) -> Tensor:
    """Logits from attention's result."""
    rows, _, length, _ = y.shape
    joined = b.reshape(b.transpose(y, dim0=1, dim1=2, name="rows"), shape=(rows, length, HEADS * WIDTH), name="joined")
    made: Tensor = b.linear(joined, head, name="logits")
    return made


def losses(b: Builder, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Σ of the cross entropies of valid tokens, and how many there are."""
    valid = b.float(b.ne(labels, value=IGNORED, name="valid"), name="valid.float")
    total: Tensor = b.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORED, name="total")
    return total, b.sum(valid, name="count")


def model() -> Program:
    b = tv.program("context")
    ids = b.input("ids", (ROWS, LENGTH), dtype="i64", ids=IDS)
    labels = b.input("labels", (ROWS, LENGTH), dtype="i64", ids=IDS, ignore=IGNORED)
    size = HEADS * WIDTH
    table, wq, wk, wv = b.parameter("table", (IDS, size)), *(b.parameter(n, (size, size)) for n in ("wq", "wk", "wv"))
    head = b.parameter("head", (IDS, size))
    x = b.embedding(ids, table, name="x")
    q, k, v = (heads(b, x, w, n) for w, n in ((wq, "q"), (wk, "k"), (wv, "v")))
    y, _ = b.attention(q, k, v, is_causal=True, name=["y", "logsumexp"])
    return finish(b, b.div(*losses(b, mixed(b, y, head), labels), name="loss"))


def objective(r: RankBuilder, ids: Tensor, labels: Tensor, w: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A micro-batch: positions are cut over cp, keys and values are gathered."""
    x = r.embedding(ids, w["table"], name="x")
    q = heads(r, x, w["wq"], "q")
    k, v = (
        r.all_gather(heads(r, x, w[f"w{n}"], f"{n}.own"), group="cp", dim=2, backward="reduce_scatter", name=f"{n}.whole")
        for n in ("k", "v")
    )
    own = LENGTH // CP
    y, _ = r.attention(q, k, v, is_causal=True, query_offset=r.each(lambda at: at["cp"] * own), name=["y", "logsumexp"])
    return losses(r, mixed(r, y, w["head"]), labels)


@case(
    "B130",
    "Case study of the paper: loss times cp, loss per token",
    reference="NVIDIA/Megatron-LM#673, appendix B.1 of the TrainVerify paper",
    mechanism="With a loss per token gradients are divided by all tokens and not by dp·cp, but the loss is still multiplied by cp.",
    cause=Cause.WRONG_FACTOR,
    tensors=("mb0/scaled", "mb1/scaled", "mb0/total.grad", "mb1/total.grad"),
)
def gradient_finalization(right: bool) -> Pair:
    p = tv.plan("context", tv.Mesh(dp=DP, cp=CP))
    with p.ranks() as r:
        size = HEADS * WIDTH
        shapes = {"table": (IDS, size), "wq": (size, size), "wk": (size, size), "wv": (size, size), "head": (IDS, size)}
        w = {n: r.parameter(n, shape, "o k") for n, shape in shapes.items()}
        totals, counts = [], []
        for m in range(MICRO):
            r.prefix = f"mb{m}/"
            shape, form, fixed = (ROWS // DP // MICRO, LENGTH // CP), "(dp mb b) (cp s)", {"mb": (m, MICRO)}
            ids = r.input(f"mb{m}/ids", shape, form, "ids", dtype="i64", ids=IDS, fixed=fixed)
            labels = r.input(f"mb{m}/labels", shape, form, "labels", dtype="i64", ids=IDS, ignore=IGNORED, fixed=fixed)
            total, count = objective(r, ids, labels, w)
            scaled = r.identity(total, name="scaled") if right else r.mul(total, value=CP, name="scaled")  # bug
            r.backward(scaled)
            totals.append(total)
            counts.append(count)
        r.prefix = ""
        tokens = r.all_reduce(r.add(*counts, name="tokens.own"), group=("dp", "cp"), name="tokens")
        r.loss(r.div(r.all_reduce(r.add(*totals, name="totals"), group=("dp", "cp"), name="totals.all"), tokens, name="loss"))
        for name, weight in w.items():
            g = r.all_reduce(r.gradient(weight), group=("dp", "cp"), name=f"{name}.grad.sum")
            update(r, weight, r.div(g, tokens, name=f"{name}.grad.mean"))
    return model(), p.build()
