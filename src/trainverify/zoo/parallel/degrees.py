"""How many ways a step is divided, and the mesh that follows."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

from trainverify.build.tape import BuildError
from trainverify.graph.mesh import Mesh

Schedule = Literal["gpipe", "1f1b", "interleaved"]

# How attention sees the whole sequence when ranks along cp have parts of it:
#   ring     keys and values go round, partial softmaxes are rescaled
#   zigzag   keys and values are gathered; a rank has one block from the front and one from the back
#   ulysses  all-to-all from parts of the sequence to parts of the heads and back
ContextKind = Literal["ring", "zigzag", "ulysses"]

# How ZeRO cuts what it shards over data-parallel ranks:
#   parameter  every tensor along the first dimension that divides; one that has none stays whole (DeepSpeed's persistent parameters)
#   chunk      every tensor along its first dimension as torch.chunk does, padded where it does not divide (FSDP2)
#   flat       the tensors of a layer one after the other, padded to divide (Megatron, FSDP1)
Sharding = Literal["parameter", "chunk", "flat"]

# Where the loss per token is divided by the number of valid tokens of the whole batch:
#   gradients  every micro-batch's gradients are those of a sum; they are divided after the last one (Megatron)
#   loss       tokens are counted first, and every micro-batch's loss is divided before its backward pass (TorchTitan)
Normalise = Literal["gradients", "loss"]


@dataclass(frozen=True)
class Degrees:
    """Data, tensor and pipeline parallel sizes; `sp` cuts activations between tensor-parallel regions along the sequence.

    `stages` gives the layers of every pipeline stage (with several chunks: of every chunk, in the order of the model); without
    it they are spread evenly, the first ones taking what is left over. `chunks` is how many pieces of the model a rank has under
    the interleaved schedule. `zero` shards over dp: 1 optimizer state, 2 also gradients, 3 also parameters. `cp` cuts the
    sequence, `ep` the experts of a mixture; the ranks of `ep` are some of those of `dp`.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    sp: bool = False
    microbatches: int = 1
    schedule: Schedule = "1f1b"
    normalise: Normalise = "gradients"
    stages: tuple[int, ...] | None = None
    chunks: int = 1
    zero: int = 0
    shards: Sharding = "parameter"
    cp: int = 1
    cp_kind: ContextKind = "ring"
    ep: int = 1

    @property
    def ranks(self) -> int:
        return self.dp * self.cp * self.tp * self.pp

    def only(self, model: str, *built: str) -> None:
        """Refuse what plans of a model do not have: every field beside the common ones that is not named here."""
        common = {"dp", "tp", "pp", "sp", "microbatches", "schedule", "normalise", "stages"}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name not in common and f.name not in built and value != f.default:
                raise BuildError(f"plans of {model} have no {f.name}={value}")
        for name in ("dp", "tp", "pp", "cp", "ep", "microbatches", "chunks"):
            if getattr(self, name) < 1:
                raise BuildError(f"{name} must be 1 or more")
        if self.zero not in range(4):
            raise BuildError(f"ZeRO has stages 1, 2 and 3 (0: none), not {self.zero}")
        if self.zero and self.dp * self.cp == 1:
            raise BuildError(f"ZeRO {self.zero} shards over data-parallel ranks; with dp=1 there is nothing to shard")
        if self.shards != "parameter" and not self.zero:
            raise BuildError(f"shards={self.shards} says what ZeRO cuts, and nothing is cut without it: zero=1, 2 or 3 goes with it")
        if self.schedule == "interleaved":
            if self.pp == 1 or self.chunks == 1:
                raise BuildError("the interleaved schedule needs several stages (pp) with several chunks each (chunks)")
            if self.microbatches % self.pp:
                raise BuildError(f"interleaved: {self.microbatches} micro-batches do not divide among {self.pp} stages")
        elif self.chunks > 1:
            raise BuildError(f"the schedule {self.schedule} has one chunk of layers on a stage; interleaved has several")
        if self.sp and self.tp == 1:
            raise BuildError("sequence parallelism (sp) divides among tensor-parallel ranks; with tp=1 there is nothing to divide")

    def only_ulysses(self, model: str, loss: str) -> None:
        """Refuse other ways of context parallelism, and what no such plan has."""
        if self.cp > 1 and self.cp_kind != "ulysses":
            raise BuildError(f"plans of {model} with context parallelism have cp_kind=ulysses, not {self.cp_kind}")
        if self.cp > 1 and loss == "per_sequence":
            raise BuildError(f"plans of {model} with context parallelism have no loss per sequence")

    def layers(self, total: int) -> list[list[range]]:
        """The layers of every stage, chunk by chunk."""
        pieces = self.pp * self.chunks
        where = f"{self.pp} stages" + (f" of {self.chunks} chunks" if self.chunks > 1 else "")
        spare = 2 if self.chunks == 1 else 0  # the first stage may have nothing but the embedding, the last one nothing but the head
        if pieces > total + spare:
            raise BuildError(f"{total} layers are fewer than {where}")
        even, more = divmod(total, pieces)
        counts = self.stages or tuple(even + (i < more) for i in range(pieces))
        if len(counts) != pieces or sum(counts) != total or min(counts) < 0:
            raise BuildError(f"stages of {counts} layers for {total} layers on {where}")
        if 0 in (counts[1:-1] if spare else counts):
            raise BuildError(f"{total} layers on {where}: stage {counts.index(0, 1 if spare else 0)} of {counts} has no layer")
        ends = [sum(counts[: i + 1]) for i in range(pieces)]
        found = [range(end - n, end) for end, n in zip(ends, counts, strict=True)]
        return [found[i :: self.pp] for i in range(self.pp)]

    def rows(self, batch: int) -> int:
        """Rows of one micro-batch on one rank."""
        passes = "data-parallel ranks" + (f" × {self.microbatches} micro-batches" if self.microbatches > 1 else "")
        return divided(batch, self.dp * self.microbatches, "rows of the batch", passes, "batch")

    def share(self, size: int, what: str, option: str | None = None, unit: int = 1) -> int:
        """What one tensor-parallel rank holds; `option` gives the size, in multiples of `unit`."""
        if option is None and size % self.tp:
            raise BuildError(f"{size} {what} do not divide among {self.tp} tensor-parallel ranks: try --tp {_divisor(size, self.tp)}")
        return divided(size, self.tp, what, "tensor-parallel ranks", option, unit)


