"""How many ways a step is divided, and the mesh that follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainverify.build.tape import BuildError
from trainverify.graph.mesh import Mesh

Schedule = Literal["gpipe", "1f1b"]

# Where the loss per token is divided by the number of valid tokens of the whole batch:
#   gradients  every micro-batch's gradients are those of a sum; they are divided after the last one (Megatron)
#   loss       tokens are counted first, and every micro-batch's loss is divided before its backward pass (TorchTitan)
Normalise = Literal["gradients", "loss"]


@dataclass(frozen=True)
class Degrees:
    """Data, tensor and pipeline parallel sizes; `sp` cuts activations between tensor-parallel regions along the sequence.

    `stages` gives the layers of every pipeline stage; without it they are spread evenly, the first ones taking what is left over.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    sp: bool = False
    microbatches: int = 1
    schedule: Schedule = "1f1b"
    normalise: Normalise = "gradients"
    stages: tuple[int, ...] | None = None

    def layers(self, total: int) -> list[range]:
        """The layers of every stage."""
        even, more = divmod(total, self.pp)
        counts = self.stages or tuple(even + (i < more) for i in range(self.pp))
        if len(counts) != self.pp or sum(counts) != total:
            raise BuildError(f"stages of {counts} layers for {total} layers on {self.pp} stages")
        ends = [sum(counts[: i + 1]) for i in range(self.pp)]
        return [range(end - n, end) for end, n in zip(ends, counts, strict=True)]

    def rows(self, batch: int) -> int:
        """Rows of one micro-batch on one rank."""
        return divided(batch, self.dp * self.microbatches, "rows of the batch")

    def share(self, size: int, what: str) -> int:
        """What one tensor-parallel rank holds."""
        return divided(size, self.tp, what)


def divided(size: int, among: int, what: str) -> int:
    if size % among:
        raise BuildError(f"{size} {what} do not divide among {among}")
    return size // among


@dataclass(frozen=True)
class Axes:
    """The mesh axes of tensor parallelism. With fewer key-value heads than ranks there are two: `kv` tells the ranks of
    different key-value heads apart, the ranks along `rep` hold copies of one head's weights."""

    tensor: tuple[str, ...]  # all of them
    heads: tuple[str, ...]  # along which key-value heads differ
    copies: tuple[str, ...]  # along which they are repeated
    mesh: Mesh

    @property
    def text(self) -> str:
        """For patterns: the tensor-parallel position, slow axis first."""
        return " ".join(self.tensor)

    def size(self, axes: tuple[str, ...]) -> int:
        size = 1
        for a in axes:
            size *= self.mesh.length(a)
        return size


def axes_for(how: Degrees, kv_heads: int) -> Axes:
    if kv_heads % how.tp == 0:
        return Axes(("tp",), ("tp",), (), Mesh(pp=how.pp, dp=how.dp, tp=how.tp))
    copies = divided(how.tp, kv_heads, "tensor-parallel ranks")
    return Axes(("kv", "rep"), ("kv",), ("rep",), Mesh(pp=how.pp, dp=how.dp, kv=kv_heads, rep=copies))
