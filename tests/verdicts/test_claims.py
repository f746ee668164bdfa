"""What a plan reports or declares must be so, also where nothing is computed from it."""

from __future__ import annotations

from dataclasses import replace

import pytest

import trainverify as tv
from prove.meaning import system_of
from trainverify.graph.lineage import Layout, Part, Parts, Run, layout
from trainverify.graph.plan import Plan, Template
from trainverify.graph.program import Function, Op, Output, Program
from trainverify.graph.types import TensorType
from trainverify.prove.algebra.engine import prove, prove_again
from trainverify.verdicts import verify


def vector(*shape: int) -> TensorType:
    return TensorType(shape, "f32")


# -- a parameter that ranks compute, as those that gather it do ----------------------------------------------------------


def gathered(order: tuple[int, int]) -> tuple[Program, Plan]:
    """A sum over all rows of a table, of which every rank gathers the halves; in which order makes no difference to the sum."""
    b = tv.program("l")
    b.loss(b.sum(b.state("w", (4, 3)), name="loss"))
    p = tv.plan("p", tv.Mesh(dp=2))
    p.group("all", order)
    with p.ranks() as r:
        whole = r.all_gather(r.state("w", (2, 3), "(dp b) k"), group="all", dim=0, name="whole")
        r.lives(whole, "w", "b k")
        r.loss(r.sum(whole, name="loss"))
    return b.build(), p.build()


def test_a_gathered_table_is_what_the_plan_says() -> None:
    report = verify(*gathered((0, 1)))
    assert (report.verdict, [o.name for o in report.obligations]) == ("PROVED", ["loss", "declared lineage of w"]), report.reason


@pytest.mark.parametrize("engine", ["algebra", "smt"])
def test_a_gathered_table_is_not_what_the_plan_says(engine: str) -> None:
    report = verify(*gathered((1, 0)), engine=engine)  # type: ignore[arg-type]
    assert report.verdict == "REFUTED", report.reason
    assert report.reason == "declared lineage of w differs on rank 0; first wrong tensor: whole on rank 0"


# -- gradients under the name of another parameter -----------------------------------------------------------------------


def two_gradients(swapped: bool) -> tuple[Program, Plan]:
    names = ("x", "w", "v", "wx", "y", "gw", "gv")
    ops = (
        Op("mul", ("w", "x"), ("wx",)),
        Op("mul", ("wx", "v"), ("y",)),
        Op("sum", ("y",), ("loss",)),
        Op("mul", ("x", "v"), ("gw",), (), "backward"),
        Op("mul", ("x", "w"), ("gv",), (), "backward"),
    )
    outputs = (Output("loss", "loss"), Output("gw", "gradient", "w"), Output("gv", "gradient", "v"))
    tensors = {**dict.fromkeys(names, vector(3)), "loss": vector()}
    logical = Program("l", tensors, ("x",), ("w", "v"), (), ops, outputs)
    if swapped:
        outputs = (Output("loss", "loss"), Output("gw", "gradient", "v"), Output("gv", "gradient", "w"))
    lineage = tuple(layout(n, {}) for n in ("x", "w", "v", "gw", "gv"))
    return logical, Plan("p", tv.Mesh(dp=2), (Template(replace(logical, outputs=outputs), (0, 1)),), {}, lineage)


def test_gradients_that_are_declared_are_reported_of_their_parameters() -> None:
    assert verify(*two_gradients(False)).verdict == "PROVED"
    report = verify(*two_gradients(True))
    assert (report.verdict, report.difference and report.difference.layout.local) == ("REFUTED", "gv"), report.reason


# -- a layout that is given twice ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "PROVED"), (0.5, "REFUTED")])
def test_what_is_said_twice_is_held_once(factor: float, verdict: str) -> None:
    b = tv.program("l")
    b.loss(b.sum(b.input("x", (4, 3)), name="loss"))
    p = tv.plan("p", tv.Mesh(dp=2))
    with p.ranks() as r:
        x = r.input("x", (2, 3), "(dp b) k")
        r.lives(x, "x", "(dp b) k")
        r.loss(r.all_reduce(r.mul(r.sum(x), value=factor), group="dp", name="loss"))
    report = verify(b.build(), p.build())
    assert report.verdict == verdict, report.reason


