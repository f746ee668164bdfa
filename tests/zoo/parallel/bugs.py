"""Mistakes that frameworks had, planted in plans of the zoo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from trainverify.graph.plan import Plan
from trainverify.graph.program import Op, Program, Ref
from trainverify.zoo import gpt, llama
from trainverify.zoo.parallel import Degrees, gpt_plan, gpt_step, llama_plan, llama_step
from verdicts.changes import Change, attrs, in_program, inputs, lineage, op_of, replaced
from zoo.parallel.mistakes import again, column, instead, skipped, together

LLAMA = llama.Config(layers=1, hidden=24, heads=6, kv_heads=2, ffn=10, vocabulary=14, sequence=10, batch=12)
GPT = gpt.Config(layers=2, hidden=12, heads=6, ffn=10, vocabulary=14, sequence=10, batch=12)
WHERE = {
    "zero1": (LLAMA, Degrees(dp=2, zero=1, microbatches=2)),
    "zero2": (LLAMA, Degrees(dp=2, tp=2, zero=2, microbatches=2)),
    "zero3": (LLAMA, Degrees(dp=2, zero=3, microbatches=2)),
    "flat": (LLAMA, Degrees(dp=4, zero=1, shards="flat")),
    "chunk": (LLAMA, Degrees(dp=4, zero=2, shards="chunk")),
    "gpt zero1": (GPT, Degrees(dp=2, pp=2, zero=1, microbatches=2)),
    "interleaved": (replace(LLAMA, layers=4), Degrees(pp=2, chunks=2, schedule="interleaved", microbatches=4)),
    "per sequence": (replace(LLAMA, loss="per_sequence"), Degrees(dp=2, microbatches=2)),
    "packed": (replace(LLAMA, packed=True), Degrees(dp=2, microbatches=2)),
    "master": (replace(LLAMA, dtype="bf16"), Degrees(dp=2, zero=1)),
}


@cache
def base(name: str) -> tuple[Program, Plan]:
    config, how = WHERE[name]
    master = name == "master"
    if isinstance(config, gpt.Config):
        return gpt_step(config, master=master), gpt_plan(config, how, master=master)
    return llama_step(config, master=master), llama_plan(config, how, master=master)


def shifted(name: str, output: str, by: int) -> Change:
    """A slice starts and stops elsewhere."""

    def apply(plan: Plan) -> Plan:
        t = next(t for t in plan.templates if t.program.name == name)
        op = t.program.ops[op_of(t.program, output)]
        bound = {key: dict(zip(t.ranks, t.bindings[value.name], strict=True)) for key, value in op.attrs if isinstance(value, Ref)}
        change = together(
            *(column(name, f"moved.{key}", lambda r, key=key: bound[key][r] - by * (bound["start"][r] >= by)) for key in bound),
            attrs(name, output, **{key: Ref(f"moved.{key}") for key in bound}),
        )
        return change(plan)

    return apply


def sent_again(first: str, second: str) -> Callable[[Program], Program]:
    """The second tensor is not handed over, but the first one once more."""

    def apply(program: Program) -> Program:
        assert any(o.name == "send" and o.inputs == (second,) for o in program.ops)
        ops = [replace(o, inputs=(first,)) if o.name == "send" and o.inputs == (second,) else o for o in program.ops]
        return replace(program, ops=tuple(ops))

    return apply


def own_rows(output: str, size: int) -> Change:
    """A slice in place of a reduce_scatter."""
    attributes = (("dim", 0), ("start", Ref("low")), ("stop", Ref("high")))
    change = replaced("pp0", output, lambda op: replace(op, name="slice", attrs=attributes))
    return together(column("pp0", "low", lambda r: r * size), column("pp0", "high", lambda r: (r + 1) * size), change)


def order_of_layers(program: Program) -> Program:
    """What arrives for the second chunk goes through the layers of the first one, and the other way round."""

    def renamed(name: str | None) -> str | None:
        if name is None or name.startswith("mb"):
            return name
        for a, b in (("layers.0.", "layers.2."), ("layers.2.", "layers.0.")):
            if name.startswith(a) and ".grad" not in name and not name.endswith((".m", ".v")):
                return b + name.removeprefix(a)
        return name

    forward = [replace(o, inputs=tuple(map(renamed, o.inputs))) if o.phase == "forward" else o for o in program.ops]
    return replace(program, ops=tuple(forward))


def late_gather(program: Program) -> Program:
    """The old weight is gathered, not the new one."""
    i = op_of(program, "layers.0.attention.wq.new")
    ops = list(program.ops)
    ops[i] = replace(ops[i], inputs=("layers.0.attention.wq.shard",))
    return replace(program, ops=tuple(ops))


def without_output(name: str) -> Callable[[Program], Program]:
    return lambda p: replace(p, outputs=tuple(o for o in p.outputs if o.tensor != name))


Q = "layers.0.attention.wq"
BUGS: dict[str, tuple[str, str, str, Change]] = {
    # bug: (plan, verdict, the wrong tensor or the finding's code, the change)
    "gradient shard: own slice instead of reduce-scatter": (
        "zero1",
        "REFUTED",
        f"{Q}.grad.shard",
        own_rows(f"{Q}.grad.shard", 12),
    ),
    "stale parameter: the old one is gathered": ("zero1", "REFUTED", f"{Q}.new", in_program("pp0", late_gather)),
    "shard boundary off by one row": ("zero1", "REFUTED", f"{Q}.shard", shifted("pp0", f"{Q}.shard", 1)),
    "shards taken from the other end": (
        "zero1",
        "REFUTED",
        f"{Q}.shard",
        together(
            column("pp0", "back.low", lambda r: (1 - r) * 12),
            column("pp0", "back.high", lambda r: (2 - r) * 12),
            attrs("pp0", f"{Q}.shard", start=Ref("back.low"), stop=Ref("back.high")),
        ),
    ),
    "norm of own shards only": ("zero1", "REFUTED", "squares.dp", skipped("pp0", "squares.dp")),
    "norm counts tensor-parallel copies": (
        "zero2",
        "REFUTED",
        "squares.dp.again",
        again("pp0", "squares.dp", "group.tp"),
    ),
    "second micro-batch's shard overwrites the first": (
        "zero2",
        "REFUTED",
        f"{Q}.grad.sum",
        instead("pp0", f"{Q}.grad.sum", "identity", f"{Q}.grad.shard.1"),
    ),
    "gradients scattered over the wrong axis": (
        "zero2",
        "REFUTED",
        f"{Q}.grad.shard",
        attrs("pp0", f"{Q}.grad.shard", group=Ref("group.tp")),
    ),
    "weights gathered in the other order": (
        "zero3",
        "REFUTED",
        f"mb1/{Q}.whole",
        lambda plan: _turned(plan, f"mb1/{Q}.whole"),
    ),
    "reduce-scatter of a gradient is missing": ("zero3", "REFUTED", f"{Q}.grad", own_rows(f"{Q}.grad", 12)),
    "another layer's weight gathered for the backward pass": (
        "zero3",
        "REFUTED",
        "mb0/layers.0.attention.wk.again",
        inputs("pp0", "mb0/layers.0.attention.wk.again", "layers.0.attention.wv"),
    ),
    "padding of a flat bucket is not zero": (
        "chunk",
        "REFUTED",
        "lm_head.grad.shard.zeros",
        attrs("pp0", "lm_head.grad.shard.zeros", value=1.0),
    ),
    "flat bucket divided at the wrong place": (
        "flat",
        "REFUTED",
        f"{Q}.new.flat",
        attrs("pp0", f"{Q}.new.flat", start=1, stop=577),
    ),
    "flat bucket joined in another order": (
        "flat",
        "REFUTED",
        "layers.0.flat1.grad.shard.joined",
        replaced("pp0", "layers.0.flat1.grad.shard.joined", lambda op: replace(op, inputs=tuple(_swapped(op.inputs)))),
    ),
    "lineage claims the neighbour's shard": (
        "flat",
        "INVALID",
        "TV305",
        lineage("layers.0.flat1.m", lambda lay: replace(lay, form=replace(lay.form, by_rank=lay.form.by_rank[:1]))),
    ),
    "a moment's shard is not reported": ("zero1", "INVALID", "TV307", in_program("pp0", without_output(f"{Q}.m.new"))),
    "tied shards not synchronised": (
        "gpt zero1",
        "REFUTED",
        "wte.grad.tied",
        together(skipped("pp0", "wte.grad.tied"), skipped("pp1", "wte.grad.tied")),
    ),
    "tied shards synchronised twice": (
        "gpt zero1",
        "REFUTED",
        "wte.grad.tied.again",
        together(again("pp0", "wte.grad.tied", "group.ends"), again("pp1", "wte.grad.tied", "group.ends")),
    ),
    "chunks of layers in the other order": (
        "interleaved",
        "REFUTED",
        "mb0/layers.0.attention.normed",  # the first of all those in both chunks
        in_program("pp0", order_of_layers),
    ),
    "activation of the micro-batch before handed over": (
        "interleaved",
        "REFUTED",
        "mb1/chunk1.received",  # what the send brings to the other rank
        in_program("pp1", sent_again("mb0/layers.1.residual", "mb1/layers.1.residual")),
    ),
    "sends of the interleaved schedule one after the other": (
        "interleaved",
        "INVALID",
        "TV205",
        together(*(in_program(f"pp{i}", lambda p: _unbatched(p)) for i in (0, 1))),
    ),
    "divided by half of the rows": (
        "per sequence",
        "REFUTED",
        "mb0/loss.share",
        attrs("pp0", "mb0/loss.share", value=6),
    ),
    "tokens counted over the wrong dimension": (
        "per sequence",
        "REFUTED",
        "mb1/loss.sequences",
        instead("pp0", "mb1/loss.sequences", "identity", "mb1/loss.sums"),
    ),
    "documents see each other": (
        "packed",
        "REFUTED",
        "mb0/mask.pairs",
        instead("pp0", "mb0/mask.pairs", "segment_mask", "mb0/labels", "mb0/labels", is_causal=True),
    ),
    "documents see the future": (
        "packed",
        "REFUTED",
        "mb0/mask.pairs",
        attrs("pp0", "mb0/mask.pairs", is_causal=False),
    ),
    "positions of another micro-batch": (
        "packed",
        "REFUTED",
        "mb0/rope.cos.rows",
        inputs("pp0", "mb0/rope.cos.rows", "mb1/positions", "rope.cos"),
    ),
    "working copy made of the old master": (
        "master",
        "REFUTED",
        f"{Q}.working",
        inputs("pp0", f"{Q}.working", f"{Q}.master"),
    ),
    "gradient that was not clipped goes to the master": (
        "master",
        "REFUTED",
        f"{Q}.master.new",
        inputs("pp0", f"{Q}.master.new", f"{Q}.master", f"{Q}.grad.final", f"{Q}.m", f"{Q}.v"),
    ),
}


def _swapped(names: tuple[str | None, ...]) -> list[str | None]:
    """Weights of one size in each other's place."""
    found = list(names)
    i, j = (next(n for n, name in enumerate(found) if name is not None and w in name) for w in ("attention.wk", "attention.wv"))
    found[i], found[j] = found[j], found[i]
    return found


def _turned(plan: Plan, output: str) -> Plan:
    t = plan.templates[0]
    names = dict(zip(t.ranks, t.bindings["group.dp"], strict=True))
    groups = dict(plan.groups) | {f"{g}.turned": tuple(reversed(plan.groups[str(g)])) for g in names.values()}
    plan = column("pp0", "group.turned", lambda r: f"{names[r]}.turned")(replace(plan, groups=groups))
    return attrs("pp0", output, group=Ref("group.turned"))(plan)


def _unbatched(program: Program) -> Program:
    """Sends and receives of a step wait for each other in the order of the program."""

    def alone(op: Op) -> Op:
        return replace(op, attrs=tuple(a for a in op.attrs if a[0] != "batch"))

    return replace(program, ops=tuple(map(alone, program.ops)))
