"""ResNet: convolutions, BatchNorm over the batch with running statistics, residual blocks, mean over places, linear."""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import trainverify.build.program as build
from trainverify.build.program import ProgramBuilder
from trainverify.build.tape import Tensor
from trainverify.graph.program import Program


@dataclass(frozen=True)
class Config:
    blocks: tuple[int, ...]  # for each stage; a stage after the first halves height and width
    bottleneck: bool = False  # 1×1, 3×3, 1×1 with four times the width, instead of two 3×3
    width: int = 64  # of the first stage; doubled by every next one
    classes: int = 1000
    size: tuple[int, int] = (224, 224)
    batch: int = 32
    channels: int = 3
    stem: Literal["large", "small"] = "large"  # 7×7 by two and a max pool by two, or 3×3
    momentum: float = 0.1
    eps: float = 1e-5
    loss: Literal["mean", "sum"] = "mean"


PRESETS: Final[dict[str, Config]] = {
    "resnet18": Config((2, 2, 2, 2)),
    "resnet34": Config((3, 4, 6, 3)),
    "resnet50": Config((3, 4, 6, 3), bottleneck=True),
    "resnet101": Config((3, 4, 23, 3), bottleneck=True),
    "resnet152": Config((3, 8, 36, 3), bottleneck=True),
}


def forward(config: Config) -> Program:
    b = build.program("resnet")
    x = b.input("images", (config.batch, config.channels, *config.size))
    labels = b.input("labels", (config.batch,), "i64", ids=config.classes)
    if config.stem == "large":
        x = b.relu(normed_conv(b, config, "conv1", "bn1", x, config.width, 7, 2), name="stem.relu")
        x = b.max_pool2d(x, kernel=3, stride=2, padding=1, name="stem.pooled")
    else:
        x = b.relu(normed_conv(b, config, "conv1", "bn1", x, config.width, 3), name="stem.relu")
    for stage, count in enumerate(config.blocks):
        for i in range(count):
            x = block(b, config, f"layer{stage + 1}.{i}.", x, config.width << stage, 2 if stage and not i else 1)
    pooled = b.mean(x, dim=(2, 3), name="pooled")
    weight = b.parameter("fc.weight", (config.classes, pooled.shape[1]))
    logits = b.linear(pooled, weight, b.parameter("fc.bias", (config.classes,)), name="logits")
    b.loss(b.cross_entropy(logits, labels, reduction=config.loss, name="loss"))
    return b.build()


def block(b: ProgramBuilder, config: Config, at: str, x: Tensor, width: int, stride: int) -> Tensor:
    """Convolutions beside a shortcut; a projection where the shapes differ."""
    convs = [(width, 3, stride), (width, 3, 1)] if not config.bottleneck else [(width, 1, 1), (width, 3, stride), (4 * width, 1, 1)]
    y = x
    for i, (channels, kernel, step) in enumerate(convs, 1):
        y = normed_conv(b, config, f"{at}conv{i}", f"{at}bn{i}", y, channels, kernel, step)
        y = b.relu(y, name=f"{at}relu{i}") if i < len(convs) else y
    if x.shape != y.shape:
        x = normed_conv(b, config, f"{at}downsample.0", f"{at}downsample.1", x, y.shape[1], 1, stride)
    return b.relu(b.add(y, x, name=at + "residual"), name=at + "out")


def normed_conv(b: ProgramBuilder, config: Config, conv: str, norm: str, x: Tensor, channels: int, kernel: int, stride: int = 1) -> Tensor:
    weight = b.parameter(conv + ".weight", (channels, x.shape[1], kernel, kernel))
    x = b.conv2d(x, weight, stride=stride, padding=kernel // 2, name=conv + ".out")
    scale, shift = (b.parameter(f"{norm}.{n}", (channels,)) for n in ("weight", "bias"))
    mean = b.state(norm + ".running_mean", (channels,))
    var = b.state(norm + ".running_var", (channels,), domain="nonnegative")
    names = [f"{norm}.{n}" for n in ("out", "mean", "var", "running_mean.new", "running_var.new")]
    y, _, _, new_mean, new_var = b.batch_norm(x, scale, shift, mean, var, momentum=config.momentum, eps=config.eps, name=names)
    b.update(mean, new_mean)
    b.update(var, new_var)
    return y
