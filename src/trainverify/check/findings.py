"""Findings of the well-formedness check: a code, a message in the user's notation, where, and a hint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal

from trainverify.graph.program import Source

Severity = Literal["error", "unsupported", "warning"]

# code → title. TV1xx programs, TV2xx communication, TV3xx lineage and obligations, TV4xx plans of nnScaler, TV5xx captured code.
CODES: Final[dict[str, str]] = {
    "TV100": "object that is not a program or plan",
    "TV101": "tensor that nothing defines",
    "TV102": "use before definition",
    "TV103": "tensor defined twice",
    "TV104": "unknown operator",
    "TV105": "shape or dtype mismatch",
    "TV106": "attribute that does not fit",
    "TV107": "call that does not fit",
    "TV108": "output that does not exist or has no meaning",
    "TV109": "integer input without a declared range",
    "TV110": "reference that nothing binds",
    "TV111": "backward op of a forward op that does not exist",
    "TV112": "communication in a logical program",
    "TV113": "missing or malformed type",
    "TV201": "unknown or malformed group",
    "TV202": "rank outside its group",
    "TV203": "members of a collective disagree",
    "TV204": "send and recv that do not match",
    "TV205": "deadlock",
    "TV206": "result of a collective that nobody uses",
    "TV207": "rank without a program or with two, or a program without a rank",
    "TV208": "edit that does not apply",
    "TV301": "source without lineage",
    "TV302": "lineage of something that does not exist",
    "TV303": "lineage that does not fit the shapes",
    "TV304": "overlapping lineage",
    "TV305": "incomplete lineage",
    "TV306": "partial value where a whole one is needed",
    "TV307": "missing output",
    "TV308": "nothing to verify",
    "TV309": "preconditions that differ",
    "TV310": "lineage between different kinds of sources",
    "TV311": "approximation that is not needed",
    "TV401": "tensor of another micro-batch",
    "TV402": "claim that does not hold",
    "TV403": "forward and backward passes that do not pair up",
    "TV404": "gradient that stays within a replica",
    "TV405": "gradients listed in another order, or twice",
    "TV406": "devices of one stage that differ",
    "TV501": "result of communication that is read before it is waited for",
    "TV502": "memory that is written while communication uses it",
    "TV503": "communication that is never waited for",
    "TV504": "value without a meaning here",
    "TV505": "memory that outlives the step and is not compared",
    "TV506": "ranks that were not captured",
    "TV507": "ranks that do not say the same",
    "TV508": "small number that differs after the step",
    "TV509": "arguments or results that are not those of the reference",
    "TV510": "new value that is cut otherwise than the old one",
    "TV511": "change that decides on later steps, and is not the reference's",
    "TV512": "what a capture refuses or cannot see, and the code goes on after",
}


@dataclass(frozen=True)
class Finding:
    code: str
    message: str
    rank: int | None = None
    tensor: str | None = None
    source: Source | None = None
    hint: str | None = None
    severity: Severity = "error"

    def __str__(self) -> str:
        where = "".join(
            (f" on rank {self.rank}" if self.rank is not None else "", f" ({self.source})" if self.source else ""),
        )
        hint = f"\n  hint: {self.hint}" if self.hint else ""
        return f"{self.code} {CODES[self.code]}{where}: {self.message}{hint}"


class Report:
    """Findings as they are made: each once, and of every code and severity at most `most`; the rest is counted."""

    def __init__(self, most: int = 100):
        self.most = most
        self._found: list[Finding] = []
        self._seen: set[tuple[str, str, str | None]] = set()
        self._counts: dict[tuple[str, Severity], int] = {}
        self.count = 0  # of all findings, also those made again
        self._rank: int | None = None

    @contextmanager
    def on(self, rank: int | None) -> Iterator[None]:
        """Findings that name no rank are of this one."""
        before, self._rank = self._rank, rank
        try:
            yield
        finally:
            self._rank = before

    def add(
        self,
        code: str,
        message: str,
        *,
        rank: int | None = None,
        tensor: str | None = None,
        source: Source | None = None,
        hint: str | None = None,
        severity: Severity = "error",
    ) -> None:
        self.count += 1
        key = (code, message, None if source is None else str(source))
        if key in self._seen:
            return
        self._seen.add(key)
        count = self._counts[code, severity] = self._counts.get((code, severity), 0) + 1
        if count <= self.most:
            self._found.append(Finding(code, message, self._rank if rank is None else rank, tensor, source, hint, severity))

    def has(self, *codes: str) -> bool:
        """Whether something other than a warning was found under one of these codes."""
        return any(f.code in codes and f.severity != "warning" for f in self._found)

    def findings(self) -> list[Finding]:
        more = [Finding(c, f"{n - self.most} more like these", severity=s) for (c, s), n in self._counts.items() if n > self.most]
        return [*self._found, *more]


def others(count: int, what: str) -> str:
    """` (and 3 more ranks)`, or nothing."""
    return f" (and {count} more {what})" if count > 0 else ""


def names(items: Iterable[str], most: int = 6) -> str:
    """A few names, the rest counted."""
    listed = list(items)
    return ", ".join(listed[:most]) + (f", … ({len(listed)} in all)" if len(listed) > most else "")
