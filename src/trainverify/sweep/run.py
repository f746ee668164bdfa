"""Running a matrix: every configuration verified in a process of its own, or on a cluster, each verdict kept."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from trainverify import files
from trainverify.build.tape import BuildError
from trainverify.completion.steps import several_steps
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.limits import OutOfTime, limited
from trainverify.refusal import Refused
from trainverify.sweep import captured
from trainverify.sweep.cache import VERDICTS, Cache, Row, digest, kept, restored, version
from trainverify.sweep.captured import NOT_BUILT
from trainverify.sweep.matrix import Case
from trainverify.verdicts import verify

ATTEMPTS: Final = 3  # of a configuration whose process is lost


@dataclass(frozen=True)
class How:
    """How configurations are judged."""

    folder: Path | None = None  # of the cache
    points: int = 1
    seconds: float | None = None  # for one configuration


def judge(case: Case, how: How) -> Row:
    """The verdict on one configuration, from the cache if it is there."""
    if case.command:
        return captured.judged(case.name, case.command, case.folder, how.points, how.seconds)
    cache = None if how.folder is None else Cache(how.folder)
    known, notes = _known(case, how, cache)
    if known is not None:
        return known
    try:
        with limited(how.seconds, None):
            logical, plan = built(case)
            key = digest(logical, plan, how.points, case.allow)
            if cache is not None:
                found, note = cache.get(key)
                notes = notes or note
                row = None if found is None else restored(case.name, found)
                if row is not None:
                    _remember(cache, case, how, key)
                    return replace(row, note=notes)
            report = verify(logical, plan, points=how.points, allow=case.allow)
    except OutOfTime as error:
        return Row(case.name, "UNKNOWN", f"time limit: {error}", how.seconds or 0.0, note=notes)
    except MemoryError:
        return Row(case.name, "UNKNOWN", "out of memory", 0.0, note=notes)
    except (BuildError, Refused) as error:
        return Row(case.name, NOT_BUILT, str(error), 0.0, note=notes)
    place = "" if report.place is None else f"{report.place.tensor} on rank {report.place.rank}: {report.place.cause}"
    row = Row(
        case.name, report.verdict, report.reason, round(report.seconds, 3), place, allowed=", ".join(c.name for c in report.approximations)
    )
    if cache is not None and row.verdict in VERDICTS:
        cache.put(key, kept(row))
        _remember(cache, case, how, key)
    return replace(row, note=notes)


def built(case: Case) -> tuple[Program, Plan | Program]:
    """Both programs of a configuration."""
    logical: Program
    plan: Plan | Program
    if case.wish is not None:
        logical, plan = case.wish.build()
    else:
        logical, plan = files.read_program(Path(str(case.logical))), files.read(Path(str(case.plan)))
    return several_steps(logical, case.steps), several_steps(plan, case.steps)


def _known(case: Case, how: How, cache: Cache | None) -> tuple[Row | None, str]:
    """A model of the zoo is made by this package alone: while the package is the same, so are its programs."""
    if cache is None or case.wish is None:
        return None, ""
    link, note = cache.get(_link(case, how))
    if link is None or not isinstance(link.get("pair"), str):
        return None, note
    found, note = cache.get(link["pair"])
    return (None if found is None else restored(case.name, found)), note


def _link(case: Case, how: How) -> str:
    return digest("zoo", case.wish, case.steps, how.points, case.allow, version())


def _remember(cache: Cache, case: Case, how: How, key: str) -> None:
    if case.wish is not None:
        cache.put(_link(case, how), {"pair": key})


def sweep(cases: Sequence[Case], how: How, workers: int) -> Iterator[Row]:
    """Rows as they are ready. A process that is lost is replaced, and its configuration tried again."""
    left = {c.name: c for c in cases}
    for attempt in range(ATTEMPTS):
        width = workers if attempt == 0 else 1  # alone, so that one that ends its process takes no other with it
        yield from _round(left, how, width)
        if not left:
            return
    for name in left:
        yield Row(name, "UNKNOWN", f"its process ended without an answer, {ATTEMPTS} times", 0.0)


def _round(left: dict[str, Case], how: How, workers: int) -> Iterator[Row]:
    """Judges what is left, and takes out what has an answer."""
    batches = [list(left.values())] if workers > 1 else [[c] for c in left.values()]
    for batch in batches:
        with ProcessPoolExecutor(min(workers, len(batch)), mp_context=multiprocessing.get_context("fork")) as pool:
            pending = {pool.submit(judge, case, how): case.name for case in batch}
            for done in as_completed(pending):
                try:
                    row = done.result()
                except BrokenProcessPool:
                    continue
                left.pop(pending[done])
                yield row


__all__ = ["ATTEMPTS", "NOT_BUILT", "How", "built", "judge", "sweep"]
