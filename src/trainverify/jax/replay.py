"""Replay: the *translated* programs, run in our numeric domain on all ranks, against JAX itself on host devices.

A translation that loses or invents something shows here as a number. Every output of every rank is compared, element by element.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

import jax
from trainverify.domains.numeric import NUMERIC
from trainverify.evaluate.run import random_inputs, run_logical, run_plan
from trainverify.evaluate.small import shrink_system
from trainverify.graph.obligations import obligations
from trainverify.graph.plan import units
from trainverify.jax.inputs import shape_of
from trainverify.jax.judge import Pair, takes_mesh
from trainverify.jax.meshes import real_mesh
from trainverify.ops import OPS
from trainverify.ops.table import OpTable
from trainverify.translate.targets import CaptureError
from trainverify.verdicts import FULL, MAX_ELEMENTS, related

TOLERANCE: Final = 3e-4  # of the largest element of a tensor: float32 against float64
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Mismatch:
    rank: int | None  # None: the reference
    output: str
    error: float

    def __str__(self) -> str:
        who = "the reference" if self.rank is None else f"rank {self.rank}"
        return f"{who}: {self.output} differs by {self.error:.2g} of its largest element"


@dataclass(frozen=True)
class Replay:
    compared: int
    worst: float
    mismatches: tuple[Mismatch, ...] = ()

    @property
    def agrees(self) -> bool:
        return not self.mismatches and self.compared > 0

    def __str__(self) -> str:
        if self.agrees:
            return f"replay: {self.compared} outputs of the translated programs agree with JAX (worst difference {self.worst:.1g})"
        return "; ".join(["replay does not agree with JAX", *map(str, self.mismatches[:5])])


def arguments(made: Pair, args: Sequence[Any], inputs: Mapping[str, Array]) -> tuple[Any, ...]:
    """The arguments of the step with the values that our evaluation starts from."""
    leaves, tree = jax.tree_util.tree_flatten(tuple(args))
    arrays = [jax.numpy.asarray(inputs[a.name], shape_of(x).dtype) for a, x in zip(made.reference.arguments, leaves, strict=True)]
    return tuple(jax.tree_util.tree_unflatten(tree, arrays))


def replay(
    reference: Callable[..., Any], distributed: Callable[..., Any], args: Sequence[Any], made: Pair, ops: OpTable = OPS, seed: int = 0
) -> Replay:
    """Both programs at the sizes they were traced at, and the code they come from, on the same random values."""
    if any(p.draws for p in made.parts):
        raise CaptureError("a step that draws random numbers is not replayed")
    parts = units(made.plan)
    wanted, _ = obligations(made.logical, made.plan, parts)
    small = shrink_system(related(made.logical, made.plan, ops, parts, wanted), base=FULL, most=MAX_ELEMENTS)
    inputs = dict(random_inputs(small, seed))
    for part in made.parts:
        inputs |= {n: np.asarray(c.data) for n, c in part.constants.items()}
    with np.errstate(all="ignore"):
        logical = run_logical(small, inputs, NUMERIC)
        plan = run_plan(small, made.plan.lineage, inputs, NUMERIC)
    given = arguments(made, args, inputs)
    one = jax.tree_util.tree_leaves(jax.jit(reference)(*given))
    step = distributed(real_mesh(made.mesh or made.plan.mesh)) if takes_mesh(distributed) else distributed
    many = jax.tree_util.tree_leaves(jax.jit(step)(*given))
    found: list[Mismatch] = []
    compared, worst = 0, 0.0

    def compare(rank: int | None, what: str, ours: Array | None, theirs: Array) -> None:
        nonlocal compared, worst
        error = float("inf") if ours is None else _difference(np.asarray(ours), theirs)
        compared, worst = compared + 1, max(worst, error)
        if not error <= TOLERANCE:
            found.append(Mismatch(rank, what, error))

    for o, theirs in zip(made.logical.outputs[: len(one)], one, strict=True):  # after them, what is only compared
        compare(None, str(o), logical.get(o.tensor), np.asarray(theirs))
    for c, k in enumerate(small.classes):
        for row, rank in enumerate(k.ranks):
            for o, theirs in zip(k.program.outputs[: len(many)], many, strict=True):
                ours = plan.get(c, row, o.tensor)
                compare(rank, str(o), ours, _share(made, rank, theirs, None if ours is None else np.asarray(ours).shape, o.of))
    return Replay(compared, worst, tuple(found))


def _share(made: Pair, rank: int, theirs: Any, shape: tuple[int, ...] | None, of: str | None) -> Array:
    """What a device holds of a result; cut as the argument is if JAX leaves it cut otherwise."""
    held = {s.device: s.data for s in theirs.addressable_shards}
    mine = held.get(jax.devices()[rank])
    if mine is not None and tuple(mine.shape) == shape:
        return np.asarray(mine)
    lay = next((x for x in made.plan.lineage if x.logical == of), None)
    whole = np.asarray(theirs)
    if lay is None:
        return whole
    (part,) = lay.parts(made.plan.mesh, rank, whole.shape)
    return whole[np.ix_(*(r.positions() for r in part.logical))] if whole.ndim else whole


def _difference(ours: Array, theirs: Array) -> float:
    """The largest difference, relative to the largest element; infinite for another shape."""
    if ours.shape != theirs.shape:
        return float("inf")
    if not ours.size:
        return 0.0
    theirs = theirs.astype(np.float64)
    scale = max(float(np.abs(theirs).max()), 1e-6)
    return float(np.abs(ours - theirs).max()) / scale


__all__ = ["Mismatch", "Replay", "replay"]
