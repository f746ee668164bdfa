"""Programs and function bodies (TV1xx)."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest

import trainverify as tv
from check.plans import change, codes, found, index_of, op, small, small_plan, types, with_program
from trainverify.check import validate
from trainverify.graph.plan import Plan, Template
from trainverify.graph.program import Domain, Function, Op, Output, Program, Ref
from trainverify.graph.types import TensorType


def only(program: Program, plan: Plan | None = None) -> tuple[str, str]:
    """Code and message of the only finding."""
    (finding,) = validate(program, plan) if plan is None else found(None, plan)
    return finding.code, finding.message


def test_well_formed() -> None:
    assert codes(small(), None) == []
    assert codes(small(), small_plan()) == []


def tiny(ops: list[Op], tensors: dict[str, TensorType], **more: Any) -> Program:
    inputs = more.pop("inputs", ("x",))
    return Program("tiny", tensors, inputs, ops=tuple(ops), **more)


def test_tv101_dangling_input() -> None:
    p = tiny([op("add", ("x", "ghost"), ("y",), 7)], types(x=(2, 3), y=(2, 3)))
    (f,) = validate(p, None)
    assert (f.code, str(f.source), f.tensor) == ("TV101", "user.py:7", "ghost")
    assert f.message == "tiny: y = add(x, ghost): nothing defines 'ghost'"
    assert str(f) == "TV101 tensor that nothing defines (user.py:7): tiny: y = add(x, ghost): nothing defines 'ghost'"


def test_tv101_type_without_definition() -> None:
    p = tiny([op("relu", ("x",), ("y",))], types(x=(2, 3), y=(2, 3), z=(5,)))
    assert only(p) == ("TV101", "tiny: 'z' has a type, but nothing defines it")


def test_tv101_function_returns_nothing() -> None:
    body = Function("f", types(x=(2, 3)), ("x",), ("gone",), ())
    p = tiny([op("call", ("x",), ("y",), function="f")], types(x=(2, 3), y=(2, 3)), functions={"f": body})
    assert only(p) == ("TV101", "function f: it returns 'gone', which nothing defines")


def test_tv102_use_before_definition() -> None:
    p = tiny([op("relu", ("z",), ("y",), 3), op("relu", ("x",), ("z",), 4)], types(x=(2, 3), y=(2, 3), z=(2, 3)))
    assert only(p) == ("TV102", "tiny: y = relu(z): 'z' is defined later, by z = relu(x) (user.py:4)")


def test_tv102_own_result() -> None:
    p = tiny([op("relu", ("y",), ("y",))], types(x=(2, 3), y=(2, 3)))
    assert only(p) == ("TV102", "tiny: y = relu(y): 'y' is its own result")


def test_tv103_defined_twice() -> None:
    p = tiny([op("relu", ("x",), ("y",)), op("exp", ("x",), ("y",))], types(x=(2, 3), y=(2, 3)))
    assert only(p) == ("TV103", "tiny: y = exp(x): 'y' is a result of y = relu(x) already")
    p = tiny([op("relu", ("x",), ("x",))], types(x=(2, 3)))
    assert ("TV103", "tiny: x = relu(x): 'x' is a source already") in [(f.code, f.message) for f in validate(p, None)]
    p = tiny([], types(x=(2, 3)), inputs=("x", "x"))
    assert only(p) == ("TV103", "tiny: 'x' is declared twice")


def test_tv104_unknown_operator_is_unsupported() -> None:
    p = tiny([op("frobnicate", ("x",), ("y",), 9)], types(x=(2, 3), y=(2, 3)))
    (f,) = validate(p, None)
    assert (f.code, f.severity, f.message) == ("TV104", "unsupported", "tiny: y = frobnicate(x): 'frobnicate'")


def test_tv105_result_type() -> None:
    p = small()
    wrong = replace(p, tensors={**p.tensors, "y": TensorType((6, 11))})
    assert "TV105" in codes(wrong, None)
    assert validate(wrong, None)[0].message == "small: y = linear(x, w): 'y' is f32[6,10], declared f32[6,11]"
    wrong = replace(p, tensors={**p.tensors, "loss": TensorType((), "f64")})
    assert validate(wrong, None)[0].message == "small: loss = mean(y): 'loss' is f32[], declared f64[]"


def test_tv105_operands_and_arity() -> None:
    p = tiny([op("add", ("x", "z"), ("y",))], types(x=(2, 3), z=(2, 5), y=(2, 3)), inputs=("x", "z"))
    (f,) = validate(p, None)
    assert f.code == "TV105"
    assert f.message.startswith("tiny: y = add(x, z): add(f32[2,3], f32[2,5])")
    p = tiny([op("relu", ("x",), ("y", "z"))], types(x=(2, 3), z=(2, 3), y=(2, 3)))
    assert only(p) == ("TV105", "tiny: y, z = relu(x): it has 1 results, 2 are named")
    p = tiny([op("relu", ("x", "x"), ("y",))], types(x=(2, 3), y=(2, 3)))
    assert only(p) == ("TV105", "tiny: y = relu(x, x): relu takes 1 tensors, got 2")


def test_tv106_attributes() -> None:
    p = tiny([op("transpose", ("x",), ("y",), dim0=0, dim1="last")], types(x=(2, 3), y=(3, 2)))
    assert only(p) == ("TV106", "tiny: y = transpose(x, dim0=0, dim1=last): transpose: attribute dim1 = 'last' is not int = 1")
    p = tiny([op("relu", ("x",), ("y",), inplace=True)], types(x=(2, 3), y=(2, 3)))
    (f,) = validate(p, None)
    assert (f.code, f.severity) == ("TV106", "unsupported")
    assert f.message == "tiny: y = relu(x, inplace=True): relu has no attribute 'inplace' (it has: none)"
    p = tiny([op("to", ("x",), ("y",))], types(x=(2, 3), y=(2, 3)))
    assert only(p) == ("TV106", "tiny: y = to(x): to needs the attribute 'dtype'")


def test_tv106_attribute_given_twice() -> None:
    twice = replace(op("to", ("x",), ("y",)), attrs=(("dtype", "f32"), ("dtype", "f32")))
    p = tiny([twice], types(x=(2, 3), y=(2, 3)))
    assert only(p) == ("TV106", "tiny: y = to(x, dtype=f32, dtype=f32): an attribute is given twice")
    twice = replace(op("call", ("x",), ("y",)), attrs=(("function", "double"), ("function", "triple")))
    assert only(tiny([twice], types(x=(2, 3), y=(2, 3)), functions={"double": BODY}))[0] == "TV106"


def test_tv106_unknown_phase() -> None:
    p = tiny([op("relu", ("x",), ("y",), phase="sideways")], types(x=(2, 3), y=(2, 3)))
    assert only(p)[0] == "TV106"


BODY = Function("double", types(a=(2, 3), b=(2, 3)), ("a",), ("b",), (op("add", ("a", "a"), ("b",)),))


def test_calls() -> None:
    p = tiny([op("call", ("x",), ("y",), function="double")], types(x=(2, 3), y=(2, 3)), functions={"double": BODY})
    assert codes(p, None) == []


@pytest.mark.parametrize(
    ("call", "tensors", "message"),
    [
        (op("call", ("x",), ("y",), function="triple"), types(x=(2, 3), y=(2, 3)), "no function 'triple'"),
        (op("call", ("x", "x"), ("y",), function="double"), types(x=(2, 3), y=(2, 3)), "double takes 1 tensors, not 2"),
        (op("call", ("x",), (), function="double"), types(x=(2, 3)), "double returns 1 tensors, not 0"),
        (op("call", (None,), ("y",), function="double"), types(x=(2, 3), y=(2, 3)), "double needs 'a'"),
        (op("call", ("x",), ("y",), function="double"), types(x=(2, 5), y=(2, 3)), "'x' is f32[2,5], double takes 'a' as f32[2,3]"),
        (op("call", ("x",), ("y",), function="double"), types(x=(2, 3), y=(2, 7)), "'y' is f32[2,7], double returns 'b' as f32[2,3]"),
    ],
)
def test_tv107_call_that_does_not_fit(call: Op, tensors: dict[str, TensorType], message: str) -> None:
    assert only(tiny([call], tensors, functions={"double": BODY})) == ("TV107", f"tiny: {call}: {message}")


def test_tv107_recursion() -> None:
    f = Function("f", types(a=(2,), b=(2,)), ("a",), ("b",), (op("call", ("a",), ("b",), function="g"),))
    g = Function("g", types(a=(2,), b=(2,)), ("a",), ("b",), (op("call", ("a",), ("b",), function="f"),))
    p = tiny([op("call", ("x",), ("y",), function="f")], types(x=(2,), y=(2,)), functions={"f": f, "g": g})
    assert only(p) == ("TV107", "function f calls itself: f → g → f")


def test_tv107_expansion_of_calls_is_bounded() -> None:
    """Twenty-eight levels that each call the next one twice are 2²⁸ ops."""
    bodies = {"f0": Function("f0", types(a=(2,), b=(2,)), ("a",), ("b",), (op("relu", ("a",), ("b",)),))}
    for i in range(1, 28):
        twice = (op("call", ("a",), ("c",), function=f"f{i - 1}"), op("call", ("c",), ("b",), function=f"f{i - 1}"))
        bodies[f"f{i}"] = Function(f"f{i}", types(a=(2,), b=(2,), c=(2,)), ("a",), ("b",), twice)
    p = tiny([op("call", ("x",), ("y",), function="f27")], types(x=(2,), y=(2,)), functions=bodies)
    findings = validate(p, None)
    assert {(f.code, f.severity) for f in findings} == {("TV107", "unsupported")}


def outputs(*items: Output) -> list[tuple[str, str]]:
    p = replace(small(), outputs=items)
    return [(f.code, f.message) for f in validate(p, None)]


def test_tv108_outputs() -> None:
    loss = Output("loss", "loss")
    assert outputs(loss, Output("gone", "metric", "m")) == [("TV108", "small: metric m: nothing defines 'gone'")]
    assert outputs(loss, Output("w.new", "parameter", "v")) == [("TV108", "small: updated parameter v: there is no parameter 'v'")]
    assert outputs(loss, Output("w.new", "state", "w")) == [("TV108", "small: updated state w: there is no state 'w'")]
    assert outputs(loss, Output("y", "parameter", "w")) == [("TV108", "small: updated parameter w: 'y' is f32[6,10], 'w' is f32[10,8]")]
    assert outputs(loss, Output("y", "gradient", "w")) == [("TV108", "small: gradient of w: 'y' is f32[6,10], 'w' is f32[10,8]")]
    assert outputs(loss, loss) == [("TV108", "small: there are two outputs for the loss")]
    assert outputs(loss, Output("y", "trophy", "w")) == [("TV108", "small: 'y' has the unknown role 'trophy'")]  # type: ignore[arg-type]
    assert outputs(loss, Output("loss", "metric")) == [("TV108", "small: the metric 'loss' has no name")]


def test_tv109_integer_inputs_say_what_they_index() -> None:
    ids = TensorType((2, 3), "i64")
    p = tiny([op("embedding", ("x", "w"), ("y",))], types(x=ids, w=(7, 5), y=(2, 3, 5)), inputs=("x", "w"))
    (f,) = validate(p, None)
    assert (f.code, f.message, f.hint) == ("TV109", "tiny: input 'x' is i64[2,3]", "say what it indexes: Domain('ids', size) for 'x'")
    assert codes(replace(p, domains={"x": Domain("ids", 7)}), None) == []
    assert only(replace(p, domains={"x": Domain("ids")})) == ("TV109", "tiny: 'x': ids in [0, None) has no size")
    wrong = replace(p, domains={"x": Domain("ids", 7), "w": Domain("ids", 5)})
    assert only(wrong) == ("TV109", "tiny: 'w' is f32[7,5] and cannot hold ids in [0, 5)")
    wrong = replace(p, domains={"x": Domain("ids", 7), "y": Domain("positive")})
    assert only(wrong) == ("TV109", "tiny: a range is declared for 'y', which is not a source")


def on_ranks(ops: list[Op], tensors: dict[str, TensorType], bindings: Any, functions: Any = {}) -> Plan:  # noqa: B006
    p = Program("part", tensors, ("x",), ops=tuple(ops), outputs=(Output(ops[-1].outputs[-1], "metric", "m"),), functions=functions)
    return Plan("plan", tv.Mesh(tp=3), (Template(p, (0, 1, 2), bindings),), {"all": (0, 1, 2)})


def test_references_are_checked_with_the_values_of_every_rank() -> None:
    cut = op("slice", ("x",), ("y",), 5, dim=0, start=Ref("from"), stop=Ref("to"))
    good = on_ranks([cut], types(x=(6, 5), y=(2, 5)), {"from": (0, 2, 4), "to": (2, 4, 6)})
    assert codes(None, good) == []
    (f,) = found(None, on_ranks([cut], types(x=(6, 5), y=(2, 5)), {"from": (0, 2, 4), "to": (2, 4, 7)}))
    assert (f.code, f.rank, str(f.source)) == ("TV105", 2, "user.py:5")
    (f,) = found(None, on_ranks([cut], types(x=(6, 5), y=(2, 5)), {"from": (0, 1, 4), "to": (2, 4, 6)}))
    assert (f.code, f.rank, f.message) == (
        "TV105",
        1,
        "part: y = slice(x, dim=0, start=$from, stop=$to): 'y' is f32[3,5], declared f32[2,5]",
    )


def test_references_inside_calls() -> None:
    body = Function(
        "cut", types(a=(6, 5), b=(2, 5)), ("a",), ("b",), (op("slice", ("a",), ("b",), dim=0, start=Ref("low"), stop=Ref("to")),)
    )
    call = op("call", ("x",), ("y",), 4, function="cut", low=Ref("from"))
    good = on_ranks([call], types(x=(6, 5), y=(2, 5)), {"from": (0, 2, 4), "to": (2, 4, 6)}, {"cut": body})
    assert codes(None, good) == []
    (f,) = found(None, on_ranks([call], types(x=(6, 5), y=(2, 5)), {"from": (0, 2, 9), "to": (2, 4, 6)}, {"cut": body}))
    assert (f.code, f.rank) == ("TV105", 2)


def test_tv110_references() -> None:
    cut = op("slice", ("x",), ("y",), dim=0, start=Ref("from"), stop=2)
    tensors = types(x=(6, 5), y=(2, 5))
    message = "part: y = slice(x, dim=0, start=$from, stop=2): neither a call nor the ranks of part bind $from"
    assert only(small(), on_ranks([cut], tensors, {})) == ("TV110", message)
    assert only(small(), on_ranks([cut], tensors, {"from": (0, 0)})) == ("TV110", "part: $from has 2 values for 3 ranks")
    message = "tiny: y = slice(x, dim=0, start=$from, stop=2): no call binds $from"
    assert only(tiny([cut], tensors)) == ("TV110", message)


def test_tv110_a_call_does_not_bind_what_ranks_bind() -> None:
    body = Function("cut", types(a=(6, 5), b=(2, 5)), ("a",), ("b",), (op("slice", ("a",), ("b",), dim=0, start=Ref("from"), stop=2),))
    call = op("call", ("x",), ("y",), **{"function": "cut", "from": 0})
    p = on_ranks([call], types(x=(6, 5), y=(2, 5)), {"from": (0, 0, 0)}, {"cut": body})
    assert only(small(), p) == ("TV110", "part: y = call(x, from=0, function=cut): it binds $from, and so do the ranks of part")


def test_tv110_warns_of_an_unused_binding() -> None:
    p = tiny([op("call", ("x",), ("y",), function="double", lr=0.1)], types(x=(2, 3), y=(2, 3)), functions={"double": BODY})
    (f,) = validate(p, None)
    assert (f.code, f.severity, f.message) == ("TV110", "warning", "tiny: y = call(x, function=double, lr=0.1): double does not use $lr")


def test_tv111_backward_op_of_nothing() -> None:
    p = small()
    p = change(p, index_of(p, "w.grad"), forward="elsewhere")
    (f,) = validate(p, None)
    assert f.code == "TV111"
    assert f.message.endswith("belongs to 'elsewhere', which is no result of a forward op")


def test_tv112_communication_in_a_logical_program() -> None:
    p = tiny([op("all_reduce", ("x",), ("y",), 2, group="tp")], types(x=(2, 3), y=(2, 3)))
    assert only(p) == ("TV112", "tiny: y = all_reduce(x, group=tp)")


def test_tv113_types() -> None:
    p = tiny([op("relu", ("x",), ("y",))], types(x=(2, 3)))
    assert only(p) == ("TV113", "tiny: y = relu(x): 'y' has no type")
    p = tiny([op("relu", ("x",), ("y",))], types(x=(2, 3), y=TensorType((2, 3), "float32")))
    assert only(p)[1].startswith("tiny: tensor 'y': dtype 'float32' is not one of f64, f32")
    p = tiny([], types(x=(2, -3)))
    assert only(p) == ("TV113", "tiny: tensor 'x': shape (2, -3) is not a tuple of sizes")
    p = tiny([], {})
    assert only(p) == ("TV113", "tiny: 'x' is declared without a type")


def test_tv100_never_raises() -> None:
    p = replace(small(), ops=(None,))  # type: ignore[arg-type]
    assert codes(p, None) == ["TV100"]
    plan = small_plan()
    assert codes(small(), replace(plan, templates=None))[0] == "TV100"  # type: ignore[arg-type]
    assert "TV106" in codes(None, with_program(plan, change(plan.templates[0].program, 0, attrs=(("dim", [1]),))))


def test_findings_are_limited() -> None:
    ops = [op("relu", (f"ghost{i}",), (f"y{i}",)) for i in range(130)]
    p = tiny(ops, types(x=(2, 3), **{f"y{i}": (2, 3) for i in range(130)}))
    findings = validate(p, None)
    assert len(findings) == 101
    assert findings[-1].message == "30 more like these"


def test_a_bug_of_a_check_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that fails on well-formed objects is an internal error, not an invalid plan."""

    def broken(*_: object) -> None:
        raise KeyError("a bug of ours")

    module = importlib.import_module("trainverify.check.validate")  # the package's attribute of this name is the function
    monkeypatch.setattr(module, "check_lineage", broken)
    with pytest.raises(KeyError, match="a bug of ours"):
        codes(small(), small_plan())
