"""Approximations applied one after the other: the changed logical program, the plan that goes with it, and what changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from trainverify.approximate.approximation import Setting
from trainverify.approximate.declared import Declared, declared
from trainverify.approximate.rewrite import Unfit
from trainverify.graph.lineage import Layout, LineageError, Pattern, Placements, Shard, pattern_dims
from trainverify.graph.plan import Plan
from trainverify.graph.program import Op, Output, Program, inline
from trainverify.ops import OPS
from trainverify.ops.table import OpTable


@dataclass(frozen=True)
class Change:
    """What one approximation made of the logical program."""

    name: str
    text: str  # as declared, with its options
    origin: str
    says: str
    sites: tuple[tuple[str, ...], ...]  # lines of a diff, by place in the program: `- ` for what was there, `+ ` for what is

    @property
    def counts(self) -> tuple[int, int]:
        """Lines removed, lines added."""
        lines = [line for site in self.sites for line in site]
        removed = sum(line.startswith("- ") for line in lines)
        return removed, len(lines) - removed

    @property
    def assumption(self) -> str:
        removed, added = self.counts
        return (
            f"{self.name}, allowed by {self.origin} ({self.text}): {self.says}. "
            f"The logical program of this verdict is the changed one: {removed} lines removed, {added} added"
        )

    def json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "declared": self.text,
            "by": self.origin,
            "says": self.says,
            "diff": [line for site in self.sites for line in site],
        }


@dataclass(frozen=True)
class Applied:
    """The programs to compare."""

    logical: Program
    plan: Plan
    changes: tuple[Change, ...] = ()


def applied(logical: Program, plan: Plan, several: Sequence[Declared], ops: OpTable = OPS) -> Applied:
    """The logical program with these approximations, and the plan read against it. Unfit where one cannot be made."""
    found = Applied(logical, replace(plan, allow=()))
    for one in several:
        found = _changed(found, one, ops)
    return found


def as_declared(logical: Program, plan: Plan, ops: OpTable = OPS) -> Applied:
    """With the approximations that the plan itself declares."""
    return applied(logical, plan, declared(plan, ()), ops)


def _changed(found: Applied, one: Declared, ops: OpTable) -> Applied:
    before = inline(found.logical)
    name = one.approximation.name
    try:
        changed = one.approximation.change(before, Setting(found.plan, one.options, ops))
        plan = replace(found.plan, lineage=tuple(_relaid(lay, changed.by_rank) for lay in found.plan.lineage))
    except (Unfit, LineageError) as error:
        raise Unfit(f"{name} (declared by {one.origin}) does not fit: {error}") from error
    if (what := _contract(before, changed.program)) is not None:
        raise Unfit(f"{name} (declared by {one.origin}) does not fit: it changes {what} of {before.name}")
    sites = (*_sites(before.ops, changed.program.ops), *_sources(before, changed.program))
    if not sites:
        raise Unfit(f"{name} (declared by {one.origin}) does not fit: it changes nothing of {before.name}")
    change = Change(name, one.text, one.origin, changed.says, sites)
    return Applied(changed.program, plan, (*found.changes, change))


def _contract(old: Program, new: Program) -> str | None:
    """What no approximation may change: what there is before the step, what is assumed of it, and what the step must report."""
    if (set(old.inputs), set(old.parameters), set(old.state)) != (set(new.inputs), set(new.parameters), set(new.state)):
        return "the inputs, parameters or state"
    if old.domains != new.domains:
        return "what is assumed of the inputs"
    if sorted(map(_role, old.outputs)) != sorted(map(_role, new.outputs)):
        return "the outputs"
    return None


def _role(o: Output) -> tuple[str, str]:
    return o.role, str(o.of)


def _relaid(lay: Layout, by_rank: Mapping[str, tuple[str, ...]]) -> Layout:
    """A layout of a tensor that has a part for every rank now; one that tells these ranks apart already stays."""
    axes = by_rank.get(lay.logical)
    if axes is None:
        return lay
    form = lay.form
    if isinstance(form, Pattern):
        dims = pattern_dims(form.text)
        if dims and dims[0][: len(axes)] == axes:
            return lay
        if dims and not form.fixed and not form.partial and not any(a in d for d in dims for a in axes):
            text = " ".join([f"({' '.join((*axes, *dims[0]))})", *(d[0] if len(d) == 1 else f"({' '.join(d)})" for d in dims[1:])])
            return replace(lay, form=Pattern(text))
    if isinstance(form, Placements):
        sharded = [a for a, p in form.axes if p == Shard(0)]
        if tuple(sharded[: len(axes)]) == axes:
            return lay
        if not sharded and not any(a in axes for a, _ in form.axes):
            return replace(lay, form=Placements((*((a, Shard(0)) for a in axes), *form.axes)))
    raise Unfit(f"{lay}: a part for every rank along {' × '.join(axes)} cannot be laid out this way")


def _sources(old: Program, new: Program) -> Iterator[tuple[str, ...]]:
    for n in (*old.sources, *(n for n in new.sources if n not in old.sources)):
        was, now = old.tensors.get(n) if n in old.sources else None, new.tensors.get(n) if n in new.sources else None
        if was != now:
            yield (*(() if was is None else (f"- {n}: {was}",)), *(() if now is None else (f"+ {n}: {now}",)))


def _sites(old: Sequence[Op], new: Sequence[Op]) -> Iterator[tuple[str, ...]]:
    """Where two lists of ops differ; what is in both is in the same order."""
    was, now = _texts(old), _texts(new)
    kept = set(was) & set(now)
    i = j = 0
    while i < len(was) or j < len(now):
        if i < len(was) and j < len(now) and was[i] == now[j]:
            i, j = i + 1, j + 1
            continue
        start = i, j
        while i < len(was) and was[i] not in kept:
            i += 1
        while j < len(now) and now[j] not in kept:
            j += 1
        if (i, j) == start:  # the order differs: say so line by line
            kept.discard(was[i] if i < len(was) else now[j])
            continue
        yield (*(f"- {t}" for t in was[start[0] : i]), *(f"+ {t}" for t in now[start[1] : j]))


def _texts(ops: Sequence[Op]) -> list[str]:
    return [f"{op}" + (f"  ({op.source})" if op.source is not None else "") for op in ops]
