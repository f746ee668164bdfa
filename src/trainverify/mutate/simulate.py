"""All ranks of a plan run one by one at full size: the slow, plain oracle behind the campaign.

It shares the meaning of local operators with the rest of the program, and nothing else: no folding, no reduced sizes,
no schedule. Collectives are written here once more, on lists of NumPy arrays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trainverify.domains.numeric import NUMERIC
from trainverify.evaluate.run import MAGNITUDES, sample
from trainverify.graph.lineage import Layout, positions, region
from trainverify.graph.plan import Plan, units
from trainverify.graph.program import Op, Program, bind, inline
from trainverify.ops import OPS
from trainverify.ops.table import Lowered

Array = Any
Known = dict[tuple[int, int], Lowered]  # by the identity of an op and of the types of its program


class Stuck(Exception):
    """Ranks that wait for each other for ever."""


def inputs(logical: Program, seed: int, magnitude: float = 1.0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    types, domains = logical.tensors, logical.domains
    return {n: sample(rng, types[n].kind, types[n].shape, domains.get(n), magnitude) for n in logical.sources}


def local_op(op: Op, values: Mapping[str, Array], program: Program, known: Known | None = None) -> list[Array]:
    """`known` remembers what ops mean: thousands of ranks share most of theirs."""
    key = (id(op), id(program.tensors))
    lowered = None if known is None else known.get(key)
    if lowered is None:
        types = tuple(None if i is None else program.tensors[i] for i in op.inputs)
        lowered = OPS.lower(op.name, op.attributes, types)
        if known is not None:
            known[key] = lowered
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
    """Every rank's program and the values of its tensors. A rank runs until it waits, and goes on when what it waits for is there."""
    programs = _programs(plan)
    values = _sources(plan, logical, programs, given)
    at = [0] * plan.size
    mail: dict[tuple[int, int, int], deque[Array]] = {}
    listening: dict[tuple[int, int, int], int] = {}  # a mailbox → the rank that waits for it
    arrived: dict[str, set[int]] = {}  # group → members that wait in it
    known: Known = {}
    ready = deque(range(plan.size))
    while ready:
        r = ready.popleft()
        p = programs[r]
        while at[r] < len(p.ops):
            op = p.ops[at[r]]
            if op.name == "send":
                box = (r, op.get("peer"), op.get("tag", 0))
                mail.setdefault(box, deque()).append(values[r][str(op.inputs[0])])
                if box in listening:
                    ready.append(listening.pop(box))
            elif op.name == "recv":
                box = (op.get("peer"), r, op.get("tag", 0))
                if not mail.get(box):
                    listening[box] = r
                    break
                values[r][op.outputs[0]] = mail[box].popleft()
            elif op.get("group") is not None:
                name = op.get("group")
                group = plan.groups[name]
                arrived.setdefault(name, set()).add(r)
                if len(arrived[name]) < len(group):
                    break
                waiting = [programs[m].ops[at[m]] for m in group]
                if any(o.name != op.name for o in waiting):
                    break
                del arrived[name]
                xs = [values[m][str(o.inputs[0])] for m, o in zip(group, waiting, strict=True) if o.inputs]
                for m, o, y in zip(group, waiting, collective(op, xs, len(group)), strict=True):
                    values[m][o.outputs[0]] = y
                    if m != r:
                        at[m] += 1
                        ready.append(m)
            else:
                values[r].update(zip(op.outputs, local_op(op, values[r], p, known), strict=True))
            at[r] += 1
    for r, p in enumerate(programs):
        if at[r] < len(p.ops):
            raise Stuck(f"rank {r} waits at {p.ops[at[r]]}")
    return list(zip(programs, values, strict=True))


def _programs(plan: Plan) -> list[Program]:
    """What every rank runs, references resolved and calls inlined; ops without references are shared."""
    found: dict[int, Program] = {}
    for t in units(plan):
        flat = inline(t.program, plan.functions)
        for i, rank in enumerate(t.ranks):
            bindings = {name: column[i] for name, column in t.bindings.items()}
            found[rank] = replace(flat, ops=tuple(bind(op, bindings) for op in flat.ops)) if bindings else flat
    return [found[r] for r in range(plan.size)]


def _sources(plan: Plan, logical: Program, programs: Sequence[Program], given: Mapping[str, Array]) -> list[dict[str, Array]]:
    found: list[dict[str, Array]] = [{} for _ in programs]
    for lay in plan.lineage:
        if lay.logical not in given:
            continue
        full = given[lay.logical]
        for rank in lay.holders(plan.mesh):
            program = programs[rank]
            if lay.local not in program.sources:
                continue
            local = found[rank].setdefault(lay.local, np.zeros(program.tensors[lay.local].shape, full.dtype))
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


def worst(logical: Program, plan: Plan, seed: int = 0, times: float = 1.0) -> tuple[float, str]:
    """The largest relative difference of a required output on any rank, and its name; at inputs `times` as large, if it has values then."""
    for magnitude in (*((times,) if times > 1 else ()), *MAGNITUDES):  # smaller inputs where the logical program overflows
        given = inputs(logical, seed, magnitude)
        with np.errstate(all="ignore"):
            want = run_logical(logical, given)
        if all(bool(np.isfinite(want[o.tensor]).all()) for o in logical.outputs):
            break
    ranks = run_plan(plan, logical, given)
    held: list[list[Layout]] = [[] for _ in ranks]
    for lay in plan.lineage:
        for rank in lay.holders(plan.mesh):
            held[rank].append(lay)
    found = (0.0, "")
    for output in logical.outputs:
        full = want[output.tensor]
        if not np.isfinite(full).all():  # a point that says nothing
            continue
        for rank, (program, values) in enumerate(ranks):
            for got, part in _held(plan, held[rank], program, values, rank, output.role, output.of, output.tensor, full):
                found = max(found, (distance(got, part), f"{output} on rank {rank}"))
    return found


def _held(
    plan: Plan,
    lineage: Sequence[Layout],
    program: Program,
    values: Mapping[str, Array],
    rank: int,
    role: Any,
    of: str | None,
    tensor: str,
    full: Array,
) -> list[tuple[Array, Array]]:
    """What a rank has of an output, and what it should have; `lineage` is what the rank holds."""
    if role in ("loss", "metric"):
        name = program.output(role, of)
        return [] if name is None else [(values[name], full)]
    pairs: list[tuple[Layout, str]] = []
    for lay in lineage:
        if lay.logical == of and lay.local in program.sources:
            name = program.output(role, lay.local)
            if name is not None and not (role == "gradient" and _declared(lineage, tensor, name)):
                pairs.append((lay, name))
        elif role == "gradient" and lay.logical == tensor and any(o.tensor == lay.local and o.role == role for o in program.outputs):
            pairs.append((lay, lay.local))
    found = []
    for lay, name in pairs:
        for part in lay.parts(plan.mesh, rank, full.shape):
            got = region(part, values[name])
            found.append((got, full.reshape(-1)[positions(part, full.shape)].reshape(got.shape)))
    return found


def _declared(lineage: Sequence[Layout], tensor: str, local: str) -> bool:
    return any(lay.logical == tensor and lay.local == local for lay in lineage)
