"""Every wrong plan: the changed cell is named with its devices, ranks and micro-batches, and the plan is proved with it mended."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from nnscaler.plans import judged, tree, verdict
from nnscaler.wrong import LLAMA, WRONG, Wrong
from trainverify.nnscaler import parse
from trainverify.nnscaler.suspects import suspects

LONG = ("backward_left_out",)  # a minute and more


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[pytest.mark.long] if c.change.__name__ in LONG else []) for c in WRONG],
    ids=[c.change.__name__ for c in WRONG],
)
def test_what_is_at_fault(case: Wrong) -> None:
    plan = tree(case.plan)
    case.change(plan)
    report = judged(case.plan, plan)
    assert report.verdict == case.verdict
    assert [f.key for f in report.at_fault] == case.faults.split()
    assert report.at_fault[0].why.startswith(case.why), report.at_fault[0].why
    count, n = plan["runtime_ndevs"], len(plan["devices"])
    for f in report.at_fault:
        assert f.mended == len(report.at_fault)
        assert f.ranks == tuple(r for r in range(count) if r % n in f.devices)
    text = io.StringIO()
    report.print(Console(file=text, width=10000))
    lines = text.getvalue().splitlines()
    for f in report.at_fault:
        assert any("at fault: " in line and all(c in line for c in f.cells) and f.why in line for line in lines)
    assert f"at fault: {', '.join(report.at_fault[0].cells)}" in lines[0]
    found = json.loads(json.dumps(report.json()))["at_fault"][0]
    assert list(found) == ["cells", "ids", "devices", "ranks", "microbatches", "why", "mended"]
    assert (found["devices"], found["ranks"]) == (list(report.at_fault[0].devices), list(report.at_fault[0].ranks))
    if report.verdict == "REFUTED":  # the first wrong tensor is on a device of it
        assert report.place is not None
        assert report.place.rank % n in report.at_fault[0].devices


@pytest.mark.long
def test_pieces_permuted_at_the_boundary() -> None:
    """nnScaler's own: with 4 tensor-parallel devices pieces are labelled 0, 2, 1, 3, and joined by position."""
    report = judged("llama1l_v03_dp2pp2tp4nm2")
    assert report.verdict == "REFUTED"
    assert [f.key for f in report.at_fault] == ["395@1,2/0,1", "645@1,2/0,1", "678@0,1,2,3/0,1", "428@0,1,2,3/0,1"]
    assert str(report.at_fault[0]) == (
        "at fault: forward adapter 395 (ChunkPrim, MovePrim) on devices 1, 2 (ranks 1, 2, 9, 10), micro-batches 0, 1: the plan says that "
        "it makes embedding[0:4, 0:128, 64:96], it makes embedding[0:4, 0:128, 32:64] (with these 4 mended the plan is proved)"
    )
    assert report.place is not None
    assert (report.place.rank, report.place.tensor) == (1, "mb0/embedding.1")


@pytest.mark.parametrize("name", [LLAMA, "mlp2l_v03_dp2pp2tp2nm2", "mlp2l_v08_dp2pp2tp2nm2", "mlp4b_v08_dp2pp2tp1nm4_zero"])
def test_nothing_is_unusual_in_a_right_plan(name: str) -> None:
    assert suspects(parse(tree(name.split("_dp")[0] + "_single"), "one"), parse(tree(name), "plan")) == []


def test_two_changes_are_both_named() -> None:
    plan = tree(LLAMA)
    for case in WRONG:
        if case.change.__name__ in ("attention_scale", "reducer_drops_a_weight"):
            case.change(plan)
    report = judged(LLAMA, plan)
    assert [f.key for f in report.at_fault] == ["24@0,1/0,1", "1005+1006@0,1/0,1"]
    assert {f.mended for f in report.at_fault} == {2}


def test_a_harmless_change_is_not_named() -> None:
    """A label that is false on all devices alike changes nothing: only the divisor is at fault."""
    plan = tree(LLAMA)
    next(c.change for c in WRONG if c.change.__name__ == "attention_scale")(plan)
    for d in ("0", "2"):
        for cell in plan["execplan"][d]["cells"].values():
            for p in cell.get("prims", ()):
                if cell["cid"] == 245 and p["kind"] in ("ChunkPrim", "MovePrim"):
                    for t in (*p["outputs"], *(p["inputs"] if p["kind"] == "MovePrim" else ())):
                        t["indmap"][2] = [64, 128]
                if cell["cid"] == 245 and p["kind"] == "AllGatherPrim":
                    p["inputs"][0]["indmap"][2] = [64, 128]
    report = judged(LLAMA, plan)
    assert any(f.code == "TV402" for f in report.findings)
    assert [f.key for f in report.at_fault] == ["24@0,1/0,1"]


@pytest.mark.long
def test_what_is_nowhere_unusual_is_named_by_its_values() -> None:
    """Tensors of the two plans have different names: no operation of the one is known to be one of the other."""
    plan, single = tree(LLAMA), tree("llama1l_v03_single")
    for t in single["full_tensors"].values():
        t["name"] += "" if t["is_param"] or t["is_buffer"] or t["name"] == "tokens" else "_"
    next(c.change for c in WRONG if c.change.__name__ == "attention_scale")(plan)
    report = verdict(plan, single)
    assert report.verdict == "REFUTED"
    (fault,) = report.at_fault
    assert (fault.mended, fault.why.startswith("first wrong tensor: ")) == (0, True)
    assert str(fault).startswith("suspect: ")
