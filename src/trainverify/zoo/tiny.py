"""Models of the zoo built anew at tiny widths, with the same layers and the same plan: small enough to be run as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from trainverify.build.tape import BuildError
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.graph.rebuilt import Rebuilt
from trainverify.zoo import deepseek, gpt, llama, resnet
from trainverify.zoo.recipes import Wish, family_of


@dataclass(frozen=True)
class Tiny:
    """Both programs at tiny widths, and what those are."""

    sizes: str
    logical: Program
    plan: Plan


def tiny(wish: Wish) -> Tiny:
    """The model of a wish at tiny widths; BuildError or ValueError where the plan does not fit them."""
    family, config = family_of(wish.name), wish.config()
    small = _tiny(config)
    plan = family.plan(small, wish.how, master=wish.master, deviations=wish.deviations)
    before = dict(_sizes(config))
    sizes = [f"{n}={v}" for n, v in _sizes(small) if before.get(n) != v]
    return Tiny(", ".join(sizes), family.step(small, master=wish.master), plan)


def _sizes(config: Any) -> Iterator[tuple[str, object]]:
    """All sizes of a model, by name."""
    for f in fields(config):
        value = getattr(config, f.name)
        if is_dataclass(value):
            yield from _sizes(value)
        elif isinstance(value, int | tuple):
            yield f.name, value


def _tiny(config: Any) -> Any:
    if isinstance(config, llama.Config):
        return replace(config, hidden=12, heads=6, kv_heads=2, ffn=20, vocabulary=12, sequence=8)
    if isinstance(config, deepseek.Config):
        gate = replace(config.gate, experts=8, active=2, groups=1 if config.gate.groups == 1 else 2, top_groups=1)
        widths: dict[str, Any] = {"hidden": 24, "heads": 6, "ffn": 20, "expert_ffn": 8, "vocabulary": 56, "sequence": 6, "kv_rank": 14}
        ranks: dict[str, Any] = {"head": 8, "rotary": 4, "value": 6, "q_rank": None if config.q_rank is None else 10}
        return replace(config, gate=gate, **widths, **ranks)
    if isinstance(config, gpt.Config):
        return replace(config, hidden=18, heads=6, ffn=24, vocabulary=30, sequence=12)
    if isinstance(config, resnet.Config):
        return replace(config, width=6, classes=10, size=(32, 32))
    return config


def rebuilt(wish: Wish, change: Callable[[Plan], Plan] = lambda plan: plan) -> tuple[Rebuilt, ...]:
    """The programs of a wish at tiny widths, with the same change in the plan; none where the plan does not fit such widths."""
    try:
        small = tiny(wish)
    except (BuildError, ValueError):
        return ()
    return (Rebuilt(small.sizes, lambda: (small.logical, change(small.plan))),)
