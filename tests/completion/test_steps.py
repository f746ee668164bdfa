"""Two training steps as one: what differs in the second only is refuted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import trainverify as tv
from trainverify import cli, files
from trainverify.build.tape import BuildError
from trainverify.graph.plan import Edit, Plan
from trainverify.graph.program import Op
from trainverify.zoo import llama
from trainverify.zoo.parallel import Degrees, llama_plan, llama_step

RANKS, ROWS, WIDTH, OUT = 3, 4, 5, 2
OPTIMIZERS = {"adamw": tv.AdamW(lr=0.1), "sgd": tv.SGD(lr=0.1, momentum=0.9)}
SLOTS = {"adamw": ("m", "v"), "sgd": ("momentum",)}


def logical(optimizer: str, steps: int = 1) -> tv.Program:
    b = tv.program("regression")
    x, t = b.input("x", (RANKS * ROWS, WIDTH)), b.input("t", (RANKS * ROWS, OUT))
    w = b.parameter("w", (OUT, WIDTH))
    e = b.sub(b.tanh(b.linear(x, w, name="y"), name="z"), t, name="e")
    b.loss(b.mean(b.mul(e, e, name="sq"), name="loss"))
    return tv.complete(b.build(), OPTIMIZERS[optimizer], steps=steps)


def plan(optimizer: str) -> tv.Plan:
    p = tv.plan("regression", tv.Mesh(dp=RANKS))
    with p.ranks() as r:
        x, t = r.input("x", (ROWS, WIDTH), "(dp b) k"), r.input("t", (ROWS, OUT), "(dp b) k")
        w = r.parameter("w", (OUT, WIDTH), "o k")
        e = r.sub(r.tanh(r.linear(x, w, name="y"), name="z"), t, name="e")
        loss = r.mean(r.mul(e, e, name="sq"), name="loss.own")
        r.backward(loss)
        r.phase = "optimizer"
        r.loss(r.all_reduce(loss, group="dp", op="avg", name="loss"))
        grad = r.all_reduce(r.gradient(w), group="dp", op="avg", name="w.grad.mean")
        r.output(grad, "gradient", "w")
        slots = [r.state(f"w.{s}", (OUT, WIDTH), "o k", domain="nonnegative" if s == "v" else None) for s in SLOTS[optimizer]]
        rule = OPTIMIZERS[optimizer]
        new = r.emit(rule.op, (w, grad, *slots), rule.attrs("w"), ["w.new", *(f"{s.name}.new" for s in slots)])
        for old, fresh in zip((w, *slots), new, strict=True):
            r.update(old, fresh)
    return p.build()


def changed(plan: Plan, output: str, change: Callable[[Op], tuple[Op, ...]], rank: int | None = None) -> Plan:
    """The plan with another op, or others, in the place of one: everywhere, or on one rank."""
    (template,) = plan.templates
    ops = template.program.ops
    at = next(i for i, op in enumerate(ops) if output in op.outputs)
    made = change(ops[at])
    if rank is not None:
        return replace(plan, edits=(Edit(rank, (at,), made),))
    types = {o: template.program.tensors[ops[at].outputs[k]] for op in made for k, o in enumerate(op.outputs)}
    program = replace(template.program, ops=(*ops[:at], *made, *ops[at + 1 :]), tensors={**template.program.tensors, **types})
    return replace(plan, templates=(replace(template, program=program),))


def taking(old: str, new: str) -> Callable[[Op], tuple[Op, ...]]:
    return lambda op: (replace(op, inputs=tuple(new if i == old else i for i in op.inputs)),)


def not_counted(op: Op) -> tuple[Op, ...]:
    return (op.with_attrs(step=1),)


def not_summed(op: Op) -> tuple[Op, ...]:
    return (Op("identity", op.inputs, op.outputs, (), op.phase),)


def applied_twice(op: Op) -> tuple[Op, ...]:
    """The update of the first step once more, before the second one."""
    again = replace(op, inputs=("w.new", "w.grad.mean", "w.momentum.new"), outputs=("late", "late.momentum"))
    return again, replace(op, inputs=("late", *op.inputs[1:]))


NEW = "step 2/w.new"
BUGS: dict[str, tuple[str, Callable[[Plan], Plan]]] = {
    # what goes wrong in the second step: (optimizer, the change)
    "stale bucket": ("sgd", lambda p: changed(p, NEW, taking("step 2/w.grad.mean", "w.grad.mean"))),
    "step counter not advanced on one rank": ("adamw", lambda p: changed(p, NEW, not_counted, rank=1)),
    "gradients not synchronised": ("sgd", lambda p: changed(p, "step 2/w.grad.mean", not_summed)),
    "momentum not carried": ("sgd", lambda p: changed(p, NEW, taking("w.momentum.new", "w.momentum"))),
    "delayed update twice": ("sgd", lambda p: changed(p, NEW, applied_twice)),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_steps_are_proved(optimizer: str) -> None:
    report = tv.verify(logical(optimizer, steps=2), tv.several_steps(plan(optimizer)))
    assert report.verdict == "PROVED", report.reason
    assert {o.name for o in report.obligations} >= {"loss", "metric loss of step 1", "updated parameter w", "gradient of w"}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_of_the_second_step_is_refuted(bug: str) -> None:
    optimizer, change = BUGS[bug]
    report = tv.verify(logical(optimizer, steps=2), change(tv.several_steps(plan(optimizer))))
    assert report.verdict == "REFUTED", report.reason
    assert not any(o.status == "different" and "step 1" in o.name for o in report.obligations)


def test_three_steps_are_not_two() -> None:
    """INVALID: the third batch is nowhere."""
    assert tv.verify(logical("sgd", steps=3), tv.several_steps(plan("sgd"))).verdict == "INVALID"


def test_a_whole_model_at_real_widths() -> None:
    config = replace(llama.PRESETS["llama3-8b"], layers=2, batch=8)
    how = Degrees(dp=2, tp=2, pp=2, microbatches=2)
    report = tv.verify(tv.several_steps(llama_step(config)), tv.several_steps(llama_plan(config, how)), points=1)
    assert report.verdict == "PROVED", report.reason


def test_numbers_are_those_of_one_step_after_the_other() -> None:
    """Against PyTorch: two steps of AdamW on two batches."""
    torch = pytest.importorskip("torch", reason="PyTorch is absent")
    from completion.running import run

    rng = np.random.default_rng(3)
    values = {n: rng.standard_normal(t.shape) for n, t in logical("adamw", 2).tensors.items() if n in logical("adamw", 2).sources}
    values["w.m"], values["w.v"] = np.zeros((OUT, WIDTH)), np.zeros((OUT, WIDTH))
    found = run(logical("adamw", 2), values)
    w = torch.nn.Parameter(torch.tensor(values["w"]))
    optimizer = torch.optim.AdamW([w], lr=0.1, weight_decay=0.01)
    for prefix in ("", "step 2/"):
        optimizer.zero_grad()
        loss = ((torch.tanh(torch.tensor(values[prefix + "x"]) @ w.T) - torch.tensor(values[prefix + "t"])) ** 2).mean()
        loss.backward()
        optimizer.step()
    np.testing.assert_allclose(found["step 2/w.new"], w.detach().numpy(), rtol=1e-9)


def test_only_optimizers_count_on() -> None:
    """A slice has a `step` too."""
    b = tv.program("sliced")
    x, w = b.input("x", (3, 8)), b.parameter("w", (2, 8))
    b.loss(b.sum(b.linear(x, w, name="y"), name="loss"))
    b.phase = "optimizer"
    b.metric("half", b.slice(w, dim=1, start=0, stop=8, step=2, name="half"))
    program = tv.several_steps(b.build())
    found = {o: op for op in program.ops for o in op.outputs}
    assert found["half"].get("step") == found["step 2/half"].get("step") == 2


def test_several_steps_of_several_are_refused() -> None:
    with pytest.raises(BuildError, match="several steps already"):
        tv.several_steps(tv.several_steps(logical("sgd")))


def test_edits_of_one_step_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edited = changed(plan("adamw"), "w.new", not_counted, rank=1)
    with pytest.raises(BuildError, match="edit the plan of several steps"):
        tv.several_steps(edited)
    files.write(tmp_path / "model.json", logical("adamw"))
    files.write(tmp_path / "plan.json", edited)
    assert cli.run(["verify", str(tmp_path / "model.json"), str(tmp_path / "plan.json"), "--steps", "2"]) == 2
    assert capsys.readouterr().err.startswith("error: --steps 2: regression: edits of single ranks")
