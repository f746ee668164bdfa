"""Forms that grow without end stop as "too large" within seconds, and never as an exception of Python."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import pytest

import trainverify as tv
from prove.meaning import system_of
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.prove.algebra.engine import Proof, prove, prove_again
from trainverify.prove.algebra.kernel import Kernel
from trainverify.prove.algebra.terms import Limits, TooLarge
from trainverify.verdicts import single

SECONDS = 30  # of processor time; a few are usual


def timed(logical: Program, plan: Plan) -> Proof:
    began = time.process_time()
    system, wanted = system_of(logical, plan)
    proof = prove_again(system, wanted, prove(system, wanted))
    assert time.process_time() - began < SECONDS
    assert len(proof.proved) + len(proof.failed) == len(wanted)
    return proof


def products_of_sums(b: tv.ProgramBuilder) -> tv.Tensor:
    s = b.add(b.input("x", (4,)), b.input("y", (4,)))
    p = s
    for _ in range(30):
        p = b.mul(p, b.add(s, b.mul(p, p)))
    return p


def long_chain(b: tv.ProgramBuilder) -> tv.Tensor:
    s, ys = b.input("x", (4,)), [b.input(f"y{i}", (4,)) for i in range(8)]
    for i in range(800):
        s = b.add(s, b.mul(ys[i % 8], value=float(i + 1)))
    return b.mul(s, s)


def many_terms(b: tv.ProgramBuilder) -> tv.Tensor:
    s = b.input("x", (4,))
    for i in range(200):
        s = b.add(s, b.exp(b.input(f"y{i}", (4,))))
    return b.mul(s, s)


def nested_maxima(b: tv.ProgramBuilder) -> tv.Tensor:
    y, z = b.input("x", (4,)), b.input("z", (4,))
    for _ in range(600):
        y = b.add(b.maximum(y, z), y)
    return b.exp(b.mul(y, z))


def nested_functions(b: tv.ProgramBuilder) -> tv.Tensor:
    x = b.input("x", (4,))
    y = x
    for _ in range(600):
        y = b.exp(b.add(b.mul(y, value=0.1), x))
    return y


def huge_numbers(b: tv.ProgramBuilder) -> tv.Tensor:
    x = b.input("x", (4,))
    y = b.add(x, value=3.0)
    for _ in range(60):
        y = b.mul(y, value=1e9)
    for _ in range(12):
        y = b.mul(y, y)
    return b.add(y, x)


def symmetric(b: tv.ProgramBuilder) -> tv.Tensor:
    x = b.input("x", (4, 4))
    for _ in range(8):
        x = b.matmul(x, b.matmul(x, b.transpose(x)))
    return x


@pytest.mark.parametrize("make", [products_of_sums, long_chain, many_terms, nested_maxima, nested_functions, huge_numbers, symmetric])
def test_growth_ends(make: Callable[[tv.ProgramBuilder], tv.Tensor]) -> None:
    b = tv.program(make.__name__)
    b.loss(b.sum(make(b), name="loss"))
    program = b.build()
    timed(program, single(program))


@pytest.mark.parametrize("stale", [None, 5])
def test_64_micro_batches(stale: int | None) -> None:
    b = tv.program("l")
    h = b.silu(b.linear(b.input("x", (128, 4)), b.parameter("w", (3, 4))))
    b.loss(b.mean(b.mul(h, h), name="loss"))
    logical = tv.complete(b.build(), tv.SGD(lr=0.1))
    p = tv.plan("p", tv.Mesh(dp=2))
    with p.ranks() as r:
        w = r.parameter("w", (3, 4), "o k")
        losses = []
        for m in range(64):
            x = r.input(f"x{m}", (1, 4), "(dp mb b) k", "x", fixed={"mb": (0 if m == stale else m, 64)})
            h = r.silu(r.linear(x, w))
            losses.append(r.mul(r.mean(r.mul(h, h)), value=1 / 64))
        for one in losses:
            r.backward(one)
        total = losses[0]
        for one in losses[1:]:
            total = r.add(total, one)
        r.loss(r.all_reduce(total, group="dp", op="avg", name="loss"))
        g = r.all_reduce(r.gradient(w), group="dp", op="avg")
        r.output(g, "gradient", "w")
        r.update(w, r.sgd(w, g, lr=0.1))
    proof = timed(logical, p.build())
    assert bool(proof.proved) == (stale is None)
    assert bool(proof.failed) == (stale is not None)


def test_limits_of_the_kernel() -> None:
    k = Kernel(Limits(monomials=50, factors=10, atoms=30))
    x = [k.input(f"x{i}", (), ()) for i in range(20)]
    total = k.add(*x)
    with pytest.raises(TooLarge):
        k.times(total, total)
    with pytest.raises(TooLarge):
        functools.reduce(k.times, x)
    with pytest.raises(TooLarge):
        [k.input(f"x{i}", (), ()) for i in range(20, 60)]
