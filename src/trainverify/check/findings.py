"""Findings of the well-formedness check: a code, a message in the user's notation, where, and a hint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from trainverify.graph.program import Source

Severity = Literal["error", "unsupported", "warning"]

# code → title. TV1xx programs, TV2xx communication, TV3xx lineage and obligations.
CODES: Final[dict[str, str]] = {
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
    "TV201": "unknown or malformed group",
    "TV202": "rank outside its group",
    "TV203": "members of a collective disagree",
    "TV204": "send and recv that do not match",
    "TV205": "deadlock",
    "TV206": "result of a collective that nobody uses",
    "TV207": "rank without a program, or with two",
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
