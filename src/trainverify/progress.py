"""What a long run says while it works: phases, counts within a phase, the first failure.

All are text, so that any function of text can listen.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

Progress = Callable[[str], None]
WORTH: Final = 1.0  # seconds of a phase that is mentioned when it is over


class Counted(str):
    """`PHASE: DONE of TOTAL THINGS`."""

    phase: str
    done: int
    total: int
    things: str

    def __new__(cls, phase: str, done: int, total: int, things: str) -> Counted:
        made = super().__new__(cls, f"{phase}: {done:,} of {total:,} {things}")
        made.phase, made.done, made.total, made.things = phase, done, total, things
        return made


class Failure(str):
    """Something that is certainly wrong; what it comes from is still to be found."""


def silent(text: str) -> None:
    pass


class Phases:
    """The phases of a run as they are told: what goes on now, and lines about what is over."""

    def __init__(self, write: Callable[[str], None], every: bool, clock: Callable[[], float] = time.monotonic):
        """`write` takes finished lines. With `every`, each phase is written when it begins; else long ones when they end."""
        self.write = write
        self.every = every
        self.clock = clock
        self.began = self.since = clock()
        self.phase = self.text = "reading"
        self.count: Counted | None = None
        self.failed = False
        self._said = 0.0

    def tell(self, text: str) -> None:
        if isinstance(text, Failure):
            self._fail(text)
            return
        phase = text.phase if isinstance(text, Counted) else text
        if phase != self.phase:
            self.over()
            self.phase, self.since, self._said = phase, self.clock(), self.clock()
            if self.every:
                self.write(f"{self.elapsed:6.1f} s  {text}")
        elif self.every and self.clock() - self._said >= 5:
            self._said = self.clock()
            self.write(f"{self.elapsed:6.1f} s  {text}")
        self.count = text if isinstance(text, Counted) else None
        self.text = text

    def _fail(self, text: str) -> None:
        """The first failure is told at once, unless the report comes as soon."""
        if not self.failed and (self.every or self.elapsed > WORTH):
            self.write(f"{self.elapsed:6.1f} s  {text}")
        self.failed = True

    def over(self) -> None:
        """The phase at hand ends."""
        seconds = self.clock() - self.since
        if not self.every and seconds >= WORTH:
            counted = f" ({self.count.total:,} {self.count.things})" if self.count is not None else ""
            self.write(f"{seconds:6.1f} s  {self.phase}{counted}")
        self.count = None

    @property
    def elapsed(self) -> float:
        return self.clock() - self.began

    def line(self) -> str:
        """What goes on, and for how long."""
        now = self.clock()
        total = f", {now - self.began:.0f} s in all" if self.since > self.began else ""
        return f"{self.text}  {now - self.since:.0f} s{total}"
