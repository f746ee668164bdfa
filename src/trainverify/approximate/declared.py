"""Which approximations are allowed: `NAME` or `NAME:OPTION=VALUE,…`, by the plan or by whoever verifies it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from trainverify.approximate.approximation import Approximation
from trainverify.approximate.rewrite import Unfit
from trainverify.approximate.table import APPROXIMATIONS
from trainverify.graph.plan import Plan

Allow = Iterable[str | Approximation]
Origin = Literal["the plan", "the user"]


@dataclass(frozen=True)
class Declared:
    """An approximation with its options, and who declares it."""

    approximation: Approximation
    origin: Origin
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        options = ",".join(f"{k}={v}" for k, v in self.options.items())
        return self.approximation.name + (f":{options}" if options else "")


def declared(plan: Plan, allow: Allow) -> tuple[Declared, ...]:
    """What the plan declares, then what the caller does; each once."""
    found: dict[str, Declared] = {}
    several: list[tuple[str | Approximation, Origin]] = [*((a, "the plan") for a in plan.allow), *((a, "the user") for a in allow)]
    for given, origin in several:
        one = parsed(given, origin)
        other = found.setdefault(one.approximation.name, one)
        if other.options != one.options:
            raise Unfit(f"{other.text} (declared by {other.origin}) and {one.text} (declared by {one.origin}): which of them?")
    return tuple(found.values())


def parsed(given: str | Approximation, origin: Origin) -> Declared:
    if isinstance(given, Approximation):
        return Declared(given, origin)
    name, _, rest = given.partition(":")
    if name not in APPROXIMATIONS:
        near = difflib.get_close_matches(name, APPROXIMATIONS, 1)
        hint = f"; did you mean {near[0]}?" if near else f" (they are {', '.join(APPROXIMATIONS)})"
        raise Unfit(f"no approximation {name!r}{hint}")
    known = APPROXIMATIONS[name].options
    options: dict[str, str] = {}
    for item in rest.split(",") if rest else ():
        key, equals, value = item.partition("=")
        if not equals or not value or key in options:
            raise Unfit(f"{given}: {item!r}: NAME:OPTION=VALUE,… is expected, each option once")
        if key not in known:
            raise Unfit(f"{given}: {name} has no option {key!r} (it has {', '.join(known)})")
        options[key] = value
    return Declared(APPROXIMATIONS[name], origin, dict(sorted(options.items())))
