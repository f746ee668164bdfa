"""Plans whose literals count something: rows, classes, ranks, micro-batches; each with twins whose count is wrong.

A family draws sizes, writes the logical program with `mean`, `var`, `cross_entropy` and the like, and the plan with sums and literals.
One or two axes or the ranks have a real length, all other sizes are at most 3, so that all ranks can be simulated at full size.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import trainverify as tv
from trainverify.graph.mesh import Mesh
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program

Tensor = Any
Builder = Any
Number = int | float | Fraction

MANY: Final = (65, 72, 96, 128)  # ranks
HUGE: Final = (1000, 8192)
FEW: Final = (2, 3, 4, 5, 8)
LENGTHS: Final = (1023, 2187, 4096, 5000, 8191, 30000, 32000)
MESHES: Final = ((13, 5), (8, 9), (12, 8), (16, 8), (3, 25))  # two axes that are many ranks together
SPELLINGS: Final = ("int", "float", "fraction", "share", "tensor")
OPEN: Final = ("relu", "tanh", "abs")  # what the plan spells in a way that no law of the algebra covers


@dataclass(frozen=True)
class Counted:
    """A correct plan, and plans with one wrong literal by what is wrong with it."""

    family: str
    logical: Program
    right: Plan
    wrong: Mapping[str, Callable[[], Plan]]
    open: str = ""  # why a correct plan may be left open


@dataclass(frozen=True)
class Cut:
    """An axis over ranks."""

    ranks: int
    chunk: int

    @property
    def total(self) -> int:
        return self.ranks * self.chunk


class Draw:
    """What the families draw from."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.open = ""

    def small(self, least: int = 1) -> int:
        return self.rng.randint(least, 3)

    def cut(self, huge: bool = True, most: int = 40_000) -> Cut:
        """Many ranks with few positions each, few ranks with many, or many with many."""
        rng, kind = self.rng, self.rng.random()
        if kind < 0.08 and huge:
            ranks = rng.choices(HUGE, [4, 1])[0]
            return Cut(ranks, 1 if ranks == max(HUGE) else self.small())
        if kind < 0.5:
            return Cut(rng.choice(MANY), self.small())
        if kind < 0.6:
            ranks = rng.choice(MANY)
            return Cut(ranks, min(most, rng.choice(LENGTHS)) // ranks)
        ranks = rng.choice(FEW)
        return Cut(ranks, min(most, rng.choice(LENGTHS)) // ranks)

    def activation(self) -> Activation:
        if self.rng.random() < 0.12:
            name = self.rng.choice(OPEN)
            self.open = f"{name} spelled in another way"
            return Activation(name, True)
        return Activation(self.rng.choice(("none", "none", "relu", "tanh", "silu", "square")))

    def spelling(self) -> str:
        return self.rng.choice(SPELLINGS)

    def optimizer(self) -> Any:
        return self.rng.choice((None, tv.SGD(lr=0.5), tv.SGD(lr=0.1, momentum=0.9), tv.AdamW(lr=0.01, step=self.rng.randint(1, 50))))


@dataclass(frozen=True)
class Activation:
    name: str
    otherwise: bool = False  # in the plan

    def __call__(self, b: Builder, x: Tensor, plan: bool = False) -> Tensor:
        if self.name == "none":
            return x
        if not (plan and self.otherwise):
            return getattr(b, self.name)(x)
        match self.name:
            case "relu":
                return b.maximum(x, b.mul(x, value=0))
            case "tanh":
                return b.sub(b.mul(b.sigmoid(b.mul(x, value=2)), value=2), value=1)
            case _:
                return b.add(b.relu(x), b.relu(b.neg(x)))


def over(b: Builder, x: Tensor, count: Number, spelling: str, name: str | None = None) -> Tensor:
    """x / count, with the literal spelled in one of many ways; all of them are exact."""
    if spelling == "tensor":
        return b.div(x, b.full(shape=(), value=count), name=name)
    if spelling == "share":
        return b.mul(x, value=1 / Fraction(count), name=name)
    number: Callable[[Any], Number] = {"int": lambda n: n, "float": float, "fraction": Fraction}[spelling]
    return b.div(x, value=number(count), name=name)


def around(count: int, **degrees: int) -> dict[str, int]:
    """Wrong counts by what is wrong with them."""
    found = {"one more": count + 1, "one less": count - 1, "doubled": 2 * count, "forgotten": 1, "divided twice": count * count}
    for name, size in degrees.items():
        found[f"times {name}"] = count * size
        if count % size == 0:
            found[f"over {name}"] = count // size
    return {text: n for text, n in found.items() if n not in (0, count)}


def mesh(**sizes: int) -> Mesh:
    return Mesh(tuple(sizes.items()))


def weight(b: Builder, name: str, shape: tuple[int, ...], form: str | None, optimizer: Any) -> Tensor:
    """A parameter; without an optimizer an input, as a program that trains nothing has no parameters. `form` is a plan's."""
    declare = b.input if optimizer is None else b.parameter
    return declare(name, shape) if form is None else declare(name, shape, form)


def finish(r: Builder, weights: Mapping[str, tuple[Tensor, str]], gradients: Mapping[str, Tensor], optimizer: Any) -> None:
    """Report gradients, and what the optimizer makes of the parameters."""
    for name, (w, form) in weights.items():
        grad = gradients[name]
        r.output(grad, "gradient", name)
        slots = [r.state(f"{name}.{kind}", w.shape, form, domain=domain) for kind, domain in optimizer.state()]
        made = getattr(r, optimizer.op)(w, grad, *slots, **optimizer.attrs(name))
        for old, new in zip([w, *slots], made if isinstance(made, tuple) else (made,), strict=True):
            r.update(old, new)


def completed(b: Builder, optimizer: Any) -> Program:
    forward: Program = b.build()
    return forward if optimizer is None else tv.complete(forward, optimizer)
