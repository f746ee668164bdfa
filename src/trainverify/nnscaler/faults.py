"""What is at fault in a wrong plan: the suspects without which the plan would be right.

A suspect is at fault if the plan is proved with it mended. Of several that are needed together, those are left out without which it is
proved too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from trainverify.nnscaler.dump import Cell, Dump
from trainverify.nnscaler.suspects import Suspect, suspects
from trainverify.nnscaler.writer import Origin, title

MOST: Final = 30_000  # cells that are run, in all plans that are tried
Proved = Callable[[Dump], bool]


@dataclass(frozen=True)
class Fault:
    """Cells of a plan, with the ranks and micro-batches in which they are wrong.

    `mended`: so many faults, this one among them, were mended, and then the plan was proved; 0 if that could not be shown.
    """

    cells: tuple[str, ...]
    ids: tuple[int, ...]
    devices: tuple[int, ...]
    ranks: tuple[int, ...]
    microbatches: tuple[int, ...]
    why: str
    mended: int

    def json(self) -> dict[str, Any]:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()}

    @property
    def key(self) -> str:
        """In short, for lists: ids of cells @ devices / micro-batches."""
        ids = "+".join(map(str, self.ids)) or (self.cells[0].replace(" ", "-") if self.cells else "-")
        return f"{'' if self.mended else '?'}{ids}@{','.join(map(str, self.devices))}/{','.join(map(str, self.microbatches))}"

    def __str__(self) -> str:
        what = ", ".join(self.cells)
        where = f"device{_s(self.devices)} {_listed(self.devices)} (rank{_s(self.ranks)} {_listed(self.ranks)})"
        when = f", micro-batch{'es' if len(self.microbatches) > 1 else ''} {_listed(self.microbatches)}" if self.microbatches else ""
        lead = "at fault" if self.mended else "suspect"
        return f"{lead}: {what} on {where}{when}: {self.why}{self.tail}"

    @property
    def tail(self) -> str:
        return f" (with {'this' if self.mended == 1 else f'these {self.mended}'} mended the plan is proved)" if self.mended else ""


def _s(items: tuple[int, ...]) -> str:
    return "s" if len(items) > 1 else ""


def _listed(items: tuple[int, ...], most: int = 8) -> str:
    return ", ".join(map(str, items[:most])) + (f", … ({len(items)} in all)" if len(items) > most else "")


def faults(logical: Dump, dump: Dump, proved: Proved) -> list[tuple[Suspect, Fault]]:
    """The suspects that are at fault; if that cannot be shown, all of them, marked as such."""
    found = suspects(logical, dump)
    known = [s for s in found if s.mend is not None]
    budget = MOST // max(1, size(dump))
    if known and budget:
        if proved(_mended(dump, known)):
            if len(known) > 1 and len(known) < budget:
                for s in list(known):
                    rest = [k for k in known if k is not s]
                    if rest and proved(_mended(dump, rest)):
                        known = rest
            return [(s, named(dump, s, len(known))) for s in known]
        if len(known) > 1:
            for s in known[: budget - 1]:
                if proved(_mended(dump, [s])):
                    return [(s, named(dump, s, 1))]
    return [(s, named(dump, s, 0)) for s in found]


def size(dump: Dump) -> int:
    """Cells that run in a step of one replica."""
    return sum(max(1, len(s.cell.nodes)) for steps in dump.sequences.values() for s in steps)


def _mended(dump: Dump, which: Iterable[Suspect]) -> Dump:
    for s in which:
        if s.mend is not None:
            dump = s.mend(dump)
    return dump


def named(dump: Dump, s: Suspect, mended: int) -> Fault:
    found = [m.cell for m in s.members if m.cell is not None]
    devices = tuple(sorted({m.device for m in s.members}))
    micros = tuple(sorted({i for m in s.members for i in m.micros}))
    return Fault(_titles(found) or ("missing cell",), _ids(found), devices, ranks(dump, devices), micros, s.why, mended)


def of(dump: Dump, origin: Origin, why: str) -> Fault:
    """What a cell that could not be run, or made the first wrong tensor, is called."""
    found = [] if origin.cell is None else [origin.cell]
    trainer = origin.cell is None or origin.cell.kind == "IRWeightReducer"
    micros = tuple(range(dump.microbatches)) if trainer else (origin.micro,)
    return Fault(_titles(found) or ("the trainer",), _ids(found), (origin.device,), ranks(dump, (origin.device,)), micros, why, 0)


def ranks(dump: Dump, devices: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(d + k * len(dump.devices) for k in range(dump.replicas) for d in devices))


def _titles(found: Iterable[Cell]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(title(c) for c in found))


def _ids(found: Iterable[Cell]) -> tuple[int, ...]:
    return tuple(sorted({c.cid for c in found}))
