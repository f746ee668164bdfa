"""Changed programs: equal to the same model written by hand, gradients included; what cannot be changed exactly is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

import trainverify as tv
from approximate import models
from trainverify.approximate import Applied, Approximation, Changed, Setting, Unfit, applied, declared
from trainverify.build.tape import Tensor
from trainverify.graph.plan import Plan
from trainverify.graph.program import Op, Program
from trainverify.verdicts import verify


def changed(program: Program, plan: Plan, *allow: str | Approximation) -> Applied:
    return applied(program, plan, declared(plan, allow))


def by_hand(parts: int) -> Program:
    """Rows of every part normalised apart, part by part."""
    b = tv.program("net")
    x, y = b.input("x", (models.ROWS, models.WIDTH)), b.input("y", (models.ROWS, models.CHANNELS))
    w, g, s = b.parameter("w", (models.CHANNELS, models.WIDTH)), b.parameter("g", (models.CHANNELS,)), b.parameter("s", (models.CHANNELS,))
    h, rows = b.linear(x, w, name="h"), models.ROWS // parts
    pieces = [b.slice(h, dim=0, start=i * rows, stop=(i + 1) * rows, name=f"h{i}") for i in range(parts)]
    normed = [b.batch_norm(piece, g, s, name=[f"n{i}", f"mean{i}", f"var{i}"])[0] for i, piece in enumerate(pieces)]
    n = b.concat(*normed, dim=0, name="n")
    b.loss(b.mean(b.square(b.sub(n, y, name="e"), name="squares"), name="loss"))
    b.metric("size", b.sum(b.square(h, name="h2"), name="size"))
    return tv.complete(b.build(), tv.SGD(lr=0.5))


def test_local_batch_norm_is_the_model_written_by_hand() -> None:
    """PROVED: loss, gradients and new weights; REFUTED with another number of parts."""
    step = models.step(running=False)
    four = changed(step, models.plan(4), "local-batch-norm").logical
    assert verify(by_hand(4), four, points=1).verdict == "PROVED"
    assert verify(by_hand(2), four, points=1).verdict == "REFUTED"
    assert verify(step, four, points=1).verdict == "REFUTED"


def test_running_statistics_get_a_row_for_every_rank() -> None:
    found = changed(models.step(), models.plan(4), "local-batch-norm")
    assert found.logical.tensors["m"].shape == (4 * models.CHANNELS,)
    assert {str(lay.form) for lay in found.plan.lineage if lay.logical in ("m", "v", "m.new", "v.new")} == {'"(dp c)"'}
    assert "+ m: f32[12]" in found.changes[0].json()["diff"]  # type: ignore[operator]


def routed(groups: int = 1, top_groups: int = 1) -> Program:
    b = tv.program("mixture")
    x, w = b.input("x", (6, 5)), b.parameter("w", (8, 5))
    limits = {"groups": groups, "top_groups": top_groups} if groups > 1 else {}
    b.loss(b.sum(b.square(b.moe_gate(b.linear(x, w, name="logits"), top_k=3, **limits, name="weights"), name="squares"), name="loss"))
    return tv.complete(b.build())


def one_rank(program: Program) -> Plan:
    return Plan(program.name, tv.Mesh(dp=2), ())


def test_routing_is_the_gate_with_groups() -> None:
    found = changed(routed(), one_rank(routed()), "node-limited-routing:groups=4,top=2").logical
    assert verify(routed(4, 2), found, points=1).verdict == "PROVED"
    assert verify(routed(2, 1), found, points=1).verdict == "REFUTED"
    again = changed(routed(4, 3), one_rank(routed()), "node-limited-routing:groups=4,top=2").logical
    assert verify(routed(4, 2), again, points=1).verdict == "PROVED"


def dropping(places: int | None, tokens: int = 3) -> Program:
    b = tv.program("mixture")
    x, w, v = b.input("x", (6, 5)), b.parameter("w", (4, 5)), b.parameter("v", (4, 2))
    weights = b.moe_gate(b.linear(x, w, name="logits"), top_k=2, name="weights")
    b.metric("load", b.sum(b.float(b.gt(weights, value=0, name="hot"), name="hot.float"), name="load"))
    if places is not None:  # place by place: who comes before
        rows = b.reshape(b.float(b.gt(weights, value=0)), shape=(6 // tokens, tokens, 4))
        earlier = b.float(b.gt(b.reshape(b.arange(start=0, stop=tokens), shape=(tokens, 1)), b.arange(start=0, stop=tokens)))
        before = b.einsum(earlier, rows, spec="st,bte->bse")
        weights = b.mul(weights, b.reshape(b.float(b.lt(before, value=places)), shape=(6, 4)))
    b.loss(b.sum(b.square(b.einsum(weights, v, spec="te,eh->th", name="y"), name="squares"), name="loss"))
    return tv.complete(b.build())


def test_capacity_drops_tokens_beyond_the_last_place() -> None:
    plan = one_rank(dropping(None))
    found = changed(dropping(None), plan, "capacity:places=1,tokens=3").logical
    same = verify(dropping(1), found, points=3)  # UNKNOWN: counted by a matrix here, by cumsum there; it agrees at random points
    assert {o.status for o in same.obligations} <= {"agreed", "proved"}, same.reason
    assert verify(dropping(2), found, points=2).verdict == "REFUTED"
    assert verify(dropping(1, 6), found, points=2).verdict == "REFUTED"


def weighed(*terms: str, reported: bool = False, detached: Sequence[str] = ()) -> Program:
    """Terms are differentiated; `reported`: they are a part of the reported loss, also those that are detached."""
    b = tv.program("sum")
    x, w, v = b.input("x", (6, 5)), b.parameter("w", (4, 5)), b.parameter("v", (4,))
    h = b.linear(x, w, name="h")
    loss = b.sum(b.mul(b.square(h, name="h2"), v, name="p"), name="loss")
    b.metric("size", b.sum(b.exp(h, name="big"), name="size"))
    b.metric("tilt", b.sum(b.mul(h, v, name="q"), name="tilt"))
    if not reported:
        b.loss(loss)
        return tv.complete(b.build(), tv.SGD(lr=0.5), auxiliary=dict.fromkeys(terms, 0.25))
    for t in sorted({*terms, *detached}):
        metric = next(Tensor(o.tensor, b.tensors[o.tensor]) for o in b.outputs if o.of == t)
        if t in detached:
            metric = b.detach(metric, name=f"{t}.value")
        loss = b.add(loss, b.mul(metric, value=0.25, name=f"{t}.part"), name="loss.all")
    b.loss(loss)
    return tv.complete(b.build(), tv.SGD(lr=0.5))


@pytest.mark.parametrize("reported", [False, True])
def test_auxiliary_terms_are_left_out(reported: bool) -> None:
    """Of gradients alone: a loss that is reported with its terms has them still."""

    def differentiating(*terms: str) -> Program:
        return weighed(*terms, reported=reported, detached=[t for t in ("size", "tilt") if reported and t not in terms])

    both, plan = weighed("size", "tilt", reported=reported), one_rank(weighed())
    none = changed(both, plan, "without-auxiliary-loss").logical
    assert verify(differentiating(), none, points=1).verdict == "PROVED"
    assert verify(both, none, points=1).verdict == "REFUTED"
    if reported:
        assert verify(weighed(), none, points=1).verdict == "REFUTED"  # its loss has no terms
    one = changed(both, plan, "without-auxiliary-loss:metric=size").logical
    assert verify(differentiating("tilt"), one, points=1).verdict == "PROVED"
    assert verify(differentiating("size"), one, points=1).verdict == "REFUTED"


UNFIT = {
    "no such op": (lambda: (routed(), one_rank(routed())), "local-batch-norm", "mixture has no batch norm"),
    "rows do not divide": (lambda: (models.step(), models.plan(5)), "local-batch-norm", "24 rows do not divide among 5 ranks"),
    "batch not divided": (lambda: (models.step(), models.plan(1)), "local-batch-norm", "does not divide the batch"),
    "no such axis": (lambda: (models.step(), models.plan(4)), "local-batch-norm:axes=tp", "no axis 'tp'"),
    "groups": (lambda: (routed(), one_rank(routed())), "node-limited-routing:groups=3,top=2", "8 experts do not divide into 3 groups"),
    "other groups": (
        lambda: (routed(2, 1), one_rank(routed())),
        "node-limited-routing:groups=4,top=2",
        "1 of 2 groups already",
    ),
    "too few": (lambda: (routed(), one_rank(routed())), "node-limited-routing:groups=4,top=1", "3 experts from 1 groups with 2 each"),
    "too many": (lambda: (routed(), one_rank(routed())), "node-limited-routing:groups=4,top=5", "5 of 4 groups"),
    "nothing limited": (lambda: (routed(4, 2), one_rank(routed())), "node-limited-routing:groups=4,top=2", "it changes nothing"),
    "option missing": (lambda: (routed(), one_rank(routed())), "node-limited-routing:groups=4", "the option top=N is missing"),
    "no number": (lambda: (routed(), one_rank(routed())), "node-limited-routing:groups=x,top=2", "groups=x: a number"),
    "no capacity": (lambda: (routed(), one_rank(routed())), "capacity:places=6,tokens=6", "none is ever dropped"),
    "no auxiliary": (lambda: (models.step(), models.plan(4)), "without-auxiliary-loss", "no metric is added"),
    "other metric": (lambda: (weighed("size"), one_rank(weighed())), "without-auxiliary-loss:metric=tilt", "no such term"),
    "unknown": (lambda: (models.step(), models.plan(4)), "local-batchnorm", "did you mean local-batch-norm"),
    "unknown option": (lambda: (models.step(), models.plan(4)), "local-batch-norm:axis=dp", "has no option 'axis'"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_unfit_is_refused(name: str) -> None:
    make, allow, why = UNFIT[name]
    with pytest.raises(Unfit, match=why):
        changed(*make(), allow)


def edited(program: Program, output: str, **changes: object) -> Program:
    return replace(program, ops=tuple(replace(op, **changes) if output in op.outputs else op for op in program.ops))  # type: ignore[arg-type]


def test_a_backward_pass_of_its_own_is_refused() -> None:
    """Gradients that are not the derivative of the op that changes would belong to the unchanged program."""
    step, plan = models.step(), models.plan(4)
    grad = next(op for op in step.ops if op.name == "batch_norm.grad")
    other = edited(step, grad.outputs[0], inputs=(*grad.inputs[:3], None, None, grad.inputs[5]))
    with pytest.raises(Unfit, match="is not the derivative"):
        changed(other, plan, "local-batch-norm")
    unmarked = edited(step, grad.outputs[0], forward=None)
    with pytest.raises(Unfit, match="no op of the backward pass belongs to it"):
        changed(unmarked, plan, "local-batch-norm")


def test_statistics_that_others_read_are_refused() -> None:
    step = models.step()
    op = Op("neg", ("mean",), ("mean.neg",))
    ops = (*step.ops, op)
    other = replace(step, ops=ops, tensors={**step.tensors, "mean.neg": step.tensors["mean"]})
    with pytest.raises(Unfit, match=r"mean changes from f32\[3\] to f32\[12\]"):
        changed(other, models.plan(4), "local-batch-norm")


def test_an_approximation_cannot_change_what_is_demanded_or_assumed() -> None:
    def fewer(program: Program, setting: Setting) -> Changed:
        return Changed(replace(program, outputs=program.outputs[:1]), "")

    def assumed(program: Program, setting: Setting) -> Changed:
        return Changed(replace(program, domains={}), "")

    for change, what in ((fewer, "the outputs"), (assumed, "what is assumed of the inputs")):
        with pytest.raises(Unfit, match=what):
            changed(models.step(), models.plan(4), Approximation("own", "", change))


def test_declared_twice_with_different_options_is_refused() -> None:
    plan = models.plan(4, allow="local-batch-norm")
    assert [d.origin for d in declared(plan, ["local-batch-norm"])] == ["the plan"]
    with pytest.raises(Unfit, match="which of them"):
        declared(plan, ["local-batch-norm:axes=dp"])
