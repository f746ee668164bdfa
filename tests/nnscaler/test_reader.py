"""Dumps that are not as the format says, or mean something unknown: one line that names file, cell and field."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nnscaler.plans import DATA, Tree, cells, judged, messages, tree, verdict
from trainverify.cli import run
from trainverify.files import FileError
from trainverify.nnscaler import parse, read
from trainverify.ops import OPS
from trainverify.ops.table import OpTable, op
from trainverify.primitives.node import Node

MLP = "mlp2l_v08_dp2pp2tp2nm2"


def segment(plan: Tree) -> Any:
    return plan["execplan"]["0"]["cells"]["11"]


def change(path: list[Any], value: Any = None, drop: bool = False) -> Callable[[Tree], None]:
    def apply(plan: Tree) -> None:
        at: Any = plan
        for key in path[:-1]:
            at = at[key]
        if drop:
            del at[path[-1]]
        else:
            at[path[-1]] = value

    return apply


NODES = ["execplan", "0", "cells", "11", "nodes"]
BAD = [
    (change(["format"], "nnsdump/2"), 'plan: format: expected "nnsdump/1", got "nnsdump/2"; not a dump of an nnScaler plan'),
    (change(["full_tensors"], drop=True), "plan: full_tensors: missing"),
    (change(["full_tensors", "9", "dtype"], "torch.float4"), 'plan: full_tensors["9"].dtype: unknown dtype "torch.float4"'),
    (change(["full_tensors", "9", "is_loss"], drop=True), 'plan: full_tensors["9"].is_loss: missing'),
    (
        change(["full_tensors", "9"], drop=True),
        'plan: execplan["0"].cells["11"].nodes["2: cell 23"].outputs[0].parent: tensor 45 belongs to 9, which is not in full_tensors',
    ),
    (change(["execplan", "2"], drop=True), 'plan: execplan["2"]: missing'),
    (
        change(["execplan", "0", "seq", 1, "cell"], "12"),
        'plan: execplan["0"].seq[1].cell: there is no cell "12" on this device',
    ),
    (change([*NODES, 1, "inputs"], drop=True), 'plan: execplan["0"].cells["11"].nodes["1: cell 19"].inputs: missing'),
    (
        change([*NODES, 0, "prims", 0, "kind"], "TeleportPrim"),
        'plan: execplan["0"].cells["11"].nodes["0: cell 132"].prims[0].kind: unknown prim "TeleportPrim"',
    ),
    (
        change([*NODES, 0, "prims", 0, "kwargs"], {"dim": 0}),
        'plan: execplan["0"].cells["11"].nodes["0: cell 132"].prims[0].kwargs.ranks: missing',
    ),
    (
        change([*NODES, 1, "inputs", 0, "indmap"], [[0, 16], [0, 129]]),
        'plan: execplan["0"].cells["11"].nodes["1: cell 19"].inputs[0].indmap: [[0, 16], [0, 129]] is no region of data [32, 128]',
    ),
    (change([*NODES, 1, "kind"], "IRWarp"), 'plan: execplan["0"].cells["11"].nodes["1: cell 19"].kind: unknown kind of cell "IRWarp"'),
    (
        change(["execplan", "0", "seq", 1, "inputs"], []),
        'plan: execplan["0"].seq[1].inputs: 0 for the 1 of cell 11',
    ),
    (change(["runtime_ndevs"], 6), "plan: devices: 6 ranks run the devices [0, 1, 2, 3]: expected 0, 1, …, and a whole number of replicas"),
    (change(["schedule", "nmicros"], 0), "plan: schedule.nmicros: 0 micro-batches"),
]


@pytest.mark.parametrize(("apply", "said"), BAD, ids=[said.split(": ", 1)[1][:40] for _, said in BAD])
def test_one_line(apply: Callable[[Tree], None], said: str) -> None:
    plan = tree(MLP)
    apply(plan)
    with pytest.raises(FileError) as error:
        parse(plan, "plan")
    assert str(error.value) == said


def test_every_field_of_a_cell_can_be_missing() -> None:
    """Whatever is left out, the answer is an error or a verdict, never another exception."""
    names = {key for cell in cells(tree(MLP), 0) for key in cell}
    for name in sorted(names):
        plan = tree(MLP)
        for cell in cells(plan, 0):
            cell.pop(name, None)
        try:
            report = judged(MLP, plan)
        except FileError as error:
            assert str(error).endswith(f"{name}: missing") or "mirror" in str(error)  # noqa: PT017
        else:
            assert name in {"name", "signature", "anno", "comment", "module_stack", "_scaled_device", "mirror"}
            assert (report.verdict == "PROVED") == (name not in {"signature", "mirror"}), name


def test_a_plan_is_no_logical_program() -> None:
    with pytest.raises(FileError, match="runtime_ndevs: 8 ranks and 2 micro-batches: the logical program is a plan for one device"):
        verdict(tree(MLP), tree(MLP))


def test_batches_that_do_not_fit() -> None:
    with pytest.raises(FileError, match="no multiple of the single-device batch"):
        verdict(tree("mlp4b_v08_dp2pp1tp2nm1_rand1"), tree("mlp2l_v08_single"))


def test_a_tensor_that_nothing_makes() -> None:
    plan = tree(MLP)
    segment(plan)["nodes"][1]["inputs"][0]["tid"] = 9999
    report = judged(MLP, plan)
    assert report.verdict == "INVALID"
    assert messages(report) == [
        "TV101 error: cell 19 (torch.nn.functional.linear) on device 0, micro-batch 0, layers.0: "
        "nothing on this device has made data[0:16, 0:128] (tensor 9999)"
    ]


# -- functions without a meaning --------------------------------------------------------------------------------------------


def custom(name: str) -> Tree:
    """The sums of a plan as somebody's own function."""
    plan = tree(name)
    for d in plan["devices"]:
        for cell in cells(plan, d):
            if cell["signature"] == "torch.sum":
                cell["signature"] = "their.model.total"
    return plan


