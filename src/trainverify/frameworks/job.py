"""A job of a framework: what is captured, how its batch lies on the ranks, and the verdict on it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from trainverify.frameworks.shims import Checked, Shim, listed
from trainverify.graph.mesh import Mesh
from trainverify.ops.table import OpTable
from trainverify.prove.attempt import Engine
from trainverify.report import Report
from trainverify.torch.cache import Cache
from trainverify.torch.command import Subject
from trainverify.torch.command import verdict as verdict_on
from trainverify.torch.inputs import Batch
from trainverify.torch.judge import captures
from trainverify.torch.launch import Failed, Reads, run
from trainverify.torch.ways import Choices, Processes, all_ways
from trainverify.translate.targets import CaptureError

ALL_RANKS: Final = 16  # up to so many, every rank is captured
AT_ONCE: Final = 4  # ranks after which captures are kept: what is interrupted goes on from there
SECONDS: Final = 3600.0  # of the clock that one process may take: on a busy machine a rank of a large model takes many minutes
BY_CHANCE: Final = 3  # ranks besides the corners


@dataclass(frozen=True)
class Job:
    """A framework with its options: the same step on one device and on the ranks of a mesh."""

    framework: str
    mesh: Mesh
    batch: Batch
    loss: Any
    reference: Callable[[], Any]
    distributed: Callable[[int, int], Any]
    shims: tuple[Shim, ...]
    remarks: tuple[str, ...] = ()  # for the verdict line
    cuts: Mapping[str, Any] = field(default_factory=dict)
    trial: Callable[[Path], Trial] | None = None  # given an empty folder


@dataclass(frozen=True)
class Trial:
    """The same parallelism at a tiny size: a job to capture with shims, and the same steps for real without them.

    A real step of a rank has its own data loader, and then says with `batch` what it read; that of the reference takes a batch.
    With `logs`, communication after the optimizer's update is of metrics that are logged, and no part of the step. With `single`, the
    framework names single precision where no other can be given."""

    job: Job
    reference: Callable[[], Any]
    distributed: Callable[[int, int], Any]
    text: str
    logs: bool = False
    single: bool = False


def in_process(work: Callable[[], Any], what: str) -> Any:
    """What a function gives in a process of its own: frameworks change the one they run in."""
    (found,) = run([work])
    if isinstance(found, Failed):
        raise CaptureError(f"{what}: {found.message}")
    return found


def corners(mesh: Mesh, seed: int = 0) -> tuple[int, ...]:
    """Of many ranks, those that mesh coordinates tell apart: the first three and the last along every axis, next to the first two along
    the others; the last rank; and some by chance, which must agree with them."""
    if mesh.size <= ALL_RANKS:
        return tuple(range(mesh.size))
    found = {0, mesh.size - 1}
    for name in mesh.names:
        length = mesh.length(name)
        along = sorted({*range(min(3, length)), length - 1})
        others = [range(min(2, mesh.length(n))) if n != name else along for n in mesh.names]
        for where in itertools.product(*others):
            found.add(mesh.rank(dict(zip(mesh.names, where, strict=True))))
    rest = [r for r in range(mesh.size) if r not in found]
    found.update(random.Random(seed).sample(rest, min(BY_CHANCE, len(rest))))
    return tuple(sorted(found))


def captured(job: Job, table: OpTable, tell: Callable[[str], None], all_ranks: bool = False, cache: Cache | None = None) -> Subject:
    """The reference and the ranks; all of it again for every combination of branches on data."""
    ranks = tuple(range(job.mesh.size)) if all_ranks else corners(job.mesh)
    few = len(ranks) if cache is None else AT_ONCE

    def run_way(choices: Sequence[Choices]) -> list[Processes]:
        given = (job.reference, job.distributed, job.mesh.size, job.batch, job.mesh, table, None)
        found: list[Processes] = []
        for i in range(0, len(ranks), few):

            def count(text: str, done: int = i) -> None:
                tell(f"{text}; {done} of {len(ranks)} ranks are there")

            some = captures(*given, count, SECONDS, ranks=ranks[i : i + few], choices=choices, cache=cache)
            found = [(one, [*before, *more]) for (one, before), (_, more) in zip(found, some, strict=True)] if found else some
        return found

    found = all_ways(run_way)
    return Subject(found[0].reference, found[0].ranks, job.mesh, job.batch, job.cuts, job.loss, None, found)


@dataclass(frozen=True)
class How:
    """How a job is verified: random points, the engine, where programs are written to, whether every rank is captured."""

    points: int = 3
    seed: int = 0
    engine: Engine = "algebra"
    folder: Path | None = None
    all_ranks: bool = False


Check = Callable[[Job], Checked]


def verdict(
    job: Job,
    table: OpTable,
    tell: Callable[[str], None],
    how: How = How(),
    cache: Cache | None = None,
    check: Check | None = None,
) -> Report:
    """The report, with the shims that it rests on: those are accepted, or checked by `check` once something is proved."""
    try:
        subject = captured(job, table, tell, how.all_ranks, cache)
    except Reads as error:
        return listed(Report("UNKNOWN", str(error), f"the ranks of {job.framework} on {job.mesh}"), job.shims, job.framework, job.remarks)
    return judged(job, subject, table, tell, how, check)


def judged(
    job: Job,
    subject: Subject,
    table: OpTable,
    tell: Callable[[str], None],
    how: How = How(),
    check: Check | None = None,
) -> Report:
    """The report on what was captured."""
    report = verdict_on(subject, table, how.points, how.seed, how.engine, False, how.folder, tell)
    found = check(job) if check is not None and report.verdict.startswith(("PROVED", "REFUTED")) else None
    return listed(report, job.shims, job.framework, job.remarks, check is None, found)
