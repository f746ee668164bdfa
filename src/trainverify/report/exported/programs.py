"""Both programs of an example as NumPy statements: one device, what ranks start with, all ranks together, what is compared."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence

from trainverify.evaluate.example import Example
from trainverify.evaluate.flow import Task, tasks_of
from trainverify.evaluate.small import Meeting, Small, Step, shares
from trainverify.graph.lineage import Layout, Part
from trainverify.graph.obligations import Obligation
from trainverify.graph.program import Op
from trainverify.report.exported.expressions import Unwritable, Writer

_FILL = {"real": "0.0", "int": "0", "bool": "False"}


def remark(op: Op) -> str:
    """An op and its line as a comment: on one line, whatever its names are."""
    text = f"{op}" + (f"  ({op.source})" if op.source is not None else "")
    return "# " + "".join(c if c.isprintable() else "?" for c in text)


def _assigned(step: Step, own: str, writer: Writer) -> list[str]:
    """The statements of an op; `own` is the dictionary of its tensors."""
    at = len(writer.lines)
    made = writer.write(step.nodes, [None if i is None else f"{own}[{i!r}]" for i in step.inputs])
    temporary, writer.lines[at:] = writer.lines[at:], []
    return [remark(step.op), *temporary, *(f"{own}[{o!r}] = {text}" for o, text in zip(step.outputs, made, strict=True))]


def logical_lines(small: Small, writer: Writer) -> list[str]:
    return [line for step in small.logical_steps for line in _assigned(step, "v", writer)]


def given_lines(example: Example) -> Iterator[str]:
    """What every rank starts with, cut out of the inputs of the logical program."""
    small = example.small
    known = set(example.lineage)
    holders: dict[tuple[int, str], list[Layout]] = {}
    for lay, rank in small.parts:
        if lay in known:
            holders.setdefault((rank, lay.local), []).append(lay)
    needed = {t for task in tasks_of(small) for t in task.reads} | _compared(example)
    rows = sorted((rank, c) for c, k in enumerate(small.classes) for rank in k.ranks)
    for rank, c in rows:
        program = small.classes[c].program
        for n in [n for n in program.sources if (c, n) in needed]:
            parts = [(lay, part) for lay in holders.get((rank, n), ()) for part in small.parts[lay, rank]]
            yield from _local(small, rank, n, small.local_shapes[c][n], program.tensors[n].kind, parts)


def _compared(example: Example) -> set[tuple[int, str]]:
    return {(c, h.layout.local) for c in range(len(example.small.classes)) for o in example.wanted for h in o.holdings}


def _local(small: Small, rank: int, name: str, shape: tuple[int, ...], kind: str, parts: Sequence[tuple[Layout, Part]]) -> Iterator[str]:
    target = f"ranks[{rank}][{name!r}]"
    if len(parts) == 1 and not parts[0][1].padding and parts[0][1].partial is None:
        lay, part = parts[0]
        if math.prod(shape) == math.prod(r.size for r in part.logical):
            view = "" if shape == tuple(r.size for r in part.logical) and not part.flat else f".reshape({shape})"
            yield f"{target} = {_taken(small, part, lay.logical, f'given[{lay.logical!r}]')}{view}"
            return
    yield f"{target} = np.full({shape}, {_FILL[kind]})"
    for lay, part in parts:
        if not part.padding:
            yield f"{_region(part, target, None)} = {_taken(small, part, lay.logical, f'given[{lay.logical!r}]')}"


def _taken(small: Small, part: Part, logical: str, whole: str) -> str:
    """The elements of a logical tensor that a part holds."""
    shape = small.shapes[logical]
    if part.flat or any(r.count > 1 for r in part.logical):
        where = small.positions(part, logical)
        return f"{whole}.reshape(-1)[{where.reshape(-1).tolist()}].reshape({where.shape})"
    if all(r.start == 0 and r.size == s for r, s in zip(part.logical, shape, strict=True)):
        return whole
    cuts = [":" if r.size == s else f"{r.start}:{r.start + r.size}" for r, s in zip(part.logical, shape, strict=True)]
    return f"{whole}[{', '.join(cuts)}]"


def _region(part: Part, local: str, shape: tuple[int, ...] | None) -> str:
    """The region of a local tensor that a part is about; of one of this shape only as much as is needed."""
    if shape is not None and not part.flat and not any(part.local) and tuple(r.size for r in part.logical) == shape:
        return local
    if part.flat:
        return f"{local}.reshape(-1)[{part.local[0]}:{part.local[0] + part.logical[0].size}]"
    cuts = [f"{s}:{s + r.size}" for s, r in zip(part.local, part.logical, strict=True)]
    return f"{local}[{', '.join([*cuts, '...'])}]"


def plan_lines(small: Small, writer: Writer) -> Iterator[str]:
    """All ranks, op after op; ops of the same ranks that follow each other share a loop."""
    opened: tuple[int, ...] | None = None
    for task in in_order(small):
        if isinstance(task.what, Meeting):
            opened = None
            yield from _met(task.what, small, writer)
            continue
        k = small.classes[task.c]
        ranks = tuple(k.ranks[row] for row in task.what.rows)
        if ranks != opened:
            opened = ranks
            yield f"for v in {_dictionaries(ranks)}:"
        for line in _assigned(task.what, "v", writer):
            yield "    " + line


def _dictionaries(ranks: Sequence[int]) -> str:
    return f"[ranks[r] for r in {list(ranks)}]"


def in_order(small: Small) -> Iterator[Task]:
    """Tasks as programs have them, each after what it reads."""
    position = {(c, t): i for c, k in enumerate(small.classes) for i, op in enumerate(k.program.ops) for t in op.outputs}
    tasks = list(tasks_of(small))
    makers: dict[tuple[int, str], int] = {}
    users: dict[tuple[int, str], list[int]] = {}
    for n, task in enumerate(tasks):
        for t in task.makes:
            makers[t] = makers.get(t, 0) + 1
        for t in set(task.reads):
            users.setdefault(t, []).append(n)
    waits = [sum(makers.get(t, 0) for t in set(task.reads)) for task in tasks]
    place = [max((position.get(t, 0) for t in task.makes), default=0) for task in tasks]
    ready = [(place[n], n) for n, count in enumerate(waits) if not count]
    heapq.heapify(ready)
    while ready:
        _, n = heapq.heappop(ready)
        yield tasks[n]
        for t in tasks[n].makes:
            for user in users.get(t, ()):
                waits[user] -= 1
                if not waits[user]:
                    heapq.heappush(ready, (place[user], user))


def _met(meeting: Meeting, small: Small, writer: Writer) -> Iterator[str]:
    yield remark(meeting.op)

    def named(group: Sequence[tuple[int, int, str]]) -> list[tuple[int, str]]:
        return [(small.classes[c].ranks[row], t) for c, row, t in group]

    senders, receivers = [named(g) for g in meeting.senders], [named(g) for g in meeting.receivers]
    if meeting.nodes is None:
        for ((a, given),), ((b, taken),) in zip(senders, receivers, strict=True):
            yield f"ranks[{b}][{taken!r}] = ranks[{a}][{given!r}]"
        return
    names = {t for g in senders for _, t in g}, {t for g in receivers for _, t in g}
    groups = [[r for r, _ in g] for g in senders]
    if len(names[0]) == len(names[1]) == 1 and groups == [[r for r, _ in g] for g in receivers]:
        (given,), (taken,) = names
        yield f"for group in {groups}:"
        yield f"    x = np.stack([ranks[r][{given!r}] for r in group])"
        yield from _result(meeting, writer)
        yield "    for r, y in zip(group, result, strict=True):"
        yield f"        ranks[r][{taken!r}] = y"
        return
    yield f"for givers, takers in {list(zip(senders, receivers, strict=True))}:"
    yield "    x = np.stack([ranks[r][t] for r, t in givers])"
    yield from _result(meeting, writer)
    yield "    for (r, t), y in zip(takers, result, strict=True):"
    yield "        ranks[r][t] = y"


def _result(meeting: Meeting, writer: Writer) -> Iterator[str]:
    assert meeting.nodes is not None
    at = len(writer.lines)
    (made,) = writer.write(meeting.nodes[:1], ["x"])
    temporary, writer.lines[at:] = writer.lines[at:], []
    yield from ("    " + line for line in temporary)
    yield f"    result = {made}"


def check_lines(example: Example) -> Iterator[str]:
    """What is compared: for every obligation and rank that holds a part of it, got and want."""
    small = example.small
    for o in example.wanted:
        for h in o.holdings:
            for rank in (r for r in h.ranks if r in small.places):
                for part in small.parts[h.layout, rank]:
                    if part.padding and not o.stays:
                        continue
                    got, want = _both(small, o, h.layout, rank, part)
                    yield f"yield {str(o)!r}, {rank}, {got}, {want}"


def _both(small: Small, o: Obligation, layout: Layout, rank: int, part: Part) -> tuple[str, str]:
    local, shape = f"ranks[{rank}][{layout.local!r}]", small.local_shapes[small.places[rank][0]][layout.local]
    if part.padding:
        return _region(part, local, shape), "0.0"
    want = _taken(small, part, layout.logical, f"whole[{layout.logical!r}]")
    if part.partial is None:
        return _region(part, local, shape), want
    op, _, n = part.partial
    found = shares(small, layout, rank, part)
    if found is None:
        raise Unwritable(f"a share of {o} that no rank holds")
    total = " + ".join(_region(p, f"ranks[{r}][{layout.local!r}]", shape) for r, p in found)
    return f"({total}) / {n}" if op == "avg" else total, want
