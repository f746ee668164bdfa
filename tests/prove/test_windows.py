"""Convolutions and pooling at any size: forms mean their numbers, right plans are proved, wrong ones are not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

import trainverify as tv
from prove.meaning import check_plan, check_program
from prove.showing import attempt, shown
from trainverify.build.program import ProgramBuilder
from trainverify.build.tape import Tensor
from trainverify.domains.numeric import NUMERIC
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.primitives import node as F
from trainverify.primitives.plain import plain
from trainverify.primitives.windows import Windows, overlap, window
from trainverify.prove.algebra.kernel import Kernel
from trainverify.prove.algebra.terms import BORDERED, Poly, named_need, variables
from trainverify.zoo.parallel.degrees import Degrees
from trainverify.zoo.parallel.resnet import resnet_plan, resnet_step
from trainverify.zoo.resnet import PRESETS, Config

Made = Callable[[ProgramBuilder, Tensor, Tensor], Tensor]
TINY = Config((1,), width=2, classes=3, size=(9, 6), batch=4)


def program(made: Made, size: tuple[int, ...] = (2, 3, 9, 7), kernel: tuple[int, ...] = (4, 3, 3, 3)) -> Program:
    """A sum of squares of what is made of x and w, so that no two elements mean the same, with its gradients."""
    b = tv.program("windows")
    x, w = b.parameter("x", size), b.parameter("w", kernel)
    y = made(b, x, w)
    weights = b.input("weights", y.shape)
    b.loss(b.add(b.sum(b.mul(b.square(y), weights)), b.sum(b.square(w)), name="loss"))
    return tv.complete(b.build())


RIGHT: dict[str, Made] = {
    "plain": lambda b, x, w: b.conv2d(x, w),
    "padded": lambda b, x, w: b.conv2d(x, w, padding=1),
    "stride": lambda b, x, w: b.conv2d(x, w, stride=2, padding=1),
    "gaps between windows": lambda b, x, w: b.conv2d(x, w, stride=(4, 3)),
    "dilation": lambda b, x, w: b.conv2d(x, w, dilation=2, padding=(2, 1)),
    "maxima": lambda b, x, w: b.max_pool2d(b.conv2d(x, w, padding=1), kernel=3, stride=2, padding=1),
    "maxima of everything": lambda b, x, w: b.max_pool2d(x, kernel=2),
    "means": lambda b, x, w: b.avg_pool2d(b.conv2d(x, w), kernel=2, padding=1),
}


@pytest.mark.parametrize("name", RIGHT)
def test_forms_mean_their_numbers_and_equal_themselves(name: str) -> None:
    made = program(RIGHT[name])
    small = program(RIGHT[name], (1, 2, 6, 5), (2, 2, 3, 3))
    found = check_program(small, 3)
    assert not found.wrong, found.wrong
    assert not found.without, found.without
    assert not attempt(made, made).failed


WRONG: dict[str, tuple[Made, Made]] = {
    "a dilation with as much more padding": (
        lambda b, x, w: b.conv2d(x, w, padding=1),
        lambda b, x, w: b.conv2d(x, w, padding=2, dilation=2),
    ),
    "one more row before": (
        lambda b, x, w: b.conv2d(x, w, padding=(1, 0)),
        lambda b, x, w: b.conv2d(b.pad(x, pads=(0, 0, 2, 0)), w),
    ),
    "windows that begin earlier": (
        lambda b, x, w: b.conv2d(x, w, stride=3),
        lambda b, x, w: b.conv2d(b.slice(b.pad(x, pads=(0, 0, 1, 0)), dim=2, start=0, stop=9), w, stride=3),
    ),
    "zeros outside of maxima": (
        lambda b, x, w: b.max_pool2d(x, kernel=3, stride=2, padding=1),
        lambda b, x, w: b.max_pool2d(b.pad(x, pads=(1, 1, 1, 1)), kernel=3, stride=2),
    ),
    "maxima of larger windows": (
        lambda b, x, w: b.max_pool2d(x, kernel=2, stride=2),
        lambda b, x, w: b.max_pool2d(x, kernel=3, stride=2),
    ),
    "maxima for means": (
        lambda b, x, w: b.max_pool2d(x, kernel=2, stride=2),
        lambda b, x, w: b.avg_pool2d(x, kernel=2, stride=2),
    ),
    "height for width": (
        lambda b, x, w: b.conv2d(x, w, padding=1),
        lambda b, x, w: b.conv2d(x, b.transpose(w, dim0=2, dim1=3), padding=1),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_windows_are_not_proved(name: str) -> None:
    logical, plan = (program(made, (2, 3, 9, 9)) for made in WRONG[name])
    assert logical.tensors["weights"] == plan.tensors["weights"]
    assert not {"loss", "gradient of x"} & {str(o) for o in attempt(logical, plan).proved}
    assert not attempt(logical, logical).failed


def infinite(beside: bool) -> Program:
    """Of log v, which is −∞ at 0, only every second element is used; beside it, 0 times all of them."""
    b = tv.program("gaps")
    v, w = b.input("v", (1, 1, 5, 5), domain="nonnegative"), b.parameter("w", (1, 1, 1, 1))
    x = b.log(v, name="x")
    y = b.sum(b.conv2d(x, w, stride=2), name="y")
    b.loss(b.add(y, b.mul(b.sum(x), value=0)) if beside else y)
    return b.build()


def test_what_no_window_has_may_be_infinite() -> None:
    assert shown(infinite(False), infinite(False)) == {"loss"}
    assert shown(infinite(False), infinite(True)) == set()


def outside(beside: bool) -> Program:
    """The maximum of a window that lies in the padding as a whole is −∞, and its exponential 0; beside it, 0 times that maximum."""
    b = tv.program("outside")
    y = b.max_pool2d(b.input("x", (1, 1, 3, 3)), kernel=1, stride=1, padding=1, name="y")
    e = b.exp(y, name="e")
    b.loss(b.sum(b.add(e, b.mul(y, value=0)) if beside else e, name="loss"))
    return b.build()


def test_maxima_of_windows_outside_of_the_row_are_not_finite() -> None:
    assert shown(outside(False), outside(False)) == {"loss"}
    assert shown(outside(False), outside(True)) == set()


def windowed(k: Kernel, p: int, e: int) -> Poly:
    """Element e of window p of a row of four numbers, −∞ outside."""
    t = k.bound()
    return k.row(f"{BORDERED}4 3 2 1 1 1", k.input("x", (4,), [t]), {t: 4}, [p, e], [2, 3])


def certain(k: Kernel, what: str, p: Poly) -> bool:
    ((((uid, idx, _),), _),) = p.items()
    return k.certain(named_need(what, uid, idx))


def test_the_largest_of_a_window_occurs_in_it() -> None:
    """But not the largest of another window, or that of all windows, and not among some elements only."""
    k = Kernel()
    p, q, e, f = (k.bound() for _ in range(4))
    own, everywhere = k.maximum(windowed(k, p, f), {f: 3}), k.maximum(windowed(k, q, f), {q: 2, f: 3})
    assert certain(k, "nonzero", k.sum(k.same(windowed(k, p, e), own), {e: 3}))
    assert certain(k, "nonzero", k.sum(k.same(windowed(k, p, e), everywhere), {p: 2, e: 3}))
    assert not certain(k, "nonzero", k.sum(k.same(windowed(k, p, e), everywhere), {e: 3}))
    assert not certain(k, "nonzero", k.sum(k.same(windowed(k, 0, e), k.substitute(own, {p: 1})), {e: 3}))
    assert not certain(k, "nonzero", k.sum(k.same(windowed(k, p, e), own), {p: 2}))
    assert not certain(k, "nonzero", k.sum(k.same(windowed(k, q, e), k.maximum(windowed(k, f, e), {f: 2})), {e: 3}))


def test_the_largest_of_a_window_that_lies_inside_in_part_is_a_number() -> None:
    k = Kernel()
    p, e, t = (k.bound() for _ in range(3))
    outside = k.row(f"{BORDERED}4 1 1 1 1 0", k.input("x", (4,), [t]), {t: 4}, [p, e], [5, 1])
    diagonal = k.substitute(windowed(k, p, e), {p: e})
    for made, finite in ((windowed(k, p, e), True), (outside, False), (k.substitute(windowed(k, p, e), {e: 0}), False)):
        ((((uid, _, _),), _),) = k.maximum(made, {v: n for v, n in ((p, 2), (e, 3)) if v in variables(made)}).items()
        assert k.infinite(uid) != finite
    ((((uid, _, _),), _),) = diagonal.items()
    assert k.infinite(uid)


def two_convolutions(tp: int) -> Program:
    b = tv.program("two")
    x = b.input("x", (2, 3, 9, 7))
    v, w = b.parameter("v", (2 * tp, 3, 3, 3)), b.parameter("w", (5, 2 * tp, 3, 3))
    h = b.relu(b.conv2d(x, v, padding=1, name="h"), name="a")
    b.loss(b.mean(b.square(b.conv2d(h, w, stride=2, name="y"), name="squares"), name="loss"))
    return tv.complete(b.build())


def by_channels(tp: int, pads: int = 1, forgotten: bool = False) -> Plan:
    p = tv.plan("two", tv.Mesh(tp=tp))
    with p.ranks() as r:
        x = r.input("x", (2, 3, 9, 7), "b c h w")
        v, w = r.parameter("v", (2, 3, 3, 3), "(tp o) c h w"), r.parameter("w", (5, 2, 3, 3), "o (tp c) h w")
        h = r.relu(r.conv2d(x, v, padding=pads, dilation=pads, name="h"), name="a")
        part = r.conv2d(h, w, stride=2, name="y.part")
        y = part if forgotten else r.all_reduce(part, group="tp", backward="identity", name="y")
        loss = r.mean(r.square(y, name="squares"), name="loss")
        r.backward(loss)
        r.loss(loss)
        for t in (v, w):
            r.output(r.gradient(t), "gradient", t.name)
    return p.build()


@pytest.mark.parametrize(("how", "verdict"), [({}, "PROVED"), ({"pads": 2}, "REFUTED"), ({"forgotten": True}, "REFUTED")])
def test_channels_of_convolutions_on_ranks(how: dict[str, int], verdict: str) -> None:
    found = tv.verify(two_convolutions(3), by_channels(3, **how), points=1)  # type: ignore[arg-type]
    assert found.verdict == verdict
    if verdict == "PROVED":
        assert {o.engine for o in found.obligations} == {"algebra"}
    else:
        assert attempt(two_convolutions(3), by_channels(3, **how)).proved == []  # type: ignore[arg-type]


def test_ranks_of_resnet_plans() -> None:
    found = check_plan(resnet_step(TINY, None, None), resnet_plan(TINY, Degrees(dp=2), None, None), 1)
    assert found.tensors > 100
    assert not found.wrong, found.wrong
    assert not found.without, found.without


@pytest.mark.long
@pytest.mark.parametrize(("synchronised", "all_shown"), [(True, True), (False, False)])
def test_resnet_18_at_full_size(synchronised: bool, all_shown: bool) -> None:
    """Statistics of a rank's own images are not those of the batch, by the algebra alone."""
    config = replace(PRESETS["resnet18"], batch=6)
    proof = attempt(resnet_step(config, None, None), resnet_plan(config, Degrees(dp=3), None, None, synchronised=synchronised))
    assert (not proof.failed) == all_shown
    assert all_shown or not proof.proved


