"""Shims are checked by a real run: agreement is seen, and so is every way in which a shim changes what a framework does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: frameworks are not captured")

import numpy as np  # noqa: E402

import trainverify.torch as tvt  # noqa: E402
from trainverify.frameworks.job import Job, Trial  # noqa: E402
from trainverify.frameworks.shims import PLACED, Checked, Shim, listed  # noqa: E402
from trainverify.frameworks.trust import Differs, assembled, checked  # noqa: E402
from trainverify.graph.mesh import Mesh  # noqa: E402
from trainverify.ops import OPS  # noqa: E402
from trainverify.report import Report  # noqa: E402

MESH = Mesh({"dp": 2})
BATCH = {"ids": tvt.Ids((6, 3), "(dp b) s", below=5)}


@dataclass
class Step:
    """Embeddings, and a sum of gradients over ranks; `batch` is what this rank reads for real."""

    scale: float = 1.0
    twice: bool = False
    rank: int | None = None
    alone: bool = False
    limit: float | None = None

    def __post_init__(self) -> None:
        self.model = torch.nn.Embedding(5, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        if self.rank is not None:
            self.batch = {"ids": torch.arange(9).reshape(3, 3) * (self.rank + 1) % 5}

    def __call__(self, batch: Any) -> Any:
        ids = batch["ids"] if self.rank is None else self.batch["ids"]
        loss = (self.model(ids) ** 2).sum() * self.scale
        loss.backward()
        if not self.alone:
            torch.distributed.all_reduce(self.model.weight.grad)
            if self.twice:
                torch.distributed.all_reduce(loss.detach().clone())
        if self.limit is not None:
            norm = self.model.weight.grad.norm()
            if norm > self.limit:
                self.model.weight.grad.mul_(self.limit / norm)
        self.optimizer.step()
        return {"loss": loss.detach()}


def outcome(limit: float | None = None, **real: Any) -> Checked:
    """Captured as it is; the real ranks differ as told."""

    def reference() -> Step:
        return Step(alone=True, limit=limit)

    job = Job("frame", MESH, BATCH, {"dp": "sum"}, reference, lambda rank, world: Step(limit=limit), ())

    def ranks(rank: int, world: int) -> Step:
        store = torch.distributed.FileStore(str(folders[0] / "store"), world)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
        return Step(rank=rank, limit=real.pop("unlike", limit), **real)

    folders: list[Path] = []

    def trial(folder: Path) -> Trial:
        folders.append(folder)
        return Trial(job, reference, ranks, "a tiny model")

    return checked(Job("frame", MESH, BATCH, {"dp": "sum"}, job.reference, job.distributed, (), trial=trial), OPS, lambda text: None)


def test_a_real_run_that_agrees() -> None:
    found = outcome()
    assert found.agrees, found.text
    assert "the same 2 calls" in found.text


@pytest.mark.parametrize("limit", [1e-3, 1e6])
def test_a_branch_that_the_real_run_takes_either_way(limit: float) -> None:
    assert outcome(limit).agrees


def test_a_branch_that_a_shim_turns_round() -> None:
    found = outcome(1e-3, unlike=1e6)
    assert not found.agrees
    assert "gradient" in found.text


def test_a_call_that_a_shim_loses() -> None:
    found = outcome(twice=True)
    assert not found.agrees
    assert "nothing more in the capture, all_reduce of 1 × float32 in ranks 0,1 for real" in found.text


def test_numbers_that_a_shim_changes() -> None:
    found = outcome(scale=3.0)
    assert not found.agrees
    assert "gradient" in found.text


def test_a_framework_without_a_real_run() -> None:
    assert not checked(Job("frame", MESH, BATCH, "whole", Step, lambda rank, world: Step(), ()), OPS, lambda text: None).agrees


def test_ranks_with_the_same_rows_read_the_same() -> None:
    mesh, batch = Mesh({"dp": 2, "tp": 2}), {"ids": tvt.Ids((4, 3), "(dp b) s", below=50)}
    rows = np.arange(12).reshape(4, 3)
    parts = [{"ids": rows[:2]}, {"ids": rows[:2]}, {"ids": rows[2:]}, {"ids": rows[2:]}]
    assert (assembled(batch, mesh, parts)["ids"] == rows).all()
    with pytest.raises(Differs, match="rank 3 is not what other ranks with the same rows read"):
        assembled(batch, mesh, [*parts[:3], {"ids": rows[2:] + 1}])
    with pytest.raises(Differs, match="not below 50"):
        assembled(batch, mesh, [{"ids": p["ids"] + 45} for p in parts])


PLAIN = Shim("clock", "time stands still", "there is none", lambda config: None)
STAYS = Shim("device", "the processor", "there is no other", lambda config: None, stays="there is no other")
PROOF = Report("PROVED", "1 obligation", "the ranks")


def test_a_proof_on_shims_that_nobody_accepts() -> None:
    """UNKNOWN: without a real run, with one that differs, and with a shim that a real run needs too."""
    for shims, found in (([PLAIN], None), ([PLAIN], Checked(False, "a number differs")), ([PLAIN, STAYS], Checked(True, "all agrees"))):
        report = listed(PROOF, shims, "frame 1.0", accepted=False, checked=found)
        assert report.verdict == "UNKNOWN"
        assert "--accept-shims" in report.reason
    assert "a number differs" in listed(PROOF, [PLAIN], "frame 1.0", accepted=False, checked=Checked(False, "a number differs")).reason


def test_a_shim_that_changes_no_value_asks_for_nothing() -> None:
    """PROVED, and what is not covered is said; beside one that may change values, UNKNOWN."""
    place = Shim("device", "the processor", "there is no other", lambda config: None, "there is no other", PLACED)
    report = listed(PROOF, [place], "frame 1.0", accepted=False)
    assert report.verdict == "PROVED"
    assert any("order of streams is not covered" in a for a in report.assumptions)
    assert listed(PROOF, [place, PLAIN], "frame 1.0", accepted=False).verdict == "UNKNOWN"
    assert listed(PROOF, [place, PLAIN], "frame 1.0", accepted=False, checked=Checked(True, "all agrees")).verdict == "PROVED"


def test_a_refutation_that_a_real_run_contradicts() -> None:
    """UNKNOWN where real numbers are others than the captured ones; REFUTED where they are the same, or where nothing ran."""
    refuted = Report("REFUTED", "a difference", "the ranks")
    assert listed(refuted, [PLAIN], "frame 1.0", accepted=False, checked=Checked(False, "a number differs")).verdict == "UNKNOWN"
    for found in (Checked(True, "all agrees"), Checked(False, "no run", ran=False)):
        assert listed(refuted, [PLAIN], "frame 1.0", accepted=False, checked=found).verdict == "REFUTED"


def test_a_proof_on_shims_that_are_checked_or_accepted() -> None:
    """PROVED."""
    report = listed(PROOF, [PLAIN, PLAIN], "frame 1.0", accepted=False, checked=Checked(True, "all agrees"))
    assert report.verdict == "PROVED"
    assert "2 shims, 2 of them checked by a real run" in report.reason
    assert listed(PROOF, [PLAIN, STAYS], "frame 1.0", accepted=True).verdict == "PROVED"


def test_a_refutation_stays_one() -> None:
    """REFUTED, with the shims that it rests on."""
    report = listed(Report("REFUTED", "a difference", "the ranks"), [STAYS], "frame 1.0", accepted=False)
    assert report.verdict == "REFUTED"
    assert "1 shims" in report.reason
