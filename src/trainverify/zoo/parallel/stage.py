"""One pipeline stage: its weights, and the parts of a model that communicate within tensor parallelism, as Megatron has them.

Between regions activations are replicated, or with sequence parallelism cut along the sequence. Every collective names
its backward; the loss is computed on every rank of a tensor-parallel group, and each seeds its own.
"""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from collections.abc import Callable, Mapping

from trainverify.build.plan import RankBuilder
from trainverify.build.tape import BuildError, Tensor
from trainverify.graph.program import Value
from trainverify.zoo.language import IGNORED
from trainverify.zoo.parallel.degrees import Axes, Degrees
from trainverify.zoo.parallel.zero import Bucket, Weight, buckets


class Stage:
    """`gradients` names the logical gradient of every parameter: sharded ones say what they hold."""

    def __init__(self, r: RankBuilder, how: Degrees, axes: Axes, index: int, gradients: Mapping[str, str] | None = None):
        self.r = r
        self.how = how
        self.axes = axes
        self.index = index
        self.gradients = gradients or {}
        self.ranks = r.ranks
        self.weights: dict[str, Weight] = {}
        self.buckets: list[Bucket] = []
        self.tensors: dict[str, Tensor] = {}  # by weight, or with ZeRO 3 by bucket
        self.shards: dict[str, Tensor] = {}  # of gradients so far, by bucket (ZeRO 2)
        self._whole: dict[str, Tensor] = {}  # weights gathered for the pass at hand (ZeRO 3)
        self._bucket_of: dict[str, Bucket] = {}
        self._pass = ""
        self._starts: dict[tuple[tuple[str, ...], int, int], Value] = {}

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
        form: str,
        split: tuple[str, ...] = (),
        summed: tuple[str, ...] = (),
        tied: Value = None,
        counted: bool = True,
        blocks: tuple[int, ...] = (),
        data: tuple[str, ...] | None = None,
    ) -> None:
        """Declare a parameter; `s[name]` is the tensor to compute with."""
        self.weights[name] = Weight(name, shape, form, split, summed, tied, counted, data, blocks)

    def declared(self) -> None:
        """All weights are known: parameters as the ranks store them."""
        self.buckets = buckets(self)
        for b in self.buckets:
            for w in b.weights:
                self._bucket_of[w.name] = b
                if b.zero < 3:
                    self.tensors[w.name] = self.r.parameter(w.name, w.shape, w.form)
            if b.zero == 3:
                first, *others = b.weights
                self.tensors[b.name] = self.r.parameter(b.name, b.shape, b.form(first), first.name)
                for w in others:
                    self.r.lives(self.tensors[b.name], w.name, b.form(w))

    def start(self, prefix: str) -> None:
        """A forward pass begins: its tensors have this prefix, and weights are gathered anew."""
        self.r.prefix = self._pass = prefix
        self._whole = {}

    def __getitem__(self, name: str) -> Tensor:
        b = self._bucket_of[name]
        if b.zero < 3:
            return self.tensors[name]
        if name not in self._whole:
            self._whole |= self._gather(b, "whole", self._pass)
            again: dict[str, Tensor] = {}
            for w in b.weights:
                self.r.recompute(self._whole[w.name], self._once_more(b, w.name, self._pass, again))
        return self._whole[name]

    def _gather(self, b: Bucket, label: str, prefix: str) -> dict[str, Tensor]:
        before, self.r.prefix = self.r.prefix, prefix
        made = b.gathered(self.tensors[b.name], f"{b.name}.{label}", [f"{w.name}.{label}" for w in b.weights])
        self.r.prefix = before
        return {w.name: t for w, t in zip(b.weights, made, strict=True)}

    def _once_more(self, b: Bucket, name: str, prefix: str, again: dict[str, Tensor]) -> Callable[[], Tensor]:
        """Backward passes gather a bucket once more, all of it at its first use."""

        def gather() -> Tensor:
            if not again:
                again.update(self._gather(b, "again", prefix))
            return again[name]

        return gather

    def collect(self) -> None:
        """After a backward pass: with ZeRO 2 its gradients are added up over the ranks, and each keeps its shard."""
        if self.how.zero != 2:
            return
        r = self.r
        before, r.phase = r.phase, "backward"
        for b in (b for b in self.buckets if b.zero == 2):
            found = [r.take_gradient(self.tensors[w.name]) for w in b.weights]
            if any(g is None for g in found):
                if any(g is not None for g in found):
                    raise BuildError(f"a backward pass reaches only some of the weights of {b.name}")
                continue
            shard = b.scattered([g for g in found if g is not None], f"{b.name}.grad.shard")
            known = self.shards.get(b.name)
            self.shards[b.name] = shard if known is None else r.add(known, shard, name=f"{b.name}.grad.sum")
        r.phase = before

    def column(self, name: str, rows: int, width: int, blocks: tuple[int, ...] = ()) -> None:
        """A weight whose rows (outputs) are divided among the ranks, in blocks that belong together."""
        shape = (self.how.share(rows, f"rows of {name}"), width)
        self.weight(name, shape, f"({self.axes.text} o) k", split=self.axes.tensor, blocks=blocks)

    def row(self, name: str, rows: int, width: int) -> None:
        """A weight whose columns (inputs) are divided among the ranks."""
        self.weight(name, (rows, self.how.share(width, f"columns of {name}")), f"o ({self.axes.text} k)", split=self.axes.tensor)

    def vector(self, name: str, size: int) -> None:
        """A weight that every rank has, applied to what lies between the regions: under sequence parallelism, to a part of it."""
        self.weight(name, (size,), "h", summed=self.axes.tensor if self.how.sp else ())

    def batch(self, name: str, m: int, rows: int, sequence: int, vocabulary: int, ignore: int | None = None) -> Tensor:
        """Token ids of micro-batch m: this rank's rows, and with context parallelism its stretch of each."""
        fixed: Mapping[str, tuple[int, int]] = {"mb": (m, self.how.microbatches)}
        axes = " ".join(a for a in self.axes.data if a != "cp")
        form = f"({axes} mb b) {'(cp s)' if self.how.cp > 1 else 's'}"
        return self.r.input(f"mb{m}/{name}", (rows, sequence), form, name, "i64", ids=vocabulary, ignore=ignore, fixed=fixed)

    def rows(self, table: Tensor, size: int) -> Tensor:
        """The rows of a table for so many positions: this rank's stretch of the sequence."""
        start, stop = (self.offset(size, e, ("cp",)) for e in (0, 1)) if self.how.cp > 1 else (0, size)
        return self.r.slice(table, dim=0, start=start, stop=stop, name=table.name + ".rows")

    def offset(self, size: int, ends: int = 0, axes: tuple[str, ...] | None = None) -> Value:
        """Where this rank's block of so many elements starts (or with `ends` 1 stops): ranks along some axes, by default the tensor's."""
        mesh, along = self.axes.mesh, self.axes.tensor if axes is None else axes

        def start(at: dict[str, int]) -> int:
            position = 0
            for a in along:
                position = position * mesh.length(a) + at[a]
            return (position + ends) * size

        key = (along, size, ends)
        if key not in self._starts:
            self._starts[key] = self.r.each(start)
        return self._starts[key]

    # -- context parallelism of ranks that have a stretch of every sequence (Ulysses) -----------------------------------

    def attention(self, q: Tensor, k: Tensor, v: Tensor, at: str) -> Tensor:
        """Causal attention to all positions: an all-to-all gives a rank all of them for some heads, another one takes them back."""
        r, cut = self.r, self.how.cp > 1
        if cut:
            q, k, v = (self._swapped(x, 1, 2, f"{at}.{n}.positions") for x, n in ((q, "q"), (k, "k"), (v, "v")))
        mixed, _ = r.attention(q, k, v, is_causal=True, name=[f"{at}.mixed.heads" if cut else f"{at}.mixed", f"{at}.logsumexp"])
        return self._swapped(mixed, 2, 1, f"{at}.mixed") if cut else mixed

    def _swapped(self, x: Tensor, split: int, joined: int, name: str) -> Tensor:
        if x.shape[split] % self.how.cp:
            heads = f"{x.shape[split]} heads of a tensor-parallel rank"
            raise BuildError(f"{name}: {heads} do not divide among {self.how.cp} context-parallel ones")
        return self.r.all_to_all(x, group="cp", split_dim=split, concat_dim=joined, backward="all_to_all", name=name)

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

    def loss(self, logits: Tensor, labels: Tensor, valid: Tensor, per_sequence: bool = False) -> Tensor:
        """Σ of the cross-entropies of valid tokens, or Σ over sequences of each one's mean; logits are divided by ranges of ids."""
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
        if not per_sequence:
            return r.sum(losses, name="loss.sum")
        means = r.div(r.sum(losses, dim=1, name="loss.sums"), r.sum(valid, dim=1, name="valid.counts"), name="loss.sequences")
        return r.sum(means, name="loss.sum")

    def over_dp(self, x: Tensor, name: str, along: tuple[str, ...] | None = None) -> Tensor:
        """The sum over all ranks with other tokens, or over those along some axes."""
        axes = self.axes.data if along is None else along
        return x if self.axes.size(axes) == 1 else self.r.all_reduce(x, group=axes, name=name)