@pytest.mark.parametrize("how", [Windows(9, 3, 2, 1, 1, 1), Windows(7, 2, 3, 2, 0, 1), Windows(5, 1, 2), Windows(4, 3, 1, 1, 4, 4)])
def test_windows_written_out(how: Windows) -> None:
    x = np.arange(1.0, 1 + how.size)
    row = F.input_(0, (how.size,), "real")
    (made,) = NUMERIC.run(plain([window(row, 0, how)]), [x])
    want = [[x[t] if 0 <= (t := how.place(p, k)) < how.size else 0 for k in range(how.kernel)] for p in range(how.count)]
    assert np.array_equal(made, np.array(want))
    g = F.input_(0, (how.count, how.kernel), "real")
    given = np.random.default_rng(1).integers(1, 9, (how.count, how.kernel)).astype(float)
    (back,) = NUMERIC.run(plain([overlap(g, 0, how)]), [given])
    assert np.dot(back, x) == np.sum(given * want)
    seen = {t for p in range(how.count) for k in range(how.kernel) if 0 <= (t := how.place(p, k)) < how.size}
    assert how.seen() == sum(1 << t for t in seen)
    assert [*how.inside()] == [p for p in range(how.count) if all(0 <= how.place(p, k) < how.size for k in range(how.kernel))]
    assert how.all_reached() == all(any(0 <= how.place(p, k) < how.size for k in range(how.kernel)) for p in range(how.count))
