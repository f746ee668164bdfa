"""What the plans of language models share: micro-batches through a stage, then the end of the step."""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from functools import reduce

from trainverify.build.tape import Tensor
from trainverify.completion.optimizers import Optimizer
from trainverify.completion.step import complete
from trainverify.graph.program import Program
from trainverify.zoo.language import IGNORED, Loss
from trainverify.zoo.parallel.degrees import divided
from trainverify.zoo.parallel.pipeline import Pipeline
from trainverify.zoo.parallel.stage import Stage
from trainverify.zoo.parallel.update import finish


class Model:
    """The part of a model that one stage runs: one or more chunks of its layers."""

    def __init__(
        self, stage: Stage, layers: list[range], batch: int, sequence: int, hidden: int, vocabulary: int, loss: Loss = "per_token"
    ):
        self.stage = stage
        self.batch = batch
        self.convention = loss
        self.dtype = "f32"  # of activations between stages
        self.layers = layers
        self.rows = stage.how.rows(batch)
        self.sequence = sequence = divided(sequence, stage.how.cp, "positions", "context-parallel ranks", "sequence")
        self.vocabulary = vocabulary
        stage.how.share(vocabulary, "ids", "vocabulary", unit=128)
        length = (
            stage.how.share(sequence, "positions of a context-parallel rank" if stage.how.cp > 1 else "positions", "sequence")
            if stage.how.sp
            else sequence
        )
        self.shape = (self.rows, length, hidden)  # of activations between stages
        self.losses: list[Tensor] = []  # sums, by micro-batch
        self.labels: list[Tensor] = []
        self.valid: list[Tensor] = []
        self.count: Tensor | None = None  # of valid tokens of the whole batch

    def declare(self) -> None:
        """The stage's weights and tables."""
        raise NotImplementedError

    def begin(self, m: int) -> Tensor:
        """The first stage: embedded tokens."""
        raise NotImplementedError

    def middle(self, m: int, layers: range, x: Tensor) -> Tensor:
        """A chunk of layers."""
        raise NotImplementedError

    def end(self, m: int, x: Tensor) -> Tensor:
        """The last stage: logits, divided by ranges of ids."""
        raise NotImplementedError

    def tokens(self, m: int) -> Tensor:
        return self.ids("tokens", m)

    def ids(self, name: str, m: int, ignore: int | None = None) -> Tensor:
        return self.stage.batch(name, m, self.rows, self.sequence, self.vocabulary, ignore)

    def read(self, m: int) -> None:
        """The labels of a micro-batch."""
        self.labels.append(self.ids("labels", m, IGNORED))
        self.valid.append(self.stage.valid(self.labels[m]))

    def forward(self, m: int, chunk: int, x: Tensor | None) -> Tensor:
        s, r = self.stage, self.stage.r
        s.start(f"mb{m}/")
        made = self.middle(m, self.layers[chunk], self.begin(m) if x is None else x)
        if s.last and chunk == s.how.chunks - 1:
            r.prefix = f"mb{m}/"
            logits = self.end(m, made)
            if len(self.labels) == m:
                self.read(m)
            made = s.loss(logits, self.labels[m], self.valid[m], self.convention == "per_sequence")
            if self.convention == "per_sequence":
                made = r.div(made, value=self.batch, name="loss.share")
            self.losses.append(made)
            made = made if self.count is None else r.div(made, self.count, name="loss.share")
        r.prefix = ""
        return made

    def report(self) -> None:
        """Metrics besides the loss, after the last pass."""

    def counted(self) -> Tensor:
        """The valid tokens of the stage's own rows, then of all."""
        r = self.stage.r
        counts = [r.sum(valid, name=f"mb{m}/valid.count") for m, valid in enumerate(self.valid)]
        return self.added(counts, "valid.count")

    def added(self, values: list[Tensor], name: str) -> Tensor:
        return reduce(lambda a, b: self.stage.r.add(a, b, name=name), values)


def run(model: Model, optimizer: Optimizer | None, clip: float | None, master: bool = False) -> None:
    """The whole step of a stage."""
    per_token = model.convention == "per_token"
    s, r, how = model.stage, model.stage.r, model.stage.how
    model.declare()
    s.declared()
    if per_token and how.normalise == "loss" and s.last:
        for m in range(how.microbatches):
            r.prefix = f"mb{m}/"
            model.read(m)
        r.prefix = ""
        model.count = s.over_dp(model.counted(), "tokens")
    Pipeline(r, how, s.index, model.shape, model.dtype, model.forward, s.collect).run()
    r.phase = "optimizer"
    late = _tokens(model) if per_token and how.normalise == "gradients" else None
    if s.last:
        total = s.over_dp(model.added(model.losses, "loss.sum"), "loss.total")
        r.loss(r.div(total, late or model.count, name="loss") if per_token else total)
    model.report()
    finish(s, late, optimizer, clip, master)


def _tokens(model: Model) -> Tensor:
    """The number of valid tokens of the whole batch: the last stage knows its own, tells the others, all add up over dp."""
    s, r = model.stage, model.stage.r
    count = model.counted() if s.last else None
    if s.how.pp > 1:
        count = r.broadcast(count, group="pp", root=r.peer(pp=s.how.pp - 1), shape=(), name="tokens.stage")
    assert count is not None
    return s.over_dp(count, "tokens")


def gradients(forward: Program) -> dict[str, str]:
    """What the logical step calls the gradient of every parameter."""
    return {str(o.of): o.tensor for o in complete(forward).outputs if o.role == "gradient"}
