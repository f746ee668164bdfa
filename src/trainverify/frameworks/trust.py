"""Do shims change what a framework does? A tiny job is captured with them and run for real without: the same communication, the same
numbers."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from trainverify.domains.arrays import Array
from trainverify.frameworks.doubled import doubled
from trainverify.frameworks.job import Job, Trial
from trainverify.frameworks.shims import Checked
from trainverify.graph.mesh import Mesh
from trainverify.ops.table import OpTable
from trainverify.torch.agreement import Call
from trainverify.torch.calls import Calls
from trainverify.torch.captured import Captured, condition_name
from trainverify.torch.eager import Outputs, run_step
from trainverify.torch.inputs import Batch, Ids, lies
from trainverify.torch.judge import captures, pair
from trainverify.torch.launch import Failed, run
from trainverify.torch.replay import Evaluated, compared, evaluated
from trainverify.torch.ways import Choices, Way
from trainverify.translate.targets import CaptureError

DOUBLE: Final = 1e-5  # of the largest element of a tensor: constants of the build are in single precision where code is captured
SINGLE: Final = 2e-4
SECONDS: Final = 1800.0  # of the clock that a process may take, on a busy machine


class Differs(Exception):
    """A real run shows something else than the capture."""


@dataclass(frozen=True)
class Ran:
    """What a process that ran for real computed, read and asked for."""

    outputs: Outputs
    batch: Mapping[str, Array]
    calls: tuple[Call, ...]


def checked(job: Job, table: OpTable, tell: Callable[[str], None]) -> Checked:
    """Whether a real run agrees with what is captured with shims, at a tiny size and with the same parallelism."""
    if job.trial is None:
        return Checked(False, "there is no real run to compare with", ran=False)
    with tempfile.TemporaryDirectory() as folder:
        try:
            trial = job.trial(Path(folder))
            return Checked(True, _compared(trial, table, tell))
        except CaptureError as error:
            return Checked(False, str(error), ran=False)
        except Differs as error:
            return Checked(False, str(error))


def _compared(trial: Trial, table: OpTable, tell: Callable[[str], None]) -> str:
    job = trial.job
    tell(f"checking shims: capturing {trial.text} on {job.mesh}")
    way, ours = _captured(job, table, tell, ())
    tell(f"checking shims: running {trial.text} on {job.mesh} for real")
    real = _together([_rank(trial, ours, r) for r in range(job.mesh.size)])
    whole = assembled(job.batch, job.mesh, [r.batch for r in real])
    at = ours.at({**ours.inputs, **whole})
    while (choices := other_way(way, at)) is not None:
        way, ours = _captured(job, table, tell, choices)
        at = ours.at(at.inputs)
    (alone,) = _together([_alone(trial, at, whole)])
    same_calls(way.ranks, real)
    found = compared(at, {None: alone.outputs, **{i: r.outputs for i, r in enumerate(real)}}, SINGLE if trial.single else DOUBLE)
    if not found.agrees:
        raise Differs(f"the real run computes something else: {found}")
    calls = sum(len(r.calls) for r in real)
    return (
        f"{trial.text} on {job.mesh} for real: the same {calls} calls for communication, "
        f"{found.compared} outputs that agree (worst difference {found.worst:.1g})"
    )


def _captured(job: Job, table: OpTable, tell: Callable[[str], None], choices: Choices) -> tuple[Way, Evaluated]:
    given = (job.reference, job.distributed, job.mesh.size, job.batch, job.mesh, table, None, tell, SECONDS)
    ((reference, ranks),) = captures(*given, all_ranks=True, choices=(choices,))
    way = Way(reference, tuple(ranks))
    if (text := way.disagreement()) is not None:
        raise Differs(text)
    return way, evaluated(pair(reference, ranks, job.mesh, job.batch, job.cuts, job.loss), table)


def other_way(way: Way, at: Evaluated) -> Choices | None:
    """The branches on data up to the first one that these values take the other way than what was captured; None if there is none."""
    for i, taken in enumerate(way.choices):
        name = at.made.logical.output("metric", condition_name(i))
        value = None if name is None else at.value(None, name)
        if value is None:
            raise Differs(f"{condition_name(i)} of the reference is not there to compare")
        if bool(value) != taken:
            return (*way.choices[:i], not taken)
    return None


def _rank(trial: Trial, ours: Evaluated, rank: int) -> Callable[[], Ran]:
    values, names = ours.sources(rank), ours.program(rank).sources
    return lambda: ran(lambda: trial.distributed(rank, trial.job.mesh.size), {}, values, names, trial)


def _alone(trial: Trial, ours: Evaluated, batch: Mapping[str, Array]) -> Callable[[], Ran]:
    values, names = ours.sources(None), ours.program(None).sources
    return lambda: ran(
        trial.reference, {n: torch.from_numpy(np.array(v)) for n, v in batch.items()}, values, names, replace(trial, logs=False)
    )


def ran(
    build: Callable[[], Any], inputs: Mapping[str, torch.Tensor], values: Mapping[str, Array], names: Sequence[str], trial: Trial
) -> Ran:
    """One step; if it logs, without the communication after the optimizer's update."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    ended = [0]
    with contextlib.nullcontext() if trial.single else doubled():
        step = build()
        with Calls() as calls:
            hook = register_optimizer_step_post_hook(lambda *args: ended.append(len(calls.made)))
            outputs = run_step(step, inputs, values, names)
            hook.remove()
    batch = {n: t.numpy() for n, t in getattr(step, "batch", inputs).items()}
    return Ran(outputs, batch, tuple(calls.made[: ended[-1]] if trial.logs else calls.made))


