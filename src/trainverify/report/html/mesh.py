"""The mesh as a picture: one cell for each rank, or for many that differ along folded axes only."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainverify.graph.mesh import Mesh
from trainverify.graph.plan import Plan, units
from trainverify.report.html.markup import Raw, joined, tag

MOST = 256  # cells
SIZE, GAP, LEFT, TOP = 22, 3, 90, 26


@dataclass(frozen=True)
class Drawn:
    """Which axes are drawn: `rows` below each other, `columns` beside each other; the others are folded."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    folded: tuple[str, ...]


def drawn(mesh: Mesh, most: int = MOST) -> Drawn:
    """The largest axes are folded until few enough cells are left; the last axis that is drawn runs from left to right."""
    kept = list(mesh.names)
    while len(kept) > 1 and math.prod(mesh.length(a) for a in kept) > most:
        kept.remove(max(kept, key=mesh.length))
    if math.prod(mesh.length(a) for a in kept) > most:
        kept = []
    folded = tuple(a for a in mesh.names if a not in kept)
    return Drawn(tuple(kept[:-1]), tuple(kept[-1:]), folded)


def mesh_picture(plan: Plan, wrong: frozenset[int]) -> Raw:
    """Cells are coloured by program; those with a rank at which something is wrong are marked."""
    mesh = plan.mesh
    how = drawn(mesh)
    program = {r: n for n, t in enumerate(units(plan)) for r in t.ranks}
    cells: dict[tuple[int, int], list[int]] = {}
    for r in range(mesh.size):
        at = mesh.coordinates(r)
        cells.setdefault((_place(mesh, how.rows, at), _place(mesh, how.columns, at)), []).append(r)
    height = 1 + max(y for y, _ in cells)
    width = 1 + max(x for _, x in cells)
    parts = []
    for (y, x), ranks in cells.items():
        bad = bool(wrong.intersection(ranks))
        kinds = {program.get(r, 0) for r in ranks}
        box = tag(
            "rect",
            x=LEFT + x * (SIZE + GAP),
            y=TOP + y * (SIZE + GAP),
            width=SIZE,
            height=SIZE,
            rx=3,
            class_=f"cell p{min(kinds) % 8}" + (" bad" if bad else ""),
        )
        label = tag("text", ranks[0], x=LEFT + x * (SIZE + GAP) + SIZE / 2, y=TOP + y * (SIZE + GAP) + SIZE / 2 + 3, class_="num")
        several = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks from {ranks[0]} to {ranks[-1]}"
        title = tag("title", f"{several}: {_where(mesh, how, ranks[0])}" + ("; something is wrong here" if bad else ""))
        parts.append(tag("g", title, box, *([label] if len(ranks) == 1 and ranks[0] < 1000 else [])))
    for y in range(height):
        row = next(ranks[0] for (a, _), ranks in cells.items() if a == y)
        at = mesh.coordinates(row)
        name = ", ".join(f"{a}={at[a]}" for a in how.rows)
        parts.append(tag("text", name, x=LEFT - 8, y=TOP + y * (SIZE + GAP) + SIZE / 2 + 4, class_="axis end"))
    if how.columns:
        parts.append(tag("text", f"{how.columns[0]} →", x=LEFT, y=TOP - 9, class_="axis"))
    left = 0 if any(how.rows) else LEFT - 4  # without names of rows
    total = LEFT + width * (SIZE + GAP) + 10, TOP + height * (SIZE + GAP) + 6
    box_of = f"{left} 0 {total[0] - left} {total[1]}"
    picture = tag("svg", joined(parts), viewBox=box_of, width=total[0] - left, height=total[1], role="img", aria_label=f"{mesh}")
    folded = f"; {' and '.join(f'{a} ({mesh.length(a)})' for a in how.folded)} folded into every cell" if how.folded else ""
    caption = f"{mesh}: {mesh.size:,} ranks run {len(set(program.values()))} program{'s' if len(set(program.values())) > 1 else ''}{folded}"
    return tag("figure", tag("div", picture, class_="scroll"), tag("figcaption", caption))


def _place(mesh: Mesh, axes: tuple[str, ...], at: dict[str, int]) -> int:
    found = 0
    for a in axes:
        found = found * mesh.length(a) + at[a]
    return found


def _where(mesh: Mesh, how: Drawn, rank: int) -> str:
    at = mesh.coordinates(rank)
    return ", ".join(f"{a}={at[a]}" for a in (*how.rows, *how.columns)) or "all"
