"""What must be shown: one obligation per output of the logical program, wherever the plan holds it.

Obligations come from the logical program and the lineage of inputs and state. A plan cannot make one go away by
not declaring an output: that is a problem of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from trainverify.graph.lineage import Layout, Partial, Pattern, Placements, of
from trainverify.graph.plan import Plan, Template
from trainverify.graph.program import Output, Program


@dataclass(frozen=True)
class Holding:
    """On `ranks`, `layout` says how the local tensor holds the logical one."""

    layout: Layout
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Obligation:
    output: Output
    holdings: tuple[Holding, ...]

    def __str__(self) -> str:
        return str(self.output)


@dataclass(frozen=True)
class Missing:
    """An output that a rank must have and does not (`rank` None: no rank has it)."""

    output: Output
    rank: int | None
    local: str | None
    reason: str


def obligations(logical: Program, plan: Plan, units: Sequence[Template]) -> tuple[list[Obligation], list[Missing]]:
    """Everything to be shown, and everything that is not there to be shown."""
    found: list[Obligation] = []
    missing: list[Missing] = []
    unit_of = {r: u for u in units for r in u.ranks}
    for output in logical.outputs:
        if output.role in ("loss", "metric"):
            holdings = list(_reported(output, units))
            if not holdings:
                missing.append(Missing(output, None, None, f"no rank reports the {output}"))
        else:
            declared = [x for x in of(plan.lineage, output.tensor) if output.role == "gradient"]
            if declared:
                holdings = [Holding(x, x.holders(plan.mesh)) for x in declared]
            else:
                holdings = []
                for lay in of(plan.lineage, str(output.of)):
                    holdings += _updated(output, lay, plan, unit_of, missing)
                if not holdings and not any(m.output == output for m in missing):
                    missing.append(Missing(output, None, None, f"no rank holds {output.of}"))
        if holdings:
            found.append(Obligation(output, tuple(holdings)))
    return found, missing


def _reported(output: Output, units: Sequence[Template]) -> Iterator[Holding]:
    for u in units:
        local = u.program.output(output.role, output.of)
        if local is not None:
            yield Holding(Layout(output.tensor, local, Placements(())), u.ranks)


def _updated(output: Output, lay: Layout, plan: Plan, unit_of: dict[int, Template], missing: list[Missing]) -> Iterator[Holding]:
    by_name: dict[str, list[int]] = {}
    absent: dict[str, list[int]] = {}
    for rank in lay.holders(plan.mesh):
        unit = unit_of.get(rank)
        local = None if unit is None else unit.program.output(output.role, lay.local)
        if local is None:
            absent.setdefault("program" if unit is None else unit.program.name, []).append(rank)
        else:
            by_name.setdefault(local, []).append(rank)
    for name, ranks in absent.items():
        shown = f"rank {ranks[0]}" + (f" (and {len(ranks) - 1} more)" if len(ranks) > 1 else "")
        missing.append(Missing(output, ranks[0], lay.local, f"{shown} of {name!r} holds {lay.local} but has no {output}"))
    for local, ranks in by_name.items():
        yield Holding(replace(lay, logical=output.tensor, local=local), tuple(ranks))


def is_partial(lay: Layout) -> bool:
    """Whether a layout speaks of summands rather than values."""
    match lay.form:
        case Placements(axes):
            return any(isinstance(p, Partial) for _, p in axes)
        case Pattern(partial=partial):
            return bool(partial)
        case _:
            return any(part.partial is not None for _, parts in lay.form.by_rank for part in parts)
