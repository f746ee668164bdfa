"""Bugs planted into every source: REFUTED or INVALID, and the report leads to the planted line."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

from collections import Counter  # noqa: E402

from capture.cases import CASES  # noqa: E402
from capture.planted import BUGS, called, located  # noqa: E402

RIGHT_LINES = 0.85


# Other sizes or options of a source that has bugs.
VARIANTS = {"ddp static graph", "tp by hand 4", "adamw foreach", "adamw fused fsdp", "adam fused", "nesterov fused"}


def test_every_source_has_two() -> None:
    """Two bugs in every source at least, counting those that the sources have a switch for."""
    counts = Counter(b.case for b in BUGS) + Counter({n: len(c.bugs) for n, c in CASES.items()})
    assert {n for n in CASES if counts[n] < 2} <= VARIANTS
    assert len(BUGS) >= 30


def test_planted_lines_are_there() -> None:
    for bug in BUGS:
        assert bug.lines
        compile(bug.source(), bug.where[0], "exec")


def test_a_wrong_group_is_named() -> None:
    """REFUTED: gradients are added up over the ranks of a tensor-parallel group. The line of the call, and the group that is needed."""
    bug = next(b for b in BUGS if b.name == "wrong group of the gradients")
    report = bug.verify()
    assert report.verdict == "REFUTED"
    assert located(report) in bug.lines
    assert "reduce_scatter with sum over dp is needed" in report.place.cause


@pytest.mark.capture
def test_all_planted() -> None:
    """REFUTED or INVALID; the file is right in every report, the line in most."""
    rows, verdicts, files, lines = [], [], [], []
    for bug in BUGS:
        report = bug.verify()
        at, outer = located(report), called(report)
        right_file = any(place is not None and place[0] in {f for f, _ in bug.lines} for place in (at, *outer))
        verdicts.append((bug.id, report.verdict))
        files.append((bug.id, right_file))
        lines.append(at in bug.lines)
        shown = "line" if lines[-1] else "called at" if bug.lines & set(outer) else "file" if right_file else "-"
        rows.append(f"{bug.id:50} {report.verdict:8} {shown:10} {_text(at)} (called at {', '.join(map(_text, outer))})")
        print(rows[-1], flush=True)
    print(f"{len(BUGS)} bugs: right file {sum(r for _, r in files)}, right line {sum(lines)}")
    assert [v for v in verdicts if v[1] not in ("REFUTED", "INVALID")] == []
    assert [name for name, right in files if not right] == []
    assert sum(lines) >= RIGHT_LINES * len(lines)


def _text(place: tuple[str, int] | None) -> str:
    return "-" if place is None else f"{place[0]}:{place[1]}"
