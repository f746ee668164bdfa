"""What ranks must say alike, seen by nobody who captures one rank: the messages of a group, its creation, exchanged Python objects.

The translated program has other messages than the user's where that is exact (stacked scalars are reduced one by one, a group of one
rank says nothing, a barrier carries nothing). So ranks are compared here by what they really call.
"""

from __future__ import annotations

import hashlib
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch

from trainverify.check.findings import Finding
from trainverify.graph.program import Program, Source
from trainverify.torch.starts import Start
from trainverify.translate.groups import joined

ABSENT: Final = "and no rank has it"


@dataclass(frozen=True)
class Said:
    """One call of a rank."""

    what: str
    source: Source | None = None


@dataclass(frozen=True)
class Call:
    """Communication as PyTorch is asked for it: of what kind, in which group, and how many elements this rank gives (or receives)."""

    kind: str
    members: tuple[int, ...]
    elements: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.kind} of {self.elements} × {self.dtype} in ranks {','.join(map(str, self.members))}"


def call_of(kind: str, members: Sequence[int], tensors: Sequence[torch.Tensor]) -> Call:
    dtypes = dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in tensors)
    return Call(kind, tuple(members), sum(t.numel() for t in tensors), " and ".join(dtypes))


@dataclass
class Ledger:
    """The calls of one rank that others have to make too."""

    messages: dict[str, list[Said]] = field(default_factory=dict)  # group → its collectives in order
    created: list[Said] = field(default_factory=list)  # process groups
    objects: list[Said] = field(default_factory=list)  # Python objects that ranks are taken to give as this one does
    sent: dict[tuple[int, ...], list[tuple[str, bytes]]] = field(default_factory=dict)  # group → all that it gives
    settled: dict[str, list[Said]] = field(default_factory=dict)  # group → constants that are broadcast, by their formulas
    numbers: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = field(
        default_factory=dict
    )  # small constants, before and after the step
    starts: dict[str, Start] = field(default_factory=dict)  # how what lives from step to step is made, as far as that is known
    reported: dict[str, float] = field(default_factory=dict)  # by the step, as plain numbers
    lost: list[str] = field(default_factory=list)  # such numbers that the step computes from data
    made: set[str] = field(default_factory=set)  # buffers that hold what they are computed as when the model is built
    calls: list[Call] = field(default_factory=list)  # all communication of the step, in order
    overlapping: bool = False  # messages are under way while others are started that are waited for first, or collectives of two groups

    def message(self, group: str, what: str, source: Source | None) -> None:
        self.messages.setdefault(group, []).append(Said(what, source))

    def exchanged(self, how: str, value: Any, source: Source | None) -> bytes:
        """What is sent, and taken to be what others send."""
        sent = pickle.dumps(value)  # what cannot be pickled cannot be sent either
        self.objects.append(Said(f"{how} of {repr(value)[:40]} ({hashlib.sha256(sent).hexdigest()[:16]})", source))
        return sent


def lying(t: torch.Tensor) -> str:
    """Size, dtype and order in memory of a tensor that is communicated."""
    order = "" if t.is_contiguous() else f" with strides {list(t.stride())} of {list(t.shape)}"
    return f"{t.numel()} × {str(t.dtype).removeprefix('torch.')}{order}"


def disagreements(groups: Sequence[Mapping[str, tuple[int, ...]]], ledgers: Mapping[int, Ledger]) -> Iterator[Finding]:
    """Where ranks that were captured do not say the same; `groups` are those that each rank is in."""
    for name, ranks in joined(groups).items():
        lists = {r: ledgers[r].messages.get(name, []) for r in ranks if r in ledgers}
        yield from _unlike(f"group {name}", lists, "error", "the collectives of a group are the same on all its members, in one order")
        before = {r: ledgers[r].settled.get(name, []) for r in ranks if r in ledgers}
        yield from _unlike(
            f"group {name}, constants", before, "unsupported", "a rank is captured as if a broadcast of constants gave it its own"
        )
    created = {r: led.created for r, led in ledgers.items()}
    yield from _unlike("process groups", created, "error", "every rank calls new_group for every group, in the same order")
    objects = {r: led.objects for r, led in ledgers.items()}
    yield from _unlike(
        "exchanged Python objects", objects, "unsupported", "a rank is captured as if all ranks gave the object that it gives"
    )


def _unlike(what: str, lists: Mapping[int, Sequence[Said]], severity: Any, hint: str) -> Iterator[Finding]:
    """The first difference from the first rank."""
    if not lists:
        return
    first, *others = lists
    for r in others:
        mine, theirs = lists[first], lists[r]
        at = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a.what != b.what), min(len(mine), len(theirs)))
        if at == len(mine) == len(theirs):
            continue
        a, b = (_text(x[at]) if at < len(x) else "nothing more" for x in (mine, theirs))
        rank, said = (r, theirs[at]) if at < len(theirs) else (first, mine[at])
        message = f"{what}: number {at + 1} of rank {first} is {a}, of rank {r} it is {b}"
        yield Finding("TV507", message, rank, None, said.source, hint, severity)
        return


