"""What adapters share: which ranks are captured, what a verdict says about shims, and a framework that is absent."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is absent: frameworks are not captured")

from trainverify.frameworks.deepspeed_shims import ALL_SHIMS as DEEPSPEED
from trainverify.frameworks.job import ALL_RANKS, corners
from trainverify.frameworks.megatron_layout import Cut, boxes, flat_parts, whole_rows
from trainverify.frameworks.megatron_shims import SHIMS as MEGATRON
from trainverify.frameworks.shims import Shim, listed
from trainverify.frameworks.torchtitan_shims import ALL_SHIMS
from trainverify.frameworks.torchtitan_step import Facts
from trainverify.frameworks.transformers_shims import ALL_SHIMS as TRANSFORMERS
from trainverify.frameworks.versions import KNOWN, TORCH, remark
from trainverify.graph.mesh import Mesh
from trainverify.report import Report

ROOT = Path(__file__).parents[2]


def test_few_ranks_are_all_captured() -> None:
    assert corners(Mesh({"dp": 2, "tp": 5})) == tuple(range(10))


def test_many_ranks_are_told_apart_by_their_coordinates() -> None:
    """Every coordinate that differs by its neighbours: the first three, the last; and some ranks by chance."""
    mesh = Mesh({"dp_shard": 8, "tp": 7})
    found = corners(mesh)
    assert ALL_RANKS <= len(found) < mesh.size
    for axis in mesh.names:
        assert {0, 1, 2, mesh.length(axis) - 1} <= {mesh.coordinates(r)[axis] for r in found}
    assert found == corners(mesh)
    assert found != corners(mesh, seed=1)


def test_shims_are_counted_and_listed() -> None:
    shims = (Shim("clock", "time stands still", "there is none", lambda config: None),) * 2
    report = listed(Report("PROVED", "1 obligation", "the ranks"), shims, "frame 1.0", ("one remark",))
    assert report.reason == "1 obligation; frame 1.0, 2 shims; one remark"
    assert "shim clock: time stands still: there is none (accepted, not checked)" in report.assumptions


def test_every_shim_says_what_and_why() -> None:
    assert len({s.name for s in ALL_SHIMS}) == len(ALL_SHIMS)
    assert all(s.replaces and s.why for s in ALL_SHIMS)


def test_batch_and_loss_of_ranks() -> None:
    """Rows are cut over the data-parallel axes only, and their losses add up."""
    facts = Facts({"dp_replicate": 2, "dp_shard": 3, "tp": 5}, 12, 7, 11, "0.3.0", "spmd_types")
    assert facts.batch["labels"].cut == "(dp_replicate dp_shard b) s"
    assert facts.loss == {"dp_replicate": "sum", "dp_shard": "sum"}
    assert Facts({"tp": 2}, 12, 7, 11, "0.3.0", "spmd_types").loss == "whole"


TITAN = "['torchtitan', '--config', 'llama3_debugmodel', '--world-size', '2']"


@pytest.mark.parametrize(
    ("missing", "command"),
    [
        ("torchtitan", TITAN),
        ("torch", TITAN),
        ("transformers", "['transformers', '--tp_size', '2']"),
        ("deepspeed", "['deepspeed', '--deepspeed_config', '{}', '--world-size', '2']"),
    ],
)
def test_without_the_framework(missing: str, command: str) -> None:
    """Exit code 2, and one line with what to install."""
    code = f"import sys; sys.modules['{missing}'] = None; from trainverify.cli import run; sys.exit(run({command}))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert found.returncode == 2
    assert "pip install" in found.stderr
    assert missing in found.stderr
    assert len(found.stderr.strip().splitlines()) == 1


def test_versions_known_to_work() -> None:
    """The table of the page, what `make frameworks` installs, and the extra of PyTorch are those of the code."""
    pages = {"torchtitan.md": ["torchtitan"], "megatron.md": ["megatron-core"], "transformers.md": ["transformers", "accelerate"]}
    pages["deepspeed.md"] = ["deepspeed"]
    assert {n for names in pages.values() for n in names} == set(KNOWN)
    for page, names in pages.items():
        rows = dict(re.findall(r"^\| ([\w-]+) \| ([\d., ]+) \|$", (ROOT / "docs" / page).read_text("utf-8"), re.MULTILINE))
        assert rows == {**{n: ", ".join(KNOWN[n]) for n in names}, "torch": TORCH}
    make = (ROOT / "Makefile").read_text("utf-8")
    assert all(f"{n}=={v[-1]}" in make for n, v in KNOWN.items())
    assert f"TORCH := torch=={TORCH}\n" in make
    low = re.search(r'^torch = \["torch>=(\d+)\.(\d+),<(\d+)"\]$', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    assert low is not None
    assert (int(low[1]), int(low[2])) <= tuple(map(int, TORCH.split(".")[:2])) < (int(low[3]), 0)


def test_another_version_is_told() -> None:
    assert remark("torchtitan", "0.3.0") == ()
    assert "never tried" in remark("torchtitan", "9.9")[0]


def shown_by(shim: Shim) -> str:
    return f"not needed: {shim.harmless}" if shim.harmless else f"no: {shim.stays}" if shim.stays else "yes"


@pytest.mark.parametrize(("name", "all_shims"), [("torchtitan", ALL_SHIMS), ("transformers", TRANSFORMERS), ("deepspeed", DEEPSPEED)])
def test_the_page_lists_every_shim(name: str, all_shims: tuple[Shim, ...]) -> None:
    page = (ROOT / "docs" / f"{name}.md").read_text("utf-8")
    shims = page.partition("## Shims")[2].partition("###")[0]
    assert re.findall(r"^\| ([\w ]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", shims, re.MULTILINE)[1:] == [
        (s.name, s.replaces, s.why, shown_by(s)) for s in all_shims
    ]


def test_the_page_of_megatron_lists_every_shim() -> None:
    page = (ROOT / "docs" / "megatron.md").read_text("utf-8").partition("## Shims")[2]
    assert re.findall(r"^\| ([\w ]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", page, re.MULTILINE)[1:] == [
        (s.name, s.replaces, s.why, shown_by(s)) for s in MEGATRON
    ]


def test_rows_that_a_sharded_optimizer_holds() -> None:
    """A rank's rows 1 to 4 of 4, where ranks share both halves of 3 × 4 rows; elements 5 to 9 of rows of 3 that 2 ranks share."""
    assert whole_rows((4, 5), (5, 20)) == (1, 4)
    assert whole_rows((4, 5), (5, 19)) is None
    assert boxes((4, 5), Cut(0, 2, 3, 1), (1, 4)) == [[[0, 0], [[3, 1, 1, 0], [0, 5, 1, 0]]], [[1, 0], [[8, 2, 1, 0], [0, 5, 1, 0]]]]
    assert boxes((4, 5), Cut(1, 1, 3, 2), (1, 4)) == [[[0, 0], [[1, 3, 1, 0], [10, 5, 1, 0]]]]
    assert flat_parts((4, 3), Cut(1, 1, 2, 1), (5, 9)) == [[0, 11, 1], [1, 15, 3]]
    assert flat_parts((4, 3), Cut(None, 1, 2, 1), (5, 9)) == [[0, 5, 4]]
