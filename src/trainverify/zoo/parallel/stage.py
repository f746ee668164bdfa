"""One pipeline stage: its weights, and the parts of a model that communicate within tensor parallelism, as Megatron has them.

Between regions activations are replicated, or with sequence parallelism cut along the sequence. Every collective names
its backward; the loss is computed on every rank of a tensor-parallel group, and each seeds its own.
"""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainverify.build.plan import RankBuilder, Spelling
from trainverify.build.tape import Tensor
from trainverify.graph.program import Value
from trainverify.zoo.language import IGNORED
from trainverify.zoo.parallel.degrees import Axes, Degrees


@dataclass(frozen=True)
class Weight:
    """A parameter on the ranks of a stage."""

    tensor: Tensor
    form: Spelling
    split: tuple[str, ...]  # mesh axes along which ranks hold different pieces
    summed: tuple[str, ...]  # mesh axes besides dp along which ranks compute summands of the gradient
    tied: Value = None  # the group of ranks that hold the same weight for another use
    counted: bool = True  # in the gradient norm: one of the tied copies is not


class Stage:
    def __init__(self, r: RankBuilder, how: Degrees, axes: Axes, index: int):
        self.r = r
        self.how = how
        self.axes = axes
        self.index = index
        self.weights: dict[str, Weight] = {}

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.how.pp - 1

    def weight(
        self,
        name: str,
        shape: tuple[int, ...],
        form: Spelling,
        split: tuple[str, ...] = (),
        summed: tuple[str, ...] = (),
        tied: Value = None,
        counted: bool = True,
    ) -> Tensor:
        tensor = self.r.parameter(name, shape, form)
        self.weights[name] = Weight(tensor, form, split, summed, tied, counted)
        return tensor

    def column(self, name: str, rows: int, width: int) -> Tensor:
        """A weight whose rows (outputs) are divided among the ranks."""
        return self.weight(name, (self.how.share(rows, f"rows of {name}"), width), f"({self.axes.text} o) k", split=self.axes.tensor)

    def row(self, name: str, rows: int, width: int) -> Tensor:
        """A weight whose columns (inputs) are divided among the ranks."""
        return self.weight(name, (rows, self.how.share(width, f"columns of {name}")), f"o ({self.axes.text} k)", split=self.axes.tensor)

    def vector(self, name: str, size: int) -> Tensor:
        """A weight that every rank has, applied to what lies between the regions: under sequence parallelism, to a part of it."""
        return self.weight(name, (size,), "h", summed=self.axes.tensor if self.how.sp else ())

    def __getitem__(self, name: str) -> Tensor:
        return self.weights[name].tensor

    def batch(self, name: str, m: int, rows: int, sequence: int, vocabulary: int, ignore: int | None = None) -> Tensor:
        """Token ids of micro-batch m."""
        fixed: Mapping[str, tuple[int, int]] = {"mb": (m, self.how.microbatches)}
        local = f"mb{m}/{name}"
        return self.r.input(local, (rows, sequence), "(dp mb b) s", name, "i64", ids=vocabulary, ignore=ignore, fixed=fixed)

    def offset(self, size: int, ends: int = 0) -> Value:
        """Where this rank's block of so many elements starts (or with `ends` 1 stops)."""
        mesh = self.axes.mesh

        def start(at: dict[str, int]) -> int:
            position = 0
            for a in self.axes.tensor:
                position = position * mesh.length(a) + at[a]
            return (position + ends) * size

        return self.r.each(start)

    # -- between and within tensor-parallel regions -------------------------------------------------------------------

    def enter(self, x: Tensor, name: str) -> Tensor:
        """The whole input of a region, for every rank; its gradient is the sum of all ranks'."""
        if self.how.tp == 1:
            return x
        if self.how.sp:
            return self.r.all_gather(x, group=self.axes.tensor, dim=1, backward="reduce_scatter", name=name)
        return self.r.copy(x, self.axes.tensor, name=name)

    def leave(self, part: Tensor, name: str) -> Tensor:
        """The sum of all ranks' parts, for every rank or cut along the sequence."""
        if self.how.tp == 1:
            return self.r.identity(part, name=name)
        if self.how.sp:
            return self.r.reduce_scatter(part, group=self.axes.tensor, dim=1, backward="all_gather", name=name)
        return self.r.all_reduce(part, group=self.axes.tensor, backward="identity", name=name)

    def reduced(self, x: Tensor, name: str, op: str = "sum") -> Tensor:
        """Combined over the ranks of the region, for a loss that every rank computes: each takes its own share of the gradient."""
        if self.how.tp == 1:
            return self.r.identity(x, name=name)
        how = {} if op == "sum" else {"op": op}
        return self.r.all_reduce(x, group=self.axes.tensor, **how, backward="identity", name=name)

    def embedded(self, ids: Tensor, table: Tensor) -> Tensor:
        """Rows of a table that is divided by ranges of ids."""
        start = self.offset(table.shape[0])
        return self.leave(self.r.embedding(ids, table, start=start, name="embedded.part"), "embedded")

    def valid(self, labels: Tensor) -> Tensor:
        """1 for every token that counts."""
        return self.r.float(self.r.ne(labels, value=IGNORED, name="valid"), name="valid.float")

    def loss(self, logits: Tensor, labels: Tensor, valid: Tensor) -> Tensor:
        """Σ of the cross-entropies of valid tokens; logits are divided by ranges of ids."""
        r = self.r
        size = logits.shape[-1]
        peak = r.detach(r.amax(logits, dim=-1, keepdim=True, name="logits.peak.local"), name="logits.peak.part")
        peak = self.reduced(peak, "logits.peak", "max")
        shifted = r.sub(logits, peak, name="logits.shifted")
        # an id of another rank's range, or an ignored one, hits nothing
        hit = r.float(r.one_hot(labels, num_classes=size, start=self.offset(size), name="hit"), name="hit.float")
        target = r.sum(r.mul(shifted, hit, name="target.masked"), dim=2, name="target.part")
        target = self.reduced(target, "target")
        weight = self.reduced(r.sum(r.exp(shifted, name="exponentials"), dim=2, name="weight.part"), "weight")
        losses = r.mul(r.sub(r.log(weight, name="weight.log"), target, name="loss.tokens"), valid, name="loss.valid")
        return r.sum(losses, name="loss.sum")

    def over_dp(self, x: Tensor, name: str) -> Tensor:
        """The sum over ranks that have different tokens."""
        return x if self.axes.size(self.axes.data) == 1 else self.r.all_reduce(x, group=self.axes.data, name=name)
