"""Functions behind a mask of tokens: f(mask · x) is mask · f(x) if f(0) is 0, and mask · f(mask · x) is mask · f(x) whatever f(0) is."""

from __future__ import annotations

import itertools

import pytest

import trainverify as tv
from prove.meaning import check_program
from trainverify.build.plan import RankBuilder
from trainverify.build.program import ProgramBuilder
from trainverify.build.tape import Tensor
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.verdicts import verify

TOKENS, WIDTH, HIDDEN, EXPERTS = 4096, 1024, 2816, 8
Builder = ProgramBuilder | RankBuilder


def mask(b: Builder, kind: str, given: Tensor, ids: Tensor) -> Tensor:
    """1 for tokens that an expert gets: given, by a score, or by the expert's number."""
    match kind:
        case "given":
            found = given
        case "score":
            found = b.float(b.gt(given, value=0.5))
        case "low score":
            found = b.float(b.le(given, value=0.5))
        case "number":
            found = b.float(b.eq(ids, value=3))
        case "other number":
            found = b.float(b.eq(ids, value=4))
    return b.unsqueeze(found, dim=1, name="mask")


def activation(b: Builder, f: str, h: Tensor) -> Tensor:
    return b.gelu(h, approximate="tanh", name="a") if f == "gelu by tanh" else getattr(b, f)(h, name="a")


def inputs(b: Builder, kind: str, tokens: int, form: tuple[str, ...] = ()) -> tuple[Tensor, Tensor]:
    domain = "indicator" if kind == "given" else None
    return b.input("given", (tokens,), *form, domain=domain), b.input("ids", (tokens,), *form, dtype="i64", ids=EXPERTS)


def model(f: str, kind: str = "given", bias: bool = False) -> Program:
    """All tokens go through the expert, and those that are not its own count zero."""
    b = tv.program("expert")
    x, t = b.input("x", (TOKENS, WIDTH)), b.input("t", (TOKENS, WIDTH))
    m = mask(b, kind, *inputs(b, kind, TOKENS))
    w1, w2 = b.parameter("w1", (HIDDEN, WIDTH)), b.parameter("w2", (WIDTH, HIDDEN))
    h = b.linear(x, w1, b.parameter("b", (HIDDEN,)) if bias else None, name="h")
    e = b.sub(b.linear(b.mul(activation(b, f, h), m, name="y"), w2, name="o"), t, name="e")
    b.loss(b.sum(b.mul(e, e), name="loss"))
    return tv.complete(b.build(), tv.SGD(lr=0.1))