def _together(works: Sequence[Callable[[], Ran]]) -> list[Ran]:
    found = run(works, together=True, seconds=SECONDS)
    good = []
    for i, result in enumerate(found):
        if isinstance(result, Failed):
            raise CaptureError(f"the real run fails ({i + 1} of {len(works)} processes): {result.kind}: {result.message}")
        good.append(result)
    return good


def assembled(batch: Batch, mesh: Mesh, parts: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """The whole batch from what ranks read; ranks that hold the same rows must have read the same."""
    whole: dict[str, Array] = {}
    for name, spec in batch.items():
        made = np.zeros(spec.shape, parts[0][name].dtype)
        known = np.zeros(spec.shape, bool)
        for rank, part in enumerate(parts):
            (where,) = lies(name, spec).parts(mesh, rank, spec.shape)
            at = np.ix_(*(r.positions() for r in where.logical))
            if part[name].shape != made[at].shape:
                raise Differs(f"{name} of rank {rank} is {list(part[name].shape)} for real, {list(made[at].shape)} in the capture")
            if (made[at] != part[name])[known[at]].any():
                raise Differs(f"{name} of rank {rank} is not what other ranks with the same rows read")
            made[at], known[at] = part[name], True
        if not known.all():
            raise Differs(f"{name}: no rank reads all of it")
        if isinstance(spec, Ids) and not (((made >= 0) & (made < spec.below)) | (made == spec.ignore)).all():
            raise Differs(f"{name}: the data loader yields numbers that are not below {spec.below}")
        whole[name] = made
    return whole


def same_calls(captured: Sequence[Captured], real: Sequence[Ran]) -> None:
    """Every rank asks for the same communication in the same order."""
    for c, r in zip(captured, real, strict=True):
        ours, theirs = ([replace(x, dtype=x.dtype.replace("float64", "float32")) for x in calls] for calls in (c.ledger.calls, r.calls))
        at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
        if at == len(ours) == len(theirs):
            continue
        shown = [str(x[at]) if at < len(x) else "nothing more" for x in (ours, theirs)]
        raise Differs(f"communication {at + 1} of rank {c.rank} is {shown[0]} in the capture, {shown[1]} for real")


__all__ = ["Differs", "Ran", "assembled", "checked", "ran", "same_calls"]
