"""Optimizers: which operator updates a parameter, with what attributes and what state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def every(parameter: str) -> bool:
    return True


@dataclass(frozen=True)
class SGD:
    """`torch.optim.SGD`. `decays` tells by name which parameters are in the group with weight decay."""

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    first: bool = False  # no step has been taken: the momentum buffer starts as the gradient
    decays: Callable[[str], bool] = every

    op = "sgd"

    def state(self) -> tuple[tuple[str, str | None], ...]:
        """Name and domain of the tensors kept for every parameter."""
        return (("momentum", None),) if self.momentum else ()

    def attrs(self, parameter: str) -> dict[str, object]:
        found: dict[str, object] = {"lr": self.lr}
        if self.weight_decay and self.decays(parameter):
            found["weight_decay"] = self.weight_decay
        if self.momentum:
            found |= {"momentum": self.momentum, "dampening": self.dampening, "nesterov": self.nesterov, "first": self.first}
        return found


@dataclass(frozen=True)
class AdamW:
    """`torch.optim.AdamW` at step number `step` (from 1). `decays` tells by name which parameters are in the group with weight decay."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    step: int = 1
    decays: Callable[[str], bool] = every

    op = "adamw"

    def state(self) -> tuple[tuple[str, str | None], ...]:
        """Name and domain of the tensors kept for every parameter."""
        return (("m", None), ("v", "nonnegative"))

    def attrs(self, parameter: str) -> dict[str, object]:
        decay = self.weight_decay if self.decays(parameter) else 0.0
        return {"lr": self.lr, "beta1": self.beta1, "beta2": self.beta2, "eps": self.eps, "weight_decay": decay, "step": self.step}


Optimizer = SGD | AdamW
