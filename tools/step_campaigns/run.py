"""Programs of a campaign in one or several processes."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as ready

from tools.step_campaigns.outcomes import Outcome

Judged = Callable[[Sequence[int], float], Iterator[Outcome]]  # outcomes of seeds in order; a limit of seconds for every verdict


def _worker(judged: Judged, seeds: Sequence[int], seconds: float, answer: Connection) -> None:
    for outcome in judged(seeds, seconds):
        answer.send(outcome)
    answer.send(None)


def campaign(judged: Judged, seeds: Sequence[int], workers: int, seconds: float) -> Iterator[Outcome]:
    """The outcome of every seed as soon as it is known. A worker's processes end with it."""
    if workers <= 1:
        yield from judged(seeds, seconds)
        return
    context = mp.get_context("spawn")
    processes, left = [], list[Connection]()
    for at in range(workers):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_worker, args=(judged, seeds[at::workers], seconds, theirs))
        process.start()
        theirs.close()
        processes.append(process)
        left.append(ours)
    try:
        while left:
            some = ready(left)
            for answer in [answer for answer in left if answer in some]:
                outcome: Outcome | None = answer.recv()
                if outcome is None:
                    left.remove(answer)
                else:
                    yield outcome
    finally:
        for process in processes:
            process.terminate()
            process.join()
