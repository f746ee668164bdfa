"""Scripts that mark no step: it is found, and how ranks share the batch is inferred from what they load; or there is no verdict."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

from trainverify.graph.program import Op, Program
from trainverify.graph.types import TensorType
from trainverify.ops import OPS
from trainverify.report import Report
from trainverify.torch.command import script, verdict
from trainverify.torch.inputs import Ids
from trainverify.torch.launch import Reads
from trainverify.torch.sharing import Declared, looked_up, ranged, share
from trainverify.translate.targets import CaptureError

FOUND = (Path(__file__).parent / "scripts" / "found.py").read_text("utf-8")
SYNC = "if last or world == 1 else model.no_sync()"
SAMPLER = "DistributedSampler(train, num_replicas=world, rank=rank, seed=3)"
STEP = "        optimizer.step()\n"


def judged(path: Path, arguments: str = "", declared: Mapping[str, Any] | None = None) -> Report:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork
        subject = script(str(path), arguments.split(), None, 2, OPS, lambda text: None, device="cpu", declared=declared)
    return verdict(subject, OPS, 3, 0, "algebra", False, None, lambda text: None)


def written(folder: Path, was: str = "", now: str = "") -> Path:
    assert not was or FOUND.count(was) == 1
    path = folder / "train.py"
    path.write_text(FOUND.replace(was, now) if was else FOUND, "utf-8")
    return path.relative_to(folder)


def test_proved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected: PROVED. Two micro-batches in a step, two optimizers, one with a closure; epochs, a schedule and an evaluation around it."""
    monkeypatch.chdir(tmp_path)
    report = judged(written(tmp_path))
    assert report.verdict == "PROVED", report.reason
    assert {o.name for o in report.obligations} >= {"loss", "gradient of table.weight", "updated parameter last.bias"}
    said = [a.removeprefix("inferred: ") for a in report.assumptions if a.startswith("inferred: ")]
    assert "the loss of the step is the avg over dp of what ranks report" in said
    assert "ids.micro2 holds ids below 11, the size of table.weight" in said
    assert any(a.startswith("a step goes from a batch of the loader at train.py:61 ") and a.endswith("2 batches in a step") for a in said)
    assert any(a.startswith("ranks along dp load different rows (rank 0 2, 3, rank 1 24, 13)") for a in said)


