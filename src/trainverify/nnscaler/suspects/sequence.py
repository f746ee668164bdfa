"""Sequences that take tensors of another micro-batch, or run a cell more or less often than there are micro-batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainverify.check.findings import names
from trainverify.nnscaler.dump import Cell, Dump, Slice, Step
from trainverify.nnscaler.edit import same, sequenced
from trainverify.nnscaler.suspects.kinds import Member, Mend, Suspect, every, together


def _numbered(dump: Dump, device: int) -> Iterator[tuple[int, Step, int]]:
    """Steps with the number of their cell's run."""
    counts: dict[int, int] = {}
    for i, step in enumerate(dump.sequences[device]):
        n = counts[step.cell.cid] = counts.get(step.cell.cid, -1) + 1
        yield i, step, n


def _made(dump: Dump, device: int) -> dict[int, int]:
    """Tensor between cells → the run of the cell that makes it."""
    return {tid: n for tid, (n, _) in _stands(dump, device).items()}


def _stands(dump: Dump, device: int) -> dict[int, tuple[int, Slice]]:
    """Tensor between cells → the run of the cell that makes it, and the cell's own tensor that it stands for."""
    found: dict[int, tuple[int, Slice]] = {}
    for _, step, n in _numbered(dump, device):
        for own, given in zip(step.cell.outputs, step.outputs, strict=True):
            if isinstance(own, Slice) and isinstance(given, Slice):
                found[given.tid] = (n, own)
    return found


def _given(dump: Dump, device: int, own: int, micro: int) -> Slice | None:
    """The tensor that stands for a cell's output in a micro-batch."""
    for _, step, n in _numbered(dump, device):
        for mine, given in zip(step.cell.outputs, step.outputs, strict=True):
            if n == micro and isinstance(mine, Slice) and mine.tid == own and isinstance(given, Slice):
                return given
    return None


def _taken(dump: Dump, device: int, own: int, micro: int) -> Slice | None:
    """The tensor that a cell takes for its input in a micro-batch."""
    for _, step, n in _numbered(dump, device):
        for mine, given in zip(step.cell.inputs, step.inputs, strict=True):
            if n == micro and isinstance(mine, Slice) and mine.tid == own and isinstance(given, Slice):
                return given
    return None


def wiring(dump: Dump) -> Iterator[Suspect]:
    """Cells that take a tensor of another micro-batch, or another tensor."""
    groups: dict[object, list[tuple[int, int, Step, int, str, tuple[Any, ...]]]] = {}
    for device in dump.devices:
        made = _stands(dump, device)
        for i, step, micro in _numbered(dump, device):
            if micro >= dump.microbatches:
                continue
            inputs = list(step.inputs)
            wrong = []
            for k, (own, given) in enumerate(zip(step.cell.inputs, step.inputs, strict=True)):
                if not isinstance(own, Slice) or not isinstance(given, Slice):
                    continue
                run, meant = made.get(given.tid, (micro, own))
                if run != micro:
                    wrong.append(f"{own.full.name} of micro-batch {run}")
                elif meant.tid != own.tid:
                    wrong.append(f"{meant} for {own}")
                else:
                    continue
                inputs[k] = _given(dump, device, own.tid, micro) or given
            if wrong:
                why = f"it takes {names(wrong)}"
                groups.setdefault((step.cell.kind, step.cell.isfw, step.cell.cid, micro, why), []).append(
                    (device, i, step, micro, why, tuple(inputs))
                )
    for group in groups.values():
        members = tuple(Member(d, step.cell, (micro,)) for d, _, step, micro, _, _ in group)
        yield Suspect(members, group[0][4], together(_rewired(d, i, inputs) for d, i, _, _, _, inputs in group))


def _rewired(device: int, at: int, inputs: tuple[Any, ...]) -> Mend:
    def mend(dump: Dump) -> Dump:
        steps = dump.sequences[device]
        return sequenced(dump, device, (*steps[:at], replace(steps[at], inputs=inputs), *steps[at + 1 :]))

    return mend


