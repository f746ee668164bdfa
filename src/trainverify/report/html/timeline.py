"""What ranks do when: forward and backward passes of micro-batches, each op one unit of time, waits included."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from trainverify.graph.communication import Communication, is_communication, schedule
from trainverify.graph.lineage import Pattern
from trainverify.graph.mesh import Mesh
from trainverify.graph.plan import Plan, units
from trainverify.graph.program import PHASES, CallError, Op, inline
from trainverify.ops.table import OpTable
from trainverify.report.html.markup import Raw, joined, tag

OPS: Final = 1_200_000  # of all distinct programs, calls written out: beyond that no timeline
ROWS: Final = 48
BOXES: Final = 6_000
WIDTH, HEIGHT, LEFT, TOP = 880, 22, 150, 20
WIDE: Final = 14  # of a box that has room for a number


@dataclass(frozen=True)
class Box:
    start: int
    end: int
    phase: str
    batch: int | None  # the micro-batch; None: of all, or of none


@dataclass
class Row:
    """A class of ranks on its way through its program."""

    ranks: tuple[int, ...]
    ops: tuple[Op, ...]
    talking: list[int]  # positions of communication
    meets: frozenset[int]  # the same
    batches: dict[str, frozenset[int]]
    clock: int = 0
    at: int = 0
    boxes: list[Box] = field(default_factory=list)

    def does(self, op: Op, batches: frozenset[int], start: int) -> None:
        for o in op.outputs:
            self.batches[o] = batches
        batch = next(iter(batches)) if len(batches) == 1 else None
        last = self.boxes[-1] if self.boxes else None
        if last is not None and last.end == start and (last.phase, last.batch) == (op.phase, batch):
            self.boxes[-1] = Box(last.start, start + 1, op.phase, batch)
        else:
            self.boxes.append(Box(start, start + 1, op.phase, batch))
        self.clock = start + 1

    def taken(self, op: Op) -> frozenset[int]:
        return frozenset().union(*(self.batches.get(str(i), frozenset()) for i in op.inputs if i is not None))

    def until(self, position: int) -> None:
        """Run local ops up to one."""
        while self.at < position:
            op = self.ops[self.at]
            if self.at not in self.meets:
                self.does(op, self.taken(op), self.clock)
            self.at += 1


def rows_of(plan: Plan, table: OpTable) -> list[Row] | None:
    """All classes of ranks with what they do when; None if the plan is too large or does not run."""
    parts = units(plan)
    try:
        flat = [inline(u.program, plan.functions) for u in parts]
        if sum(len(p.ops) for p in flat) > OPS:
            return None
        talk = Communication(plan, parts, table)
        order = schedule(talk)
    except (CallError, KeyError, ValueError, TypeError):
        return None
    given = _micro_batches(plan)
    rows = []
    for c in order.classes:
        program = flat[c.unit]
        talking = [n for n, op in enumerate(program.ops) if is_communication(op, table)]
        start = {n: given[n] for n in program.sources if n in given}
        rows.append(Row(c.ranks, program.ops, talking, frozenset(talking), start))
    for step in order.steps:
        _meet(rows, step)
    for row in rows:
        row.until(len(row.ops))
    return rows


def _meet(rows: list[Row], step: tuple[tuple[int, int], ...]) -> None:
    """Everybody arrives, then the exchange takes one unit of time."""
    met = []
    for c, event in step:
        row = rows[c]
        position = row.talking[event]
        row.until(position)
        met.append((row, row.ops[position]))
    now = max(row.clock for row, _ in met)
    batches = frozenset().union(*(row.taken(op) for row, op in met))
    for row, op in met:
        row.does(op, batches, now)


def _micro_batches(plan: Plan) -> Mapping[str, frozenset[int]]:
    """The micro-batch of every input that is one: a fixed position in the pattern of its lineage."""
    found = {}
    for lay in plan.lineage:
        if isinstance(lay.form, Pattern) and lay.form.fixed:
            _, index, size = lay.form.fixed[0]
            if size > 1:
                found[lay.local] = frozenset({index})
    return found


def timeline_picture(plan: Plan, table: OpTable, wrong: frozenset[int]) -> Raw | None:
    """One row for each class of ranks; None if there is nothing to see."""
    rows = rows_of(plan, table)
    if rows is None or not rows or all(len({(b.phase, b.batch) for b in r.boxes}) < 2 for r in rows):
        return None
    rows.sort(key=lambda r: r.ranks[0])
    more = len(rows) - ROWS
    rows = rows[:ROWS]
    if sum(len(r.boxes) for r in rows) > BOXES:
        return None
    end = max(r.clock for r in rows)
    scale = WIDTH / max(end, 1)
    parts = []
    for y, row in enumerate(rows):
        top = TOP + y * (HEIGHT + 4)
        bad = bool(wrong.intersection(row.ranks))
        parts.append(
            tag("text", _label(plan.mesh, row.ranks), x=LEFT - 8, y=top + HEIGHT / 2 + 4, class_="axis end" + (" badtext" if bad else ""))
        )
        for b in row.boxes:
            parts.append(_box(b, LEFT + b.start * scale, top, max((b.end - b.start) * scale, 0.6)))
    parts.append(tag("text", "time →", x=LEFT, y=TOP - 7, class_="axis"))
    total = LEFT + WIDTH + 10, TOP + len(rows) * (HEIGHT + 4) + 6
    picture = tag(
        "svg",
        joined(parts),
        viewBox=f"0 0 {total[0]} {total[1]}",
        width=total[0],
        height=total[1],
        role="img",
        aria_label="pipeline timeline",
    )
    hidden = f" {more} more classes of ranks are not shown." if more > 0 else ""
    seen = [b for r in rows for b in r.boxes]
    legend = joined(tag("span", name, class_=f"key {name}") for name in PHASES if any(b.phase == name for b in seen))
    batches = " Numbers are micro-batches." if any(b.batch is not None and (b.end - b.start) * scale >= WIDE for b in seen) else ""
    text = f"{batches} Every op takes one unit of time, so lengths are no seconds.{hidden}"
    return tag("figure", tag("div", picture, class_="scroll"), tag("figcaption", legend, text))


def _box(b: Box, x: float, y: float, width: float) -> Raw:
    what = f"{b.phase}" + ("" if b.batch is None else f", micro-batch {b.batch}") + f": {b.end - b.start} ops"
    shape = tag("rect", x=f"{x:.1f}", y=y, width=f"{width:.1f}", height=HEIGHT, class_=f"box {b.phase}")
    if b.batch is None or width < WIDE:
        return tag("g", tag("title", what), shape)
    return tag("g", tag("title", what), shape, tag("text", b.batch, x=f"{x + width / 2:.1f}", y=y + HEIGHT / 2 + 4, class_="num"))


def _label(mesh: Mesh, ranks: tuple[int, ...]) -> str:
    """A rank, or the coordinates that all ranks of a class share."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) == mesh.size:
        return f"all {mesh.size:,} ranks"
    first, others = mesh.coordinates(ranks[0]), [mesh.coordinates(r) for r in ranks]
    shared = ", ".join(f"{a}={i}" for a, i in first.items() if mesh.length(a) > 1 and all(o[a] == i for o in others))
    return f"{shared or f'{ranks[0]} …'} ({len(ranks):,} ranks)"
