"""What a plan says of the results of operations follows from what it says of their arguments, or does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from nnscaler.plans import DATA, cells, judged, messages, tree
from trainverify.nnscaler import parse, read
from trainverify.nnscaler.annotations import dims, problem, unfounded
from trainverify.nnscaler.dump import Cell, Slice

LLAMA = "llama1l_v03_dp2pp2tp2nm2"


@pytest.mark.parametrize("path", sorted(DATA.glob("*.json.gz")), ids=lambda p: p.name)
def test_plans_of_nnscaler(path: object) -> None:
    assert list(unfounded(read(str(path)))) == []


def operation(cid: int) -> Cell:
    dump = parse(tree(LLAMA), "plan")
    return next(n for s in dump.sequences[2] for n in s.cell.nodes if n.cid == cid and n.isfw)


def moved(t: Slice, dim: int, region: tuple[int, int]) -> Slice:
    return replace(t, indmap=(*t.indmap[:dim], region, *t.indmap[dim + 1 :]))


CHANGES: list[tuple[int, Callable[[Cell], Cell], str]] = [
    (
        186,  # a b k+, n k+ -> a b n
        lambda c: replace(c, outputs=(moved(c.outputs[0], 2, (256, 512)),)),
        "the plan says that it makes 256:512 of dimension n, it makes 0:256",
    ),
    (
        186,
        lambda c: replace(c, inputs=(c.inputs[0], moved(c.inputs[1], 1, (0, 64)))),
        "dimension k+ of layers.0.feed_forward.w1.weight[0:256, 0:64] is another piece than of its other arguments",
    ),
    (
        202,
        lambda c: replace(c, outputs=(replace(c.outputs[0], valmap=(0, 1)),)),
        "the plan says that it makes one of 1 summands, it makes one of 2",
    ),
    (
        33,
        lambda c: replace(c, outputs=(replace(c.outputs[0], valmap=(1, 2)),)),
        "the plan says that it makes one of 2 summands, it makes one of 1",
    ),
]


@pytest.mark.parametrize(("cid", "change", "why"), CHANGES)
def test_what_does_not_follow(cid: int, change: Callable[[Cell], Cell], why: str) -> None:
    cell = operation(cid)
    assert problem(cell) is None
    assert problem(change(cell)) == why


def test_names_of_dimensions() -> None:
    assert dims("a b (c 32^) -> ") == ["a", "b", "c", "->"]
    assert dims(" 1^ a+ (a 128^) k^ ") == ["1", "a+", "a", "k"]


def test_a_false_label_that_changes_nothing() -> None:
    """The results of one operation are said to be each other's: a warning, for the verdict goes by what runs."""
    plan = tree(LLAMA)
    for d, region in ((2, [256, 512]), (3, [0, 256])):
        (cell,) = (c for c in cells(plan, d) if c["kind"] == "IRDimops" and c.get("module_stack") == "layers.0.feed_forward.w1")
        cell["outputs"][0]["indmap"][2] = region
    report = judged(LLAMA, plan)
    assert report.verdict == "PROVED"
    assert messages(report) == [
        "TV402 warning: cell 186 (torch.nn.functional.linear) on device 2: "
        "the plan says that it makes 256:512 of dimension n, it makes 0:256",
        "TV402 warning: cell 187 (torch.nn.functional.linear) on device 3: "
        "the plan says that it makes 0:256 of dimension n, it makes 256:512",
    ]