@pytest.mark.parametrize(
    ("was", "now", "said"),
    [
        (SYNC, "if not last or world == 1 else model.no_sync()", "its avg over dp is needed"),  # the last backward pass is not reduced
        (STEP, "        for p in raw.parameters():\n            p.grad *= 3 if world > 1 else 1\n" + STEP, "mul(value=3) is one too many"),
    ],
)
def test_refuted(was: str, now: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected: REFUTED, at a line of the script."""
    monkeypatch.chdir(tmp_path)
    report = judged(written(tmp_path, was, now))
    assert report.verdict == "REFUTED", report.reason
    assert report.place is not None
    assert report.place.line is not None
    assert report.place.line.file == "train.py"
    assert said in f"{report.place.cause} {report.place.repair}"


@pytest.mark.parametrize(
    ("was", "now", "said"),
    [
        (
            SAMPLER,
            "DistributedSampler(train, num_replicas=1, rank=0, seed=3)",
            r"ranks 0 and 1 load the same rows.*train.py:61.*--mesh tp=2",
        ),
        (SAMPLER, "DistributedSampler(train, num_replicas=3, rank=rank, seed=rank)", r"ranks 0 and 1 load some of the same rows"),
        ("            losses(batch).backward()", "            losses(batch)", r"without a backward pass between them.*tvt\.step"),
    ],
    ids=["all rows", "some rows", "no backward pass"],
)
def test_no_verdict(was: str, now: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected: no verdict, and what to say or change."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CaptureError, match=said):
        judged(written(tmp_path, was, now))


def test_what_changes_between_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected: no verdict where parameters change outside of every step."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Reads, match=r"last\.bias changes after one step and before the next"):
        judged(
            written(tmp_path, "    raw.eval()\n", "    with torch.no_grad():\n        raw.last.bias.mul_(0.5)\n    raw.eval()\n"),
            "--rows 6",
        )


# -- how ranks share a batch: what is known of it, without running anything -----------------------------------------------------


def batch(rows: Sequence[int] | None, values: Sequence[int] | None, shape: Sequence[int] = (2, 5)) -> dict[str, Any]:
    """A batch with one tensor: numbers of its rows, and what these hold."""
    known = None if values is None else [f"{v}" for v in values]
    said = {"shape": list(shape), "dtype": "torch.float32", "rows": known, "low": None, "high": None, "below_zero": []}
    return {"rows": rows, "tensors": {"x": said}}


def told(*ranks: dict[str, Any]) -> list[Mapping[str, Any]]:
    return [{"line": "train.py:9", "loads": [[b]], "lengths": [], "ends": []} for b in ranks]


def test_ranks_with_other_rows_are_joined() -> None:
    shared = share(told(batch([0, 1], [5, 6]), batch([2, 3], [7, 8]), batch([4, 5], [5, 6])), Declared())
    assert (str(shared.mesh), shared.axes, dict(shared.cuts)) == ("mesh(dp=3)", ("dp",), {"x": "(dp b) d1"})
    assert shared.shapes == [[{"x": [6, 5]}]]


@pytest.mark.parametrize(("order", "mesh"), [((0, 0, 2, 2), "mesh(dp=2, mp=2)"), ((0, 2, 0, 2), "mesh(mp=2, dp=2)")])
def test_ranks_with_equal_rows_are_replicas(order: Sequence[int], mesh: str) -> None:
    shared = share(told(*(batch([r, r + 1], [r, r + 9]) for r in order)), Declared())
    assert (str(shared.mesh), shared.axes, shared.shapes) == (mesh, ("dp",), [[{"x": [4, 5]}]])
    assert any("load the same batches" in a for a in shared.assumed)


def test_a_mesh_that_is_declared() -> None:
    """All ranks may load the same rows if they are said to; not along an axis of data-parallel ranks."""
    same = told(batch([0, 1], [5, 6]), batch([0, 1], [5, 6]))
    assert share(same, Declared({"tp": 2})).cuts == {"x": None}
    with pytest.raises(CaptureError, match="ranks 0 and 1 load the same rows"):
        share(same, Declared({"dp": 2}))
    with pytest.raises(CaptureError, match="--mesh has 3 ranks"):
        share(same, Declared({"dp": 3}))


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([batch([0, 1], [5, 6]), batch([0, 1], [5, 6])], "DistributedSampler, or say .* --mesh tp=2"),
        ([batch([0, 1], [5, 6]), batch([1, 0], [6, 5])], "some of the same rows"),
        ([batch([0, 1], [5, 6]), batch([0, 1], [7, 8])], "some of the same rows"),  # another data set, or chance: nothing says which
        ([batch([0, 1], [5, 6]), batch([1, 2], [6, 7])], "some of the same rows"),
        ([batch(None, [5, 6]), batch(None, [6, 7])], "some of the same rows"),
        ([batch(None, None), batch(None, [6, 7])], "cannot be seen"),
        ([batch([0, 1], [5, 6]), batch([2], [7], (1, 5))], "do not join"),
        ([batch([0, 1], [5, 6]), batch([2, 3], [7, 8], (2, 4))], "do not join"),
        ([batch([0, 1], [5, 6, 7], (3, 5)), batch([2, 3], [5, 6, 8], (3, 5))], "no row for each"),
        ([batch([r, r + 1], [r, r]) for r in (0, 2, 2, 0)], "no axis of a mesh"),
        ([batch([r, r + 1], [r, r]) for r in (0, 0, 2)], "no axis of a mesh"),
    ],
)
def test_what_is_not_shared_clearly_is_refused(ranks: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        share(told(*ranks), Declared())


def test_the_range_of_ids() -> None:
    """From the tables that they are looked up in, through what passes them on; else it has to be said."""
    kinds = {"x": ("i64", (2, 5)), "w": ("f32", (7, 3)), "v": ("i64", (10,)), "e": ("f32", (10, 3)), "n": ("i64", (10,))}
    ops = (Op("reshape", ("x",), ("v",)), Op("embedding", ("v", "w"), ("e",)), Op("add", ("v", "v"), ("n",)))
    program = Program("p", {n: TensorType(k[1], k[0]) for n, k in kinds.items()}, ("x",), ("w",), (), ops)
    assert looked_up(program, "x") == {"w": 7}
    assert looked_up(program, "n") == {}
    specs = {"x": Ids((2, 5))}
    known = batch([0, 1], [5, 6])
    shared = share(told(known), Declared())
    made, said = ranged(specs, shared, program, told(known), Declared())
    assert (made["x"].below, said) == (7, ["inferred: x holds ids below 7, the size of w"])  # type: ignore[union-attr]
    assert ranged(specs, shared, program, told(known), Declared(below={"": 9}))[0]["x"].below == 9  # type: ignore[union-attr]
    known["tensors"]["x"].update(low=-100, high=3, below_zero=[-100])
    left, inferred = ranged(specs, shared, program, told(known), Declared())
    assert left["x"].ignore == -100  # type: ignore[union-attr]
    assert "inferred: x holds -100 where there is no label" in inferred
    for low, high, below, hint in ((-100, 3, [-100, -1], "--ignore x=-100"), (0, 7, [], "--below x=8")):
        known["tensors"]["x"].update(low=low, high=high, below_zero=below)
        with pytest.raises(CaptureError, match=hint):
            ranged(specs, shared, program, told(known), Declared())
    alone = Program("p", dict(program.tensors), ("x",), ("w",))
    known["tensors"]["x"].update(low=0, high=3)
    with pytest.raises(CaptureError, match="--below x=N"):
        ranged(specs, shared, alone, told(known), Declared())
    known["tensors"]["x"].update(low=0, high=1)
    mask, inferred = ranged(specs, shared, alone, told(known), Declared())
    assert mask["x"].below == 2  # type: ignore[union-attr]
    assert inferred == ["inferred: x holds ids below 2, a mask, as in all batches that were loaded"]
