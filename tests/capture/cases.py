"""What is captured and verified: sources, meshes, batches, and how ranks cut them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import trainverify.torch as tvt
from trainverify.graph.mesh import Mesh

SOURCES = Path(__file__).parent / "sources"
sys.path.insert(0, str(SOURCES))

import context  # noqa: E402
import data  # noqa: E402
import dtensor  # noqa: E402
import gpt  # noqa: E402
import grid  # noqa: E402
import handwritten  # noqa: E402
import llama  # noqa: E402
import moe  # noqa: E402
import optimizing  # noqa: E402
import pipeline  # noqa: E402
import tokens  # noqa: E402
import written  # noqa: E402
from llama import IGNORE, REAL, SMALL, Config, Llama, trained  # noqa: E402

__all__ = ["CASES", "IGNORE", "REAL", "SMALL", "Case", "Config", "written"]
AVERAGED = {"dp": "avg"}


@dataclass(frozen=True)
class Case:
    reference: Callable[[Config], Any]
    distributed: Callable[..., Any]  # (config, rank, world, bug)
    mesh: Mapping[str, int]
    loss: Any = "whole"
    cuts: Mapping[str, str] = field(default_factory=dict)
    ignore: bool = False
    bugs: tuple[str, ...] = ()
    cut: str = "(dp b) s"
    small: Config = SMALL  # sizes at which ranks can cut it

    def batch(self, c: Config) -> dict[str, tvt.Ids]:
        shape = (c.batch, c.sequence)
        labels = tvt.Ids(shape, self.cut, below=c.vocab, ignore=llama.IGNORE if self.ignore else None)
        return {"tokens": tvt.Ids(shape, self.cut, below=c.vocab), "labels": labels}

    @property
    def world(self) -> int:
        return Mesh(self.mesh).size

    def targets(self, c: Config, bug: str | None = None) -> tuple[Callable[..., Any], Callable[..., Any]]:
        return (lambda: self.reference(c)), (lambda rank, world: self.distributed(c, rank, world, bug))

    def verify(self, c: Config | None = None, bug: str | None = None, points: int = 1) -> Any:
        c = c or self.small
        one, ranks = self.targets(c, bug)
        return tvt.verify(one, ranks, self.world, self.batch(c), self.mesh, cuts=self.cuts, loss=self.loss, points=points)

    def replay(self, c: Config | None = None) -> Any:
        from trainverify.torch.replay import replay

        c = c or self.small
        one, ranks = self.targets(c)
        mesh = Mesh(self.mesh)
        first, *_ = tvt.captures(one, ranks, self.world, self.batch(c), mesh)
        made = tvt.pair(*first, mesh, self.batch(c), self.cuts, self.loss)
        return replay(one, ranks, self.world, self.batch(c), made)


def whole(c: Config) -> Any:
    return trained(Llama(c))


def dp(**more: Any) -> Any:
    return Case(whole, lambda c, r, w, bug: data.plain(c, bug), {"dp": 2}, AVERAGED, bugs=("no ddp",), **more)


def optimized(kind: str, how: str, shard: bool = False, bugs: tuple[str, ...] = ()) -> Case:
    """The for-loop optimizer on one device, another spelling of it on ranks."""
    return Case(
        lambda c: optimizing.stepped(replace(c, layers=1), kind, "loop"),
        lambda c, r, w, bug: optimizing.stepped(replace(c, layers=1), kind, how, w, shard, bug),
        {"dp": 2},
        AVERAGED,
        bugs=bugs,
    )


TP = {"dp": 1, "tp": 2}
HAND = ("avg forward", "avg backward", "no backward reduce", "extra reduce", "missing wait", "residual before reduce", "local norm")
CASES: dict[str, Case] = {
    "ddp": dp(),
    "ddp bucket views": Case(
        whole,
        lambda c, r, w, bug: data.options(c, bug=bug, gradient_as_bucket_view=True),
        {"dp": 2},
        AVERAGED,
        bugs=("sum by hook", "halved twice"),
    ),
    "ddp static graph": Case(whole, lambda c, r, w, bug: data.options(c, bug=bug, static_graph=True), {"dp": 2}, AVERAGED),
    "ddp unused parameters": Case(
        data.sometimes,
        lambda c, r, w, bug: data.options(c, True, bug, find_unused_parameters=True),
        {"dp": 2},
        AVERAGED,
        bugs=("sum by hook", "halved twice"),
    ),
    "ddp accumulation": Case(
        lambda c: data.accumulated(c, 1, 4),
        lambda c, r, w, bug: data.accumulated(c, w, 2, bug),
        {"dp": 2},
        AVERAGED,
        bugs=("not divided", "never synced"),
    ),
    "dp by hand": Case(data.sgd, lambda c, r, w, bug: data.by_hand(c, bug), {"dp": 2}, AVERAGED, bugs=("sum for mean", "no wait")),
    "zero redundancy": Case(whole, lambda c, r, w, bug: data.zero(c), {"dp": 2}, AVERAGED),
    "tp by hand": Case(whole, lambda c, r, w, bug: handwritten.distributed(c, w, bug), TP, cuts=handwritten.CUTS, ignore=True, bugs=HAND),
    "tp by hand 4": Case(
        whole,
        lambda c, r, w, bug: handwritten.distributed(c, w, bug),
        {"dp": 1, "tp": 4},
        cuts=handwritten.CUTS,
        ignore=True,
        small=replace(SMALL, dim=48, heads=8, kv_heads=4),
    ),
    "dtensor tp": Case(dtensor.adamw, lambda c, r, w, bug: dtensor.tensor_parallel(c, w), TP, ignore=True),
    "dtensor vocabulary": Case(dtensor.adamw, lambda c, r, w, bug: dtensor.tensor_parallel(c, w, vocabulary=True), TP, ignore=True),
    "dtensor loss parallel": Case(
        dtensor.adamw,
        lambda c, r, w, bug: dtensor.tensor_parallel(c, w, vocabulary=True, loss_cut=True, bug=bug),
        TP,
        ignore=True,
        bugs=("count all", "divided by ranks"),
    ),
    "dtensor tp sp": Case(whole, lambda c, r, w, bug: dtensor.both(c, 1, 2, shard=False), TP, ignore=True),
    "fsdp": Case(whole, lambda c, r, w, bug: dtensor.both(c, 2, 1, bug=bug), {"dp": 2, "tp": 1}, AVERAGED, bugs=("sum for mean",)),
    "fsdp kept": Case(
        whole,
        lambda c, r, w, bug: dtensor.both(c, 2, 1, reshard=False, bug=bug),
        {"dp": 2, "tp": 1},
        AVERAGED,
        bugs=("sum for mean", "halved"),
    ),
    "fsdp per token": Case(
        whole,
        lambda c, r, w, bug: dtensor.per_token(c, w, bug),
        {"dp": 2},
        {"dp": "sum"},
        ignore=True,
        bugs=("mean of means", "averaged again", "average count"),
    ),
    "fsdp 4": Case(whole, lambda c, r, w, bug: dtensor.both(c, 4, 1), {"dp": 4, "tp": 1}, AVERAGED),
    "fsdp per token 4": Case(
        whole,
        lambda c, r, w, bug: tokens.sharded(c, w, bug),
        {"dp": 4},
        ignore=True,
        bugs=("ranks' means", "divided twice"),
    ),
    "fsdp bf16": Case(whole, lambda c, r, w, bug: dtensor.both(c, 2, 1, bf16=True), {"dp": 2, "tp": 1}, AVERAGED),
    "fsdp checkpoint": Case(whole, lambda c, r, w, bug: dtensor.both(c, 2, 1, recompute=True), {"dp": 2, "tp": 1}, AVERAGED),
    "fsdp tp sp": Case(whole, lambda c, r, w, bug: dtensor.both(c, 2, 2), {"dp": 2, "tp": 2}, AVERAGED),
    "hsdp": Case(
        whole,
        lambda c, r, w, bug: dtensor.hybrid(c, 2, 2),
        {"replicas": 2, "dp": 2},
        {"replicas": "avg", "dp": "avg"},
        cut="(replicas dp b) s",
    ),
    "grid by hand": Case(
        grid.reference, lambda c, r, w, bug: grid.distributed(c), {"dp": 2, "tp": 2}, cuts=grid.CUTS, small=Config(batch=12)
    ),
    "gpt ddp": Case(gpt.alone, lambda c, r, w, bug: gpt.ddp(c, bug=bug), {"dp": 2}, AVERAGED, bugs=("divided twice", "never synced")),
    "gpt dropout": Case(
        lambda c: gpt.alone(c, 0.1),
        lambda c, r, w, bug: gpt.ddp(c, 0.1, bug),
        {"dp": 2},
        AVERAGED,
        bugs=("divided twice", "one layer evaluates"),
    ),
    "gpt fsdp": Case(gpt.alone, lambda c, r, w, bug: gpt.fsdp(c, w, bug), {"dp": 2}, AVERAGED, bugs=("sum in blocks", "scaled")),
    "gpt tp by hand": Case(
        gpt.alone,
        lambda c, r, w, bug: gpt.tensor_parallel(c, w, bug),
        TP,
        cuts=gpt.CUTS,
        bugs=("bias before reduce", "up not copied", "local softmax", "local norm"),
    ),
    "adamw fused": optimized("adamw", "fused", bugs=("other decay", "other sign")),
    "adamw foreach": optimized("adamw", "foreach"),
    "adamw fused fsdp": optimized("adamw", "fused", shard=True),
    "adam fused": optimized("adam", "fused"),
    "sgd fused": optimized("sgd", "fused", bugs=("other decay", "other limit")),
    "nesterov fused": optimized("nesterov", "fused"),
    "nesterov foreach": optimized("nesterov", "foreach", bugs=("other limit", "other sign")),
    "moe": Case(
        moe.alone,
        lambda c, r, w, bug: moe.expert_parallel(c, w, bug),
        {"dp": 2},
        AVERAGED,
        cuts=moe.CUTS,
        bugs=("experts for ranks", "answers not returned", "experts averaged", "experts not divided"),
    ),
    "pipeline by hand": Case(
        lambda c: pipeline.accumulated(c, 2),
        lambda c, r, w, bug: pipeline.by_hand(c, r, w, bug),
        {"pp": 2},
        cut="b s",
        bugs=("stale labels", "order"),
    ),
    "pipeline 1f1b": Case(
        lambda c: pipeline.accumulated(c, 4),
        lambda c, r, w, bug: pipeline.scheduled(c, r, w, 4, bug=bug),
        {"pp": 2},
        cut="b s",
        bugs=("not divided",),
    ),
    "pipeline interleaved": Case(
        lambda c: pipeline.accumulated(replace(c, layers=4), 4),
        lambda c, r, w, bug: pipeline.scheduled(replace(c, layers=4), r, w, 4, chunks=2, bug=bug),
        {"pp": 2},
        cut="b s",
        bugs=("layers in a row", "summed"),
    ),
    "ring": Case(
        context.sgd,
        lambda c, r, w, bug: context.ring(c, bug),
        {"cp": 2},
        ignore=True,
        cut="b (cp s)",
        bugs=("sees the future", "not rescaled", "gradients stay"),
    ),
    "ulysses": Case(
        context.sgd,
        lambda c, r, w, bug: context.ulysses(c, bug),
        {"cp": 2},
        ignore=True,
        cut="b (cp s)",
        bugs=("rope not offset", "own count", "norm not reduced"),
    ),
}
