"""One fresh process per rank, few at a time. What a process finds comes back through a pipe; what goes wrong comes back as text."""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from trainverify.torch.patching import look_up
from trainverify.translate.targets import CaptureError
from trainverify.versions import warning

T = TypeVar("T")


class Reads(CaptureError):
    """The code reads computed values in a way that is not captured: no verdict."""


class Traced(Exception):
    """The traceback of another process."""


@dataclass(frozen=True)
class Failed:
    kind: str
    message: str
    where: str | None
    trace: str


def users_line(error: BaseException) -> str | None:
    """The innermost line of the user's in a traceback."""
    from trainverify.torch.lines import is_users, shown

    lines = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
    return f"{shown(lines[-1].filename, os.getcwd())}:{lines[-1].lineno}" if lines else None


def _preload() -> None:
    """What every process would import by itself."""
    distributed = ("tensor", "fsdp", "pipelining")
    for name in ("torch._dynamo", *(f"torch.distributed.{n}" for n in distributed), "torch.testing._internal.distributed.fake_pg"):
        importlib.import_module(name)
    look_up()


@cache
def _warn_once() -> None:
    """Of another version of PyTorch than the tested one, one line."""
    if (text := warning("torch")) is not None:
        print(f"warning: {text}", file=sys.stderr)


def _child(work: Callable[[], Any], pipe: Connection) -> None:
    from trainverify.torch import objects
    from trainverify.torch.agreed import AGREED

    result: Any
    before = set(AGREED)
    objects.hide()  # looking through all objects for what a capture makes takes as long as there are others
    try:
        with redirect_stdout(sys.stderr):
            result = work()
    except BaseException as error:
        result = Failed(type(error).__name__, str(error), users_line(error), traceback.format_exc())
    try:
        pipe.send((result, AGREED - before))
    except Exception as error:
        pipe.send((Failed(type(error).__name__, str(error), None, traceback.format_exc()), set()))
    pipe.close()
    sys.stderr.flush()
    os._exit(0)  # torch.distributed and its threads are not ended, they are left


def run(
    works: Sequence[Callable[[], T]],
    together: bool = False,
    seconds: float = 600.0,
    tell: Callable[[int], None] = lambda done: None,
) -> list[T | Failed]:
    """The results of functions, each in a process of its own: two at a time, or all `together` (when they talk to each other)."""
    from trainverify.torch import objects
    from trainverify.torch.agreed import recall, remember
    from trainverify.torch.asks import asks
    from trainverify.torch.orders import loops

    _warn_once()
    _preload()
    recall()
    objects.remember()
    loops(), asks()  # files are read once, not by every process
    context = multiprocessing.get_context("fork")
    most = len(works) if together else max(1, min(len(works), os.cpu_count() or 1))
    results: dict[int, T | Failed] = {}
    running: dict[Connection, tuple[int, Any, float]] = {}
    waiting = list(enumerate(works))
    try:
        while waiting or running:
            while waiting and len(running) < most:
                i, work = waiting.pop(0)
                ours, theirs = context.Pipe(duplex=False)
                sys.stdout.flush()
                process = context.Process(target=_child, args=(work, theirs), daemon=False)
                process.start()
                theirs.close()
                running[ours] = i, process, time.monotonic() + seconds
            ready = wait(list(running), timeout=1.0)
            for pipe in ready:
                assert isinstance(pipe, Connection)
                i, process, _ = running.pop(pipe)
                try:
                    results[i], agreed = pipe.recv()
                    remember(agreed)  # calls that were run beside their mapping are not run again in other processes
                except EOFError:
                    process.join(5)
                    results[i] = Failed("Ended", f"the process ended with code {process.exitcode}", None, "")
                process.join(5)
                pipe.close()
                tell(len(results))
            now = time.monotonic()
            for pipe, (i, process, until) in list(running.items()):
                if now > until:
                    del running[pipe]
                    process.kill()
                    results[i] = Failed("Timeout", f"no result within {seconds:g} s", None, "")
    finally:
        for _, process, _ in running.values():
            process.kill()
    return [results[i] for i in range(len(works))]
