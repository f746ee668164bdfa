"""Configurations of PyTorch and JAX code in a matrix: each is a command line, run in a process of its own beside the matrix."""

from __future__ import annotations

import itertools
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from trainverify.refusal import Refused
from trainverify.sweep.cache import Row

# What a job may say, besides its code: options of the command by their names, those with a value and those without.
VALUES: Final[Mapping[str, tuple[str, ...]]] = {
    "torch": ("world_size", "reference_args", "device", "mesh", "loss", "below", "ignore", "also", "engine"),
    "jax": ("mesh", "engine"),
}
FLAGS: Final[Mapping[str, tuple[str, ...]]] = {"torch": ("accept_choices", "real", "replay", "all_ranks"), "jax": ("hlo", "replay")}
CODE: Final = ("reference", "distributed", "script", "args", "name")
GRACE: Final = 10.0  # seconds beyond its own limit after which a process is ended
NOT_BUILT: Final = "NOT BUILT"


def commands(where: str, kind: str, block: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Name and command line of every configuration of a table: all products of its lists."""
    known = {*CODE, *VALUES[kind], *FLAGS[kind]} - ({"script", "args"} if kind == "jax" else set())
    if (other := next((k for k in block if k not in known), None)) is not None:
        raise Refused(f"{where}.{other}: no part of a job ({', '.join(sorted(known))})")
    two = {"reference", "distributed"} & block.keys()
    if two != ({"reference", "distributed"} if "script" not in block else set()):
        raise Refused(f"{where}: two functions, reference and distributed" + (", or a script" if kind == "torch" else ""))
    options = {k: v if isinstance(v, list) else [v] for k, v in block.items() if k != "name"}
    for k, values in options.items():
        plain = bool if k in FLAGS[kind] else int if k == "world_size" else str
        if not values or not all(type(v) is plain for v in values):
            raise Refused(f"{where}.{k}: {values!r}: {plain.__name__} is expected, or a list of them")
    for chosen in itertools.product(*options.values()):
        job = dict(zip(options, chosen, strict=True))
        varied = [f"{k}={v}" for k, v in job.items() if len(options[k]) > 1 and v is not False]
        code = job.get("script") or f"{job['distributed']} against {job['reference']}"
        yield " ".join([str(block.get("name", f"{kind} {code}")), *varied]), tuple(_line(kind, job))


def _line(kind: str, job: Mapping[str, Any]) -> Iterator[str]:
    yield kind
    if "script" in job:
        yield "run"
    for k, v in job.items():
        option = f"--{k.replace('_', '-')}"
        if k in FLAGS[kind]:
            yield from [option] if v else []
        elif k not in CODE:
            yield from (option, str(v))
    yield "--json"
    if "script" in job:
        yield from ("--", job["script"], *shlex.split(job.get("args", "")))
    else:
        yield from (job["reference"], job["distributed"])


def judged(name: str, line: Sequence[str], folder: str, points: int, seconds: float | None) -> Row:
    """The verdict that the command prints. It is not kept: what code depends on is known to `--cache` of the command only."""
    limits = ["--points", str(points), *([] if seconds is None else ["--timeout", str(seconds)])]
    call = [sys.executable, "-m", "trainverify", line[0], *limits, *line[1:]]
    try:
        done = subprocess.run(call, cwd=folder, capture_output=True, timeout=None if seconds is None else seconds + GRACE)
    except subprocess.TimeoutExpired:
        return Row(name, "UNKNOWN", f"time limit: no verdict within {seconds:g} s", seconds or 0.0)
    try:
        found = json.loads(done.stdout.decode().splitlines()[-1])
    except (ValueError, IndexError):
        return Row(name, "UNKNOWN", f"its process ended without an answer, with code {done.returncode}", 0.0)
    if "error" in found:
        return Row(name, NOT_BUILT if found["exit_code"] == 2 else "UNKNOWN", found["error"], 0.0)
    wrong = found.get("first_wrong")
    place = "" if wrong is None else f"{wrong['tensor']} on rank {wrong['rank']}: {wrong['cause']}"
    return Row(name, found["verdict"], found["reason"], found["seconds"], place)


__all__ = ["FLAGS", "NOT_BUILT", "VALUES", "commands", "judged"]
