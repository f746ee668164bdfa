"""What to try when there is no verdict, or one that is not accepted."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
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
    (r"agreed on|not proved", (STAGES, FORMS, POINTS, SMALLER)),
)


# What a captured step lacks, by its reason: {0} is what the pattern finds, {1} the first line of the user's that the reason names.
_CAPTURED: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    (r"^without a mapping: (aten::\S+)", ("{1}: write {0} with ops that have a meaning; --list-ops lists those of the step",)),
    (
        r"^without a mapping: (\w+::\w+)",
        ('tvt.meaning("{0}", lambda *args: …)  # before the step is built: what the op at {1} computes, in PyTorch ops',),
    ),
    (
        r"ReadsData|reads a|depends on data|number is read|choice",
        (
            "{1}: compute with the tensor there, not with its number: torch.where in place of if, or read it after the step",
            "--real, for code that reads data",
            "--accept-choices, if the other ways need not hold",
        ),
    ),
    (
        r"carries values from step to step|left in memory is read",
        ("{1}: keep it in the model (register_buffer) or in the optimizer's state, so that it is compared; or make it anew in the step",),
    ),
    (r"^lineage: (\S+) is \[", ('say how it is cut: cuts={{"{0}": "(tp o) k"}}, beside batch in the file or as an argument of tvt.step',)),
    (r"another batch|other batches|after one step and before", ("with tvt.step(model, optimizer, batch): around the step alone",)),
)


def what_to_try(
    verdict: str, reason: str, findings: Sequence[Finding], notes: Sequence[str], options: Collection[str] | None = None
) -> list[str]:
    """Next steps for exit code 3, the likeliest first; none with an option that is not among `options`, if these are known."""

    def possible(step: str) -> bool:
        return options is None or all(o in options for o in re.findall(r"(?<![\w-])--[a-z][a-z-]*", step))

    return [s for s in _proposed(verdict, reason, findings, notes) if possible(s)]


def _proposed(verdict: str, reason: str, findings: Sequence[Finding], notes: Sequence[str]) -> list[str]:
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
    line = re.search(r"[\w./-]+\.py:\d+", reason)
    for pattern, steps in _CAPTURED:
        if (found := re.search(pattern, reason)) is not None:
            named = found[1] if found.groups() else ""
            yield from (s.format(named, line[0] if line else "there") for s in steps)
            return
    staged = any("smt: " in n or " stages " in n for n in notes)
    for pattern, steps in _BY_REASON:
        if re.search(pattern, reason):
            yield from (s for s in steps if s != STAGES or not staged)
            return
