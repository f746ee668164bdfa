"""What an adapter replaces in a framework so that it runs without its accelerator: data, listed with every verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trainverify.report import Report


@dataclass(frozen=True)
class Shim:
    """One replacement: where it is, what takes its place, and why. `apply` puts it there, for the rest of the process, given the
    configuration of the job."""

    name: str
    replaces: str
    why: str
    apply: Callable[[Any], None] = field(compare=False, repr=False)

    def __str__(self) -> str:
        return f"shim {self.name}: {self.replaces}: {self.why}"


def listed(report: Report, shims: Sequence[Shim], framework: str, more: Sequence[str] = ()) -> Report:
    """The report with the number of shims in its verdict line, and each of them among the assumptions."""
    told = "".join(f"; {m}" for m in more)
    return replace(
        report,
        reason=f"{report.reason}; {framework}, {len(shims)} shims{told}",
        assumptions=(*report.assumptions, *(str(s) for s in shims)),
    )
