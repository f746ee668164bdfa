"""Rows that are cut in ways that do not align, in layers that are alike and on ranks: forms mean what is computed, or there are none."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

import trainverify as tv
from prove.meaning import Compared, Point, check_plan, inputs_of, numbers_of, system_of
from trainverify.build.plan import RankBuilder
from trainverify.build.program import ProgramBuilder
from trainverify.build.tape import Tensor
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.prove.algebra.engine import Prover
from trainverify.verdicts import single

Builder = ProgramBuilder | RankBuilder
Steps = list[tuple[str, dict[str, Any]]]

VIEWS = {
    6: [(2, 3), (3, 2)],
    12: [(3, 4), (4, 3), (2, 6), (2, 3, 2)],
    24: [(2, 3, 4), (4, 3, 2), (3, 8)],
    30: [(2, 3, 5), (3, 2, 5), (5, 6)],
}


def steps(rng: random.Random, size: int) -> tuple[Steps, tuple[int, ...]]:
    """What is done to a row of this size, and the shape that comes out."""
    found: Steps = []
    shape: tuple[int, ...] = (size,)
    for _ in range(rng.randint(2, 4)):
        d = rng.randrange(len(shape))
        n, kind = shape[d], rng.choice(["slice", "strided", "reshape", "pad", "concat", "cumsum", "select"])
        if kind == "slice" and n > 2:
            start = rng.randrange(n - 1)
            stop = rng.randint(start + 1, n)
            found.append(("slice", {"dim": d, "start": start, "stop": stop}))
            shape = (*shape[:d], stop - start, *shape[d + 1 :])
        elif kind == "strided" and n > 3:
            step = rng.choice([2, 3])
            start = rng.randrange(step)
            found.append(("slice", {"dim": d, "start": start, "stop": n, "step": step}))
            shape = (*shape[:d], len(range(start, n, step)), *shape[d + 1 :])
        elif kind == "reshape" and (factors := [f for f in range(2, math.prod(shape)) if math.prod(shape) % f == 0]):
            first = rng.choice(factors)
            shape = (first, math.prod(shape) // first)
            found.append(("reshape", {"shape": shape}))
        elif kind == "pad":
            found.append(("pad", {"pads": (1, 2)}))
            shape = (*shape[:-1], shape[-1] + 3)
        elif kind == "concat":
            found.append(("concat", {"dim": d}))
            shape = (*shape[:d], 2 * n, *shape[d + 1 :])
        elif kind == "cumsum":
            found.append(("cumsum", {"dim": d}))
        elif kind == "select" and len(shape) > 1:
            found.append(("select", {"dim": d, "index": rng.randrange(n)}))
            shape = (*shape[:d], *shape[d + 1 :])
    return found, shape


def done(b: Builder, x: Tensor, what: Steps) -> Tensor:
    for name, attrs in what:
        x = b.concat(x, b.tanh(x), **attrs) if name == "concat" else getattr(b, name)(x, **attrs)
    return x


def viewed(b: Builder, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A number that depends on how a row is cut."""
    return b.sum(b.tanh(b.sum(b.reshape(x, shape=shape), dim=0)))


def layers(seed: int) -> Program:
    """The same in every layer; some rows are cut elsewhere too, each in its own way."""
    rng = random.Random(seed)
    size, count = rng.choice(list(VIEWS)), rng.choice([3, 4, 6])
    what, shape = steps(rng, size)
    b = tv.program("layers")
    total, rows = b.input("w", ()), [b.input(f"x{n}", (size,)) for n in range(count)]
    for n in rng.sample(range(count), rng.randint(0, count)):
        total = b.add(total, viewed(b, rows[n], rng.choice(VIEWS[size])))
    for n, x in enumerate(rows):
        y = b.input(f"y{n}", shape)
        t = b.mul(done(b, x, what), y)
        for _ in range(3):
            t = b.tanh(b.mul(t, y))
        total = b.add(total, b.sum(t))
    b.loss(total)
    return b.build()


@pytest.mark.parametrize("seed", range(230, 255))
def test_layers(seed: int) -> None:
    program = layers(seed)
    system, _ = system_of(program, single(program))
    prover = Prover(system)
    prover._run_logical()
    inputs = inputs_of(program, seed)
    numbers, point, out = numbers_of(program, inputs), Point(prover, inputs), Compared()
    for name, value in list(prover.logical.all_items()):
        if not isinstance(value, Exception):
            point.compare(name, value, system.scope.dims[name], numbers[name], {}, out, None)
    assert not out.wrong


def on_ranks(seed: int) -> tuple[Program, Plan]:
    """Rows in shards, gathered and cut; ranks are told apart now and then."""
    rng = random.Random(seed)
    size, count = rng.choice(list(VIEWS)), rng.choice([2, 3])
    ranks = rng.choice([2, 3, 6])
    what = [steps(rng, size)[0] for _ in range(count)]
    shapes = [rng.choice(VIEWS[size]) for _ in range(count)]
    forms = [rng.choice(["(tp n)", {"tp": tv.Shard(0)}]) for _ in range(count)]

    def body(b: Builder, total: Tensor, rows: list[Tensor]) -> None:
        for x, shape in zip(rows, shapes, strict=True):
            total = b.add(total, viewed(b, x, shape))
        for x, own in zip(rows, what, strict=True):
            total = b.add(total, b.sum(b.tanh(done(b, b.tanh(x), own))))
        b.loss(total)

    b = tv.program("rows")
    body(b, b.input("w", ()), [b.input(f"x{n}", (size,)) for n in range(count)])
    p = tv.plan("rows", tv.Mesh(tp=ranks))
    for where in [{"tp": n} for n in range(ranks)] if rng.random() < 0.5 else [{}]:
        with p.ranks(**where) as r:
            shards = [r.input(f"x{n}", (size // ranks,), form) for n, form in enumerate(forms)]
            body(r, r.input("w", (), ""), [r.all_gather(x, group="tp", dim=0) for x in shards])
    return b.build(), p.build()


@pytest.mark.parametrize("seed", range(240, 256))
def test_ranks(seed: int) -> None:
    assert not check_plan(*on_ranks(seed), seed).wrong
