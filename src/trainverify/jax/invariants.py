"""State that is never negative if it starts so: second moments, which are sums of squares with positive factors.

It follows from what the reference computes: that its new value is not negative where the old one is not. Only state that a root, a
logarithm or a power depends on is of interest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from trainverify.graph.program import Domain, Output
from trainverify.jax.emit import RankEmitter
from trainverify.jax.trace import Argument, Traced
from trainverify.translate.signs import Signs

_ROOTS: Final = frozenset(("sqrt", "rsqrt", "log", "pow"))


def never_negative_state(e: RankEmitter, arguments: Sequence[Argument], outputs: Sequence[Output]) -> tuple[str, ...]:
    """The arguments."""
    new = {o.of: o.tensor for o in outputs if o.role == "state"}
    named = {a.name for a in arguments if a.kind == "state" and a.domain is None and a.name in new}
    found = {n for n in named & _under_roots(e) if e.kind(n) == "real"}
    while (kept := _kept(e, found, new)) != found:
        found = kept
    return tuple(sorted(found))


def _kept(e: RankEmitter, found: set[str], new: Mapping[str | None, str]) -> set[str]:
    """State whose new value is not negative where all of this is not."""
    signs = Signs(e, lambda n: n in found or n in e.nonnegative or e.bounds.get(n, (-1, 0))[0] >= 0, e.column, e.shared)
    return {n for n in found if signs.never_negative(new[n])}


def _under_roots(e: RankEmitter) -> set[str]:
    """Inputs of the program that an argument of such a function depends on."""
    waiting = [str(op.inputs[0]) for op in e.ops if op.name in _ROOTS and op.inputs]
    seen = set(waiting)
    while waiting:
        op = e.made.get(waiting.pop())
        fresh = {i for i in (op.inputs if op is not None else ()) if i is not None} - seen
        seen |= fresh
        waiting += fresh
    return {n for n in seen if n not in e.made}


def declared(traced: Traced, names: Iterable[str]) -> Traced:
    """A step of which arguments are said not to be negative."""
    domains: Mapping[str, Domain] = dict.fromkeys(names, Domain("nonnegative"))
    return replace(traced, arguments=tuple(replace(a, domain=domains.get(a.name, a.domain)) for a in traced.arguments))


__all__ = ["declared", "never_negative_state"]