def test_an_unknown_function_is_shown_with_its_annotation() -> None:
    report = verdict(custom(MLP), custom("mlp2l_v08_single"))
    assert (report.verdict, report.exit_code) == ("UNKNOWN", 3)
    assert messages(report) == [
        "TV104 unsupported: cell 31 (their.model.total) on device 2, micro-batch 0: their.model.total() with the annotation "
        "'a+ b+ -> 1^': no meaning is known for this function; give one with --ops FILE"
    ]


def test_an_unknown_argument_is_not_skipped() -> None:
    plan = tree(MLP)
    for cell in cells(plan, 2):
        if cell["signature"] == "torch.sum":
            cell["kwargs"]["dtype"] = {"dtype": "torch.int64"}
    report = judged(MLP, plan)
    assert report.verdict == "UNKNOWN"
    assert "argument dtype" in messages(report)[0]


def total(sign: int) -> OpTable:
    from trainverify.primitives import node as F

    @op("their.model.total", "custom")
    def total(x: Node) -> Node:
        """Sum of everything."""
        return F.total(x, range(x.ndim)) * sign

    return OPS.extended([total])


def test_the_meaning_of_a_custom_function() -> None:
    assert verdict(custom(MLP), custom("mlp2l_v08_single"), ops=total(1)).verdict == "PROVED"
    assert verdict(tree(MLP), custom("mlp2l_v08_single"), ops=total(-1)).verdict == "REFUTED"


# -- the command ------------------------------------------------------------------------------------------------------------


def stored(path: Path, content: Tree) -> str:
    path.write_bytes(gzip.compress(json.dumps(content).encode(), mtime=0))
    return str(path)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    single, plan = str(DATA / "mlp2l_v08_single.json.gz"), str(DATA / f"{MLP}.json.gz")
    assert run(["nnscaler", single, plan]) == 0
    assert capsys.readouterr().out.startswith("PROVED MLP on mesh(dp=2, pp=2, tp=2) against MLP: 3 obligations")
    assert run(["nnscaler", single, plan, "--optimizer", "adamw", "--clip", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["command"], found["verdict"], len(found["obligations"])) == ("nnscaler", "PROVED", 11)
    assert run(["nnscaler", single, plan, "--correction", "mean"]) == 1
    assert run(["nnscaler", single, stored(tmp_path / "custom.json.gz", custom(MLP))]) == 3
    capsys.readouterr()
    broken = tree(MLP)
    del broken["execplan"]["1"]
    assert run(["nnscaler", single, stored(tmp_path / "broken.json.gz", broken)]) == 2
    assert capsys.readouterr().err.rstrip().endswith('broken.json.gz: execplan["1"]: missing')
    assert run(["nnscaler", single, plan, "--correction", "median"]) == 2
    capsys.readouterr()
    for wish, said in (
        (["--optimizer", "lion"], "--optimizer lion: sgd or adamw"),
        (["--lr", "0.1"], "--lr: without --optimizer"),
        (["--optimizer", "sgd", "--beta2", "0.9"], "--beta2: sgd has no such parameter"),
        (["--zero", "1"], "--zero cuts the state of an optimizer: give --optimizer too"),
        (["--optimizer", "sgd", "--zero", "3"], "ZeRO in 3 groups: 4 ranks share layers.0.weight"),
    ):
        assert run(["nnscaler", single, plan, *wish]) == 2
        assert said in capsys.readouterr().err
    adamw = ["--optimizer", "adamw", "--lr", "0.01", "--beta1", "0.8", "--beta2", "0.95", "--eps", "1e-5", "--weight-decay", "0.2"]
    assert run(["nnscaler", single, plan, *adamw, "--zero", "2"]) == 0
    assert "completed: ZeRO in 2 groups" in capsys.readouterr().out
    assert run(["nnscaler", str(tmp_path / "none.gz"), plan]) == 2
    assert run(["nnscaler", single, single]) == 0  # a plan against itself


def test_a_file_that_is_no_dump(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(FileError, match="expected an object"):
        read(tmp_path / "x.json")


def test_names_of_files_mean_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a file is, is said in it: compressed or not, whatever it is called."""
    single = stored(tmp_path / "plan_dp8_wrong", tree("mlp2l_v08_single"))
    (tmp_path / "single.txt").write_text(json.dumps(tree(MLP)))
    assert run(["nnscaler", single, str(tmp_path / "single.txt")]) == 0
    capsys.readouterr()
    assert run(["nnscaler", str(tmp_path / "single.txt"), single]) == 2  # the other way round
    assert "8 ranks and 2 micro-batches: the logical program is a plan for one device and one batch" in capsys.readouterr().err
