"""Sizes that do not go together are refused with the reason; the order of passes on pipeline stages."""

from __future__ import annotations

from dataclasses import replace

import pytest

import trainverify as tv
from trainverify.build.tape import BuildError
from trainverify.zoo.llama import Config
from trainverify.zoo.parallel import Degrees, llama_plan
from zoo.parallel.schedules import passes

SMALL = Config(layers=3, hidden=24, heads=6, kv_heads=2, ffn=10, vocabulary=14, sequence=10, batch=12)


@pytest.mark.parametrize(
    ("config", "how", "why"),
    [
        (SMALL, Degrees(dp=5), "12 rows of the batch do not divide among 5 data-parallel ranks: try --batch 15"),
        (SMALL, Degrees(tp=3), "2 key-value heads do not divide among 3 tensor-parallel ranks: try --tp 1 or 2, or a multiple of 2"),
        (
            replace(SMALL, kv_heads=3, vocabulary=15),
            Degrees(tp=3),
            "10 rows of layers.0.feed_forward.w1 do not divide among 3 tensor-parallel ranks: try --tp 2",
        ),
        (replace(SMALL, sequence=9), Degrees(tp=2, sp=True), "9 positions do not divide among 2 tensor-parallel ranks: try --sequence 10"),
        (SMALL, Degrees(pp=2, stages=(1, 1)), "stages of (1, 1) layers for 3 layers on 2 stages"),
        (SMALL, Degrees(ep=2), "plans of Llama have no ep=2"),
        (SMALL, Degrees(zero=1), "with dp=1 there is nothing to shard"),
        (SMALL, Degrees(dp=2, zero=4), "stages 1, 2 and 3"),
        (SMALL, Degrees(dp=2, shards="flat"), "shards=flat says what ZeRO cuts"),
        (SMALL, Degrees(sp=True), "with tp=1 there is nothing to divide"),
        (SMALL, Degrees(pp=2, chunks=2, microbatches=2), "the schedule 1f1b has one chunk"),
        (SMALL, Degrees(pp=2, schedule="interleaved", microbatches=2), "several chunks"),
        (SMALL, Degrees(pp=2, chunks=2, schedule="interleaved", microbatches=3), "3 micro-batches do not divide among 2 stages"),
        (SMALL, Degrees(pp=2, chunks=2, schedule="interleaved", microbatches=2), "3 layers are fewer than 2 stages of 2 chunks"),
        (
            SMALL,
            Degrees(pp=2, chunks=10**9, schedule="interleaved", microbatches=2),
            "3 layers are fewer than 2 stages of 1000000000 chunks",
        ),
        (SMALL, Degrees(pp=6), "3 layers are fewer than 6 stages"),
        (SMALL, Degrees(pp=5), "3 layers on 5 stages: stage 3 of (1, 1, 1, 0, 0) has no layer"),
        (SMALL, Degrees(pp=3, stages=(2, 0, 1)), "3 layers on 3 stages: stage 1 of (2, 0, 1) has no layer"),
        (SMALL, Degrees(pp=2, stages=(4, -1)), "stages of (4, -1) layers for 3 layers on 2 stages"),
        (
            SMALL,
            Degrees(pp=2, chunks=2, schedule="interleaved", microbatches=2, stages=(0, 1, 1, 1)),
            "3 layers are fewer than 2 stages of 2 chunks",
        ),
    ],
)
def test_refused(config: Config, how: Degrees, why: str) -> None:
    with pytest.raises(BuildError) as error:
        llama_plan(config, how)
    assert why in str(error.value)


def test_layers_are_spread() -> None:
    assert Degrees(pp=3).layers(7) == [[range(3)], [range(3, 5)], [range(5, 7)]]
    assert Degrees(pp=2, stages=(1, 4)).layers(5) == [[range(1)], [range(1, 5)]]
    assert Degrees(pp=4, stages=(0, 1, 2, 0)).layers(3) == [[range(0)], [range(1)], [range(1, 3)], [range(3, 3)]]
    assert Degrees(pp=2, chunks=2).layers(5) == [[range(2), range(3, 4)], [range(2, 3), range(4, 5)]]


def test_one_forward_one_backward() -> None:
    plan = llama_plan(SMALL, Degrees(pp=3, microbatches=4))
    assert passes(plan, 0) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert passes(plan, 1) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert passes(plan, 2).startswith("F0 B0 F1 B1 F2 B2 F3 B3")


def test_gpipe() -> None:
    plan = llama_plan(SMALL, Degrees(pp=3, microbatches=4, schedule="gpipe"))
    assert {passes(plan, s)[:23] for s in range(3)} == {"F0 F1 F2 F3 B0 B1 B2 B3"}


def test_broadcast_needs_the_root_apart() -> None:
    p = tv.plan("step", tv.Mesh(pp=2, dp=2))
    with p.ranks() as r, pytest.raises(BuildError, match="programs of their own"):
        r.broadcast(r.full(shape=(), value=1.0), group="pp", root=r.peer(pp=1))
    with p.ranks(pp=1) as r:
        with pytest.raises(BuildError, match="the root passes a tensor"):
            r.broadcast(None, group="pp", root=r.peer(pp=1), shape=())
        assert r.broadcast(r.full(shape=(2,), value=1.0), group="pp", root=r.peer(pp=1)).shape == (2,)
    with p.ranks(pp=0) as r:
        with pytest.raises(BuildError, match="what shape"):
            r.broadcast(None, group="pp", root=r.peer(pp=1))
        assert r.broadcast(None, group="pp", root=r.peer(pp=1), shape=(2,)).shape == (2,)
