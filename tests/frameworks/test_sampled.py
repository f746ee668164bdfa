"""More ranks than are captured: the verdict is about those that were, and says how many."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: frameworks are not captured")

import trainverify.torch as tvt  # noqa: E402
from trainverify.frameworks.job import How, Job, corners, verdict  # noqa: E402
from trainverify.graph.mesh import Mesh  # noqa: E402
from trainverify.ops import OPS  # noqa: E402
from trainverify.report import Report  # noqa: E402

MESH = Mesh({"dp": 20})


def trained(scale: float):
    model = torch.nn.Linear(3, 2)

    def step(batch):
        loss = model(batch["x"]).square().mean()
        (loss * scale).backward()
        if torch.distributed.is_initialized():
            for p in model.parameters():
                torch.distributed.all_reduce(p.grad, op=torch.distributed.ReduceOp.AVG)
        return loss

    return step


def judged(*wrong: int) -> Report:
    """Some ranks scale their loss."""

    def ranks(rank: int, world: int):
        return trained(2.0 if rank in wrong else 1.0)

    job = Job("a framework", MESH, {"x": tvt.Reals((40, 3), "(dp b) k")}, {"dp": "avg"}, lambda: trained(1.0), ranks, ())
    return verdict(job, OPS, lambda text: None, How(points=1))


def test_ranks_that_were_captured_are_counted() -> None:
    """PROVED(sampled): 7 of 20."""
    report = judged()
    count = len(corners(MESH))
    assert report.verdict == "PROVED(sampled)"
    assert f"{count} of 20 ranks captured" in report.reason
    assert any(f"{20 - count} of 20 ranks were not captured" in a for a in report.assumptions)
    assert report.exit_code == 3


def test_a_rank_outside_of_the_sample() -> None:
    """Not PROVED: one rank of those that were not captured is wrong, and nothing is said about it."""
    outside = next(r for r in range(20) if r not in corners(MESH))
    assert judged(outside).verdict == "PROVED(sampled)"


def test_a_rank_of_the_sample() -> None:
    """Neither: a captured rank is wrong."""
    assert judged(corners(MESH)[-2]).verdict in ("REFUTED", "UNKNOWN")
