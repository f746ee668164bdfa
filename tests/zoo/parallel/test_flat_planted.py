"""Bugs of flat buckets and uneven chunks at real widths, planted into plans that are proved: all are refuted, at the planted tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from trainverify.graph.lineage import Parts
from trainverify.graph.plan import Plan
from trainverify.graph.program import Op, Program, Ref
from trainverify.graph.rebuilt import Rebuilt
from trainverify.verdicts import verify
from trainverify.zoo import llama
from trainverify.zoo.parallel import Degrees, llama_plan, llama_step
from verdicts.changes import Change, attrs, edited, lineage, on_rank, replaced
from zoo.parallel.mistakes import column, skipped, together

REAL = llama.Config(1, 4096, 32, 8, ffn=14336, vocabulary=128256, sequence=8192, batch=3)
SMALL = llama.Config(1, 16, 4, 2, ffn=10, vocabulary=14, sequence=5, batch=3)  # where only sizes shrunk by us could be evaluated
WHERE = {
    "flat": Degrees(dp=3, zero=1, shards="flat"),
    "flat 3": Degrees(dp=3, zero=3, shards="flat"),
    "chunk": Degrees(dp=3, zero=2, shards="chunk"),
}
BUCKET, Q, K, V = "layers.0.flat1", "layers.0.attention.wq", "layers.0.attention.wk", "layers.0.attention.wv"


@cache
def base(name: str) -> tuple[Program, Plan]:
    return llama_step(REAL), llama_plan(REAL, WHERE[name])


@pytest.mark.parametrize("name", WHERE)
def test_what_the_bugs_are_planted_into_is_proved(name: str) -> None:
    report = verify(*base(name), points=1)
    assert report.verdict == "PROVED", report.notes


def moved(output: str, by: int) -> Change:
    """A slice begins and ends elsewhere, on all ranks."""
    return replaced("pp0", output, lambda op: op.with_attrs(start=int(str(op.get("start"))) + by, stop=int(str(op.get("stop"))) + by))


def moved_on(rank: int, output: str, by: int) -> Change:
    """The same on one rank, whose shard it is."""

    def apply(plan: Plan) -> Plan:
        (t,) = plan.templates

        def shifted(op: Op) -> Op:
            found = {k: dict(zip(t.ranks, t.bindings[v.name], strict=True))[rank] for k, v in op.attrs if isinstance(v, Ref)}
            return op.with_attrs(**{k: int(str(v)) + by for k, v in found.items()})

        return on_rank(rank, output, shifted)(plan)

    return apply


def exchanged(*words: str) -> Callable[[Op], Op]:
    """Two inputs in each other's place."""

    def apply(op: Op) -> Op:
        found = list(op.inputs)
        i, j = (next(n for n, name in enumerate(found) if name is not None and w in name) for w in words)
        found[i], found[j] = found[j], found[i]
        return replace(op, inputs=tuple(found))

    return apply


def turned(output: str) -> Change:
    """The ranks of a group in the other order."""

    def apply(plan: Plan) -> Plan:
        (t,) = plan.templates
        groups = dict(plan.groups) | {f"{g}.turned": tuple(reversed(plan.groups[str(g)])) for g in t.bindings["group.dp"]}
        names = dict(zip(t.ranks, t.bindings["group.dp"], strict=True))
        plan = column("pp0", "group.turned", lambda r: f"{names[r]}.turned")(replace(plan, groups=groups))
        return attrs("pp0", output, group=Ref("group.turned"))(plan)

    return apply


def bugs(config: llama.Config) -> dict[str, tuple[str, str, Change]]:
    """bug: (plan, the tensor that is named, the change)"""
    row = config.hidden
    rows = row * row // config.heads * config.kv_heads  # elements of wk, and of wv
    return {
        "padding is counted in the norm": ("flat", f"{BUCKET}.grad.shard.zeros", attrs("pp0", f"{BUCKET}.grad.shard.zeros", value=1000.0)),
        "a weight taken out one element too late": ("flat", f"{Q}.new.flat", moved(f"{Q}.new.flat", 1)),
        "two weights in each other's place after the gather": (
            "flat",
            f"{K}.new.flat",  # the first of the two
            together(moved(f"{K}.new.flat", rows), moved(f"{V}.new.flat", -rows)),
        ),
        "two gradients in each other's place": (
            "flat",
            f"{BUCKET}.grad.shard.joined",
            replaced("pp0", f"{BUCKET}.grad.shard.joined", exchanged(".wk", ".wv")),
        ),
        "two weights in each other's place before the update": (
            "flat",
            f"{BUCKET}.shard.joined",
            replaced("pp0", f"{BUCKET}.shard.joined", exchanged(".wk", ".wv")),
        ),
        "shards cut one element too early": ("flat", f"{BUCKET}.shard", moved_on(1, f"{BUCKET}.shard", -1)),
        "one rank's piece begins a row too late": ("flat", f"{BUCKET}.shard", moved_on(0, f"{BUCKET}.shard", row)),
        "norm of own pieces only": ("flat", "squares.dp", skipped("pp0", "squares.dp")),
        "shards gathered in the other order": ("flat 3", f"mb0/{BUCKET}.whole", turned(f"mb0/{BUCKET}.whole")),
        "gathered for the backward pass in the other order": ("flat 3", f"mb0/{BUCKET}.again", turned(f"mb0/{BUCKET}.again")),
        "another weight of the bucket for the backward pass": ("flat 3", f"mb0/{K}.again.flat", moved(f"mb0/{K}.again.flat", rows)),
        "a chunk of another rank": ("chunk", f"{Q}.shard", moved_on(1, f"{Q}.shard", row)),
        "padding of a chunk is not zero": ("chunk", f"{Q}.grad.shard.zeros", attrs("pp0", f"{Q}.grad.shard.zeros", value=0.5)),
        "chunks gathered in the other order": ("chunk", f"{Q}.new", turned(f"{Q}.new")),
    }


BUGS = bugs(REAL)


@pytest.mark.parametrize("bug", BUGS)
def test_bug_is_refuted(bug: str) -> None:
    name, tensor, change = BUGS[bug]
    logical, plan = base(name)
    also = [Rebuilt("width 16", lambda: (llama_step(SMALL), bugs(SMALL)[bug][2](llama_plan(SMALL, WHERE[name]))))]
    report = verify(logical, change(plan), points=1, also=also)
    assert report.verdict == "REFUTED", (report.reason, report.findings, report.notes)
    assert report.place is not None
    assert report.place.tensor == tensor
    assert tensor in edited(plan, change(plan))


def test_lineage_that_claims_the_neighbours_piece_is_invalid() -> None:
    logical, plan = base("flat")

    def first_only(lay):  # type: ignore[no-untyped-def]
        assert isinstance(lay.form, Parts)
        return replace(lay, form=replace(lay.form, by_rank=lay.form.by_rank[:1]))

    report = verify(logical, lineage(f"{BUCKET}.m", first_only)(plan), points=1)
    assert report.verdict == "INVALID"
    assert report.findings[0].code in {"TV301"}