# -- a tensor that is called as one of a call is called once the call is written out --------------------------------------


def test_a_tensor_of_the_program_is_not_one_of_a_call() -> None:
    double = Function(
        "f",
        {"a": vector(4), "y": vector(4), "z": vector(4)},
        ("a",),
        ("z",),
        (Op("mul", ("a",), ("y",), (("value", 2.0),)), Op("identity", ("y",), ("z",))),
    )
    tensors = {"x": vector(4), "f.0/y": vector(4), "z": vector(4), "loss": vector()}
    ops = (
        Op("identity", ("x",), ("f.0/y",)),
        Op("call", ("x",), ("z",), (("function", "f"),)),
        Op("sum", ("f.0/y",), ("loss",)),
    )
    plan = Program("p", tensors, ("x",), (), (), ops, (Output("loss", "loss"),), {"f": double})
    logical = replace(plan, name="l", ops=(*ops[:2], Op("sum", ("z",), ("loss",))))
    report = verify(logical, plan)
    assert report.verdict == "REFUTED", report.reason
    assert verify(logical, logical).verdict == "PROVED"


# -- padding, which a step is allowed to rely on, and so has to leave as it was -------------------------------------------


def padded(value: float, flat: bool) -> tuple[Program, Plan]:
    """A parameter of 3 elements in a buffer of 5, and its gradient filled up with a value."""
    names = {n: vector(3) for n in ("x", "w", "wx", "g", "new")}
    outputs = (Output("loss", "loss"), Output("g", "gradient", "w"), Output("new", "parameter", "w"))
    forward = (Op("mul", ("w", "x"), ("wx",)), Op("sum", ("wx",), ("loss",)), Op("identity", ("x",), ("g",), (), "backward"))
    update = Op("sub", ("w", "g"), ("new",), (), "optimizer")
    logical = Program("l", {**names, "loss": vector()}, ("x",), ("w",), (), (*forward, update), outputs)
    ops = (
        Op("slice", ("w",), ("held",), (("dim", 0), ("start", 0), ("stop", 3))),
        replace(forward[0], inputs=("held", "x")),
        forward[1],
        Op("full", (), ("rest",), (("shape", (2,)), ("value", value)), "backward"),
        Op("concat", ("x", "rest"), ("g",), (("dim", 0),), "backward"),
        update,
    )
    tensors = {**names, "loss": vector(), "held": vector(3), "rest": vector(2), **dict.fromkeys(("w", "g", "new"), vector(5))}
    parts = (Part((0,), (Run(0, 3),), flat=flat), Part((3,), (Run(0, 2),), padding=True, flat=flat))
    lineage = (layout("x", {}), Layout("w", "w", Parts(tuple((r, parts) for r in range(2)))))
    program = Program("p", tensors, ("x",), ("w",), (), ops, outputs)
    return logical, Plan("p", tv.Mesh(dp=2), (Template(program, (0, 1)),), {}, lineage)


@pytest.mark.parametrize("flat", [True, False])
def test_padding_is_zero_after_the_step(flat: bool) -> None:
    assert verify(*padded(0.0, flat)).verdict == "PROVED"
    assert verify(*padded(0.0, flat), engine="smt").verdict == "PROVED"  # no size had to shrink


@pytest.mark.parametrize("engine", ["algebra", "smt"])
@pytest.mark.parametrize("flat", [True, False])
def test_padding_is_not_zero_after_the_step(flat: bool, engine: str) -> None:
    report = verify(*padded(4.0, flat), engine=engine)  # type: ignore[arg-type]
    assert report.verdict == "REFUTED", report.reason
    assert report.reason == "updated parameter w differs on rank 0; first wrong tensor: rest on rank 0"


def test_padding_that_is_not_zero_has_no_proof() -> None:
    system, wanted = system_of(*padded(4.0, False))
    proof = prove_again(system, wanted, prove(system, wanted))
    assert {str(o): why for o, why in proof.failed.items()} == {
        "updated parameter w": "rank 0: the padding of new is not zero after the step"
    }
