"""Slices that overlap with themselves: next-token labels `x[:, :-1]`, `labels[:, 1:]` at real lengths, and what differs by a position."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import trainverify as tv
from prove.meaning import Compared, Point, inputs_of, numbers_of
from trainverify.build.plan import RankBuilder
from trainverify.build.program import ProgramBuilder
from trainverify.build.tape import Tensor
from trainverify.graph.obligations import obligations
from trainverify.graph.plan import Plan, units
from trainverify.graph.program import Program
from trainverify.graph.rebuilt import Rebuilt
from trainverify.ops import OPS
from trainverify.prove.algebra.engine import Prover
from trainverify.verdicts import related, single, verify

BATCH, LENGTH, VOCABULARY, WIDTH = 6, 4096, 32000, 1024


# -- next-token labels -------------------------------------------------------------------------------------------------


def language_model(length: int = LENGTH) -> Program:
    """Tokens are their own labels, one position later."""
    b = tv.program("language model")
    ids = b.input("ids", (BATCH, length), "i64", ids=VOCABULARY)
    e, w, g = b.parameter("e", (VOCABULARY, WIDTH)), b.parameter("w", (VOCABULARY, WIDTH)), b.parameter("g", (WIDTH,))
    x = b.embedding(ids, e, name="x")
    logits = b.linear(b.rms_norm(mixed(b, x), g, eps=1e-5, name="h"), w, name="logits")
    kept = b.slice(logits, dim=1, start=0, stop=length - 1, name="kept")
    labels = b.slice(ids, dim=1, start=1, stop=length, name="labels")
    b.loss(b.cross_entropy(kept, labels, name="loss"))
    return tv.complete(b.build(), tv.SGD(lr=0.1))


def mixed(b: ProgramBuilder | RankBuilder, x: Tensor) -> Tensor:
    """Every position depends on those before it: positions cannot be exchanged."""
    heads = b.unsqueeze(x, dim=1, name="x.heads")
    y, _ = b.attention(heads, heads, heads, is_causal=True, name=("y.heads", "y.logsumexp"))
    return b.add(x, b.squeeze(y, dim=(1,), name="y"), name="z")


def by_batch(length: int = LENGTH, logits_from: int = 0, labels_from: int = 1, views: bool = False, one_less: bool = False) -> Plan:
    """dp = 2."""
    p = tv.plan("language model", tv.Mesh(dp=2))
    with p.ranks() as r:
        ids = r.input("ids", (BATCH // 2, length), "(dp b) s", dtype="i64", ids=VOCABULARY)
        e, w = (r.parameter(n, (VOCABULARY, WIDTH), "v h") for n in "ew")
        g = r.parameter("g", (WIDTH,), "h")
        x = r.embedding(ids, e, name="x")
        logits = r.linear(r.rms_norm(mixed(r, x), g, eps=1e-5, name="h"), w, name="logits")
        size = length - 1
        kept = r.slice(logits, dim=1, start=logits_from, stop=logits_from + size, name="kept")
        labels = r.slice(ids, dim=1, start=labels_from, stop=labels_from + size, name="labels")
        if one_less:
            kept, labels = (r.slice(t, dim=1, start=0, stop=size - 1, name=f"{t.name}.less") for t in (kept, labels))
        if views:
            kept = r.view(kept, shape=(BATCH // 2 * size, VOCABULARY), name="kept.rows")
            labels = r.view(labels, shape=(BATCH // 2 * size,), name="labels.rows")
        loss = r.div(r.cross_entropy(kept, labels, name="loss.local"), value=2, name="loss.part")
        finish(r, loss, [e, w, g])
    return p.build()


def finish(r: RankBuilder, loss: Tensor, weights: list[Tensor]) -> None:
    r.backward(loss)
    r.loss(r.all_reduce(loss, group="dp", name="loss"))
    for q in weights:
        grad = r.all_reduce(r.gradient(q), group="dp", name=f"{q.name}.grad")
        r.output(grad, "gradient", q.name)
        r.update(q, r.sgd(q, grad, lr=0.1, name=f"{q.name}.new"))


def by_vocabulary(length: int = LENGTH, labels_from: int = 1, start: int = 0) -> Plan:
    """dp = 2, tp = 4: rows of both tables divided."""
    p = tv.plan("language model", tv.Mesh(dp=2, tp=4))
    with p.ranks() as r:
        ids = r.input("ids", (BATCH // 2, length), "(dp b) s", dtype="i64", ids=VOCABULARY)
        rows = VOCABULARY // 4
        e, w = (r.parameter(n, (rows, WIDTH), "(tp v) h") for n in "ew")
        g = r.parameter("g", (WIDTH,), "h")
        first = r.each(lambda at: at["tp"] * rows)
        part = r.embedding(ids, e, start=first, name="x.part")
        x = r.all_reduce(part, group="tp", backward="identity", name="x")
        h = r.copy(r.rms_norm(mixed(r, x), g, eps=1e-5, name="h"), "tp", name="h.tp")
        logits = r.linear(h, w, name="logits")
        kept = r.slice(logits, dim=1, start=0, stop=length - 1, name="kept")
        labels = r.slice(ids, dim=1, start=labels_from, stop=labels_from + length - 1, name="labels")
        peak = r.detach(r.amax(kept, dim=-1, keepdim=True, name="peak.local"), name="peak.part")
        shifted = r.sub(kept, r.all_reduce(peak, group="tp", op="max", backward=None, name="peak"), name="shifted")
        hit = r.float(
            r.one_hot(labels, num_classes=rows, start=r.each(lambda at: (at["tp"] + start) % 4 * rows), name="hit"), name="hit.float"
        )
        target = r.all_reduce(r.sum(r.mul(shifted, hit), dim=2, name="target.part"), group="tp", backward="identity", name="target")
        weight = r.all_reduce(r.sum(r.exp(shifted), dim=2, name="weight.part"), group="tp", backward="identity", name="weight")
        count = r.sum(r.float(r.ne(labels, value=-100), name="valid"), name="count")
        loss = r.div(r.div(r.sum(r.sub(r.log(weight), target), name="loss.sum"), count, name="loss.local"), value=2, name="loss.part")
        finish(r, loss, [e, w, g])
    return p.build()


@pytest.mark.parametrize("length", [4, 300, LENGTH])
def test_next_tokens_are_proved(length: int) -> None:
    for plan in (by_batch(length), by_batch(length, views=True), by_vocabulary(length)):
        report = verify(language_model(length), plan)
        assert report.verdict == "PROVED", report
        assert {(o.engine, o.scope) for o in report.obligations} == {("algebra", "full size")}


WRONG: dict[str, Callable[[int], Plan]] = {
    "the other way round": lambda n: by_batch(n, logits_from=1, labels_from=0),
    "not shifted": lambda n: by_batch(n, labels_from=0),
    "both shifted": lambda n: by_batch(n, logits_from=1),
    "one position less": lambda n: by_batch(n, one_less=True),
    "not shifted, under tp": lambda n: by_vocabulary(n, labels_from=0),
    "another rank's labels": lambda n: by_vocabulary(n, start=1),
}


@pytest.mark.parametrize("name", WRONG)
def test_labels_of_other_positions_are_refuted(name: str) -> None:
    """At 500 positions as they are, each by itself; 4096 take too much memory, so there it is at another length."""
    report = verify(language_model(500), WRONG[name](500))
    assert report.verdict == "REFUTED", report
    also = [Rebuilt("length=8", lambda: (language_model(8), WRONG[name](8)))]
    report = verify(language_model(), WRONG[name](LENGTH), also=also)
    assert report.verdict == "REFUTED", report
    assert report.reason.startswith("at length=8: ")


# -- slices of anything ------------------------------------------------------------------------------------------------


def differences(one: int = 1, other: int = 0, weights: tuple[float, float] = (1.25, -2.5), steps: int = 1) -> Program:
    """Σ of a cubic function of neighbours, of what was a function of them before."""
    b = tv.program("differences")
    x, w = b.input("x", (3, LENGTH)), b.parameter("w", (3, LENGTH))
    y = b.silu(b.mul(x, w, name="xw"), name="y")
    for n in range(steps):
        size = y.shape[1] - 1
        y1, y0 = (b.slice(y, dim=1, start=s, stop=s + size, name=f"y{n}.{s}") for s in (one, other))
        y = b.tanh(b.add(b.mul(y1, value=weights[0]), b.mul(y0, value=weights[1])), name=f"d{n}")
    b.loss(b.sum(b.mul(b.mul(y, y), y), name="loss"))
    return tv.complete(b.build(), tv.SGD(lr=0.1))


@pytest.mark.parametrize("steps", [1, 2])
def test_neighbours(steps: int) -> None:
    assert verify(differences(steps=steps), differences(steps=steps)).verdict == "PROVED"
    assert verify(differences(steps=steps), differences(0, 1, (-2.5, 1.25), steps)).verdict == "PROVED"  # the same sum
    for wrong in (differences(0, 1, steps=steps), differences(weights=(1.25, -1.5), steps=steps), differences(0, 0, steps=steps)):
        assert verify(differences(steps=steps), wrong).verdict == "REFUTED"


def padded(before: int = 1, sliced_first: bool = False) -> Program:
    """The function of a slice, put back with zeros; an inverse would be no number at what was left out."""
    b = tv.program("padded")
    x, w = b.input("x", (3, LENGTH)), b.parameter("w", (3, LENGTH))
    y, z = b.mul(x, w, name="y"), b.add(b.square(x), value=1.0, name="z")
    if sliced_first:
        y, z = (b.slice(t, dim=1, start=0, stop=LENGTH - 1) for t in (y, z))
    q = b.div(y, z, name="q")
    if not sliced_first:
        q = b.slice(q, dim=1, start=0, stop=LENGTH - 1)
    back = b.pad(q, pads=(before, 1 - before), name="back")
    e = b.exp(b.sub(back, b.mul(x, w)), name="e")  # 1 where zeros were put, not 0
    b.loss(b.sum(b.mul(e, w), name="loss"))
    return tv.complete(b.build(), tv.SGD(lr=0.1))


def test_padded_slices() -> None:
    assert verify(padded(), padded()).verdict == "PROVED"
    assert verify(padded(0), padded(0)).verdict == "PROVED"
    for right, wrong in ((1, 0), (0, 1)):
        assert verify(padded(right), padded(wrong)).verdict == "REFUTED"
    assert verify(padded(), padded(sliced_first=True)).verdict == "PROVED"


def masked(power: float, sliced_first: bool) -> Program:
    """A root of a number that is negative only at the position that is left out."""
    b = tv.program("root")
    x, w = b.input("x", (3, LENGTH)), b.parameter("w", (3, LENGTH))
    y = b.slice(x, dim=1, start=1, stop=LENGTH) if sliced_first else x
    v = b.slice(w, dim=1, start=1, stop=LENGTH)
    root = b.pow(y, exponent=power, name="root")
    if not sliced_first:
        root = b.slice(root, dim=1, start=1, stop=LENGTH)
    b.loss(b.sum(b.mul(b.mul(root, root), b.mul(v, b.slice(w, dim=1, start=0, stop=LENGTH - 1))), name="loss"))
    return tv.complete(b.build(), tv.SGD(lr=0.1))


@pytest.mark.parametrize("power", [0.5, -1.0, -0.5])
def test_what_is_left_out_needs_no_value(power: float) -> None:
    """The logical program has a value where x[0] is negative or zero; a plan that needs x[0] as well has none there."""
    assert verify(masked(power, True), masked(power, False)).verdict != "PROVED"


# -- forms mean their numbers ------------------------------------------------------------------------------------------


def small(seed: int) -> Program:
    """Slices, of slices too, of tokens and of numbers, with their gradients."""
    rng = np.random.default_rng(seed)
    b = tv.program("small")
    ids = b.input("ids", (2, 9), "i64", ids=6, ignore=-100 if seed % 2 else None)
    e = b.parameter("e", (6, 3))
    y = b.tanh(b.embedding(ids, e), name="y")
    length = 9
    for n in range(1 + seed % 2):
        size = length - 1 - int(rng.integers(0, 2))
        starts = [int(x) for x in rng.choice(length - size + 1, 2, replace=False)]
        length = size
        one, other = (b.slice(y, dim=1, start=s, stop=s + size, name=f"y{n}.{i}") for i, s in enumerate(starts))
        y = b.add(b.mul(one, b.exp(other)), b.div(other, b.add(b.square(one), value=1.0)), name=f"z{n}")
    labels = b.slice(ids, dim=1, start=9 - length, stop=9)
    logits = b.linear(y, e, name="logits")
    b.loss(b.cross_entropy(logits, labels, reduction="sum", name="loss"))
    return tv.complete(b.build(), tv.SGD(lr=0.1))


@pytest.mark.parametrize("seed", range(12))
def test_forms_mean_what_they_say(seed: int) -> None:
    program = small(seed)
    plan = single(program)
    parts = units(plan)
    wanted, _ = obligations(program, plan, parts)
    system = related(program, plan, OPS, parts, wanted)
    assert system.inference.shifts
    prover = Prover(system)
    prover._run_logical()
    inputs = inputs_of(program, seed)
    numbers, point, out = numbers_of(program, inputs), Point(prover, inputs), Compared()
    for name, value in prover.logical.items():
        assert not isinstance(value, Exception), f"{name}: {value}"
        point.compare(name, value, system.scope.dims[name], np.asarray(numbers[name]), {}, out, None)
    assert out.wrong == []
    assert out.elements > 100
