"""Attention with a mask that compares positions, which are integer inputs: over dp, tp and cp, also with chunks from both ends."""

from __future__ import annotations

import pytest

import trainverify as tv
from trainverify.build.plan import RankBuilder
from trainverify.build.program import ProgramBuilder
from trainverify.build.tape import Tensor
from trainverify.graph.lineage import Part, Parts, Run
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.graph.rebuilt import Rebuilt
from trainverify.verdicts import verify

BATCH, LENGTH, WIDTH, HEADS = 6, 4096, 1024, 8
WEIGHTS = ("wq", "wk", "wv", "wo")
Builder = ProgramBuilder | RankBuilder


def mask(b: Builder, q_pos: Tensor, k_pos: Tensor, how: str) -> Tensor:
    """bool[…, queries, keys]: which keys a query sees."""
    q, k = b.unsqueeze(q_pos, dim=len(q_pos.shape), name="q_pos.column"), b.unsqueeze(k_pos, dim=len(k_pos.shape) - 1, name="k_pos.row")
    match how:
        case "ge":
            return b.ge(q, k, name="mask")
        case "le":  # the same
            return b.le(k, q, name="mask")
        case "not":
            return b.logical_not(b.lt(q, k), name="mask")
        case "window":  # the last 1000 only
            return b.logical_and(b.ge(q, k), b.lt(q, b.add(k, value=1000)), name="mask")
        case "later":
            return b.le(q, k, name="mask")
        case "strict":
            return b.gt(q, k, name="mask")
    raise KeyError(how)


