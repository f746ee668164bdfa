"""What a campaign found: programs that are judged wrongly first, then shares, families and reasons."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from tools.step_campaigns.outcomes import Outcome

VERDICTS = ("PROVED", "REFUTED", "INVALID", "UNKNOWN", "REFUSED", "CRASH", "TIMEOUT")


def share(outcomes: Sequence[Outcome], kind: str, names: tuple[str, ...]) -> float:
    """Of the programs of a kind, those with one of these verdicts."""
    some = [o for o in outcomes if o.kind == kind]
    return sum(o.verdict.name in names for o in some) / len(some) if some else 0.0


def show(outcomes: Sequence[Outcome], console: Console) -> None:
    _verdicts(outcomes, console)
    console.print(
        f"right PROVED {share(outcomes, 'right', ('PROVED',)):.1%}, wrong found {share(outcomes, 'wrong', ('REFUTED', 'INVALID')):.1%}"
    )
    _reasons(outcomes, console)
    for o in outcomes:
        if o.kind == "later":
            console.print(
                f"later: seed {o.program.seed} {o.verdict.name}{', with the line about later steps' if o.verdict.later else ''}",
                markup=False,
            )
    for o in outcomes:
        if o.bad:
            console.print(f"{o.bad}: {o.line}", markup=False)


def _verdicts(outcomes: Sequence[Outcome], console: Console) -> None:
    table = Table("truth", "family", *VERDICTS, "all")
    for kind in ("right", "right but gradients", "wrong", "later", "does not run"):
        of_kind = [o for o in outcomes if o.kind == kind]
        families = sorted({o.program.family for o in of_kind})
        for family in ("all", *families) if of_kind else ():
            some = [o for o in of_kind if family in ("all", o.program.family)]
            counts = Counter(o.verdict.name for o in some)
            table.add_row(kind, family, *(str(counts[name] or "") for name in VERDICTS), str(len(some)))
    console.print(table)


def _reasons(outcomes: Sequence[Outcome], console: Console) -> None:
    """The most frequent reasons why there is no verdict; numbers and names of files do not count."""
    table = Table("right", "wrong", "no verdict because")
    found: Counter[tuple[str, str]] = Counter()
    for o in outcomes:
        if o.verdict.name in ("UNKNOWN", "REFUSED") and o.kind in ("right", "wrong"):
            reason = re.sub(r"\S*\.py:\d+", "FILE", re.sub(r"program_\d+", "program", o.verdict.reason))
            found[re.sub(r"\d+", "N", reason)[:150], o.kind] += 1
    reasons = sorted({reason for reason, _ in found}, key=lambda reason: -(found[reason, "right"] + found[reason, "wrong"]))
    for reason in reasons[:25]:
        table.add_row(str(found[reason, "right"] or ""), str(found[reason, "wrong"] or ""), reason)
    console.print(table)