def _text(said: Said) -> str:
    return said.what + (f" ({said.source})" if said.source else "")


def numbers(reference: Ledger, ledgers: Mapping[int, Ledger]) -> Iterator[Finding]:
    """Small numbers that live from step to step and follow from constants: the same on one device and on ranks."""
    seen = {name for led in ledgers.values() for name in led.lost}
    for rank, led in ledgers.items():
        for name, (before, after) in led.numbers.items():
            seen.add(name)
            other = reference.numbers.get(name)
            if other is None and before == after:
                continue
            if other is None:
                text = f"{name} is {_shown(before)} before the step and {_shown(after)} after it, and the reference has no such tensor"
                yield Finding("TV508", text, rank, name, None, None, "unsupported")
            elif other != (before, after):
                mine, theirs = (f"{_shown(b)} before the step and {_shown(a)} after it" for b, a in ((before, after), other))
                yield Finding("TV508", f"{name} is {mine}; on one device it is {theirs}", rank, name)
    for name, (before, after) in reference.numbers.items():
        if name not in seen and before != after:
            yield Finding("TV508", f"{name} is {_shown(after)} after the step on one device, {ABSENT}", None, name)
    yield from _reported(reference, ledgers)


def _reported(reference: Ledger, ledgers: Mapping[int, Ledger]) -> Iterator[Finding]:
    """Plain numbers that steps return. Some ranks may return none, as those that print nothing."""
    hint = "return what is to be compared, and nothing that is measured or that is this rank's own"
    for rank, led in ledgers.items():
        for name, value in led.reported.items():
            alone = reference.reported.get(name)
            if alone is None or not (math.isclose(value, alone, rel_tol=1e-12) or (math.isnan(value) and math.isnan(alone))):
                other = "the reference returns no such number" if alone is None else f"the reference returns {alone:g}"
                yield Finding("TV508", f"the step returns {name} {value:g}, and {other}", rank, name, None, hint, "unsupported")
    for name, value in reference.reported.items():
        if not any(name in led.reported for led in ledgers.values()):
            text = f"the step of the reference returns {name} {value:g}, and that of no rank returns such a number"
            yield Finding("TV508", text, None, name, None, hint, "unsupported")


class Restructured(Protocol):
    """What a captured process says about changes of structure."""

    rank: int | None
    program: Program
    structure: dict[str, str]
    ledger: Ledger
    left: list[str]


def restructured(reference: Restructured, ranks: Sequence[Restructured]) -> Iterator[Finding]:
    """What decides on later steps besides values is to change on ranks as it does on one device; else there is no verdict."""
    for c in ranks:
        for name in dict.fromkeys((*reference.structure, *c.structure)):
            mine, theirs = c.structure.get(name, "as before"), reference.structure.get(name, "as before")
            if mine != theirs and (name in c.structure or _has(c.program, name) or not any(name in r.structure for r in ranks)):
                text = f"after the step {name} is {mine} on this rank, and {theirs} on one device"
                yield Finding("TV511", text, c.rank, name, None, None, "unsupported")


def made_or_kept(reference: Restructured, ranks: Sequence[Restructured]) -> Iterator[Finding]:
    """Buffers that are made with the model on one side, and may hold anything on the other: checkpoints keep them there."""
    for c in ranks:
        for one, other in ((c, reference), (reference, c)):
            for name in sorted(one.ledger.made & {*other.program.state} - other.ledger.made):
                where = "one device" if one is c else "this rank"
                text = f"buffer {name} may hold anything before the step on {where}, and is computed with the model on the other side"
                hint = "let checkpoints keep it on both sides, or on neither (register_buffer(persistent=…))"
                yield Finding("TV511", text, c.rank, name, None, hint, "unsupported")


def left_over(reference: Restructured, ranks: Sequence[Restructured]) -> Iterator[Finding]:
    """Gradients that the step before left, and that only one side uses."""
    for c in ranks:
        for name in sorted({*reference.left} ^ {*c.left}):
            if name in c.left or _has(c.program, name.removesuffix(".grad")):
                who = "one device uses" if name in reference.left else "this rank uses"
                text = f"{who} {name}, which the step before left there, and the other side does not: is zero_grad called in every step?"
                yield Finding("TV511", text, c.rank, name, None, None, "unsupported")


def _has(program: Program, what: str) -> bool:
    """Whether a rank holds what a change is about; of modules without parameters that is not known."""
    base = what.rpartition(" of ")[2]
    return base == "the model" or any(n == base or n.startswith(f"{base}.") for n in (*program.parameters, *program.state))


def _shown(values: tuple[float, ...]) -> str:
    return f"{values[0]:g}" if len(values) == 1 else str(list(values[:4]))
