"""Stages in worker processes. One that crashes, is killed or runs out of memory costs its own stage only."""

from __future__ import annotations

import gc
import multiprocessing
import resource
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Final

from trainverify.prove.staged.align import Alignment
from trainverify.prove.staged.execute import Limits, Result, check
from trainverify.prove.staged.stages import Stage

_MEMORY: Final = 4000  # MB of address space of a worker, beyond what it starts with

Task = tuple[Stage, int]  # an element of the goal of a stage

# what workers inherit when they are forked: metadata only, no symbols
_work: tuple[Sequence[Sequence[Task]], Alignment, Limits] | None = None


def run_all(
    tasks: Sequence[Task], alignment: Alignment, limits: Limits, workers: int, progress: Callable[[str], None] = lambda text: None
) -> list[Result]:
    """Results in the order of the tasks; without workers, in this process. Elements of one stage go together."""
    groups: dict[int, list[int]] = {}
    for n, (stage, _) in enumerate(tasks):
        groups.setdefault(id(stage), []).append(n)
    bundles = [[tasks[n] for n in numbers] for numbers in groups.values()]
    if workers < 1 or not tasks:
        made = []
        for n, bundle in enumerate(bundles):
            progress(f"stages {n + 1} of {len(bundles)}: {bundle[0][0].goal.name}")
            made.append(_guarded(bundle, alignment, limits))
    else:
        global _work
        _work = (bundles, alignment, limits)
        try:
            made = _in_pools(bundles, workers, progress)
        finally:
            _work = None
    by_task = {
        n: result for numbers, results in zip(groups.values(), made, strict=True) for n, result in zip(numbers, results, strict=True)
    }
    return [by_task[n] for n in range(len(tasks))]


def _in_pools(bundles: Sequence[Sequence[Task]], workers: int, progress: Callable[[str], None]) -> list[list[Result]]:
    """After a crash those that were running are tried again one by one, so that the guilty one is known; the rest goes on."""
    results: dict[int, list[Result]] = {}
    left = list(range(len(bundles)))
    while left:
        broken = _pool(left, workers, results, progress, len(bundles))
        if broken is None:
            break
        running, left = broken
        for n in running:
            if _pool([n], 1, results, progress, len(bundles)) is not None:
                results[n] = [Result(False, "the worker process ended: killed, crashed or out of memory") for _ in bundles[n]]
    return [results[n] for n in range(len(bundles))]


def _pool(
    batch: list[int], workers: int, results: dict[int, list[Result]], progress: Callable[[str], None], count: int
) -> tuple[list[int], list[int]] | None:
    """Run a batch; None, or (stages that may have ended their worker, stages not started) if the pool broke."""
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(min(workers, len(batch)), mp_context=context, initializer=_limit)
    waiting = list(batch)
    running: dict[Future[list[Result]], int] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:  # no queue: what runs is what may be guilty
                n = waiting.pop(0)
                running[pool.submit(_one, n)] = n
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                results[running[future]] = future.result()
                del running[future]
                progress(f"{len(results)} of {count} stages")
        pool.shutdown()
        return None
    except BrokenProcessPool:
        pool.shutdown(wait=False, cancel_futures=True)
        return sorted(running.values()), waiting
    except BaseException:
        for process in list((pool._processes or {}).values()):
            process.terminate()
        pool.shutdown(wait=False, cancel_futures=True)
        raise


def _limit() -> None:
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as f:
        mine = int(f.read().split()[0]) * resource.getpagesize()
    wanted = mine + (_MEMORY << 20)
    if soft == resource.RLIM_INFINITY or wanted < soft:
        resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))


def _one(n: int) -> list[Result]:
    assert _work is not None
    bundles, alignment, limits = _work
    return _guarded(bundles[n], alignment, limits)


def _guarded(bundle: Sequence[Task], alignment: Alignment, limits: Limits) -> list[Result]:
    """Everything that was made on the way is gone afterwards."""
    results: list[Result] = []
    for stage, n in bundle:
        try:
            results.append(check(stage, n, alignment, limits))
        except MemoryError:
            gc.collect()
            results.append(Result(False, "out of memory"))
    return results
