"""What a step does besides computing its results: it calls functions of Python, and gives away the memory of arrays."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final

from jax.extend.core import Literal, jaxprs_in_params

from trainverify.check.findings import Finding
from trainverify.graph.program import Source
from trainverify.jax.interpret import kernel_name
from trainverify.jax.lines import where

# What runs its body equation by equation, where it is not inside of jit; what is compiled donates nothing
_EAGER: Final = frozenset(
    (
        *("checkpoint", "remat", "remat2", "closed_call", "core_call", "shard_map"),
        *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
    )
)


def side_effects(who: str, jaxpr: Any, meanings: Collection[str] = ()) -> list[Finding]:
    """Reasons for which a step has no verdict."""
    text = who + " calls a function of Python while it runs ({}): that may change what it reads"
    found = [(text.format(n), s) for n, s in callbacks(jaxpr, meanings)]
    lines = read_after_donation(jaxpr)[1]
    if lines:
        found.append((f"{who} reads an array after a jit that it is donated to: devices that take its memory have no such array", lines[0]))
    return [Finding("TV504", text, None, None, source, None, "unsupported") for text, source in found]


def callbacks(jaxpr: Any, meanings: Collection[str] = ()) -> Iterator[tuple[str, Source | None]]:
    """Calls of Python functions of the user's; `debug_print` has a text only."""
    for eqn in jaxpr.eqns:
        if "callback" in eqn.params and kernel_name(eqn) not in meanings:
            yield eqn.primitive.name, where(eqn.source_info)[0]
        for inner in jaxprs_in_params(eqn.params):
            yield from callbacks(inner, meanings)


def read_after_donation(jaxpr: Any) -> tuple[set[int], list[Source | None]]:
    """The arguments whose memory an eager program gives away, and the lines that donate what is read once more."""
    same: dict[Any, Any] = {}  # another name of an array → the first
    gone: dict[Any, Source | None] = {}  # donated arrays, and the line that donates
    reads: list[Source | None] = []
    for eqn in jaxpr.eqns:
        line = where(eqn.source_info)[0]
        given = [None if isinstance(v, Literal) else same.get(v, v) for v in eqn.invars]
        reads += [gone[v] for v in given if v in gone]
        taken, inner = _donations(eqn)
        reads += inner
        donated = {given[n] for n in taken} - {None}
        reads += [line for v in donated if given.count(v) > 1 or v in jaxpr.constvars]  # a constant is read by the next call
        gone.update(dict.fromkeys(donated, line))
        if eqn.primitive.name == "device_put":
            same.update({out: v for out, v in zip(eqn.outvars, given, strict=True) if v is not None})
    results = [same.get(v, v) for v in jaxpr.outvars if not isinstance(v, Literal)]
    reads += [gone[v] for v in results if v in gone]
    return {n for n, v in enumerate(jaxpr.invars) if v in gone}, reads


def _donations(eqn: Any) -> tuple[Sequence[int], list[Source | None]]:
    """The operands that an equation takes the memory of, and what its body reads after a donation of its own."""
    if eqn.primitive.name not in _EAGER:
        return [n for n, given in enumerate(eqn.params.get("donated_invars") or ()) if given], []
    taken: list[int] = []
    reads: list[Source | None] = []
    for inner in jaxprs_in_params(eqn.params):
        donated, more = read_after_donation(inner)
        reads += more
        taken += [n for n in sorted(donated) if n < len(eqn.invars)]
    return taken, reads


__all__ = ["callbacks", "read_after_donation", "side_effects"]
