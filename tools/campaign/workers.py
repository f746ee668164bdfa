"""Processes in which the cases of a campaign are judged, started anew now and then: memory goes back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Final, TypeVar

Case = TypeVar("Case")
Judged = TypeVar("Judged")
TOGETHER: Final = 100  # cases of one set of processes; a pool may wait forever for processes that end by themselves after some cases


def judged(judge: Callable[[Case], Judged], cases: Iterable[Case], workers: int) -> Iterator[Judged]:
    """What `judge` says of every case, in the order in which it is known; in this process with one worker."""
    if workers <= 1:
        yield from map(judge, cases)
        return
    left = iter(cases)
    while some := list(itertools.islice(left, TOGETHER)):
        with ProcessPoolExecutor(workers) as pool:
            running = [pool.submit(judge, case) for case in some]
            try:
                for future in as_completed(running):
                    yield future.result()
            except KeyboardInterrupt:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
