"""A verdict in a process of its own that has a time limit."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeAlias

from tools.step_campaigns.outcomes import Verdict
from trainverify.report import Report

Answer: TypeAlias = tuple[str, str, bool]  # name, reason, and whether the report says what it assumes of later steps
Judge = Callable[[Path], Answer]


def answer_of(report: Report) -> Answer:
    text = " ".join((*report.assumptions, *report.notes))
    findings = "; ".join(f"{finding.code} {finding.message}" for finding in report.findings[:2])
    return report.verdict, " ".join(part for part in (report.reason, findings) if part), "later" in text and "step" in text


def verdict(judge: Judge, path: Path, seconds: float) -> Verdict:
    """The verdict about the file's functions; the process and everything that it started is ended after `seconds`."""
    context = mp.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_judge, args=(judge, path, theirs))
    start = time.monotonic()
    process.start()
    theirs.close()
    try:
        name, reason, later = ours.recv() if ours.poll(seconds) else ("TIMEOUT", f"{seconds:.0f} seconds", False)
    except EOFError:
        name, reason, later = "CRASH", "the process ended without an answer", False
    if name in ("TIMEOUT", "CRASH"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
    process.join()
    return Verdict(name, reason, later, time.monotonic() - start)


def _judge(judge: Judge, path: Path, answer: Connection) -> None:
    os.setsid()
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    warnings.simplefilter("ignore")
    try:
        answer.send(judge(path))
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        answer.send(("CRASH", f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"[:400], False))
