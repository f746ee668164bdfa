"""The verdict on a plan of nnScaler: translate, verify, and say where in nnScaler's plan things are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from trainverify.check.findings import Finding
from trainverify.files.errors import FileError
from trainverify.graph.program import Program
from trainverify.nnscaler.device import Broken
from trainverify.nnscaler.dump import Dump
from trainverify.nnscaler.plan import PLAIN, Trainer, Translated, plan, program
from trainverify.ops import OPS
from trainverify.ops.table import OpTable
from trainverify.report import Report
from trainverify.verify import Progress, verify

_CONSTANTS: Final = ("value", "exponent", "eps", "alpha")


def _silent(text: str) -> None:
    pass


def judge(
    logical: Dump,
    dump: Dump,
    table: OpTable = OPS,
    trainer: Trainer = PLAIN,
    points: int = 3,
    seed: int = 0,
    progress: Progress = _silent,
) -> Report:
    """Is the plan the training step of the single-device plan?"""
    began = time.perf_counter()
    subject = f"{dump.name} on {dump.ranks} ranks against {logical.name}"
    progress("translating")
    try:
        made = plan(dump, table, trainer)
        batches = ratio(logical, dump, made)
        wanted = program(logical, table, trainer, batches)
    except Broken as error:
        verdict = "UNKNOWN" if error.finding.severity == "unsupported" else "INVALID"
        reason = f"unsupported: {error.finding.message}" if verdict == "UNKNOWN" else f"1 finding: {error.finding.code}"
        return Report(verdict, reason, subject, (error.finding,), seconds=time.perf_counter() - began)  # type: ignore[arg-type]
    report = verify(wanted, made.plan, table, points, seed, progress)
    report = explained(report, made, dump.replicas * dump.microbatches)
    if report.verdict != "PROVED":
        report = replace(report, findings=(*report.findings, *constants(wanted, made)))
    return replace(report, assumptions=(*report.assumptions, *assumed(dump, batches, trainer)), seconds=time.perf_counter() - began)


def ratio(logical: Dump, dump: Dump, made: Translated) -> int:
    """How many batches of the single-device plan the plan takes in one step."""
    outputs = [t for s in logical.sequences[0] if s.cell.kind == "IRDataOperation" for t in s.cell.results()]
    own = {t.full.name: t.shape[0] for t in outputs if t.shape}
    found = {made.rows[n] / own[n] for n in made.rows if n in own}
    if len(found) != 1 or (times := found.pop()) < 1 or times != int(times):
        shown = ", ".join(f"{n}: {made.rows[n]} rows, one device {own.get(n, 'none')}" for n in made.rows)
        reason = (
            f"{dump.replicas} replicas and {dump.microbatches} micro-batches read what is no multiple of the single-device batch ({shown})"
        )
        raise FileError(dump.path, "execplan", reason)
    return int(times)


def assumed(dump: Dump, batches: int, trainer: Trainer) -> list[str]:
    """What the trainer is taken to do, for this verdict."""
    found = [
        f"the data loader gives every device of a replica the same samples; replica k, micro-batch m reads block k·{dump.microbatches} + m"
    ]
    if trainer.correction == "mean":
        found.append(f"declared: the trainer divides gradients and losses by {dump.replicas} replicas × {dump.microbatches} micro-batches")
    else:
        found.append("the loss of the step is the sum of what micro-batches and replicas report; the trainer scales nothing")
    if batches > 1:
        found.append(f"a step takes {batches} batches of the single-device plan: the logical step is {batches} of them, losses added up")
    return found


def explained(report: Report, made: Translated, times: int) -> Report:
    """The report with the cells that its tensors come from."""
    notes = list(report.notes)
    if report.place is not None:
        origin = made.origin(report.place.rank, report.place.tensor)
        if origin is not None:
            notes.insert(0, f"first wrong tensor {report.place.tensor} is made by {origin}")
    if report.difference is not None and times > 1 and _times(report.difference.got, report.difference.want, times):
        notes.insert(0, f"×{times} = replicas × micro-batches: a mean loss is added up; with --correction mean the trainer divides")
    findings = []
    for f in report.findings:
        origin = made.origin(f.rank, f.tensor) if f.rank is not None and f.tensor is not None else None
        findings.append(f if origin is None or f.hint is not None else replace(f, hint=f"made by {origin}"))
    report = replace(report, findings=(*findings, *made.warnings), notes=tuple(notes))
    return contradiction(report) if report.verdict == "UNKNOWN" else report


def constants(logical: Program, made: Translated) -> Iterator[Finding]:
    """Constants of operations that no operation of the same source line has on one device: where to look in a wrong plan."""
    known: dict[tuple[str, str, str], set[object]] = {}
    for op in logical.ops:
        for key, value in op.attrs:
            if key in _CONSTANTS and op.phase == "forward":
                known.setdefault((op.name, str(op.source), key), set()).add(value)
    for t in made.plan.templates:
        for op in t.program.ops:
            for key, value in op.attrs:
                there = known.get((op.name, str(op.source), key)) if op.source is not None and op.phase == "forward" else None
                if there is not None and value not in there:
                    shown = ", ".join(map(str, sorted(map(str, there))))
                    origin = made.origin(t.ranks[0], op.outputs[0])
                    message = f"{origin}: {op.name} with {key} = {value}, on one device {shown}"
                    yield Finding("TV407", message, t.ranks[0], op.outputs[0], op.source, None, "warning")


def contradiction(report: Report) -> Report:
    """Neither proved nor refuted, and the plan contradicts what it says of its own tensors: that is ill-formed."""
    false = [f for f in report.findings if f.code == "TV402"]
    if not false:
        return report
    findings = tuple(replace(f, severity="error") if f in false else f for f in report.findings)
    reason = f"{len(false)} claims of the plan do not hold, the first one: {false[0].message} (no other verdict: {report.reason})"
    return replace(report, verdict="INVALID", reason=reason, findings=findings)


def _times(got: str, want: str, times: int) -> bool:
    try:
        a, b = float(got), float(want)
    except ValueError:
        return False
    return b != 0 and abs(a / b - times) < 1e-6
