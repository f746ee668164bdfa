"""What the plans of language models share: micro-batches through a stage, then the end of the step."""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from functools import reduce

from trainverify.build.tape import Tensor
from trainverify.complete.optimizers import Optimizer
from trainverify.zoo.language import IGNORED
from trainverify.zoo.parallel.pipeline import Pipeline
from trainverify.zoo.parallel.stage import Stage
from trainverify.zoo.parallel.update import finish


class Model:
    """The part of a model that one stage runs."""

    def __init__(self, stage: Stage, batch: int, sequence: int, hidden: int, vocabulary: int):
        self.stage = stage
        self.rows = stage.how.rows(batch)
        self.sequence = sequence
        self.vocabulary = vocabulary
        length = stage.how.share(sequence, "positions") if stage.how.sp else sequence
        self.shape = (self.rows, length, hidden)  # of activations between stages
        self.sums: list[Tensor] = []  # of the losses, by micro-batch
        self.counts: list[Tensor] = []

    def declare(self) -> None:
        """The stage's weights and tables."""
        raise NotImplementedError

    def begin(self, m: int) -> Tensor:
        """The first stage: embedded tokens."""
        raise NotImplementedError

    def middle(self, m: int, x: Tensor) -> Tensor:
        """The stage's layers."""
        raise NotImplementedError

    def end(self, m: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """The last stage: Σ of losses, number of valid tokens."""
        raise NotImplementedError

    def tokens(self, m: int) -> Tensor:
        return self.stage.batch("tokens", m, self.rows, self.sequence, self.vocabulary)

    def labels(self, m: int) -> Tensor:
        return self.stage.batch("labels", m, self.rows, self.sequence, self.vocabulary, IGNORED)

    def forward(self, m: int, x: Tensor | None) -> Tensor:
        r = self.stage.r
        r.prefix = f"mb{m}/"
        made = self.middle(m, self.begin(m) if x is None else x)
        if self.stage.last:
            r.prefix = f"mb{m}/"
            made, count = self.end(m, made)
            self.sums.append(made)
            self.counts.append(count)
        r.prefix = ""
        return made

    def added(self, values: list[Tensor], name: str) -> Tensor | None:
        return reduce(lambda a, b: self.stage.r.add(a, b, name=name), values) if values else None


def run(model: Model, optimizer: Optimizer | None, clip: float | None) -> None:
    """The whole step of a stage."""
    stage = model.stage
    model.declare()
    Pipeline(stage.r, stage.how, stage.index, model.shape, model.forward).run()
    finish(stage, model.added(model.sums, "loss.sum"), model.added(model.counts, "valid.count"), optimizer, clip)
