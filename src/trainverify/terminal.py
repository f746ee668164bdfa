"""How commands speak and end: text or one JSON object, a status line, one line for whatever goes wrong, and the exit code."""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, ParamSpec

import typer
from rich.console import Console
from rich.markup import escape

from trainverify import files
from trainverify.files.errors import one_line

P = ParamSpec("P")
USAGE, UNKNOWN, INTERNAL, INTERRUPTED, CLOSED = 2, 3, 4, 130, 141


class Terminal(Console):
    """A console whose reader may go away: that is no verdict."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


out = Terminal(soft_wrap=True, highlight=False)
err = Terminal(stderr=True, soft_wrap=True, highlight=False)


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Timeout = Annotated[float | None, typer.Option(min=0.001, metavar="SECONDS", help="Then the verdict is UNKNOWN.")]


def change(text: str) -> Any:
    return Annotated[int | None, typer.Option(min=1, metavar="N", help=text)]


class Refused(Exception):
    """Input or arguments that cannot be used."""


def fail(message: str, code: int, as_json: bool) -> int:
    """One line: on stderr, or as a JSON object on stdout."""
    if as_json:
        print(json.dumps({"error": one_line(message), "exit_code": code}))
    else:
        err.print(f"[bold red]error[/]: {escape(one_line(message))}")
    return code


def emit(command: str, exit_code: int, **fields: Any) -> int:
    """The one JSON object of a command. ASCII only, so that every locale can print it."""
    print(json.dumps({"command": command, "exit_code": exit_code, **fields}))
    return exit_code


def attempt(work: Callable[[], int], as_json: bool) -> int:
    """Whatever goes wrong ends with one line and the right code, never with a verdict."""
    try:
        code = work()
        sys.stdout.flush()
        return code
    except (files.FileError, Refused) as error:
        return fail(str(error), USAGE, as_json)
    except KeyboardInterrupt:
        return fail("interrupted; no verdict", INTERRUPTED, as_json)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads; the interpreter flushes once more
        return CLOSED
    except MemoryError:
        return fail("out of memory, no verdict", UNKNOWN, as_json)
    except (Exception, SystemExit) as error:
        if os.environ.get("TRAINVERIFY_TRACEBACK"):
            traceback.print_exception(error)
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return fail(f"internal error, no verdict: {reason} (TRAINVERIFY_TRACEBACK=1 shows where)", INTERNAL, as_json)


def guarded(command: Callable[P, int]) -> Callable[P, int]:
    @functools.wraps(command)
    def safe(*args: P.args, **kwargs: P.kwargs) -> int:
        return attempt(lambda: command(*args, **kwargs), bool(kwargs.get("as_json")))

    return safe


@contextmanager
def progress(as_json: bool) -> Iterator[Callable[[str], None]]:
    """A status line on a terminal, nothing elsewhere."""
    if as_json or not err.is_terminal:
        yield lambda text: None
        return
    with err.status("reading", spinner="line") as status:
        yield lambda text: status.update(escape(text))
