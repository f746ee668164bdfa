"""The verdict on a plan of nnScaler: translate, verify, and say what in nnScaler's plan is at fault."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from trainverify.evaluate.small import Small
from trainverify.explain.locate import locate
from trainverify.explain.place import Place
from trainverify.files.errors import FileError
from trainverify.graph.plan import Plan
from trainverify.graph.program import Op, Program
from trainverify.nnscaler.dump import Dump
from trainverify.nnscaler.faults import Fault, faults, of, ranks
from trainverify.nnscaler.plan import Translated, plan, program
from trainverify.nnscaler.suspects import Member, Suspect
from trainverify.nnscaler.trainer import PLAIN, Trainer
from trainverify.nnscaler.writer import Broken
from trainverify.ops import OPS
from trainverify.ops.table import OpTable
from trainverify.report import Report
from trainverify.verdicts import Progress, verify

Found = Sequence[tuple[Suspect, Fault]]


@dataclass(frozen=True)
class Judged(Report):
    """A report on a plan of nnScaler, with the cells that are at fault."""

    at_fault: tuple[Fault, ...] = ()

    def json(self) -> dict[str, Any]:
        return {**super().json(), "at_fault": [f.json() for f in self.at_fault]}

    def causes(self) -> list[str]:
        return [str(f) for f in self.at_fault]

    def next_steps(self) -> list[str]:
        return [s for s in super().next_steps() if "--engine" not in s]


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
) -> Judged:
    """Is the plan the training step of the single-device plan?"""
    began = time.perf_counter()
    report = _Judge(logical, dump, table, trainer, points, seed, progress).report()
    return replace(report, seconds=time.perf_counter() - began)


@dataclass(frozen=True)
class _Judge:
    logical: Dump
    dump: Dump
    table: OpTable
    trainer: Trainer
    points: int
    seed: int
    progress: Progress

    def report(self) -> Judged:
        dump, trainer = self.dump, self.trainer
        self.progress("translating")
        try:
            made = plan(dump, self.table, trainer)
            batches = ratio(self.logical, dump, made)
            wanted = program(self.logical, self.table, trainer, batches)
        except Broken as error:
            return self.broken(error)
        found: list[tuple[Suspect, Fault]] = []

        def locator(small: Small, local: Plan, *rest: Any) -> Place:
            """By what is at fault, else by values."""
            found.extend(self.faults())
            place = next((p for s, f in found if f.mended and (p := placed(wanted, made, s, f)) is not None), None)
            return place or locate(small, local, *rest)

        report = verify(wanted, made.plan, self.table, self.points, self.seed, self.progress, locator=locator)
        report = replace(explained(report, made), assumptions=(*report.assumptions, *assumed(dump, batches, trainer)))
        if report.verdict == "INVALID":
            found = self.faults()
        named = [f for _, f in found]
        if report.verdict == "REFUTED" and not any(f.mended for f in named):
            named = [*self.correction(report), *named] or self.origin(report, made)
        return judged(report, named)

    def broken(self, error: Broken) -> Judged:
        """A plan that cannot be run at all."""
        subject = f"{self.dump.name} on {self.dump.ranks} ranks against {self.logical.name}"
        finding = error.finding
        named = [f for _, f in self.faults()]
        if finding.severity == "unsupported":
            mended = tuple(f for f in named if f.mended)
            return Judged("UNKNOWN", f"unsupported: {finding.message}", subject, (finding,), at_fault=mended)
        if not any(f.mended for f in named):
            named.append(of(self.dump, error.origin, finding.message))
        return judged(Report("INVALID", f"1 finding: {finding.code}", subject, (finding,)), named)

    def faults(self) -> list[tuple[Suspect, Fault]]:
        self.progress("looking for what is at fault")
        try:
            return faults(self.logical, self.dump, self.proved)
        except (ArithmeticError, LookupError, TypeError, ValueError):  # a plan too odd to be mended: the verdict stands without it
            return []

    def proved(self, dump: Dump, trainer: Trainer | None = None) -> bool:
        """Whether a mended plan is proved."""
        trainer = trainer or self.trainer
        try:
            made = plan(dump, self.table, trainer)
            wanted = program(self.logical, self.table, trainer, ratio(self.logical, dump, made))
        except (Broken, FileError):
            return False
        nowhere = Place("", None, 0, "", None, "")
        return verify(wanted, made.plan, self.table, 1, self.seed, locator=lambda *_: nowhere).verdict == "PROVED"

    def correction(self, report: Report) -> list[Fault]:
        """A mean loss that is added up is the trainer's to correct; a sum is not."""
        times = self.dump.replicas * self.dump.microbatches
        d = report.difference
        if times == 1 or d is None:
            return []
        if self.trainer.correction == "none" and _times(d.got, d.want, times):
            why = f"×{times} = replicas × micro-batches: a mean loss is added up; with --correction mean the trainer divides"
            mended = int(self.proved(self.dump, replace(self.trainer, correction="mean")))
        elif self.trainer.correction == "mean" and _times(d.want, d.got, times):
            why = f"1/{times} = 1/(replicas × micro-batches): the loss is a sum over the batch, and the trainer divides (--correction mean)"
            mended = int(self.proved(self.dump, replace(self.trainer, correction="none")))
        else:
            return []
        devices = self.dump.devices
        return [Fault(("the trainer",), (), devices, ranks(self.dump, devices), tuple(range(self.dump.microbatches)), why, mended)]

    def origin(self, report: Report, made: Translated) -> list[Fault]:
        """Nothing is unusual: the cell that makes the first wrong tensor."""
        place = report.place
        origin = None if place is None else made.origins.get(place.rank % made.devices, {}).get(place.tensor)
        return [] if place is None or origin is None else [of(self.dump, origin, f"first wrong tensor: {place.cause}")]


