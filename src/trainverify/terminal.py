"""How commands speak and end: text or one JSON object, a status line, one line for whatever goes wrong, and the exit code."""

from __future__ import annotations

import functools
import io
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any, ParamSpec

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from trainverify.progress import Phases, silent
from trainverify.refusal import Refused, one_line

P = ParamSpec("P")
USAGE, UNKNOWN, INTERNAL, INTERRUPTED, CLOSED = 2, 3, 4, 130, 141


class Unwritable(Exception):
    """Standard output takes no more: its reader went away, or the disk is full. That is no verdict."""

    def __init__(self, cause: OSError):
        super().__init__(f"standard output: {cause.strerror or cause}")
        self.cause = cause


class Output(io.TextIOWrapper):
    """Standard output whose failures are told from those of other files."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            raise Unwritable(error) from error

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            raise Unwritable(error) from error


out = Console(soft_wrap=True, highlight=False)
err = Console(stderr=True, soft_wrap=True, highlight=False)


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Timeout = Annotated[float | None, typer.Option(min=0.001, metavar="SECONDS", help="Then the verdict is UNKNOWN.")]


def change(text: str) -> Any:
    return Annotated[int | None, typer.Option(min=1, metavar="N", help=text)]


def fail(message: str, code: int, as_json: bool) -> int:
    """One line: on stderr, or as a JSON object on stdout."""
    if as_json:
        print(json.dumps({"error": one_line(message), "exit_code": code}))
    else:
        with suppress(OSError):  # where errors are not read, the code has to do
            err.print(f"[bold red]error[/]: {escape(one_line(message))}")
    return code


def emit(command: str, exit_code: int, **fields: Any) -> int:
    """The one JSON object of a command. ASCII only, so that every locale can print it."""
    print(json.dumps({"command": command, "exit_code": exit_code, **fields}))
    return exit_code


def attempt(work: Callable[[], int], as_json: bool) -> int:
    """Whatever goes wrong ends with one line and the right code, never with a verdict."""
    try:
        code = _tried(work, as_json)
        sys.stdout.flush()
        return code
    except Unwritable as error:  # what was to be said is lost
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more
        return CLOSED if isinstance(error.cause, BrokenPipeError) else fail(str(error), USAGE, False)


def _tried(work: Callable[[], int], as_json: bool) -> int:
    """The same, but for what goes wrong with standard output."""
    try:
        return work()
    except Refused as error:
        return fail(str(error), USAGE, as_json)
    except KeyboardInterrupt:
        return fail("interrupted; no verdict", INTERRUPTED, as_json)
    except Unwritable:
        raise
    except MemoryError:
        return fail("out of memory, no verdict", UNKNOWN, as_json)
    except (Exception, SystemExit) as error:
        if os.environ.get("TRAINVERIFY_TRACEBACK"):
            traceback.print_exception(error)
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return fail(f"internal error, no verdict: {reason} (TRAINVERIFY_TRACEBACK=1 shows where)", INTERNAL, as_json)


def open_streams() -> None:
    """Standard streams that were closed lead nowhere: a file that is opened must not take their place.

    A locale that lacks a character still gets a report, and what goes wrong with standard output is told from what goes wrong elsewhere.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115  as long as the process lives
    if isinstance(sys.stdout, io.TextIOWrapper):
        encoding, lines = sys.stdout.encoding, sys.stdout.isatty()
        sys.stdout = Output(sys.stdout.detach(), encoding=encoding, errors="backslashreplace", line_buffering=lines)
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(errors="backslashreplace")


def guarded(command: Callable[P, int]) -> Callable[P, int]:
    @functools.wraps(command)
    def safe(*args: P.args, **kwargs: P.kwargs) -> int:
        return attempt(lambda: command(*args, **kwargs), bool(kwargs.get("as_json")))

    return safe


class _Line:
    """A line that is made anew whenever it is drawn."""

    def __init__(self, phases: Phases):
        self.phases = phases

    def __rich__(self) -> Text:
        return Text(self.phases.line())


@contextmanager
def progress(as_json: bool, always: bool = False) -> Iterator[Callable[[str], None]]:
    """A status line on a terminal, nothing elsewhere; with `always`, a line on stderr for every phase, wherever that leads."""

    def write(text: str) -> None:
        err.print(text, style="dim", markup=False)

    if always:
        yield Phases(write, every=True).tell
        return
    if as_json or not err.is_terminal:
        yield silent
        return
    phases = Phases(write, every=False)
    with err.status(_Line(phases), spinner="line"):
        yield phases.tell


def restored() -> None:
    """The cursor of a terminal that a process left without showing it again."""
    if err.is_terminal:
        with suppress(OSError):
            err.show_cursor(True)
