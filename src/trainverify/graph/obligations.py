"""What must be shown: one obligation per output of the logical program, wherever the plan holds it.

Obligations come from the logical program and the lineage of inputs and state. A plan cannot make one go away by
not declaring an output: that is a problem of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from trainverify.graph.lineage import Layout, Partial, Parts, Pattern, Placements
from trainverify.graph.plan import Plan, Template
from trainverify.graph.program import Output, Program, Role


@dataclass(frozen=True)
class Holding:
    """On `ranks`, `layout` says how the local tensor holds the logical one."""

    layout: Layout
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Obligation:
    output: Output
    holdings: tuple[Holding, ...]

    @property
    def stays(self) -> bool:
        """Whether the next step starts with it: then its padding must be zero, as it is assumed to be before a step."""
        return self.output.role in ("parameter", "state")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Over thousands of ranks, again and again: made once."""
        return hash((self.output, self.holdings))

    def __getstate__(self) -> dict[str, object]:
        """Another process hashes text otherwise."""
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

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
    """Everything to be shown, and everything that is not there to be shown.

    A gradient lives as declared for it, on the ranks that report it so; without a declaration, as its parameter
    does, on every rank that holds the parameter. A declaration may name fewer ranks than hold the parameter only if the
    logical step updates the parameter: the new value is then demanded on all of them. Layouts of tensors that a rank
    computes are claims, not holdings.

    A parameter or state that the logical step does not update must not change: a rank that reports a new value for it
    must report the old one.
    """
    found: list[Obligation] = []
    missing: list[Missing] = []
    plans = _Held(plan, units)
    changed = {(o.role, o.of) for o in logical.outputs}
    for output in logical.outputs:
        if output.role in ("loss", "metric"):
            holdings = list(_reported(output, units))
            if not holdings:
                missing.append(Missing(output, None, None, f"no rank reports the {output}"))
        else:
            absent: list[Missing] = []
            declared = plans.layouts.get(output.tensor, []) if output.role == "gradient" else []
            holdings = [h for x in declared if (h := plans.reported(output, x, missing)) is not None]
            if declared and not holdings and not plans.reports(output):  # never reported: what is declared has to do
                holdings = [Holding(x, x.holders(plan.mesh)) for x in declared]
            done = frozenset(r for h in holdings for r in h.ranks)
            explicit = bool(holdings)
            for lay in plans.layouts.get(str(output.of), []):
                holdings += plans.updated(output, lay, done, absent)
            if not explicit or ("parameter", output.of) not in changed:
                missing += absent
            if not holdings and not absent:
                missing.append(Missing(output, None, None, f"no rank holds {output.of}"))
        if holdings:
            found.append(Obligation(output, tuple(holdings)))
    found += [o for role, names in _kept(logical) for n in names if (role, n) not in changed for o in plans.unchanged(Output(n, role, n))]
    return found, missing


def _kept(logical: Program) -> tuple[tuple[Role, tuple[str, ...]], ...]:
    """What the next step starts with."""
    return ("parameter", logical.parameters), ("state", logical.state)


def _reported(output: Output, units: Sequence[Template]) -> Iterator[Holding]:
    for u in units:
        local = u.program.output(output.role, output.of)
        if local is not None:
            yield Holding(Layout(output.tensor, local, Placements(())), u.ranks)


class _Held:
    """Who holds what, looked up by program instead of by rank."""

    def __init__(self, plan: Plan, units: Sequence[Template]):
        self.mesh = plan.mesh
        self.units = units
        self.unit_of = {r: i for i, u in enumerate(units) for r in u.ranks}
        self.outputs = [{(o.role, o.of): o.tensor for o in reversed(u.program.outputs)} for u in units]
        self.gradients = [{(o.tensor, str(o.of)) for o in u.program.outputs if o.role == "gradient"} for u in units]
        self.sources = [frozenset(u.program.sources) for u in units]
        self.layouts: dict[str, list[Layout]] = {}
        for lay in plan.lineage:
            self.layouts.setdefault(lay.logical, []).append(lay)
        self._split: dict[tuple[tuple[str, int], ...], dict[int | None, tuple[int, ...]]] = {}

    def split(self, lay: Layout) -> dict[int | None, tuple[int, ...]]:
        """Holders by the program they run (None: no program)."""
        if lay.where in self._split and not isinstance(lay.form, Parts):
            return self._split[lay.where]
        found: dict[int | None, list[int]] = {}
        for rank in lay.holders(self.mesh):
            found.setdefault(self.unit_of.get(rank), []).append(rank)
        result = {u: tuple(ranks) for u, ranks in found.items()}
        if not isinstance(lay.form, Parts):
            self._split[lay.where] = result
        return result

    def reported(self, output: Output, lay: Layout, missing: list[Missing]) -> Holding | None:
        """The ranks whose program reports the local tensor as this gradient; once one does, all that hold it must."""
        holders = self.split(lay)
        said = {(lay.local, x.local) for x in self.layouts.get(str(output.of), ())}
        telling = {u for u in holders if u is not None and not said.isdisjoint(self.gradients[u])}
        if not telling:
            return None
        for u, ranks in holders.items():
            if u is not None and u not in telling:
                missing.append(self.absent(output, lay.local, u, ranks))
        return Holding(lay, tuple(r for u, ranks in holders.items() if u in telling for r in ranks))

    def reports(self, output: Output) -> bool:
        """Whether some rank reports this output of the parameter that it holds."""
        held = [(self.split(x), x.local) for x in self.layouts.get(str(output.of), ())]
        return any(u is not None and (output.role, local) in self.outputs[u] for split, local in held for u in split)

    def unchanged(self, output: Output) -> Iterator[Obligation]:
        """A parameter or state that the logical step leaves alone, on the ranks that report a value for it."""
        holdings = [h for lay in self.layouts.get(output.tensor, ()) for h in self.updated(output, lay, frozenset(), [])]
        if holdings:
            yield Obligation(output, tuple(holdings))

    def absent(self, output: Output, local: str, u: int | None, ranks: Sequence[int]) -> Missing:
        name = "program" if u is None else self.units[u].program.name
        shown = f"rank {ranks[0]}" + (f" (and {len(ranks) - 1} more)" if len(ranks) > 1 else "")
        return Missing(output, ranks[0], local, f"{shown} of {name!r} holds {local} but has no {output}")

    def updated(self, output: Output, lay: Layout, done: frozenset[int], missing: list[Missing]) -> Iterator[Holding]:
        by_name: dict[str, list[int]] = {}
        for u, ranks in self.split(lay).items():
            rest = [r for r in ranks if r not in done] if done else list(ranks)
            if not rest or (u is not None and lay.local in self.units[u].program.tensors and lay.local not in self.sources[u]):
                continue
            local = None if u is None else self.outputs[u].get((output.role, lay.local))
            if local is None:
                missing.append(self.absent(output, lay.local, u, rest))
            else:
                by_name.setdefault(local, []).extend(rest)
        for local, found in by_name.items():
            yield Holding(replace(lay, logical=output.tensor, local=local), tuple(found))


def is_partial(lay: Layout) -> bool:
    """Whether a layout speaks of summands rather than values."""
    match lay.form:
        case Placements(axes):
            return any(isinstance(p, Partial) for _, p in axes)
        case Pattern(partial=partial):
            return bool(partial)
        case _:
            return any(part.partial is not None for _, parts in lay.form.by_rank for part in parts)
