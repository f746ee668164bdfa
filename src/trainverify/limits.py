"""Limits on a whole run: wall-clock time and memory."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class OutOfTime(Exception):
    """The time limit of the run was reached."""


@contextmanager
def limited(seconds: float | None, megabytes: int | None) -> Iterator[None]:
    """Raises OutOfTime after `seconds`, MemoryError beyond `megabytes` of address space."""
    if megabytes is not None:
        soft = megabytes << 20
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
    before = None
    if seconds is not None:

        def stop(number: int, frame: FrameType | None) -> None:
            raise OutOfTime(f"no verdict within {seconds:g} s")

        before = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        if seconds is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
