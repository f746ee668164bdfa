"""Source text with places where ranks and the reference differ, and where a mistake can be planted."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, Union

Code: TypeAlias = Union[str, "Ranks", "One", "Site", tuple["Code", ...]]


@dataclass(frozen=True)
class Ranks:
    """Lines that only ranks run."""

    code: Code


@dataclass(frozen=True)
class One:
    """Lines that only the reference runs."""

    code: Code


@dataclass(frozen=True)
class Site:
    """Right lines, and by the name of a mistake the lines that ranks run instead.

    `gated`: the number of the step is known here. `lone`: neither side communicates, so that one rank alone may make the mistake."""

    good: Code
    bad: Mapping[str, Code] = field(default_factory=dict)
    gated: bool = True
    lone: bool = False


@dataclass(frozen=True)
class Planted:
    """A mistake by name, at which steps (a condition on `{n}`, or nothing: at all of them) and on which rank (`{rank}`) it is made."""

    name: str
    when: str = ""
    where: str = ""


@dataclass(frozen=True)
class View:
    """Who reads the text: both sides (told apart by `world`), the reference alone, or ranks alone. In a module everything is `self`'s."""

    side: Literal["both", "one", "ranks"]
    module: bool = False

    @property
    def world(self) -> str:
        return "self.world" if self.module else "world"

    def condition(self, planted: Planted, gated: bool) -> str:
        many = f"{self.world} > 1" if self.side == "both" else ""
        count, rank = ("self.calls", "self.rank") if self.module else ("n", "rank")
        when = planted.when.format(n=count) if gated else ""
        return " and ".join(part for part in (many, when, planted.where.format(rank=rank)) if part)


def lines(code: Code, view: View, planted: Planted | None) -> list[str]:
    if isinstance(code, str):
        return [line for line in textwrap.dedent(code).strip("\n").split("\n") if line.strip()]
    if isinstance(code, tuple):
        return [line for part in code for line in lines(part, view, planted)]
    if isinstance(code, Ranks):
        return _only(code.code, view, planted, "ranks", f"{view.world} > 1")
    if isinstance(code, One):
        return _only(code.code, view, planted, "one", f"{view.world} == 1")
    return _site(code, view, planted)


def _only(code: Code, view: View, planted: Planted | None, side: Literal["one", "ranks"], condition: str) -> list[str]:
    if view.side == "both":
        return _guarded(condition, lines(code, replace(view, side=side), planted))
    return lines(code, view, planted) if view.side == side else []


def _guarded(condition: str, block: list[str]) -> list[str]:
    return [f"if {condition}:", *indented(block)] if block else []


def _site(site: Site, view: View, planted: Planted | None) -> list[str]:
    good = lines(site.good, view, planted)
    if planted is None or planted.name not in site.bad or view.side == "one":
        return good
    bad = lines(site.bad[planted.name], view, planted)
    condition = view.condition(planted, site.gated)
    if not condition:
        return bad
    if not bad:
        return _guarded(f"not ({condition})", good)
    return [*_guarded(condition, bad), *(["else:", *indented(good)] if good else [])]


def indented(block: list[str], by: int = 1) -> list[str]:
    return ["    " * by + line for line in block]


def sites(code: Code) -> Iterator[Site]:
    """All places of a text where a mistake can be planted."""
    if isinstance(code, tuple):
        for part in code:
            yield from sites(part)
    elif isinstance(code, Ranks | One):
        yield from sites(code.code)
    elif isinstance(code, Site):
        yield code
        yield from sites(code.good)