def plan(f: str, kind: str = "given", bias: bool = False, before: bool = True, after: bool = True, other: str | None = None) -> Plan:
    """dp = 2, tp = 2; the mask is applied before the expert, after it, or both."""
    p = tv.plan("expert", tv.Mesh(dp=2, tp=2))
    with p.ranks() as r:
        x, t = (r.input(n, (TOKENS // 2, WIDTH), "(dp b) d") for n in "xt")
        given, ids = inputs(r, kind, TOKENS // 2, ("(dp b)",))
        m = mask(r, kind, given, ids)
        w = [r.parameter("w1", (HIDDEN // 2, WIDTH), "(tp f) d"), r.parameter("w2", (WIDTH, HIDDEN // 2), "d (tp f)")]
        if bias:
            w.append(r.parameter("b", (HIDDEN // 2,), "(tp f)"))
        x = r.copy(x, "tp", name="x.tp")
        if before:
            x = r.mul(x, mask(r, other, given, ids) if other else m, name="x.masked")
        y = activation(r, f, r.linear(x, w[0], w[2] if bias else None, name="h"))
        if after:
            y = r.mul(y, m, name="y")
        e = r.sub(r.all_reduce(r.linear(y, w[1], name="o.part"), group="tp", backward="identity", name="o"), t, name="e")
        loss = r.sum(r.mul(e, e), name="loss.part")
        r.backward(loss)
        r.loss(r.all_reduce(loss, group="dp", name="loss"))
        for q in w:
            grad = r.all_reduce(r.gradient(q), group="dp", name=f"{q.name}.total")
            r.output(grad, "gradient", q.name)
            r.update(q, r.sgd(q, grad, lr=0.1, name=f"{q.name}.new"))
    return p.build()


ZERO_AT_ZERO = ("relu", "silu", "gelu", "gelu by tanh", "tanh")
KINDS = ("given", "score", "low score", "number")


@pytest.mark.parametrize(("f", "kind"), itertools.product(ZERO_AT_ZERO, KINDS))
def test_masked_before_or_after(f: str, kind: str) -> None:
    for before, after in ((True, True), (True, False), (False, True)):
        report = verify(model(f, kind), plan(f, kind, before=before, after=after))
        if f == "gelu by tanh" and not after:  # the derivative of a cubic under tanh is not brought to one form
            assert report.verdict == "UNKNOWN"
            continue
        assert report.verdict == "PROVED", report
        assert {(o.engine, o.scope) for o in report.obligations} == {("algebra", "full size")}


@pytest.mark.parametrize("kind", KINDS)
def test_not_zero_at_zero(kind: str) -> None:
    """sigmoid(0) is ½: it has to be masked afterwards."""
    assert verify(model("sigmoid", kind), plan("sigmoid", kind)).verdict == "PROVED"
    assert verify(model("sigmoid", kind), plan("sigmoid", kind, after=False)).verdict == "REFUTED"


@pytest.mark.parametrize("f", ZERO_AT_ZERO)
def test_with_a_bias(f: str) -> None:
    """f(b) is not 0: it has to be masked afterwards."""
    proved = f in ("silu", "tanh")  # the others are sums of cases in which parts have names
    assert verify(model(f, bias=True), plan(f, bias=True)).verdict == ("PROVED" if proved else "UNKNOWN")
    assert verify(model(f, bias=True), plan(f, bias=True, after=False)).verdict == "REFUTED"


@pytest.mark.parametrize("f", ZERO_AT_ZERO)
def test_wrong_masks(f: str) -> None:
    assert verify(model(f), plan(f, before=False, after=False)).verdict == "REFUTED"
    assert verify(model(f, "number"), plan(f, "number", other="other number")).verdict == "REFUTED"
    assert verify(model(f, "number"), plan(f, "other number")).verdict == "REFUTED"
    assert verify(model(f, "score"), plan(f, "score", other="low score")).verdict == "REFUTED"
    # a mask that is not declared to be 0 or 1 is a number
    assert verify(not_an_indicator(f, False), not_an_indicator(f, True)).verdict == "REFUTED"


def not_an_indicator(f: str, before: bool) -> Program:
    b = tv.program("number")
    x, m, w = b.input("x", (TOKENS, 64)), b.input("m", (TOKENS, 1)), b.parameter("w", (48, 64))
    x = b.mul(x, m) if before else x
    y = activation(b, f, b.linear(x, w, name="h"))
    b.loss(b.sum(y if before else b.mul(y, m), name="loss"))
    return tv.complete(b.build(), tv.SGD(lr=0.1))


# -- masks next to each other ------------------------------------------------------------------------------------------


def two(how: int, f: str = "tanh") -> Program:
    """Tokens with two masks, of which one counts, both, or none."""
    b = tv.program("two")
    x, w = b.input("x", (5, 7)), b.parameter("w", (3, 7))
    m, n = (b.input(k, (5, 1), domain="indicator") for k in "mn")
    h = b.linear(x, w, name="h")
    match how:
        case 0:
            y = b.add(b.mul(activation(b, f, h), m), b.mul(activation(b, f, b.mul(h, value=-2.0)), n))
        case 1:
            y = b.add(activation(b, f, b.mul(h, m)), activation(b, f, b.mul(b.mul(h, n), value=-2.0)))
        case 2:  # m·n counts twice
            y = activation(b, f, b.add(b.mul(h, m), b.mul(b.mul(h, n), value=-2.0)))
        case 3:  # the masks exchanged
            y = b.add(activation(b, f, b.mul(h, n)), activation(b, f, b.mul(b.mul(h, m), value=-2.0)))
        case 4:  # not at once
            y = activation(b, f, b.mul(b.mul(h, m), n))
        case 5:
            y = b.mul(b.mul(activation(b, f, h), m), n)
        case 6:  # 1 − m is no mask that m decides about
            y = activation(b, f, b.sub(h, b.mul(h, m)))
        case 7:
            y = b.sub(activation(b, f, h), b.mul(activation(b, f, h), m))
    b.loss(b.sum(b.mul(y, y), name="loss"))
    return tv.complete(b.build(), tv.SGD(lr=0.1))


@pytest.mark.parametrize("f", ["relu", "silu", "gelu", "tanh"])
def test_two_masks(f: str) -> None:
    assert verify(two(4, f), two(5, f)).verdict == "PROVED"
    assert verify(two(0, f), two(1, f)).verdict == ("PROVED" if f == "relu" else "UNKNOWN")
    assert verify(two(6, f), two(7, f)).verdict != "REFUTED"
    for wrong in (2, 3, 4, 6):
        assert verify(two(0, f), two(wrong, f)).verdict == "REFUTED", wrong
    for wrong in (0, 6):
        assert verify(two(5, f), two(wrong, f)).verdict == "REFUTED", wrong


@pytest.mark.parametrize(("how", "f"), itertools.product(range(8), ["relu", "silu", "gelu", "sigmoid", "cos"]))
def test_forms_mean_what_they_say(how: int, f: str) -> None:
    for seed in range(2):
        compared = check_program(two(how, f), seed)
        assert compared.wrong == []
        assert compared.without == []


# -- what has no value -------------------------------------------------------------------------------------------------


def divided(how: int) -> Program:
    """A quotient behind a mask: where the mask is 0 its divisor may be 0, and then there is no number."""
    b = tv.program("divided")
    x, d, w = b.input("x", (TOKENS, 3)), b.input("d", (TOKENS, 1)), b.parameter("w", (TOKENS, 3))
    m = b.input("m", (TOKENS, 1), domain="indicator")
    xw = b.mul(x, w)
    match how:
        case 0:  # needs d ≠ 0 everywhere
            y = b.mul(b.tanh(b.div(xw, d)), m)
        case 1:
            y = b.tanh(b.mul(b.div(xw, d), m))
        case 2:  # needs it where m is 1
            safe = b.where(b.gt(m, value=0.0), d, b.full(shape=(TOKENS, 1), value=1.0))
            y = b.tanh(b.mul(b.div(xw, safe), m))
    b.loss(b.sum(y, name="loss"))
    return tv.complete(b.build(), tv.SGD(lr=0.1))


def test_a_mask_does_not_hide_a_divisor() -> None:
    assert verify(divided(0), divided(1)).verdict == "PROVED"
    assert verify(divided(1), divided(0)).verdict == "PROVED"
    assert verify(divided(2), divided(0)).verdict != "PROVED"  # no value where d is 0 and the token is not there
    assert verify(divided(2), divided(1)).verdict != "PROVED"
