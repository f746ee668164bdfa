"""ResNet's training step, and data-parallel plans that run it: batch norms over all ranks' images (SyncBatchNorm), or each over its own."""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from fractions import Fraction

from trainverify.build.plan import RankBuilder, plan
from trainverify.build.tape import BuildError, Tensor
from trainverify.completion.optimizers import Optimizer
from trainverify.completion.step import complete
from trainverify.graph.mesh import Mesh
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.zoo.parallel.degrees import Axes, Degrees, divided
from trainverify.zoo.parallel.llama import ADAMW
from trainverify.zoo.parallel.stage import Stage
from trainverify.zoo.parallel.update import finish
from trainverify.zoo.resnet import Config, forward


def resnet_step(config: Config, optimizer: Optimizer | None = ADAMW, clip: float | None = 1.0, master: bool = False) -> Program:
    """The step on one device: statistics of the whole batch."""
    return complete(forward(config), optimizer, clip=clip, master=master)


def resnet_plan(
    config: Config,
    how: Degrees,
    optimizer: Optimizer | None = ADAMW,
    clip: float | None = 1.0,
    master: bool = False,
    synchronised: bool = True,
) -> Plan:
    """The same step on dp ranks. Without `synchronised` every rank normalises by its own images: another step."""
    if how != Degrees(dp=how.dp):
        raise BuildError("plans of ResNet divide the batch among data-parallel ranks (dp), and nothing else")
    if how.dp < 2:
        raise BuildError("plans of ResNet have several data-parallel ranks")
    if config.loss != "mean" or master:
        raise BuildError("plans of ResNet have a mean loss, and no master copies")
    axes = Axes((), (), (), Mesh(dp=how.dp))
    p = plan("resnet", axes.mesh)
    with p.ranks() as r:
        _ResNet(Stage(r, how, axes, 0), config, synchronised).run(optimizer, clip)
    return p.build()


class _ResNet:
    def __init__(self, stage: Stage, config: Config, synchronised: bool):
        self.stage = stage
        self.r: RankBuilder = stage.r
        self.config = config
        self.rows = divided(config.batch, stage.how.dp, "images of the batch", "data-parallel ranks", "batch")
        self.synchronised = synchronised
        self.shapes = {n: t.shape for n, t in forward(config).tensors.items() if n in forward(config).parameters}

    def run(self, optimizer: Optimizer | None, clip: float | None) -> None:
        s, r, c = self.stage, self.r, self.config
        for name, shape in self.shapes.items():
            s.weight(name, shape, " ".join("abcd"[: len(shape)]))
        s.declared()
        s.start("")
        images = r.input("images", (self.rows, c.channels, *c.size), "(dp b) c h w")
        labels = r.input("labels", (self.rows,), "(dp b)", dtype="i64", ids=c.classes)
        x = self.features(images)
        logits = r.linear(r.mean(x, dim=(2, 3), name="pooled"), s["fc.weight"], s["fc.bias"], name="logits")
        part = r.div(r.cross_entropy(logits, labels, reduction="mean", name="loss.mean"), value=s.how.dp, name="loss.part")
        r.backward(part)
        r.phase = "optimizer"
        r.loss(s.over_dp(part, "loss"))
        finish(s, None, optimizer, clip)

    def features(self, x: Tensor) -> Tensor:
        r, c = self.r, self.config
        large = c.stem == "large"
        x = r.relu(self.normed("conv1", "bn1", x, 7 if large else 3, 2 if large else 1), name="stem.relu")
        if large:
            x = r.max_pool2d(x, kernel=3, stride=2, padding=1, name="stem.pooled")
        for stage, count in enumerate(c.blocks):
            for i in range(count):
                x = self.block(f"layer{stage + 1}.{i}.", x, 2 if stage and not i else 1)
        return x

    def block(self, at: str, x: Tensor, stride: int) -> Tensor:
        r = self.r
        convs = [(3, stride), (3, 1)] if not self.config.bottleneck else [(1, 1), (3, stride), (1, 1)]
        y = x
        for i, (kernel, step) in enumerate(convs, 1):
            y = self.normed(f"{at}conv{i}", f"{at}bn{i}", y, kernel, step)
            y = r.relu(y, name=f"{at}relu{i}") if i < len(convs) else y
        if x.shape != y.shape:
            x = self.normed(f"{at}downsample.0", f"{at}downsample.1", x, 1, stride)
        return r.relu(r.add(y, x, name=at + "residual"), name=at + "out")

    def normed(self, conv: str, norm: str, x: Tensor, kernel: int, stride: int) -> Tensor:
        s, r, c = self.stage, self.r, self.config
        x = r.conv2d(x, s[conv + ".weight"], stride=stride, padding=kernel // 2, name=conv + ".out")
        if not self.synchronised:
            return self.normed_alone(norm, x)
        channels, m = x.shape[1], Fraction(c.momentum)
        count = s.how.dp * x.shape[0] * x.shape[2] * x.shape[3]
        mean = r.div(self.total(x, f"{norm}.sum"), value=count, name=f"{norm}.mean")
        centred = r.sub(x, self.by_channel(mean), name=f"{norm}.centred")
        squares = self.total(r.square(centred, name=f"{norm}.centred.squares"), f"{norm}.squares")
        var = r.div(squares, value=count, name=f"{norm}.var")
        root = r.rsqrt(r.add(var, value=c.eps, name=f"{norm}.var.eps"), name=f"{norm}.root")
        y = r.mul(r.mul(centred, self.by_channel(root), name=f"{norm}.normed"), self.by_channel(s[norm + ".weight"]), name=f"{norm}.scaled")
        y = r.add(y, self.by_channel(s[norm + ".bias"]), name=f"{norm}.out")
        unbiased = r.div(squares, value=count - 1, name=f"{norm}.var.unbiased")
        for name, new in (("running_mean", mean), ("running_var", unbiased)):
            old = r.state(f"{norm}.{name}", (channels,), "c", domain="nonnegative" if name == "running_var" else None)
            kept = r.mul(old, value=1 - m, name=f"{norm}.{name}.kept")
            r.update(
                old,
                r.add(
                    kept, r.mul(r.detach(new, name=f"{norm}.{name}.now"), value=m, name=f"{norm}.{name}.share"), name=f"{norm}.{name}.new"
                ),
            )
        return y

    def normed_alone(self, norm: str, x: Tensor) -> Tensor:
        """By the images of this rank, as a batch norm does that knows of no others."""
        s, r, c = self.stage, self.r, self.config
        mean = r.state(f"{norm}.running_mean", (x.shape[1],), "c")
        var = r.state(f"{norm}.running_var", (x.shape[1],), "c", domain="nonnegative")
        affine = [s[f"{norm}.{n}"] for n in ("weight", "bias")]
        names = [f"{norm}.{n}" for n in ("out", "mean", "var", "running_mean.new", "running_var.new")]
        y, _, _, new_mean, new_var = r.batch_norm(x, *affine, mean, var, momentum=c.momentum, eps=c.eps, name=names)
        r.update(mean, new_mean)
        r.update(var, new_var)
        return y

    def total(self, x: Tensor, name: str) -> Tensor:
        """Σ over all ranks' images and places; each rank's loss depends on it."""
        part = self.r.sum(x, dim=(0, 2, 3), name=f"{name}.part")
        return self.r.all_reduce(part, group="dp", backward="all_reduce", name=name)

    def by_channel(self, x: Tensor) -> Tensor:
        return self.r.reshape(x, shape=(1, x.shape[0], 1, 1), name=f"{x.name}.wide")
