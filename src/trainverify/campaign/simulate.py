"""All ranks of a plan run one by one at full size: the slow, plain oracle behind the campaign.

It shares the meaning of local operators with the rest of the program, and nothing else: no folding, no reduced sizes,
no schedule. Collectives are written here once more, on lists of NumPy arrays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trainverify.domains.numeric import NUMERIC
from trainverify.evaluate.run import MAGNITUDES, sample
from trainverify.graph.lineage import Layout, positions, region
from trainverify.graph.plan import Plan, expand
from trainverify.graph.program import Op, Program, inline
from trainverify.ops import OPS

Array = Any


class Stuck(Exception):
    """Ranks that wait for each other for ever."""


def inputs(logical: Program, seed: int, magnitude: float = 1.0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    types, domains = logical.tensors, logical.domains
    return {n: sample(rng, types[n].kind, types[n].shape, domains.get(n), magnitude) for n in logical.sources}


def local_op(op: Op, values: Mapping[str, Array], program: Program) -> list[Array]:
    types = tuple(None if i is None else program.tensors[i] for i in op.inputs)
    lowered = OPS.lower(op.name, op.attributes, types)
    return [np.array(v) for v in NUMERIC.run(lowered.outputs, [None if i is None else values[i] for i in op.inputs])]


def run_logical(logical: Program, given: Mapping[str, Array]) -> dict[str, Array]:
    flat = inline(logical)
    values = dict(given)
    for op in flat.ops:
        values.update(zip(op.outputs, local_op(op, values, flat), strict=True))
    return values


def collective(op: Op, xs: Sequence[Array], members: int) -> list[Array]:
    """What every member gets from what the members (or the root) give."""
    kind, dim = op.get("op", "sum"), op.get("dim", 0)

    def combined() -> Array:
        stack = np.stack(xs)
        reductions: dict[str, Any] = {"sum": np.sum, "avg": np.mean, "max": np.max, "min": np.min, "prod": np.prod}
        return reductions[kind](stack, axis=0)

    match op.name:
        case "all_reduce":
            return [combined()] * members
        case "all_gather":
            return [np.concatenate(list(xs), axis=dim)] * members
        case "reduce_scatter":
            return list(np.split(combined(), members, axis=dim))
        case "all_to_all":
            cut = [np.split(x, members, axis=op.get("split_dim")) for x in xs]
            return [np.concatenate([c[j] for c in cut], axis=op.get("concat_dim")) for j in range(members)]
        case "broadcast":
            return [xs[0]] * members
    raise NotImplementedError(op.name)


def run_plan(plan: Plan, logical: Program, given: Mapping[str, Array]) -> list[tuple[Program, dict[str, Array]]]:
    """Every rank's program and the values of its tensors."""
    programs = [inline(expand(plan, r)) for r in range(plan.size)]
    values: list[dict[str, Array]] = [_sources(plan, logical, p, r, given) for r, p in enumerate(programs)]
    at = [0] * plan.size
    mail: dict[tuple[int, int, int], deque[Array]] = {}
    moved = True
    while moved:
        moved = False
        for r, p in enumerate(programs):
            while at[r] < len(p.ops):
                op = p.ops[at[r]]
                if op.name == "send":
                    mail.setdefault((r, op.get("peer"), op.get("tag", 0)), deque()).append(values[r][str(op.inputs[0])])
                elif op.name == "recv":
                    box = mail.get((op.get("peer"), r, op.get("tag", 0)))
                    if not box:
                        break
                    values[r][op.outputs[0]] = box.popleft()
                elif op.get("group") is not None:
                    group = plan.groups[op.get("group")]
                    waiting = [programs[m].ops[at[m]] if at[m] < len(programs[m].ops) else None for m in group]
                    if any(o is None or o.get("group") != op.get("group") or o.name != op.name for o in waiting):
                        break
                    xs = [values[m][str(o.inputs[0])] for m, o in zip(group, waiting, strict=True) if o is not None and o.inputs]
                    for m, o, y in zip(group, waiting, collective(op, xs, len(group)), strict=True):
                        assert o is not None
                        values[m][o.outputs[0]] = y
                        at[m] += m != r
                else:
                    values[r].update(zip(op.outputs, local_op(op, values[r], p), strict=True))
                at[r] += 1
                moved = True
    for r, p in enumerate(programs):
        if at[r] < len(p.ops):
            raise Stuck(f"rank {r} waits at {p.ops[at[r]]}")
    return list(zip(programs, values, strict=True))


def _sources(plan: Plan, logical: Program, program: Program, rank: int, given: Mapping[str, Array]) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for lay in plan.lineage:
        if lay.logical in given and lay.local in program.sources and rank in lay.holders(plan.mesh):
            full = given[lay.logical]
            local = found.setdefault(lay.local, np.zeros(program.tensors[lay.local].shape, full.dtype))
            for part in lay.parts(plan.mesh, rank, full.shape):
                target = region(part, local)
                target[...] = full.reshape(-1)[positions(part, full.shape)].reshape(target.shape)
    return found


def distance(got: Array, want: Array) -> float:
    """Relative to the largest entry; values near zero count as they are."""
    if not got.size:
        return 0.0
    gap = np.abs(np.asarray(got, np.float64) - np.asarray(want, np.float64)).max()
    scale = max(float(np.abs(np.asarray(want, np.float64)).max()), 1e-5)
    return float(gap) / scale if np.isfinite(gap) else float("inf")


def worst(logical: Program, plan: Plan, seed: int = 0) -> tuple[float, str]:
    """The largest relative difference of any required output on any rank, and its name."""
    for magnitude in MAGNITUDES:  # smaller inputs where the logical program overflows
        given = inputs(logical, seed, magnitude)
        with np.errstate(all="ignore"):
            want = run_logical(logical, given)
        if all(bool(np.isfinite(want[o.tensor]).all()) for o in logical.outputs):
            break
    ranks = run_plan(plan, logical, given)
    found = (0.0, "")
    for output in logical.outputs:
        full = want[output.tensor]
        if not np.isfinite(full).all():  # a point that says nothing
            continue
        for rank, (program, values) in enumerate(ranks):
            for got, part in _held(plan, logical, program, values, rank, output.role, output.of, output.tensor, full):
                found = max(found, (distance(got, part), f"{output} on rank {rank}"))
    return found


def _held(
    plan: Plan,
    logical: Program,
    program: Program,
    values: Mapping[str, Array],
    rank: int,
    role: Any,
    of: str | None,
    tensor: str,
    full: Array,
) -> list[tuple[Array, Array]]:
    if role in ("loss", "metric"):
        name = program.output(role, of)
        return [] if name is None else [(values[name], full)]
    pairs: list[tuple[Layout, str]] = []
    for lay in plan.lineage:
        if rank in lay.holders(plan.mesh):
            if lay.logical == of and lay.local in program.sources:
                name = program.output(role, lay.local)
                if name is not None and not (role == "gradient" and _declared(plan, tensor, rank, name)):
                    pairs.append((lay, name))
            elif role == "gradient" and lay.logical == tensor and any(o.tensor == lay.local and o.role == role for o in program.outputs):
                pairs.append((lay, lay.local))
    found = []
    for lay, name in pairs:
        for part in lay.parts(plan.mesh, rank, full.shape):
            got = region(part, values[name])
            found.append((got, full.reshape(-1)[positions(part, full.shape)].reshape(got.shape)))
    return found


def _declared(plan: Plan, tensor: str, rank: int, local: str) -> bool:
    return any(lay.logical == tensor and lay.local == local and rank in lay.holders(plan.mesh) for lay in plan.lineage)
