"""What is left when a step ends: memory that carries values or is compared with nothing, results read too early, drawn numbers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainverify.check.findings import Finding
from trainverify.graph.program import Source
from trainverify.torch.chance import generators
from trainverify.torch.discover import Found, owner_of
from trainverify.torch.translate import Translator


def carried(t: Translator, rank: int | None) -> list[Finding]:
    """Values that the step before left in memory and that this one reads. Single numbers may be kept for a log."""
    text = "what the step before left in memory is read, which no model or optimizer holds and nothing is compared with"
    places = dict.fromkeys((p.source, size == 1) for p, size in t.memory.left_reads)
    return [Finding("TV505", text, rank, None, source, None, "warning" if one else "unsupported") for source, one in places]


def early(t: Translator, rank: int | None) -> list[Finding]:
    """Results of communication that are read before it is waited for."""
    first: dict[int | None, Finding] = {}  # of every communication only where it is read first
    for why, source in t.notes.early:
        first.setdefault(why.pending, Finding("TV501", why.reason, rank, None, source))
    return list(first.values())


def waited_later(findings: Sequence[Finding], late: Collection[Source | None]) -> list[Finding]:
    """Communication that one step starts and a later one waits for may be right: what it gives is compared with nothing."""
    hint = "let the step that starts communication wait for it"

    def is_late(f: Finding) -> bool:
        return f.source in late if f.code == "TV503" else f.code == "TV501" and any(f"({s})" in f.message for s in late)

    return [replace(f, severity="unsupported", hint=hint) if is_late(f) else f for f in findings]


def poisoned(t: Translator, rank: int | None) -> list[Finding]:
    """What was sent without having a value."""
    places = dict.fromkeys((u.reason, u.source) for u in t.notes.poisoned if u.pending is None)
    return [Finding("TV504", f"communicated: {why}", rank, None, at, None, "unsupported") for why, at in places]


def strays(t: Translator, rank: int | None) -> list[Finding]:
    """Memory that is older than the step, and carries values to the next one. What is written before it is read carries none, but is
    compared with nothing all the same, if it is not DDP's own."""
    step, found = t.step, []
    assert step is not None
    for (key, reducer), source in step.strays.items():
        size = t._alive[key].nbytes()
        if t.followed.unchanged(key, step.counts):
            continue
        if step.carried(key, t.memory.old_reads.get(key, ())):
            text = f"memory of {size} bytes, no tensor of a model or an optimizer, carries values from step to step"
            found.append(Finding("TV505", text, rank, None, source, None, "unsupported"))
        elif not reducer and size:  # memory that was given back holds nothing
            text = f"memory of {size} bytes that is older than the step is written by it and is compared with nothing"
            found.append(Finding("TV505", text, rank, None, source, None, "warning"))
    return list(dict.fromkeys(found))


def unfound(stepped: Mapping[str, Any], found: Found, rank: int | None) -> list[Finding]:
    """Optimizers that have updated parameters of the model, and whose state nothing leads to."""
    there = {id(owner_of(o)) for o in found.optimizers}
    text = "an optimizer that nothing in the step's function leads to updates {}, and its state is compared with nothing"
    hint = "let the step's function refer to it"
    names: dict[int, str] = {}
    for name, optimizer in stepped.items():
        if id(owner_of(optimizer)) not in there:
            names.setdefault(id(optimizer), name)
    return [Finding("TV505", text.format(n), rank, n, None, hint, "unsupported") for n in names.values()]


def drawn(t: Translator, rank: int | None) -> list[Finding]:
    """Numbers that Python drew in the step: the next one has others."""
    step, now = t.step, generators()
    assert step is not None
    text = "the step draws random numbers by {}, which are constants here and others in every step: draw them with torch"
    changed = [n for n, state in step.generators.items() if now[n] != state]
    return [Finding("TV504", text.format(n), rank, None, None, None, "unsupported") for n in changed]
