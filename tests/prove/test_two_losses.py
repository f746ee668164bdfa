"""Two losses through one shared layer, with a backward pass each: their gradients meet in the layer's weight only."""

from __future__ import annotations

import pytest

import trainverify as tv
from trainverify.build.plan import RankBuilder
from trainverify.build.program import ProgramBuilder
from trainverify.build.tape import Tensor
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.verdicts import verify

ROWS, WIDTH, HIDDEN = 512, 1024, 768
Builder = ProgramBuilder | RankBuilder


def shared(b: Builder, x: Tensor, t: Tensor, w: list[Tensor], f: str) -> tuple[Tensor, Tensor]:
    """Two heads on one function of a linear layer; the second loss counts half."""
    h = getattr(b, f)(b.linear(x, w[0], name="u"), name="h")
    errors = [b.sub(b.linear(h, v), t) for v in w[1:]]
    first, second = (b.mean(b.mul(e, e), name=f"loss{n}") for n, e in enumerate(errors))
    return first, b.mul(second, value=0.5, name="half")


def model(f: str = "tanh") -> Program:
    b = tv.program("two losses")
    x, t = b.input("x", (ROWS, WIDTH)), b.input("t", (ROWS, WIDTH))
    w = [b.parameter("w", (HIDDEN, WIDTH)), b.parameter("v1", (WIDTH, HIDDEN)), b.parameter("v2", (WIDTH, HIDDEN))]
    b.loss(b.add(*shared(b, x, t, w, f), name="loss"))
    return tv.complete(b.build(), tv.SGD(lr=0.1))


def plan(f: str, passes: str, dp: int) -> Plan:
    """The backward passes in a row: of losses 0 and 1, or of their sum."""
    p = tv.plan("two losses", tv.Mesh(dp=dp))
    with p.ranks() as r:
        x, t = (r.input(n, (ROWS // dp, WIDTH), "(dp b) d") for n in "xt")
        w = [r.parameter("w", (HIDDEN, WIDTH), "o d"), *(r.parameter(n, (WIDTH, HIDDEN), "o d") for n in ("v1", "v2"))]
        losses = shared(r, x, t, w, f)
        total = r.add(*losses, name="loss.local")
        for each in passes:
            r.backward(total if each == "+" else losses[int(each)])

        def over_dp(x: Tensor, name: str) -> Tensor:
            return r.all_reduce(x, group="dp", op="avg", name=name) if dp > 1 else r.identity(x, name=name)

        r.loss(over_dp(total, "loss"))
        for v in w:
            grad = over_dp(r.gradient(v), f"{v.name}.total")
            r.output(grad, "gradient", v.name)
            r.update(v, r.sgd(v, grad, lr=0.1, name=f"{v.name}.new"))
    return p.build()


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("f", ["tanh", "silu", "gelu", "relu", "sigmoid"])
def test_two_losses_are_proved(f: str, dp: int) -> None:
    assert verify(model(f), model(f)).verdict == "PROVED"
    for passes in ("+", "01", "10"):
        report = verify(model(f), plan(f, passes, dp))
        assert report.verdict == "PROVED", (passes, report)
        assert {(o.engine, o.scope) for o in report.obligations} == {("algebra", "full size")}


@pytest.mark.parametrize("dp", [1, 2])
def test_a_loss_too_often_is_refuted(dp: int) -> None:
    for passes in ("011", "+0", "001", "0101"):
        report = verify(model(), plan("tanh", passes, dp))
        assert report.verdict == "REFUTED", (passes, report)