def _divisor(size: int, most: int) -> int:
    """The largest divisor of a size up to a number."""
    return max(n for n in range(1, most + 1) if size % n == 0)


def divided(size: int, among: int, what: str, ranks: str = "ranks", option: str | None = None, unit: int = 1) -> int:
    """A share of a size; where it does not divide, `option` of the command line has the next size that does."""
    if size % among:
        step = math.lcm(among, unit)
        how = "" if option is None else f": try --{option} {-(-size // step) * step}"
        raise BuildError(f"{size} {what} do not divide among {among} {ranks}{how}")
    return size // among


@dataclass(frozen=True)
class Axes:
    """The mesh axes of tensor parallelism. With fewer key-value heads than ranks there are two: `kv` tells the ranks of
    different key-value heads apart, the ranks along `rep` hold copies of one head's weights."""

    tensor: tuple[str, ...]  # all of them
    heads: tuple[str, ...]  # along which key-value heads differ
    copies: tuple[str, ...]  # along which they are repeated
    mesh: Mesh
    data: tuple[str, ...] = ("dp",)  # along which ranks have different tokens, and gradients add up

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
    data = {"dp": how.dp} | ({"cp": how.cp} if how.cp > 1 else {})
    if kv_heads % how.tp == 0:
        return Axes(("tp",), ("tp",), (), Mesh({"pp": how.pp, **data, "tp": how.tp}), tuple(data))
    if how.tp % kv_heads:
        able = [str(n) for n in range(1, kv_heads + 1) if kv_heads % n == 0]
        near = f"--tp {' or '.join(able)}, or a multiple of {kv_heads}"
        raise BuildError(f"{kv_heads} key-value heads do not divide among {how.tp} tensor-parallel ranks: try {near}")
    copies = how.tp // kv_heads
    return Axes(("kv", "rep"), ("kv",), ("rep",), Mesh({"pp": how.pp, **data, "kv": kv_heads, "rep": copies}), tuple(data))