def runs(dump: Dump) -> Iterator[Suspect]:
    """Cells that run more or less often than there are micro-batches."""
    groups: dict[object, list[tuple[int, Cell, tuple[int, ...], str]]] = {}
    for device in dump.devices:
        made = _made(dump, device)
        steps: dict[int, list[Step]] = {}
        for step in dump.sequences[device]:
            steps.setdefault(step.cell.cid, []).append(step)
        for found in steps.values():
            cell = found[0].cell
            wanted = 1 if cell.kind == "IRWeightReducer" else dump.microbatches
            if len(found) == wanted:
                continue
            micros = [_micro(s, made, n) for n, s in enumerate(found)]
            if len(found) < wanted:
                which = tuple(m for m in range(wanted) if m not in micros)
            else:
                which = tuple(m for m, k in Counter(micros).items() if k > 1) or (len(found) - 1,)
            times = f"it runs {len(found)} times in a step, expected {wanted}"
            why = f"{times}: micro-batch {', '.join(map(str, which))} {'is left out' if len(found) < wanted else 'is done again'}"
            groups.setdefault((cell.kind, cell.isfw, cell.cid, which, why), []).append((device, cell, which, why))
        # a backward segment that never runs
        there = {s.cell.cid for s in dump.sequences[device]}
        for step in {s.cell.cid: s for s in dump.sequences[device]}.values():
            cell = step.cell
            if cell.kind == "IRSegment" and cell.isfw and cell.mirror is not None and cell.mirror not in there:
                why = f"its backward segment {cell.mirror} never runs"
                groups.setdefault((cell.cid, why), []).append((device, cell, every(dump), why))
    for group in groups.values():
        members = tuple(Member(d, cell, which) for d, cell, which, _ in group)
        mends = [m for d, cell, which, _ in group for m in _repeated(dump, d, cell, which)]
        yield Suspect(members, group[0][3], together(mends) if mends else None)


def _micro(step: Step, made: Mapping[int, int], run: int) -> int:
    """The micro-batch that a step belongs to, by what it takes; else by its number."""
    found = Counter(made[t.tid] for t in step.inputs if isinstance(t, Slice) and t.tid in made)
    return found.most_common(1)[0][0] if found else run


def _repeated(dump: Dump, device: int, cell: Cell, micros: Sequence[int]) -> Iterator[Mend]:
    """Mends of a sequence: a second run left out, a missing one put where its inputs are there."""
    made = _made(dump, device)
    numbered = [(i, s, _micro(s, made, n)) for i, s, n in _numbered(dump, device) if same(s.cell, cell)]
    wanted = 1 if cell.kind == "IRWeightReducer" else dump.microbatches
    for micro in micros:
        places = [i for i, _, m in numbered if m == micro]
        if len(numbered) > wanted and len(places) > 1:
            yield _without(device, places[-1])
        elif len(numbered) < wanted and numbered:
            inputs = tuple(_given(dump, device, t.tid, micro) if isinstance(t, Slice) else t for t in cell.inputs)
            outputs = tuple((_taken(dump, device, t.tid, micro) or t) if isinstance(t, Slice) else t for t in cell.outputs)
            if all(t is not None for t in inputs):
                yield _with(device, Step(cell, inputs, outputs))


def _without(device: int, at: int) -> Mend:
    return lambda dump: sequenced(dump, device, (*dump.sequences[device][:at], *dump.sequences[device][at + 1 :]))


def _with(device: int, step: Step) -> Mend:
    """The step before the first one that takes something from it, else after the last one that makes something for it."""
    taken, made = ({t.tid for t in ts if isinstance(t, Slice)} for ts in (step.inputs, step.outputs))

    def mend(dump: Dump) -> Dump:
        steps = dump.sequences[device]
        later = [i for i, s in enumerate(steps) if made & {t.tid for t in s.inputs if isinstance(t, Slice)}]
        before = [i for i, s in enumerate(steps) if taken & {t.tid for t in s.outputs if isinstance(t, Slice)}]
        at = later[0] if later else before[-1] + 1 if before else len(steps)
        return sequenced(dump, device, (*steps[:at], step, *steps[at:]))

    return mend
