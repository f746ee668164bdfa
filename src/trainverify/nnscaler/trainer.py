"""What the trainer does around a plan of nnScaler: corrections, optimizer, clipping, ZeRO."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final, Literal

from trainverify.completion.optimizers import SGD, AdamW, Optimizer

Correction = Literal["none", "mean"]


@dataclass(frozen=True)
class Trainer:
    """What the trainer does around a plan, which the plan does not show.

    `correction="mean"`: it divides gradients, and averages losses, over replicas and micro-batches. `optimizer` and `clip`
    complete the step. `zero`: the ranks that share a weight are cut into so many groups (`zero_ngroups`), and each of a group
    keeps the optimizer's state of its piece of the weight only, and updates that; 0 is no ZeRO.
    """

    correction: Correction = "none"
    optimizer: Optimizer | None = None
    clip: float | None = None
    zero: int = 0


PLAIN: Final = Trainer()
_KINDS: Final[dict[str, tuple[Any, dict[str, float]]]] = {"sgd": (SGD, {"lr": 0.1, "momentum": 0.9}), "adamw": (AdamW, {"lr": 1e-3})}


def optimizer_of(name: str | None, **wish: float | None) -> Optimizer | None:
    """The optimizer of that name; what is None keeps its default. ValueError for a name or parameter that there is not."""
    given = {key: value for key, value in wish.items() if value is not None}
    if name is not None and name not in _KINDS:
        raise ValueError(f"--optimizer {name}: {' or '.join(_KINDS)}")
    kind, defaults = (None, {}) if name is None else _KINDS[name]
    known = set() if kind is None else {f.name for f in fields(kind)}
    for key in given:
        if key not in known:
            raise ValueError(f"--{key.replace('_', '-')}: " + ("without --optimizer" if name is None else f"{name} has no such parameter"))
    found: Optimizer | None = None if kind is None else kind(**{**defaults, **given})
    return found
