"""Every program equals itself, in other words too, by the general path: also where it divides by what may be 0 in a branch."""

from __future__ import annotations

from typing import Any, Final

import pytest

import trainverify as tv
from prove.hidden import HIDDEN
from prove.infinite import FINITE, INFINITE, Body, made
from prove.rewritten import WORDS
from prove.unseen import UNSEEN, root_of_an_inverse_of_any
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.verdicts import verify

EITHER_SIGN: Final = {root_of_an_inverse_of_any}  # √(1/x) is another one at −0, and of which sign a sum is 0 no form says
BODIES: Final[list[Body]] = [b for b in (*HIDDEN, *(w.body for w in UNSEEN), *INFINITE, *FINITE) if b not in EITHER_SIGN]
BATCH, WIDTH, OUT = 48, 256, 192


@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("body", BODIES)
def test_a_body_equals_itself(body: Body, words: str) -> None:
    """Expected: PROVED at full size."""
    program = made(body, True)
    assert verify(program, WORDS[words](program), points=1).verdict == "PROVED"


def clipped(b: Any, gradient: Any, norm: Any, limit: Any, other: bool) -> Any:
    """As optax clips: the branch that divides is not taken where the norm is 0."""
    scaled = b.mul(b.div(gradient, norm), limit)
    small = b.lt(norm, limit)
    return b.where(small, scaled, gradient) if other else b.where(small, gradient, scaled)


def stepped(b: Any, gradients: dict[Any, Any], limit: Any, count: Any, other: bool) -> None:
    """Clip all gradients by their norm, and update with a bias correction of the number of steps."""
    squares = [b.sum(b.square(g)) for g in gradients.values()]
    norm = b.sqrt(b.add(*squares))
    correction = b.sub(b.full(shape=(), value=1.0), b.exp(b.mul(count, value=-0.125)))
    for w, g in gradients.items():
        b.output(g, "gradient", w.name)
        b.update(w, b.sub(w, b.div(clipped(b, g, norm, limit, other), correction)))


def model(literal: bool) -> Program:
    b = tv.program("clip")
    x, t = b.input("x", (BATCH, WIDTH)), b.input("t", (BATCH, OUT))
    ws = [b.parameter("w0", (WIDTH, WIDTH)), b.parameter("w1", (OUT, WIDTH))]
    limit = b.full(shape=(), value=1.0) if literal else b.input("limit", (), domain="positive")
    count = b.input("count", (), domain="positive")
    e = b.sub(b.linear(b.relu(b.linear(x, ws[0])), ws[1]), t)
    loss = b.mean(b.square(e), name="loss")
    b.loss(loss)
    b.backward(loss)
    stepped(b, {w: b.gradient(w) for w in ws}, limit, count, False)
    return b.build()


def on_eight(literal: bool, forgotten: bool = False, other: bool = False) -> Plan:
    p = tv.plan("clip", tv.Mesh(dp=8))
    with p.ranks() as r:
        x, t = r.input("x", (BATCH // 8, WIDTH), "(dp b) k"), r.input("t", (BATCH // 8, OUT), "(dp b) k")
        ws = [r.parameter("w0", (WIDTH, WIDTH), "o k"), r.parameter("w1", (OUT, WIDTH), "o k")]
        limit = r.full(shape=(), value=1.0) if literal else r.input("limit", (), "", domain="positive")
        count = r.input("count", (), "", domain="positive")
        e = r.sub(r.linear(r.relu(r.linear(x, ws[0])), ws[1]), t)
        loss = r.mean(r.square(e), name="local")
        r.backward(loss)
        r.loss(r.all_reduce(loss, group="dp", op="avg", name="loss"))
        kept = ws[1] if forgotten else None
        made = {w: r.gradient(w) if w is kept else r.all_reduce(r.gradient(w), group="dp", op="avg") for w in ws}
        stepped(r, made, limit, count, other)
    return p.build()


@pytest.mark.parametrize("literal", [True, False])
def test_clipping_in_a_branch(literal: bool) -> None:
    """Expected: PROVED on eight ranks; REFUTED with a gradient that is not averaged, or the branches exchanged."""
    assert verify(model(literal), on_eight(literal)).verdict == "PROVED"
    assert verify(model(literal), on_eight(literal, forgotten=True)).verdict == "REFUTED"
    assert verify(model(literal), on_eight(literal, other=True)).verdict == "REFUTED"
