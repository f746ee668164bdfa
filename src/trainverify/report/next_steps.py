"""What to try when there is no verdict, or one that is not accepted."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from trainverify.check.findings import Finding

STAGES: Final = "--engine auto: stages at reduced sizes for what the algebra leaves open; --accept-reduced accepts such a proof"
FORMS: Final = "--verbose: both sides of what is open in normal form; write the op in which they part as the logical program does"
POINTS: Final = "--points 20, if the plan may be wrong: a difference that shows at few points only is met at more of them"
SMALLER: Final = "the same plan with fewer layers or smaller sizes: what is open is then found and changed sooner"

# A pattern of the reason, and what helps then. The first that fits counts.
_BY_REASON: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    (r"^time limit", ("--timeout with more seconds, or none", SMALLER, "--progress: in which phase the time goes")),
    (r"memory limit|out of memory", ("--memory with more megabytes, or a machine that has more", SMALLER)),
    (
        r"literal rounding",
        ("write the literal as what it stands for: a division, or the op that counts (mean, all_reduce with op='avg')",),
    ),
    (
        r"may count",
        (
            "write the count as the op that counts (mean, all_reduce with op='avg')",
            "the same plan at sizes with at most 4 million elements, which are evaluated as they are",
        ),
    ),
    (r"undecided", ("--seed with other numbers: at another point the difference may be larger", "sizes that are smaller")),
    (
        r"could not be run|has no value",
        ("--seed with other numbers", "domains of inputs (ids, positive, nonnegative) so that the step has a value"),
    ),
    (r"too large to evaluate|no small sizes", (SMALLER, "sizes that divide evenly: then small ones keep the structure")),
    (r"ranks captured|not captured|captured", ("--all-ranks", "without --cache, if the code changed in a way that its files do not show")),
    (r"reads|depends on data|choice", ("--real, for code that reads data", "--accept-choices, if the other ways need not hold")),
    (r"agreed on|not proved", (STAGES, FORMS, POINTS, SMALLER)),
)


def what_to_try(verdict: str, reason: str, findings: Sequence[Finding], notes: Sequence[str]) -> list[str]:
    """Next steps for exit code 3, the likeliest first."""
    if verdict == "PROVED(reduced)":
        return ["--accept-reduced, if a proof at reduced sizes with the same partition structure will do", "--engine algebra, at full size"]
    if verdict == "PROVED(sampled)":
        return ["--all-ranks, which captures every rank", "--accept-sampled, if a proof about the captured ranks will do"]
    return list(dict.fromkeys(_steps(reason, findings, notes))) or [FORMS, SMALLER]


def _steps(reason: str, findings: Sequence[Finding], notes: Sequence[str]) -> Iterator[str]:
    for f in findings:
        if f.severity == "unsupported":
            if f.hint:
                yield f.hint
            if f.code == "TV104":
                yield "declare the operator in a few lines and pass the file: --ops FILE (docs/adding-an-operator.md)"
    staged = any("smt: " in n or " stages " in n for n in notes)
    for pattern, steps in _BY_REASON:
        if re.search(pattern, reason):
            yield from (s for s in steps if s != STAGES or not staged)
            return