def judged(report: Report, named: Sequence[Fault]) -> Judged:
    at_fault = [f for f in named if f.mended] or list(named)
    same = {f.name: getattr(report, f.name) for f in fields(Report)}
    if at_fault and report.verdict in ("REFUTED", "INVALID"):
        first = at_fault[0]
        more = f" (and {len(at_fault) - 1} more)" if len(at_fault) > 1 else ""
        same["reason"] = f"{report.reason}; {'at fault' if first.mended else 'suspect'}: {', '.join(first.cells)}{more}"
    return Judged(**same, at_fault=tuple(at_fault))


def placed(logical: Program, made: Translated, s: Suspect, fault: Fault) -> Place | None:
    """What a cell at fault makes, as the first wrong tensor."""
    for m in s.members:
        template = next(t for t in made.plan.templates if m.device in t.ranks)
        tensor = _tensor(made, template.program, s, m)
        if tensor is None:
            continue
        op = next((o for o in template.program.ops if tensor in o.outputs), None)
        base = re.sub(r"\.\d+$", "", tensor.rpartition("/")[2])
        theirs: Op | None = next((o for o in logical.ops if base in o.outputs), None)
        return Place(base if theirs is not None else "", theirs, m.device, tensor, op, fault.why + fault.tail)
    return None


def _tensor(made: Translated, local: Program, s: Suspect, m: Member) -> str | None:
    """The first tensor that a cell makes, or leaves as it was; of a reducer the gradient that it is about."""
    for weight in s.weights:
        return next((o.tensor for o in local.outputs if o.role == "gradient" and o.of == weight), None)
    origins = made.origins[m.device]
    found = [n for n, o in origins.items() if m.cell is not None and (o.cell is m.cell or any(o.cell is n for n in m.cell.nodes))]
    first = next((n for n in found if not m.micros or origins[n].micro in m.micros), None)
    if first is None and m.cell is not None and m.cell.kind == "IRAdapter":
        return made.passed.get((m.device, m.cell.cid, m.micros[0]))
    return first


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
    if trainer.optimizer is not None:
        clip = "" if trainer.clip is None else f", gradients clipped at {trainer.clip:g}"
        found.append(f"completed: the trainer updates with {type(trainer.optimizer).__name__}{clip}")
    if trainer.zero and trainer.optimizer is not None:
        found.append(
            f"completed: ZeRO in {trainer.zero} group{'s' if trainer.zero > 1 else ''}: a rank keeps state of, and updates, its piece of "
            "every weight that a reducer's ranks share, cut along the first dimension that divides; where none does, all of it"
        )
    if batches > 1:
        found.append(f"a step takes {batches} batches of the single-device plan: the logical step is {batches} of them, losses added up")
    return found


def explained(report: Report, made: Translated) -> Report:
    """The report with the cells that its tensors come from."""
    notes = list(report.notes)
    if report.place is not None:
        origin = made.origin(report.place.rank, report.place.tensor)
        if origin is not None:
            notes.insert(0, f"first wrong tensor {report.place.tensor} is made by {origin}")
    findings = []
    for f in report.findings:
        origin = made.origin(f.rank, f.tensor) if f.rank is not None and f.tensor is not None else None
        findings.append(f if origin is None or f.hint is not None else replace(f, hint=f"made by {origin}"))
    report = replace(report, findings=(*findings, *made.warnings), notes=tuple(notes))
    return contradiction(report) if report.verdict == "UNKNOWN" else report


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
