"""One change between an old and a new thing, and ranks in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["added", "removed", "changed"]


@dataclass(frozen=True)
class Change:
    where: str  # the part of a plan or report
    what: str  # "op", "group", "lineage", …
    old: str | None
    new: str | None

    @property
    def kind(self) -> Kind:
        return "added" if self.old is None else "removed" if self.new is None else "changed"

    def json(self) -> dict[str, str | None]:
        return {"where": self.where, "what": self.what, "kind": self.kind, "old": self.old, "new": self.new}


def between(where: str, what: str, old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[Change]:
    """What was removed, added or says something else, by name."""
    for name in [*old, *(n for n in new if n not in old)]:
        if old.get(name) != new.get(name):
            yield Change(where, what, old.get(name), new.get(name))


def ranks_in_words(ranks: Iterable[int], size: int) -> str:
    """`all ranks`, or `ranks 0-3, 7`."""
    some = sorted(ranks)
    if len(some) == size:
        return "all ranks" if size > 1 else "rank 0"
    spans: list[list[int]] = []
    for r in some:
        if spans and spans[-1][1] == r - 1:
            spans[-1][1] = r
        else:
            spans.append([r, r])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans[:12])
    more = f", … ({len(some)} in all)" if len(spans) > 12 else ""
    return f"rank{'s' if len(some) > 1 else ''} {text}{more}"
