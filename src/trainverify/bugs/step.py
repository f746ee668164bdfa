"""Pieces of training steps that many cases share. Ops that these append have the line of the case that calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trainverify as tv
from trainverify.build.plan import RankBuilder
from trainverify.build.program import ProgramBuilder
from trainverify.build.tape import Tensor
from trainverify.graph.lineage import Part, Parts, Run
from trainverify.graph.program import Program

LR = 0.1
Builder = ProgramBuilder | RankBuilder


def finish(b: ProgramBuilder, loss: Tensor, clip: float | None = None) -> Program:
    """The whole step of a model with this loss: gradients and SGD."""
    b.loss(loss)
    return tv.complete(b.build(), tv.SGD(lr=LR), clip=clip)


def update(r: RankBuilder, w: Tensor, grad: Tensor, clipped: Tensor | None = None) -> None:
    """Report a gradient and take a step of SGD with it, or with what clipping leaves of it."""
    r.phase = "optimizer"
    r.output(grad, "gradient", w.name)
    r.update(w, r.sgd(w, grad if clipped is None else clipped, lr=LR, name=f"{w.name}.new"))


def squares(b: Builder, y: Tensor, t: Tensor, name: str = "squares") -> Tensor:
    """Σ (y − t)²."""
    e = b.sub(y, t, name=f"{name}.e")
    made: Tensor = b.sum(b.mul(e, e, name=f"{name}.sq"), name=name)
    return made


def masked(b: Builder, y: Tensor, t: Tensor, mask: Tensor, name: str = "masked") -> Tensor:
    """Σ mask·Σ (y − t)² over rows, each with a mask of 0 or 1."""
    e = b.sub(y, t, name=f"{name}.e")
    rows = b.sum(b.mul(e, e, name=f"{name}.sq"), dim=-1, name=f"{name}.rows")
    made: Tensor = b.sum(b.mul(rows, mask, name=f"{name}.kept"), name=name)
    return made


def piece(r: RankBuilder, x: Tensor, dim: int, start: Callable[[dict[str, int]], int], size: int, name: str) -> Tensor:
    """So many positions of a dimension, from where a rank's mesh coordinates say."""
    made: Tensor = r.slice(x, dim=dim, start=r.each(start), stop=r.each(lambda at: start(at) + size), name=name)
    return made


def zigzag_row(r: RankBuilder, x: Tensor, i: int, offset: int, name: str) -> Tensor:
    """One of the two rows of four, from an offset on, that a rank holds under zig-zag on cp=2: the first of them, or its mirror image."""
    return piece(r, x, 0, lambda at: offset + (3 - at["cp"] if i else at["cp"]), 1, name)


def rows_of(ranks: Sequence[Sequence[int]], shape: tuple[int, ...], dim: int = 0, first: int = 0) -> Parts:
    """A local tensor of whole rows of a logical tensor of this shape: rank by rank their numbers, in order."""

    def part(at: int, row: int) -> Part:
        local = tuple(at if d == dim else 0 for d in range(len(shape)))
        return Part(local, tuple(Run(row, 1) if d == dim else Run(0, size) for d, size in enumerate(shape)))

    return Parts(tuple((first + r, tuple(part(i, row) for i, row in enumerate(rows))) for r, rows in enumerate(ranks)))
