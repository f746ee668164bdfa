"""What a report says about a bug, in the terms of the corpus: a cause of the closed list, a tensor, a line.

Explanations are sentences. Each row below says which cause the sentences of one form state; a sentence of no such form states none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath

from trainverify.bugs.case import Cause
from trainverify.graph.program import Source
from trainverify.report import Report

_SUM = r"(all_reduce|reduce_scatter)"
_SCALE = r"(mul|div)(\.grad)?"
SENTENCES: tuple[tuple[str, Cause], ...] = (
    (r"a share only", Cause.MISSING_REDUCTION),
    (r"a partial sum", Cause.MISSING_REDUCTION),
    (rf"identity where \S+ has {_SUM}", Cause.MISSING_REDUCTION),
    (rf"{_SUM}\b.* is one too many", Cause.EXTRA_REDUCTION),
    (r"add is one too many", Cause.COUNTED_TWICE),
    (r".* is left out: nothing uses it", Cause.LOST_CONTRIBUTION),
    (r"identity where \S+ has (sgd|adamw)", Cause.MISSING_UPDATE),
    (r"(sgd|adamw)\b.* where ", Cause.OPTIMIZER_SETTING),
    (r".*(sgd|adamw) has ", Cause.OPTIMIZER_SETTING),
    (r"takes \S+ (in place of|where) ", Cause.WRONG_INPUT),
    (r"holds values of .* instead", Cause.WRONG_INPUT),
    (r"holds the elements of .* in another order", Cause.WRONG_ORDER),
    (r"holds other elements", Cause.WRONG_BLOCK),
    (r"slice\b.* takes other positions", Cause.WRONG_BLOCK),
    (r".* holds positions .* where .* are needed", Cause.WRONG_BLOCK),
    (r"(all_gather|all_to_all|reduce_scatter|concat|slice)\(.*dim=.* where .*dim=", Cause.WRONG_DIMENSION),
    (r"from another rank than", Cause.WRONG_GROUP),
    (r"scaled: ×", Cause.WRONG_FACTOR),
    (rf"({_SCALE}|full)\(.*value=.* where ", Cause.WRONG_FACTOR),
    (rf"{_SCALE}\(.* is one too many", Cause.WRONG_FACTOR),
    (r"identity where a product with", Cause.WRONG_FACTOR),
    (r"a product with \S+ where none is needed", Cause.WRONG_FACTOR),
)
CODES: dict[str, Cause] = {"TV201": Cause.WRONG_GROUP, "TV202": Cause.WRONG_GROUP}
_NEEDED = re.compile(rf"{_SUM}\((?P<attrs>.*)\) where \S+ with (?P<way>\w+) over (?P<over>.+?) is needed")


@dataclass(frozen=True)
class Explanation:
    text: str | None = None
    cause: Cause | None = None
    tensor: str | None = None
    line: tuple[str, int] | None = None  # file name and number


def explanation(report: Report) -> Explanation:
    """Where a refuted or invalid plan goes wrong, as its report says."""
    if report.place is not None:
        place = report.place
        return Explanation(place.cause, stated(place.cause), place.tensor, _line(place.line))
    finding = next((f for f in report.findings if f.severity == "error"), None)
    if finding is None:
        return Explanation()
    return Explanation(f"{finding.code} {finding.message}", CODES.get(finding.code), finding.tensor, _line(finding.source))


def stated(sentence: str) -> Cause | None:
    """The cause that an explanation states."""
    found = _NEEDED.match(sentence)
    if found is not None:
        attrs = dict(a.split("=", 1) for a in found["attrs"].split(", "))
        same_ranks = attrs.get("group", "").removeprefix("$group.") == found["over"]
        return Cause.WRONG_REDUCTION if same_ranks and attrs.get("op", "sum") != found["way"] else Cause.WRONG_GROUP
    return next((cause for form, cause in SENTENCES if re.match(form, sentence)), None)


def _line(source: Source | None) -> tuple[str, int] | None:
    return None if source is None else (PurePath(source.file).name, source.line)
