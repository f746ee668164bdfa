"""The same on a cluster of Dask: lost workers are replaced by its scheduler, results are those of a local run."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from trainverify.refusal import Refused
from trainverify.sweep.cache import Row
from trainverify.sweep.matrix import Case
from trainverify.sweep.run import ATTEMPTS, How, judge


def on_cluster(address: str, cases: Sequence[Case], how: How) -> Iterator[Row]:
    """Rows as they are ready, from the workers of a scheduler such as tcp://host:8786."""
    try:
        distributed: Any = importlib.import_module("distributed")
    except ImportError as error:
        raise Refused("--cluster needs Dask: pip install 'trainverify[cluster]'") from error
    try:
        client = distributed.Client(address, timeout="15s")
    except (OSError, TimeoutError, ValueError) as error:
        raise Refused(f"--cluster {address}: {error}") from error
    # A time limit is a signal, which only the main thread of a process gets: the scheduler has limits of its own.
    plain = replace(how, seconds=None)
    with client:
        futures = {client.submit(judge, case, plain, pure=False, retries=ATTEMPTS): case for case in cases}
        for done in distributed.as_completed(list(futures)):
            try:
                yield done.result()
            except Exception as error:
                yield Row(futures[done].name, "UNKNOWN", f"no answer from the cluster: {error}", 0.0)


__all__ = ["on_cluster"]
