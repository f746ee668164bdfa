"""Positions that ranks count from different starts, as slices of one range: exact, and a wrong start stays wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import torch.distributed as dist  # noqa: E402

import trainverify.torch as tvt  # noqa: E402
from trainverify.graph.program import Output, Source  # noqa: E402
from trainverify.torch.positions import aligned  # noqa: E402
from trainverify.translate.emit import Emitter  # noqa: E402

BATCH = {"x": tvt.Reals((3, 4096, 5), "b (cp s) k")}
MESH = {"cp": 4}


def turned(x, positions):
    return (x * torch.outer(positions.float(), torch.arange(5) / 7).cos()).pow(2).sum()


def reference():
    return lambda batch: turned(batch["x"], torch.arange(4096))


def distributed(rank: int, world: int, more: int = 0, added: bool = False):
    def step(batch):
        length = batch["x"].shape[1]
        start = rank * length + (more if rank == 2 else 0)
        loss = turned(batch["x"], torch.arange(length) + start if added else torch.arange(start, start + length))
        dist.all_reduce(loss)
        return loss

    return step


@pytest.mark.parametrize("added", [False, True])
def test_positions_of_every_rank(added: bool) -> None:
    """PROVED."""
    report = tvt.verify(reference, lambda r, w: distributed(r, w, 0, added), 4, BATCH, MESH, points=1)
    assert report.verdict == "PROVED", report.reason


@pytest.mark.parametrize("added", [False, True])
def test_one_position_too_far_on_one_rank(added: bool) -> None:
    """REFUTED: rank 2 counts from one position later on."""
    report = tvt.verify(reference, lambda r, w: distributed(r, w, 1, added), 4, BATCH, MESH, points=1)
    assert report.verdict == "REFUTED"
    assert report.place is not None
    assert report.place.rank == 2
    assert report.place.op is not None
    assert report.place.op.source == Source("tests/capture/test_positions.py", line_of(__file__, "start + length"))


def line_of(file: str, text: str) -> int:
    return next(i for i, line in enumerate(Path(file).read_text("utf-8").splitlines(), 1) if text in line)


def counting(*ranges: tuple[int, int, int]):
    e = Emitter()
    made = [e.op("arange", (), {"start": a, "stop": b, "step": s, "dtype": "i64"}, f"range{i}") for i, (a, b, s) in enumerate(ranges)]
    return e.program("p", (), (), (), [Output(m, "metric", m) for m in made], {})


def test_only_ranges_that_differ_between_ranks_are_sliced() -> None:
    whole = counting((0, 30, 1), (0, 7, 1))
    first, second = aligned(whole, [counting((0, 5, 1), (0, 7, 1), (0, 5, 2)), counting((20, 25, 1), (0, 7, 1), (2, 7, 2))])
    assert [op.name for op in first.ops] == ["arange", "slice", "arange", "arange"]
    assert [(op.get("start"), op.get("stop")) for op in second.ops][:2] == [(0, 30), (20, 25)]
    assert second.ops[1].outputs == counting((20, 25, 1)).ops[0].outputs


def test_positions_before_the_first_are_left_alone() -> None:
    """A range from −1 on is no slice of one that starts at 0."""
    programs = [counting((-1, 4, 1)), counting((5, 10, 1))]
    assert aligned(counting((0, 10, 1)), programs) == programs
