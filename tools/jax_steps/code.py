"""Source text whose lines belong to one side or both, with places where a mistake can be planted.

A line that starts with `R|` is one that only ranks run, one with `1|` the reference's. A place is a token in the text: an expression,
or whole lines. Conditions on the step and the rank are values that JAX traces, so a mistake that is made only there is chosen by
`jnp.where` or `lax.cond`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final, Literal

from tools.steps.code import Planted

Side = Literal["one", "ranks"]
OTHER: Final = {"one": "R|", "ranks": "1|"}
TOKEN: Final = re.compile(r"⟦(\d+)⟧")
CHOICES: Final = {
    "array": "jnp.where({cond}, {bad}, {good})",
    "tree": "jax.tree.map(lambda a, b: jnp.where({cond}, a, b), {bad}, {good})",
    "lazy": "lax.cond({cond}, lambda: {bad}, lambda: {good})",
}


@dataclass(frozen=True)
class Site:
    """A right expression, or right lines, and by the name of a mistake those that ranks run instead.

    `gated`: the number of the step is `n` here. `lone`: neither side communicates, so that one rank alone may make the mistake.
    `choice`: how one of both is chosen; "" for lines and what is no value."""

    good: str
    bad: Mapping[str, str]
    gated: bool
    lone: bool
    choice: str


@dataclass
class Draft:
    """The places of a program while it is written, and what decides which mistakes fit."""

    rng: Random
    axis: str  # an axis of the mesh, by whose index a rank is chosen
    size: int  # of that axis
    vma: bool  # check_vma is on: nothing may depend on the rank where a result is to be replicated
    counted: bool  # the step has its number, `n`
    nested: bool  # ranks' functions are defined in the step: `n` is known there too
    clips: bool = False  # gradients are clipped by `clipped`
    nonlinear: bool = False  # the update is no linear function of the gradients
    apart: bool = False  # what comes is outside of shard_map: there is no rank
    sites: list[Site] = field(default_factory=list)

    def site(self, good: str, bad: Mapping[str, str], *, tree: bool = False, gated: bool = True, lone: bool = False) -> str:
        """The token of an expression."""
        choice = "tree" if tree else "array"
        lone = lone and not self.vma and not self.apart
        if lone and tree and self.rng.random() < 0.4:  # both ways have the same types there
            choice = "lazy"
        self.sites.append(Site(good, dict(bad), gated and self.counted, lone, choice))
        return f"⟦{len(self.sites) - 1}⟧"

    def inner(self, good: str, bad: Mapping[str, str], *, tree: bool = False, lone: bool = False) -> str:
        """The token of an expression in a function that the step calls."""
        return self.site(good, bad, tree=tree, gated=self.nested, lone=lone)

    def lines(self, good: str, bad: Mapping[str, str]) -> str:
        """The token of whole lines, or of text in the arguments of a function: the mistake is made always."""
        self.sites.append(Site(good, dict(bad), False, False, ""))
        return f"⟦{len(self.sites) - 1}⟧"


def side_of(text: str, side: Side) -> str:
    """The lines of one side."""
    kept = [line for line in text.split("\n") if line.strip() and not line.startswith(OTHER[side])]
    return "\n".join(line[2:] if line[:2] in OTHER.values() else line for line in kept)


def rendered(text: str, sites: Sequence[Site], planted: Planted | None, axis: str) -> str:
    """Text without tokens; with a mistake, if one is planted in it."""
    while (found := TOKEN.search(text)) is not None:
        new = _chosen(sites[int(found.group(1))], planted, axis)
        start = text.rfind("\n", 0, found.start()) + 1
        before = text[start : found.start()]
        end = text.find("\n", found.end())
        end = len(text) if end < 0 else end
        if not before.strip() and not text[found.end() : end].strip():  # whole lines
            block = [before + line for line in new.split("\n") if line.strip()]
            text = text[:start] + "\n".join(block) + (text[end:] if block else text[end + 1 :])
        else:
            text = text[: found.start()] + new + text[found.end() :]
    return text


def _chosen(site: Site, planted: Planted | None, axis: str) -> str:
    if planted is None or planted.name not in site.bad:
        return site.good
    bad = site.bad[planted.name]
    gates = [planted.when.format(n="n") if site.gated else "", planted.where.format(rank=f'lax.axis_index("{axis}")') if site.lone else ""]
    conditions = [gate for gate in gates if gate]
    if not conditions or not site.choice:
        return bad
    cond = conditions[0] if len(conditions) == 1 else " & ".join(f"({gate})" for gate in conditions)
    return CHOICES[site.choice].format(cond=cond, bad=bad, good=site.good)


def tokens(text: str, sites: Sequence[Site]) -> Iterator[Site]:
    """All places of a text, also those within places."""
    for found in TOKEN.finditer(text):
        site = sites[int(found.group(1))]
        yield site
        for inner in (site.good, *site.bad.values()):
            yield from tokens(inner, sites)


def indented(text: str, by: int = 1) -> str:
    """Every line further in; marks stay at its start."""
    found = []
    for line in text.split("\n"):
        mark = line[:2] if line[:2] in OTHER.values() else ""
        found.append(mark + "    " * by + line.removeprefix(mark) if line.strip() else "")
    return "\n".join(found)
