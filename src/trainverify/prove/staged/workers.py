"""Stages in worker processes. One that crashes, is killed or runs out of memory costs its own stage only."""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from typing import Final

from trainverify.limits import OutOfTime
from trainverify.prove.staged.elements import Elements
from trainverify.prove.staged.execute import Limits, Result, check
from trainverify.prove.staged.records import Stage

_MEMORY: Final = 4000  # MB of address space of a worker, beyond what it starts with

Task = tuple[Stage, int]  # an element of the goal of a stage

# what workers inherit when they are forked: metadata only, no symbols
_work: tuple[Sequence[Sequence[Task]], Elements, Limits] | None = None


def run_all(
    tasks: Sequence[Task],
    elements: Elements,
    limits: Limits,
    workers: int,
    done: Callable[[int, Result], None],
    progress: Callable[[str], None] = lambda text: None,
) -> None:
    """Every task, in this process or in workers; `done` hears of each result at once. Elements of one stage go together,
    up to the first that is not shown."""
    groups: dict[Stage, list[int]] = {}
    for n, (stage, _) in enumerate(tasks):
        groups.setdefault(stage, []).append(n)
    bundles = [[tasks[n] for n in numbers] for numbers in groups.values()]
    numbers = list(groups.values())

    def finished(bundle: int, results: Sequence[Result]) -> None:
        for n, result in zip(numbers[bundle], results, strict=False):
            done(n, result)

    if workers < 1 or not tasks:
        for n, bundle in enumerate(bundles):
            progress(f"stages {n + 1} of {len(bundles)}: {bundle[0][0].goal.name}")
            finished(n, _guarded(bundle, elements, limits))
        return
    global _work
    _work = (bundles, elements, limits)
    try:
        _in_pools(bundles, workers, finished, progress)
    finally:
        _work = None


Finished = Callable[[int, Sequence[Result]], None]


def _in_pools(bundles: Sequence[Sequence[Task]], workers: int, finished: Finished, progress: Callable[[str], None]) -> None:
    """After a crash those that were running are tried again one by one, so that the guilty one is known; the rest goes on."""
    left = list(range(len(bundles)))
    count = 0

    def counted(n: int, results: Sequence[Result]) -> None:
        nonlocal count
        count += 1
        finished(n, results)
        progress(f"{count} of {len(bundles)} stages")

    while left:
        broken = _pool(left, workers, counted)
        if broken is None:
            break
        running, left = broken
        for n in running:
            if _pool([n], 1, counted) is not None:
                counted(n, [Result(False, "the worker process ended: killed, crashed or out of memory") for _ in bundles[n]])


def _pool(batch: list[int], workers: int, finished: Finished) -> tuple[list[int], list[int]] | None:
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
            ready, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in ready:
                results = future.result()
                finished(running.pop(future), results)
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    threading.Thread(target=_follow, daemon=True).start()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as f:
        mine = int(f.read().split()[0]) * resource.getpagesize()
    wanted = mine + (_MEMORY << 20)
    if soft == resource.RLIM_INFINITY or wanted < soft:
        resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))


def _follow() -> None:
    """A worker ends with its parent, however that ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _one(n: int) -> list[Result]:
    assert _work is not None
    bundles, elements, limits = _work
    return _guarded(bundles[n], elements, limits)


def _guarded(bundle: Sequence[Task], elements: Elements, limits: Limits) -> list[Result]:
    """Results up to the first element that is not shown. Everything that was made on the way is gone afterwards."""
    results: list[Result] = []
    for stage, n in bundle:
        if results and not results[-1].proved:
            break
        try:
            results.append(check(stage, n, elements, limits))
        except MemoryError:
            gc.collect()
            results.append(Result(False, "out of memory"))
        except Exception as error:
            if OutOfTime.__name__ in str(error):  # raised inside the solver's library, which wraps it
                raise OutOfTime(str(error)) from error
            results.append(Result(False, f"the check failed: {type(error).__name__}: {error}"))
    return results
