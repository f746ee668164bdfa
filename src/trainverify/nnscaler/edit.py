"""Changed copies of a plan: cells replaced on one device, whatever segment they stand in, or another sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from trainverify.nnscaler.dump import Cell, Dump, Step

Change = Callable[[Cell], Cell]


def cells(dump: Dump, device: int) -> Iterator[Cell]:
    """All cells of a device, each once, those inside of segments after their segment."""
    for cell in {id(s.cell): s.cell for s in dump.sequences[device]}.values():
        yield cell
        yield from cell.nodes


def changed(dump: Dump, device: int, change: Change) -> Dump:
    """The plan with every cell of a device replaced by what `change` makes of it. A cell that runs often stays one cell."""
    made: dict[int, Cell] = {}

    def new(cell: Cell) -> Cell:
        if id(cell) not in made:
            nodes = tuple(new(n) for n in cell.nodes)
            if any(a is not b for a, b in zip(nodes, cell.nodes, strict=True)):
                made[id(cell)] = change(replace(cell, nodes=nodes))
            else:
                made[id(cell)] = change(cell)
        return made[id(cell)]

    steps = []
    for s in dump.sequences[device]:
        cell = new(s.cell)
        own = s.inputs is s.cell.inputs and s.outputs is s.cell.outputs  # it stands for itself
        steps.append(Step(cell, cell.inputs, cell.outputs) if own else replace(s, cell=cell))
    return sequenced(dump, device, tuple(steps))


def replaced(dump: Dump, device: int, old: Cell, new: Cell) -> Dump:
    """The plan with one cell replaced."""
    return changed(dump, device, lambda c: new if same(c, old) else c)


def same(a: Cell, b: Cell) -> bool:
    """Whether two cells are one, perhaps in changed copies of a plan."""
    return (a.kind, a.cid, a.isfw, a.mirror) == (b.kind, b.cid, b.isfw, b.mirror)


def sequenced(dump: Dump, device: int, steps: tuple[Step, ...]) -> Dump:
    return replace(dump, sequences={**dump.sequences, device: steps})
