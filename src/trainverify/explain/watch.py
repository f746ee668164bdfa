"""How long an explanation may take: the verdict stands without it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Final

SECONDS: Final = 40.0
STOPPED: Final = f"search stopped after {SECONDS:g} s"


class Stopped(Exception):
    """The time for an explanation is over."""


@dataclass(frozen=True)
class Watch:
    """Looked at wherever a search may take long; seconds are processor time, so that a busy machine gives the same answers."""

    until: float

    @staticmethod
    def started(seconds: float = SECONDS) -> Watch:
        return Watch(time.process_time() + seconds)

    def look(self) -> None:
        if time.process_time() > self.until:
            raise Stopped


NO_LIMIT: Final = Watch(math.inf)
