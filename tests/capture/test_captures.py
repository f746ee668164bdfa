"""Real PyTorch code, captured on fake tensors, verified, and replayed against real runs. PROVED unless a bug is planted."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

from capture.cases import CASES, SOURCES  # noqa: E402


def line_of(file: str, bug: str) -> int:
    """The line that a planted bug is on."""
    lines = (SOURCES / file).read_text("utf-8").splitlines()
    return next(i for i, text in enumerate(lines, 1) if f"# bug: {bug}" in text)


# Small captures that every run of the suite makes; `make capture` makes all of them.
FIRST = ["ddp", "tp by hand", "fsdp tp sp"]


@pytest.mark.parametrize("name", FIRST)
def test_proved(name: str) -> None:
    report = CASES[name].verify()
    assert report.verdict == "PROVED", report.reason


def test_replayed() -> None:
    """What was translated for every rank is what runs: DDP's buckets, its all-reduce, clip and AdamW."""
    found = CASES["ddp"].replay()
    assert found.agrees, str(found)
    assert found.compared > 200


def test_a_missing_wait_is_found() -> None:
    """INVALID: a gradient is used while its all-reduce is under way."""
    report = CASES["dp by hand"].verify(bug="no wait")
    assert report.verdict == "INVALID"
    assert report.findings[0].code == "TV501"
    assert str(report.findings[0].source) == f"tests/capture/sources/data.py:{line_of('data.py', 'no wait')}"


def test_a_missing_reduce_is_refuted() -> None:
    """REFUTED: the backward pass of a column-parallel layer does not add up over ranks."""
    report = CASES["tp by hand"].verify(bug="no backward reduce")
    assert report.verdict == "REFUTED"
    assert report.place is not None
    assert report.place.op is not None
    assert str(report.place.op.source).startswith("tests/capture/sources/handwritten.py")


@pytest.mark.capture
@pytest.mark.parametrize("name", sorted(set(CASES) - set(FIRST)))
def test_all_proved(name: str) -> None:
    report = CASES[name].verify()
    assert report.verdict == "PROVED", report.reason


@pytest.mark.capture
@pytest.mark.parametrize("name", sorted(set(CASES) - {"fsdp bf16"}))
def test_all_replayed(name: str) -> None:
    found = CASES[name].replay()
    assert found.agrees, str(found)


@pytest.mark.capture
@pytest.mark.parametrize(("name", "bug"), [(n, b) for n, c in CASES.items() for b in c.bugs])
def test_planted_bugs(name: str, bug: str) -> None:
    """REFUTED or INVALID."""
    report = CASES[name].verify(bug=bug)
    assert report.verdict in ("REFUTED", "INVALID"), report.reason
