"""Limits on a whole run: wall-clock time and memory, also where C code cannot be interrupted or ends the process."""

from __future__ import annotations

import gc
import os
import resource
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

GRACE: Final = 2.0  # seconds after the time limit until a process that does not stop by itself is ended

_SELDOM: Final = (500_000, 20, 20)  # new objects until a collection, and how many of these until older ones are looked at
_OVER: Final = b"\xff"  # no exit code
_UNIT: Final = 1 if sys.platform == "darwin" else 1024  # bytes of ru_maxrss
_CONTAINER: Final = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class OutOfTime(BaseException):
    """The time limit of the run was reached. Not an `Exception`: no handler on the way may take it for something else."""


@dataclass(frozen=True)
class Ended:
    """A process that gave no answer."""

    signal: int | None  # that ended it
    overtime: bool  # it did not stop at its time limit
    megabytes: int = 0  # of memory that it had at most


def default_megabytes() -> int | None:
    """Three quarters of the memory that there is, for the machine or the container; None if that is not known."""
    found = []
    with suppress(OSError, ValueError):
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for path in _CONTAINER:
        with suppress(OSError, ValueError):  # no such file, or "max"
            found.append(int(Path(path).read_text()))
    return (3 * min(found) // 4) >> 20 if found else None


def allowed_megabytes() -> int | None:
    """How much address space this process may have; None if there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft >> 20


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Millions of expressions that live to the end, and few cycles: the garbage collector need not look at them again and again."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*_SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


@contextmanager
def limited(seconds: float | None, megabytes: int | None, processor: bool = False) -> Iterator[None]:
    """Raises OutOfTime after `seconds`, MemoryError beyond `megabytes` of address space; afterwards all is as before.

    With `processor` seconds are processor time of this process, which does not depend on what else runs on the machine.
    """
    limits = resource.getrlimit(resource.RLIMIT_AS)
    timer, alarm = (signal.ITIMER_PROF, signal.SIGPROF) if processor else (signal.ITIMER_REAL, signal.SIGALRM)
    before = None
    try:
        if seconds is not None:

            def stop(number: int, frame: FrameType | None) -> None:
                raise OutOfTime(f"no verdict within {seconds:g} s")

            before = signal.signal(alarm, stop)
            signal.setitimer(timer, seconds)
        if megabytes is not None:
            soft = min(x for x in (megabytes << 20, *limits) if x != resource.RLIM_INFINITY)  # a lower limit stays
            resource.setrlimit(resource.RLIMIT_AS, (soft, limits[1]))
        yield
    except ImportError as error:  # part of a library that is loaded when it is first used
        if megabytes is not None and any(sign in str(error).lower() for sign in ("failed to map", "cannot allocate memory")):
            raise MemoryError(str(error)) from error
        raise
    finally:
        if seconds is not None:
            signal.setitimer(timer, 0)
            signal.signal(alarm, before)
        if megabytes is not None:
            resource.setrlimit(resource.RLIMIT_AS, limits)


def isolated(work: Callable[[Callable[[], None]], int], seconds: float | None) -> int | Ended:
    """`work` in a process of its own, which is ended when it overstays `seconds` by far.

    `work` gets a function to call when what is limited is over (from then on it may take its time, for printing),
    and returns an exit code.
    """
    answer, write = os.pipe()
    alive, hold = os.pipe()  # closes when this process ends, however it ends
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.close(answer)
        os.close(hold)
        _child(work, write, alive)
    os.close(write)
    os.close(alive)
    overtime = False
    try:
        wait = None if seconds is None else seconds + GRACE
        overtime = not select.select([answer], [], [], wait)[0]
        code = b"" if overtime else os.read(answer, 1)
        if code == _OVER:
            code = os.read(answer, 1)
    finally:
        os.kill(child, signal.SIGKILL)  # it is not reaped yet, so the number is still its own
        _, status, used = os.wait4(child, 0)
        os.close(answer)
        os.close(hold)
    if code:
        return code[0]
    return Ended(os.WTERMSIG(status) if os.WIFSIGNALED(status) else None, overtime, used.ru_maxrss * _UNIT >> 20)


def _child(work: Callable[[Callable[[], None]], int], write: int, alive: int) -> None:
    """Ends with the process; whatever happens, only a code that was written counts."""

    def over() -> None:
        os.write(write, _OVER)

    def follow() -> None:
        os.read(alive, 1)
        os._exit(1)

    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
        threading.Thread(target=follow, daemon=True).start()
        code = work(over)
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(write, bytes([code]))
    finally:
        os._exit(0)
