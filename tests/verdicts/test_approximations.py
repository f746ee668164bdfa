"""Plans that deviate on purpose: REFUTED by default, PROVED with the named approximation, REFUTED with it and another bug."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from rich.console import Console

from approximate import models
from trainverify import cli, files
from trainverify.approximate import Approximation, Changed, Setting, Unfit
from trainverify.completion.steps import several_steps
from trainverify.graph.lineage import Pattern
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.graph.types import TensorType
from trainverify.report import Report
from trainverify.report.html import page
from trainverify.report.html.page import Entry
from trainverify.testing.assertion import assert_equivalent
from trainverify.verdicts import verify
from trainverify.zoo import resnet
from trainverify.zoo.deepseek import Config, Gate
from trainverify.zoo.parallel import Degrees, deepseek_plan, deepseek_step
from trainverify.zoo.parallel.deviations import Deviations
from trainverify.zoo.parallel.resnet import resnet_plan, resnet_step
from trainverify.zoo.recipes import Wish
from verdicts.changes import Change, attrs, in_program
from zoo.parallel.mistakes import skipped

LOCAL = "local-batch-norm"
ROUTING = "node-limited-routing:groups=4,top=2"
CAPACITY = "capacity:places=2"
ALONE = "without-auxiliary-loss"
RESNET = resnet.Config((1,), stem="small", width=2, classes=3, size=(2, 2), batch=8)
EIGHT = Gate(8, 3)
DEEPSEEK = Config(1, 0, 10, 2, 6, 4, 1, EIGHT, 14, sequence=6, q_rank=None, kv_rank=4, head=4, rotary=2, value=3, batch=4)
HOW = Degrees(dp=4, ep=4, normalise="loss")

NODES = Deviations(node_limited=2)

Pair = tuple[Program, Plan]


@cache
def net() -> Pair:
    return models.step(), models.plan(4)


@cache
def convolutions() -> Pair:
    return resnet_step(RESNET, None, None), resnet_plan(RESNET, Degrees(dp=4), None, None, synchronised=False)


@cache
def experts(deviations: Deviations = NODES) -> Pair:
    return deepseek_step(DEEPSEEK, None, None), deepseek_plan(DEEPSEEK, HOW, None, None, deviations=deviations)


DEVIATING: dict[str, tuple[Callable[[], Pair], str]] = {
    "batch norm": (net, LOCAL),
    "ResNet": (convolutions, LOCAL),
    "DeepSeek, nodes": (experts, ROUTING),
    "DeepSeek, capacity": (lambda: experts(Deviations(rank_capacity=2)), CAPACITY),
    "DeepSeek, balance": (lambda: experts(Deviations(no_auxiliary=True)), ALONE),
}


def run(pair: Pair, *allow: str | Approximation, bug: Change | None = None, fast: bool = True) -> Report:
    return verify(pair[0], pair[1] if bug is None else bug(pair[1]), points=1, fail_fast=fast, allow=allow)


LONG = ("DeepSeek, capacity", "DeepSeek, balance", "nodes: one node more", "capacity: one place more", "balance: loss of own tokens")


def marked(names: Iterable[str]) -> list[object]:
    return [pytest.param(n, marks=pytest.mark.long) if n in LONG else n for n in names]


@pytest.mark.parametrize("name", marked(DEVIATING))
def test_refuted_by_default_and_proved_if_allowed(name: str) -> None:
    pair, allow = DEVIATING[name][0](), DEVIATING[name][1]
    assert run(pair).headline == "REFUTED"
    report = run(pair, allow)
    assert report.headline == f"PROVED with {allow.partition(':')[0]}", report.notes
    assert report.exit_code == 0
    assert {o.status for o in report.obligations} == {"proved"}
    assert {o.name for o in report.obligations} == {str(o) for o in pair[0].outputs}


BUGS: dict[str, tuple[str, Change]] = {
    "gradient not added up": ("batch norm", skipped("all", "w.grad.dp")),
    "momentum of running statistics": ("batch norm", attrs("all", "m.new", momentum=0.2)),
    "running statistics swapped": ("batch norm", in_program("all", lambda p: swapped_outputs(p, "m.new", "mean"))),
    "ResNet: gradient of a convolution not added up": ("ResNet", skipped("all", "conv1.weight.grad.dp")),
    "ResNet: another momentum": ("ResNet", attrs("all", "bn1.running_var.new", momentum=0.2)),
    "nodes: one node more": ("DeepSeek, nodes", attrs("pp0", "mb0/layers.0.moe.weights", top_groups=3)),
    "nodes: not in the backward pass": (
        "DeepSeek, nodes",
        attrs("pp0", "mb0/layers.0.moe.logits.grad.1", groups=1, top_groups=1),
    ),
    "nodes: gradient not added up": ("DeepSeek, nodes", skipped("pp0", "lm_head.grad.dp")),
    "capacity: one place more": ("DeepSeek, capacity", attrs("pp0", "mb0/layers.0.moe.taken", value=3)),
    "balance: loss of own tokens": ("DeepSeek, balance", skipped("pp0", "loss.total")),
}


def swapped_outputs(program: Program, old: str, new: str) -> Program:
    return replace(program, outputs=tuple(replace(o, tensor=new) if o.tensor == old else o for o in program.outputs))


@pytest.mark.parametrize("bug", marked(BUGS))
def test_another_bug_is_refuted(bug: str) -> None:
    name, change = BUGS[bug]
    make, allow = DEVIATING[name]
    report = run(make(), allow, bug=change)
    assert report.headline == f"REFUTED with {allow.partition(':')[0]}", (report.reason, report.findings)
    assert report.exit_code == 1


@pytest.mark.long
def test_resnet_50_at_full_size() -> None:
    """224 × 224 images on 8 ranks, as `--zoo resnet50 --dp 8 --local-batch-norm` builds it."""
    pair = Wish("resnet50", Degrees(dp=8), deviations=Deviations(local_batch_norm=True)).build()
    assert run(pair).headline == "REFUTED"
    assert run(pair, LOCAL).headline == "PROVED with local-batch-norm"
    assert run(pair, LOCAL, bug=skipped("all", "layer2.0.conv1.weight.grad.dp")).headline == "REFUTED with local-batch-norm"


def test_the_cause_is_searched_in_the_changed_program() -> None:
    report = run(net(), LOCAL, bug=skipped("all", "w.grad.dp"), fast=False)
    assert report.place is not None
    assert report.place.tensor == "w.grad.dp"


def test_unneeded_is_a_finding() -> None:
    """INVALID: the plan equals the unchanged program, and not the changed one."""
    report = verify(models.step(), models.plan(4, local=False), points=1, allow=[LOCAL])
    assert (report.headline, report.exit_code) == ("INVALID", 1)
    assert [f.code for f in report.findings] == ["TV311"]
    assert "the plan equals the logical program as it is" in report.findings[0].message


def test_one_of_two_that_is_unneeded_is_named() -> None:
    step = models.step(weight=0.25)
    assert run((step, models.plan(4, weight=0.25)), LOCAL).headline == "PROVED with local-batch-norm"
    report = run((step, models.plan(4, weight=0.25)), LOCAL, ALONE)
    assert report.headline == "INVALID with local-batch-norm"
    assert report.findings[0].message == f"{ALONE}, declared by the user: the plan equals the logical program with {LOCAL} alone"
    assert run((step, models.plan(4)), LOCAL, ALONE).headline == "PROVED with local-batch-norm, without-auxiliary-loss"
    assert run((step, models.plan(4)), LOCAL).headline == "REFUTED with local-batch-norm"
    assert run((step, models.plan(4, local=False, weight=0.25)), LOCAL, ALONE).headline == "INVALID"


def test_half_of_a_batch_norm_is_refuted() -> None:
    """The mean over all ranks, the variance over one: neither program."""
    plan = skipped("all", "sq")(models.plan(4, local=False))
    assert run((models.step(), plan)).headline == "REFUTED"
    assert run((models.step(), plan), LOCAL).headline == "REFUTED with local-batch-norm"


def test_two_steps_carry_the_statistics_of_every_rank() -> None:
    step, plan = models.step(), models.plan(4)
    report = verify(several_steps(step, 2), several_steps(plan, 2), points=1, allow=[LOCAL])
    assert report.headline == "PROVED with local-batch-norm"


def test_a_plan_that_tells_ranks_apart_itself() -> None:
    """Its running statistics are laid out rank by rank: no layout of the unchanged program."""
    plan = models.plan(4, layout="(dp c)")
    assert run((models.step(), plan)).verdict == "INVALID"
    assert run((models.step(), plan), LOCAL).headline == "PROVED with local-batch-norm"


def test_an_approximation_of_the_user() -> None:
    def halved(program: Program, setting: Setting) -> Changed:
        ops = tuple(op.with_attrs(lr=0.25) if op.name == "sgd" else op for op in program.ops)
        return Changed(replace(program, ops=ops), "half the learning rate")

    half = Approximation("half", "", halved)
    assert run((models.step(), models.plan(4, local=False)), half).headline == "INVALID"
    plan = in_program("all", lambda p: replace(p, ops=tuple(op.with_attrs(lr=0.25) if op.name == "sgd" else op for op in p.ops)))(
        models.plan(4, local=False)
    )
    assert run((models.step(), plan)).verdict == "REFUTED"
    assert run((models.step(), plan), half).headline == "PROVED with half"


def shown(report: Report, verbose: bool = False) -> str:
    out = io.StringIO()
    report.print(Console(file=out, width=1000, soft_wrap=True), verbose)
    return out.getvalue()


def test_declared_by_the_plan_it_is_said_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step, plan = models.step(), models.plan(4, allow=LOCAL)
    report = run((step, plan))
    text, first = shown(report), f"{LOCAL}, allowed by the plan ({LOCAL}): every batch norm takes"
    assert text.startswith("PROVED with local-batch-norm net on mesh(dp=4)")
    assert "- n, mean, var, m.new, v.new = batch_norm(h, g, s, m, v)" in text
    assert report.assumptions[0].startswith(first)
    html = page([Entry(report)])
    assert html.count("PROVED with local-batch-norm") >= 2
    assert "allowed by the plan" in html
    files.write(tmp_path / "step.json", step)
    files.write(tmp_path / "plan.json", plan)
    assert files.read(tmp_path / "plan.json") == plan
    extra = ["--junit", str(tmp_path / "junit.xml"), "--sarif", str(tmp_path / "report.sarif")]
    assert cli.run(["verify", str(tmp_path / "step.json"), str(tmp_path / "plan.json"), "--json", *extra]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["verdict"] == "PROVED with local-batch-norm"
    assert tree["approximations"][0]["by"] == "the plan"
    assert tree["assumptions"][0].startswith(first)
    for name in ("junit.xml", "report.sarif"):
        assert "PROVED with local-batch-norm" in (tmp_path / name).read_text()
    assert cli.run(["show", str(tmp_path / "plan.json")]) == 0
    assert "allow local-batch-norm" in capsys.readouterr().out
    assert cli.run(["validate", str(tmp_path / "plan.json"), "--logical", str(tmp_path / "step.json")]) == 0


def test_a_passing_test_warns() -> None:
    with pytest.warns(UserWarning, match="PROVED with local-batch-norm: net on"):
        assert_equivalent(models.step(), models.plan(4, allow=LOCAL), points=1)


def test_an_ill_formed_program_is_not_changed() -> None:
    step = models.step()
    broken = replace(step, tensors={**step.tensors, "h": TensorType(())})
    assert verify(broken, models.plan(4), allow=[LOCAL]).headline == "INVALID"
    plan = models.plan(4)
    layouts = tuple(replace(lay, form=Pattern("(dp b")) if lay.logical == "x" else lay for lay in plan.lineage)
    with pytest.raises(Unfit, match="does not fit: pattern"):
        verify(step, replace(plan, lineage=layouts), allow=[LOCAL])


def test_in_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table names what is allowed, and a verdict that is kept is not that of the same files without it."""
    files.write(tmp_path / "step.json", models.step())
    files.write(tmp_path / "plan.json", models.plan(4))
    pair = 'logical = "step.json"\nplan = "plan.json"\n'
    matrix = tmp_path / "matrix.toml"
    matrix.write_text(f'[[files]]\n{pair}name = "strict"\n[[files]]\n{pair}name = "allowed"\nallow = "{LOCAL}"\n')
    for _ in range(2):
        assert cli.run(["sweep", str(matrix), "--cache", str(tmp_path / "cache"), "--workers", "1", "--json"]) == 1
        tree = json.loads(capsys.readouterr().out)
        assert [r["verdict"] for r in tree["rows"]] == ["REFUTED", "PROVED with local-batch-norm"]
        assert tree["counts"] == {"PROVED with local-batch-norm": 1, "REFUTED": 1}
    assert all(r["cached"] for r in tree["rows"])
    matrix.write_text(f"[[files]]\n{pair}allow = 3\n")
    assert cli.run(["sweep", str(matrix)]) == 2


def test_unfit_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files.write(tmp_path / "step.json", models.step())
    files.write(tmp_path / "plan.json", models.plan(4, allow=ROUTING))
    assert cli.run(["verify", str(tmp_path / "step.json"), str(tmp_path / "plan.json")]) == 2
    assert "node-limited-routing (declared by the plan) does not fit: net has no op that routes" in capsys.readouterr().err