def attend(b: Builder, x: Tensor, keys: Tensor, weights: list[Tensor], see: Tensor, heads: int, by_hand: bool = False) -> Tensor:
    """Causal attention of x to the keys."""

    def split(t: Tensor) -> Tensor:
        return b.transpose(b.view(t, shape=(*t.shape[:2], heads, WIDTH // HEADS)), dim0=1, dim1=2)

    wq, wk, wv, wo = weights
    q, k, v = split(b.linear(x, wq, name="q")), split(b.linear(keys, wk, name="k")), split(b.linear(keys, wv, name="v"))
    see = b.unsqueeze(see, dim=1, name="see") if len(see.shape) == 3 else see
    if by_hand:
        scores = b.masked_fill(b.einsum(q, k, spec="bhsd,bhtd->bhst"), b.logical_not(see), value=float("-inf"), name="scores")
        y = b.einsum(b.softmax(scores, dim=-1, name="shares"), v, spec="bhst,bhte->bhse")
    else:
        y, _ = b.attention(q, k, v, see, name=("y.heads", "y.logsumexp"))
    return b.linear(b.view(b.transpose(y, dim0=1, dim1=2), shape=(*x.shape[:2], heads * WIDTH // HEADS)), wo, name="o")


def model(per_row: bool = False, how: str = "ge", two: bool = False, by_hand: bool = False, length: int = LENGTH) -> Program:
    """Positions are one for all rows or of every row, the same for queries and keys or two inputs."""
    b = tv.program("positions")
    x, t = b.input("x", (BATCH, length, WIDTH)), b.input("t", (BATCH, length, WIDTH))
    shape = (BATCH, length) if per_row else (length,)
    q_pos = b.input("pos", shape, "i64", ids=length)
    k_pos = b.input("k_pos", shape, "i64", ids=length) if two else q_pos
    o = attend(b, x, x, [b.parameter(n, (WIDTH, WIDTH)) for n in WEIGHTS], mask(b, q_pos, k_pos, how), HEADS, by_hand)
    e = b.sub(o, t)
    b.loss(b.sum(b.mul(e, e), name="loss"))
    return tv.complete(b.build(), tv.SGD(lr=0.1))


def finish(r: RankBuilder, o: Tensor, t: Tensor, weights: list[Tensor], group: tuple[str, ...]) -> None:
    e = r.sub(o, t, name="e")
    loss = r.sum(r.mul(e, e), name="loss.part")
    r.backward(loss)
    r.loss(r.all_reduce(loss, group=group, name="loss"))
    for w in weights:
        grad = r.all_reduce(r.gradient(w), group=group, name=f"{w.name}.total")
        r.output(grad, "gradient", w.name)
        r.update(w, r.sgd(w, grad, lr=0.1, name=f"{w.name}.new"))


def by_heads(per_row: bool = False, how: str = "ge", two: bool = False, by_hand: bool = False) -> Plan:
    """dp = 3, tp = 2."""
    p = tv.plan("positions", tv.Mesh(dp=3, tp=2))
    with p.ranks() as r:
        x, t = (r.input(n, (BATCH // 3, LENGTH, WIDTH), "(dp b) s d") for n in "xt")
        shape, form = ((BATCH // 3, LENGTH), "(dp b) s") if per_row else ((LENGTH,), "s")
        q_pos = r.input("pos", shape, form, dtype="i64", ids=LENGTH)
        k_pos = r.input("k_pos", shape, form, dtype="i64", ids=LENGTH) if two else q_pos
        weights = [r.parameter(n, (WIDTH // 2, WIDTH), "(tp o) d") for n in WEIGHTS[:3]] + [
            r.parameter("wo", (WIDTH, WIDTH // 2), "o (tp d)")
        ]
        x = r.copy(x, "tp", name="x.tp")
        o = attend(r, x, x, weights, mask(r, q_pos, k_pos, how), HEADS // 2, by_hand)
        finish(r, r.all_reduce(o, group="tp", backward="identity", name="o.sum"), t, weights, ("dp",))
    return p.build()


def by_context(per_row: bool = False, how: str = "ge", own_keys: bool = False, by_hand: bool = False, swapped: bool = False) -> Plan:
    """dp = 3, cp = 4: every rank has a quarter of the positions, and gathers keys and their positions."""
    p = tv.plan("positions", tv.Mesh(dp=3, cp=4))
    size = LENGTH // 4
    with p.ranks() as r:
        x, t = (r.input(n, (BATCH // 3, size, WIDTH), "(dp b) (cp s) d") for n in "xt")
        shape, form = ((BATCH // 3, size), "(dp b) (cp s)") if per_row else ((size,), "(cp s)")
        pos = r.input("pos", shape, form, dtype="i64", ids=LENGTH)
        weights = [r.parameter(n, (WIDTH, WIDTH), "o d") for n in WEIGHTS]
        keys = r.all_gather(x, group="cp", dim=1, backward="reduce_scatter", name="keys")
        d = len(shape) - 1
        k_pos = r.concat(*[pos] * 4, dim=d) if own_keys else r.all_gather(pos, group="cp", dim=d, backward=None, name="k_pos")
        see = mask(r, k_pos, pos, how) if swapped else mask(r, pos, k_pos, how)
        if swapped:
            see = r.transpose(see, dim0=d, dim1=d + 1)
        o = attend(r, x, keys, weights, see, HEADS, by_hand)
        finish(r, o, t, weights, ("dp", "cp"))
    return p.build()


def from_both_ends(mixed_up: str = "", length: int = LENGTH) -> Plan:
    """dp = 3, cp = 2: rank r has chunks r and 3 − r of four, and puts the gathered ones in order."""
    p = tv.plan("positions", tv.Mesh(dp=3, cp=2))
    size = length // 4

    def parts(*shape: int) -> Parts:
        d, found = len(shape) - 1 - (len(shape) == 3), []
        for rank in range(6):
            dp, cp = divmod(rank, 2)
            mine = []
            for n, chunk in enumerate((cp, 3 - cp)):
                runs = [Run(0, s) for s in shape]
                runs[d] = Run(chunk * size, size)
                if len(shape) == 3:
                    runs[0] = Run(dp * 2, 2)
                mine.append(Part(tuple(n * size if e == d else 0 for e in range(len(shape))), tuple(runs)))
            found.append((rank, tuple(mine)))
        return Parts(tuple(found))

    with p.ranks() as r:
        x, t = (r.input(n, (2, 2 * size, WIDTH), parts(BATCH, length, WIDTH)) for n in "xt")
        pos = r.input("pos", (2 * size,), parts(length), dtype="i64", ids=length)
        weights = [r.parameter(n, (WIDTH, WIDTH), "o d") for n in WEIGHTS]

        def ordered(t: Tensor, d: int, order: tuple[int, ...] = (0, 2, 3, 1)) -> Tensor:
            chunks = [r.slice(t, dim=d, start=n * size, stop=(n + 1) * size, name=f"{t.name}.{n}") for n in range(4)]
            return r.concat(*(chunks[n] for n in order), dim=d, name=f"{t.name}.ordered")

        keys = ordered(r.all_gather(x, group="cp", dim=1, backward="reduce_scatter", name="keys"), 1)
        k_pos = r.all_gather(pos, group="cp", dim=0, backward=None, name="k_pos")
        if mixed_up != "positions as gathered":
            k_pos = ordered(k_pos, 0, (0, 3, 2, 1) if mixed_up == "two chunks exchanged" else (0, 2, 3, 1))
        if mixed_up == "queries at the positions of keys":
            pos = r.slice(k_pos, dim=0, start=0, stop=2 * size)
        finish(r, attend(r, x, keys, weights, mask(r, pos, k_pos, "ge"), HEADS), t, weights, ("dp", "cp"))
    return p.build()


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("how", ["ge", "le", "not"])
def test_positions_are_proved(per_row: bool, how: str) -> None:
    logical = model(per_row)
    for plan in (by_heads(per_row, how), by_context(per_row, how)):
        report = verify(logical, plan)
        assert report.verdict == "PROVED", report
        assert {(o.engine, o.scope) for o in report.obligations} == {("algebra", "full size")}


def test_other_masks_are_proved() -> None:
    assert verify(model(two=True), by_heads(two=True)).verdict == "PROVED"
    assert verify(model(how="window"), by_heads(how="window")).verdict == "PROVED"
    assert verify(model(how="window"), by_context(how="window")).verdict == "PROVED"
    assert verify(model(by_hand=True), by_heads(by_hand=True)).verdict == "PROVED"
    assert verify(model(by_hand=True), by_context(by_hand=True)).verdict == "PROVED"
    assert verify(model(), from_both_ends()).verdict == "PROVED"


WRONG: dict[str, tuple[Program, Plan]] = {
    "later keys": (model(), by_heads(how="later")),
    "not its own position": (model(), by_heads(how="strict")),
    "later keys, cp": (model(), by_context(how="later")),
    "not its own position, cp": (model(), by_context(how="strict")),
    "its own positions as those of all keys": (model(), by_context(own_keys=True)),
    "queries and keys exchanged": (model(), by_context(swapped=True)),
    "two chunks exchanged": (model(), from_both_ends("two chunks exchanged")),
    "positions as gathered": (model(), from_both_ends("positions as gathered")),
    "queries at the positions of keys": (model(), from_both_ends("queries at the positions of keys")),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_positions_are_refuted(name: str) -> None:
    also = [Rebuilt("length=16", lambda: (model(length=16), from_both_ends(name, 16)))] if name == "two chunks exchanged" else []
    report = verify(*WRONG[name], also=also)
    assert report.verdict == "REFUTED", report


def test_a_window_is_not_proved() -> None:
    """At small sizes no position is 1000 before another: nothing refutes it."""
    assert verify(model(), by_context(how="window")).verdict != "PROVED"
    assert verify(model(how="window"), by_context()).verdict != "PROVED"


# -- maxima over pieces ------------------------------------------------------------------------------------------------


def peak(pieces: tuple[int, ...] = (0, 1), fn: str = "amax", also: float = 0.0) -> Program:
    """The largest of two rows of different lengths, one after the other."""
    b = tv.program("peak")
    w = [b.parameter("a", (3, 1000)), b.parameter("b", (3, 4096))]
    row = b.concat(*(w[n] for n in pieces), dim=1, name="row")
    y = b.detach(getattr(b, fn)(b.add(row, value=also), dim=1, keepdim=True, name="peak"))
    each = [b.sum(b.mul(b.sub(x, y), x)) for x in w]
    b.loss(b.add(*each, name="loss"))
    return tv.complete(b.build(), tv.SGD(lr=0.1))


def test_maxima_over_unequal_pieces() -> None:
    for fn in ("amax", "amin"):
        assert verify(peak(fn=fn), peak(fn=fn)).verdict == "PROVED"
        assert verify(peak(fn=fn), peak((1, 0), fn)).verdict == "PROVED"
    assert verify(peak(), peak(fn="amin")).verdict == "REFUTED"
    for pieces in ((0, 0), (1, 1)):
        assert verify(peak(), peak(pieces)).verdict == "REFUTED"
    assert verify(peak(), peak(also=0.5)).verdict == "REFUTED"
