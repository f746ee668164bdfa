"""A verdict within limits on time and memory: printed, with its exit code."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Annotated

import typer

from trainverify.cli.outputs import NOTHING_MORE, Outputs
from trainverify.limits import Ended, OutOfTime, allowed_megabytes, isolated, limited
from trainverify.prove.attempt import Engine
from trainverify.report import Report
from trainverify.terminal import INTERNAL, Output, attempt, emit, fail, out, progress, restored

EngineName = Annotated[
    Engine, typer.Option("--engine", help="Tensor algebra at full size, stages and a solver at reduced sizes, both, or what is needed.")
]
Memory = Annotated[int | None, typer.Option(min=1, metavar="MB", help="Of address space; beyond it the verdict is UNKNOWN.")]


def judged(
    command: str,
    subject: str,
    work: Callable[[Callable[[str], None]], Report],
    as_json: bool,
    timeout: float | None,
    memory: int | None,
    here: bool = False,
    outputs: Outputs = NOTHING_MORE,
    artifact: str | None = None,
    unfit: Collection[str] = (),
) -> int:
    """Print the report that `work` makes within the limits; its exit code. `here`: in this process, if nothing else was asked for.

    `artifact` is the file of the user's that the verdict is about; `unfit` are options of the command that do not go with what was asked.
    """
    own = (
        isinstance(sys.stdout, Output) or sys.stdout is sys.__stdout__
    )  # else a caller that replaced it would not get what a process of its own prints
    limit = memory if memory is not None else allowed_megabytes() if own else None

    def show(report: Report) -> int:
        report = outputs.written(replace(report, options=options_of(command) - set(unfit)), artifact)
        if as_json:
            emit(command, **report.json())
        else:
            report.print(out, outputs.verbose)
        return report.exit_code

    def attempted(over: Callable[[], None]) -> int:
        try:
            with limited(timeout, memory), progress(as_json, outputs.progress) as tell:
                report = work(tell)
        except OutOfTime as error:
            report = Report("UNKNOWN", f"time limit: {error}", subject)
        except MemoryError:
            report = Report("UNKNOWN", beyond(memory, limit), subject)
        over()
        return show(report)

    if timeout is None and memory is None and (here or limit is None):
        return attempted(lambda: None)
    result: int | Ended | None = None
    try:
        result = isolated(lambda over: attempt(lambda: attempted(over), as_json), timeout)
    finally:
        if not isinstance(result, int) and not as_json:
            restored()
    if not isinstance(result, Ended):
        return result
    if result.overtime:
        return show(Report("UNKNOWN", f"time limit: no verdict within {timeout:g} s", subject))
    how = "" if result.signal is None else f" (signal {result.signal})"
    if memory is not None or (limit is not None and (result.signal == signal.SIGKILL or 2 * result.megabytes > limit)):
        return show(Report("UNKNOWN", f"{beyond(memory, limit)}{how}", subject))
    return fail(f"internal error, no verdict: the process ended{how}", INTERNAL, as_json)


def options_of(command: str) -> frozenset[str]:
    """What a command can be told."""
    from trainverify.cli.application import loaded

    return frozenset(name for p in loaded(command).params for name in p.opts)


def beyond(memory: int | None, limit: int | None) -> str:
    """`memory` is what was asked for, `limit` what there was."""
    if memory is not None:
        return f"memory limit: more than {memory} MB of address space needed"
    return "out of memory" if limit is None else f"out of memory: more than {limit} MB of address space needed; --memory MB allows more"
