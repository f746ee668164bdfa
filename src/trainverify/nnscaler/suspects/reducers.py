"""Reducers that leave out a weight, sum over other ranks than those that share it, twice, or too early."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from trainverify.check.findings import names
from trainverify.nnscaler.dump import OPERATIONS, Cell, Dump, Slice, Step, positions
from trainverify.nnscaler.edit import cells, sequenced
from trainverify.nnscaler.suspects.kinds import Member, Mend, Suspect, every, instead, together


def reducers(dump: Dump) -> Iterator[Suspect]:
    """Gradients that are not summed over those who share their weight, or twice, or before they are there."""
    groups: dict[object, list[Suspect]] = {}
    for device in dump.devices:
        for key, cell, why, mend, weights in _reducers(dump, device):
            groups.setdefault(key, []).append(Suspect((Member(device, cell, every(dump)),), why, mend, weights))
    for group in groups.values():
        members = tuple(m for s in group for m in s.members)
        yield replace(group[0], members=members, mend=together(s.mend for s in group if s.mend is not None))
    if dump.reducer != "sum":
        everywhere = tuple(
            Member(d, s.cell, every(dump)) for d in dump.devices for s in dump.sequences[d] if s.cell.kind == "IRWeightReducer"
        )
        yield Suspect(everywhere, f"reducer_op is {dump.reducer}", lambda dump: replace(dump, reducer="sum"))


def _reducers(dump: Dump, device: int) -> Iterator[tuple[object, Cell | None, str, Mend, tuple[str, ...]]]:
    """What is wrong with the reducers of a device; what is alike on several devices has the same key."""
    shared = {tid: found for (d, tid), found in _shared(dump).items() if d == device}
    weights = {tid: t for tid, (t, _) in shared.items()}
    wanted = {tid: group for tid, (_, group) in shared.items()}
    steps = [s for s in dump.sequences[device] if s.cell.kind == "IRWeightReducer"]
    counts = Counter(t.tid for s in steps for t in s.cell.tensors())
    left = [tid for tid, group in wanted.items() if not counts[tid] and (dump.replicas > 1 or len(group) > 1)]
    if left:
        why = f"no reducer sums the gradients of {names(weights[t].full.name for t in left)}"
        mend = _reducing(device, [weights[t] for t in left], wanted)
        yield ("left", why), steps[0].cell if len(steps) == 1 else None, why, mend, tuple(weights[t].full.name for t in left)
    twice = [tid for tid, n in counts.items() if n > 1]
    if twice:
        why = f"the gradients of {names(weights[t].full.name for t in twice if t in weights)} are summed {counts[twice[0]]} times"
        yield ("twice", why), steps[-1].cell, why, _once(device), tuple(weights[t].full.name for t in twice if t in weights)
    last = max((i for i, s in enumerate(dump.sequences[device]) if s.cell.kind == "IRSegment"), default=-1)
    for i, step in enumerate(dump.sequences[device]):
        cell = step.cell
        if cell.kind != "IRWeightReducer":
            continue
        groups = {wanted[t.tid] for t in cell.tensors() if t.tid in wanted}
        for rank in range(device, dump.ranks, len(dump.devices)):
            members = positions(cell.scaled.get(rank, _ranks(dump, cell.device)))
            if len(groups) == 1 and (right := _ranks(dump, next(iter(groups)))) != members:
                why = f"rank {rank} sums over {list(members)}; its weights are shared by {list(right)}"
                mend = instead(device, cell, replace(cell, device=next(iter(groups)), scaled={}))
                yield "ranks", cell, why, mend, tuple(t.full.name for t in cell.tensors())
                break
        if i < last:
            yield "early", cell, "it runs before the last backward pass", _last(device), tuple(t.full.name for t in cell.tensors())


def _ranks(dump: Dump, devices: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(d + k * len(dump.devices) for k in range(dump.replicas) for d in devices))


def _shared(dump: Dump) -> dict[tuple[int, int], tuple[Slice, tuple[int, ...]]]:
    """(device, weight) → the devices whose gradients of it must be added up: those of a weight that comes in parts, else itself."""
    users: dict[tuple[int, int], Slice] = {}
    parts: set[tuple[int, int]] = set()
    for device in dump.devices:
        for cell in cells(dump, device):
            if cell.kind in OPERATIONS:
                for t in cell.tensors():
                    if t.full.param and not t.full.grad and t.grad is not None:
                        users[device, t.tid] = t
                        if t.grad.valmap[1] > 1:
                            parts.add((device, t.tid))
    result = {}
    for (device, tid), t in users.items():
        whole = tuple(d for d in dump.devices if (d, tid) in parts)
        result[device, tid] = (t, whole if (device, tid) in parts else (device,))
    return result


def _reducing(device: int, weights: Sequence[Slice], wanted: Mapping[int, tuple[int, ...]]) -> Mend:
    """One more reducer for each group of devices."""

    def mend(dump: Dump) -> Dump:
        groups: dict[tuple[int, ...], list[Slice]] = {}
        for t in weights:
            groups.setdefault(wanted[t.tid], []).append(t)
        steps = list(dump.sequences[device])
        for n, (group, tensors) in enumerate(groups.items()):
            cell = Cell("IRWeightReducer", -1 - n, "reducer", "", False, group, tuple(tensors), (), {}, None)
            steps.append(Step(cell, cell.inputs, cell.outputs))
        return sequenced(dump, device, tuple(steps))

    return mend


def _once(device: int) -> Mend:
    def mend(dump: Dump) -> Dump:
        seen: set[int] = set()
        steps = []
        for s in dump.sequences[device]:
            if s.cell.kind == "IRWeightReducer":
                kept = tuple(t for t in s.cell.tensors() if t.tid not in seen)
                seen.update(t.tid for t in kept)
                cell = replace(s.cell, inputs=kept)
                s = Step(cell, cell.inputs, cell.outputs)
            steps.append(s)
        return sequenced(dump, device, tuple(steps))

    return mend


def _last(device: int) -> Mend:
    def mend(dump: Dump) -> Dump:
        steps = dump.sequences[device]
        return sequenced(dump, device, tuple(sorted(steps, key=lambda s: s.cell.kind == "IRWeightReducer")))

    return mend
