"""Plans that are wrong in ways that a prover may overlook: none of their false obligations is proved, evaluation aside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

import trainverify as tv
from prove.meaning import system_of
from trainverify.check import validate
from trainverify.graph.lineage import layout
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.ops import OPS
from trainverify.prove.algebra.engine import Proof, prove
from trainverify.verify import single

Case = Callable[[], tuple[Program, Plan]]
CASES: dict[str, Case] = {}


def wrong(make: Case) -> Case:
    CASES[make.__name__] = make
    return make


def attempt(logical: Program, plan: Plan | Program) -> Proof:
    plan = single(plan) if isinstance(plan, Program) else plan
    assert [f for f in validate(logical, plan, OPS) if f.severity != "warning"] == []
    system, wanted = system_of(logical, plan)
    return prove(system, wanted)


@pytest.mark.parametrize("name", CASES)
def test_not_proved(name: str) -> None:
    proof = attempt(*CASES[name]())
    assert proof.proved == [], name
    assert proof.failed


# -- folding ranks ---------------------------------------------------------------------------------------------------


@wrong
def a_local_tensor_holds_another_logical_one_on_the_second_rank() -> tuple[Program, Plan]:
    b = tv.program("l")
    x, w = b.input("x", (4, 3)), b.input("w0", (3,))
    b.input("w1", (3,))
    b.loss(b.sum(b.mul(x, w), name="loss"))
    p = tv.plan("p", tv.Mesh(dp=2))
    with p.ranks() as r:
        x = r.input("x", (2, 3), "(dp b) k")
        w = r._source(r._inputs, "w", (3,), "f32", None)
        r.loss(r.all_reduce(r.sum(r.mul(x, w)), group="dp", name="loss"))
    made = p.build()
    held = (layout("w0", "k", "w", {"dp": 0}), layout("w1", "k", "w", {"dp": 1}))
    return b.build(), replace(made, lineage=(*made.lineage, *held))


@wrong
def halves_of_the_batch_declared_rank_by_rank() -> tuple[Program, Plan]:
    b = tv.program("l")
    x = b.input("x", (4, 3))
    b.loss(b.mul(b.sum(b.slice(x, dim=0, start=0, stop=2)), value=2.0, name="loss"))
    p = tv.plan("p", tv.Mesh(dp=2))
    with p.ranks() as r:
        x = r._source(r._inputs, "x", (2, 3), "f32", None)
        r.loss(r.all_reduce(r.sum(x), group="dp", name="loss"))
    held = tuple(layout("x", "(h b) k", "x", {"dp": i}, {"h": (i, 2)}) for i in range(2))
    return b.build(), replace(p.build(), lineage=held)


@wrong
def one_of_two_groups_in_another_order() -> tuple[Program, Plan]:
    b = tv.program("l")
    b.loss(b.sum(b.mul(b.input("x", (4, 6)), b.input("w", (4, 6))), name="loss"))
    p = tv.plan("p", tv.Mesh(dp=2, tp=2))
    p.group("g0", (0, 1))
    p.group("g1", (3, 2))
    with p.ranks() as r:
        x, w = r.input("x", (2, 3), "(dp b) (tp k)"), r.input("w", (2, 6), "(dp b) k")
        whole = r.all_gather(x, group=r.each_rank(lambda k: "g0" if k < 2 else "g1", "g"), dim=1)
        r.loss(r.all_reduce(r.sum(r.mul(whole, w)), group="dp", name="loss"))
    return b.build(), p.build()


@wrong
def groups_along_one_axis_here_and_another_there() -> tuple[Program, Plan]:
    b = tv.program("l")
    s = b.sum(b.input("x", (2, 2, 2, 3)), dim=1)
    b.loss(b.sum(b.mul(s, s), name="loss"))
    p = tv.plan("p", tv.Mesh(a=2, b=2, c=2))
    with p.ranks() as r:
        x = r.input("x", (1, 1, 1, 3), "a b c k")
        group = r.each_rank(lambda k: p.mesh_group(k, ("b",) if p.mesh.coordinates(k)["a"] == 0 else ("c",)), "g")
        s = r.all_reduce(x, group=group)
        r.loss(r.all_reduce(r.sum(r.mul(s, s)), group=("a", "c"), name="loss"))
    return b.build(), p.build()


@wrong
def one_group_sums_and_another_averages() -> tuple[Program, Plan]:
    b = tv.program("l")
    y = b.sum(b.input("x", (2, 2, 3)), dim=1)
    b.loss(b.sum(b.mul(y, y), name="loss"))
    p = tv.plan("p", tv.Mesh(dp=2, tp=2))
    with p.ranks() as r:
        x = r.input("x", (1, 1, 3), "dp tp k")
        s = r.all_reduce(x, group="tp", op=r.each_rank(lambda k: "sum" if k < 2 else "avg", "op"))
        r.loss(r.all_reduce(r.sum(r.mul(s, s)), group="dp", name="loss"))
    return b.build(), p.build()
