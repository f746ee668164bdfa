"""Bugs planted into plans of Llama and GPT: each is refuted (or the plan is invalid), and the planted tensor is named."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from trainverify.graph.plan import Plan
from trainverify.graph.program import Program, Ref
from trainverify.verdicts import verify
from trainverify.zoo import gpt, llama
from trainverify.zoo.parallel import Degrees, gpt_plan, gpt_step, llama_plan, llama_step
from verdicts.changes import Change, attrs, edited, in_program, inputs, on_rank, op_of, replaced
from zoo.parallel.evaluation import evaluated
from zoo.parallel.mistakes import LLAMA, MANY, again, column, exchanged_sends, instead, other_batch, skipped, synced_early, together, turned

GPT = gpt.Config(layers=2, hidden=12, heads=6, ffn=10, vocabulary=14, sequence=10, context=11, batch=12)
ONE = replace(LLAMA, layers=1)


@cache
def base(name: str) -> tuple[Program, Plan]:
    match name:
        case "llama":
            return llama_step(LLAMA), llama_plan(LLAMA, MANY)
        case "flat":
            return llama_step(ONE), llama_plan(ONE, replace(MANY, pp=1))
        case "llama divided late":
            return llama_step(LLAMA), llama_plan(LLAMA, replace(MANY, normalise="gradients"))
        case "llama sp":
            how = Degrees(dp=2, tp=2, sp=True, microbatches=2, normalise="loss")
            return llama_step(ONE), llama_plan(ONE, how)
        case "llama one key-value head":
            config = replace(ONE, kv_heads=1)
            return llama_step(config), llama_plan(config, Degrees(dp=2, tp=2, microbatches=2, normalise="loss"))
        case "llama one head per rank":
            config = replace(ONE, heads=2)
            return llama_step(config), llama_plan(config, Degrees(dp=2, tp=2, microbatches=2, normalise="loss"))
        case "llama shared heads":
            config = llama.Config(layers=1, hidden=24, heads=6, kv_heads=3, ffn=18, vocabulary=30, sequence=12, batch=12)
            return llama_step(config), llama_plan(config, Degrees(dp=2, tp=6, sp=True, microbatches=2, normalise="loss"))
        case "gpt":
            return gpt_step(GPT), gpt_plan(GPT, MANY)
        case "gpt sp":
            config = replace(GPT, layers=1)
            return gpt_step(config), gpt_plan(config, Degrees(dp=2, tp=2, sp=True, microbatches=2, normalise="loss"))
    raise KeyError(name)


# -- ways of going wrong --------------------------------------------------------------------------------------------------


def bias_in_every_part(program: Program) -> Program:
    """The bias is added before the sum over ranks."""
    at = "mb0/h.0.attn."
    i, j = op_of(program, at + "part"), op_of(program, at + "out")
    ops = list(program.ops)
    ops[i] = replace(ops[i], inputs=(*ops[i].inputs, "h.0.attn.c_proj.bias"))
    ops[j] = replace(ops[j], name="identity", inputs=ops[j].inputs[:1])
    return replace(program, ops=tuple(ops))


def own_block(name: str, output: str, size: int) -> Change:
    """A slice in place of a reduce_scatter."""
    change = replaced(name, output, lambda op: replace(op, name="slice", attrs=(("dim", 1), ("start", Ref("low")), ("stop", Ref("high")))))
    return together(column(name, "low", lambda r: r % 2 * size), column(name, "high", lambda r: (r % 2 + 1) * size), change)


def counted_again(program: Program) -> Program:
    i = op_of(program, "norm.tp")
    ops = list(program.ops)
    ops[i] = replace(ops[i], inputs=(*ops[i].inputs, "wte.grad.tied"))
    return replace(program, ops=tuple(ops))


def unbatched(program: Program) -> Program:
    """A steady 1F1B step that sends first and receives after that."""
    return replace(program, ops=tuple(replace(o, attrs=tuple(a for a in o.attrs if a[0] != "batch")) for o in program.ops))


def gathered_whole(name: str) -> Change:
    """All positions for every rank, cut to the first ones."""
    return attrs(name, "mb0/positions", start=0, stop=5)


BUGS: dict[str, tuple[str, str, str, Change]] = {
    # bug: (plan, verdict, the wrong tensor or the finding's code, the change)
    "sum over ranks missing after attention": (
        "llama",
        "REFUTED",
        "mb0/layers.0.attention.out",
        skipped("pp0", "mb0/layers.0.attention.out"),
    ),
    "sum over ranks missing backward": ("flat", "REFUTED", "mb1/layers.0.ffn.normed.grad", skipped("pp0", "mb1/layers.0.ffn.normed.grad")),
    "one sum too many forward": ("llama", "REFUTED", "mb0/layers.0.ffn.out.again", again("pp0", "mb0/layers.0.ffn.out", "group.tp")),
    "one sum too many backward": (
        "flat",
        "REFUTED",
        "mb1/layers.0.attention.normed.grad.again",
        again("pp0", "mb1/layers.0.attention.normed.grad", "group.tp"),
    ),
    "gradient summed over tp instead of dp": (
        "flat",
        "REFUTED",
        "layers.0.attention.wq.grad.dp",
        attrs("pp0", "layers.0.attention.wq.grad.dp", group=Ref("group.tp")),
    ),
    "gradient not summed over dp": ("flat", "REFUTED", "lm_head.grad.dp", skipped("pp0", "lm_head.grad.dp")),
    "sequence gathered in another order": ("llama sp", "REFUTED", "mb1/layers.0.ffn.input", turned("pp0", "mb1/layers.0.ffn.input")),
    "backward of the gather does not add up": (
        "llama sp",
        "REFUTED",
        "mb0/layers.0.ffn.normed.grad",
        own_block("pp0", "mb0/layers.0.ffn.normed.grad", 5),
    ),
    "rotary tables from position 1 on": ("llama", "REFUTED", "rope.cos.rows", attrs("pp1", "rope.cos.rows", start=1, stop=11)),
    "positions of the first part on every rank": ("gpt sp", "REFUTED", "mb0/positions", gathered_whole("pp0")),
    "ids looked up in the next rank's range": (
        "flat",
        "REFUTED",
        "mb0/embedded.part",
        together(column("pp0", "other", lambda r: (1 - r % 2) * 7), attrs("pp0", "mb0/embedded.part", start=Ref("other"))),
    ),
    "range of ids of the first rank in the loss": ("flat", "REFUTED", "mb0/hit", attrs("pp0", "mb0/hit", start=0)),
    "target logit not masked": (
        "flat",
        "REFUTED",
        "mb1/target.masked",
        instead("pp0", "mb1/target.masked", "identity", "mb1/logits.shifted"),
    ),
    "maximum of each rank's own logits": ("flat", "REFUTED", "mb0/logits.peak", skipped("pp0", "mb0/logits.peak")),
    "exponentials of own logits only": ("flat", "REFUTED", "mb1/weight", skipped("pp0", "mb1/weight")),
    "ignored tokens in the loss": ("flat", "REFUTED", "mb0/loss.valid", instead("pp0", "mb0/loss.valid", "identity", "mb0/loss.tokens")),
    "loss of a micro-batch scaled": ("flat", "REFUTED", "mb1/loss.share.grad", attrs("pp0", "mb1/loss.share.grad", value=0.5)),
    "tokens counted on one rank": ("llama divided late", "REFUTED", "tokens", together(skipped("pp0", "tokens"), skipped("pp1", "tokens"))),
    "tokens of one micro-batch": ("flat", "REFUTED", "valid.count", instead("pp0", "valid.count", "identity", "mb1/valid.count")),
    "norm counts copies": ("flat", "REFUTED", "squares.whole.local.again", again("pp0", "squares.whole.local", "group.tp")),
    "norm of one stage": ("llama", "REFUTED", "squares", together(skipped("pp0", "squares"), skipped("pp1", "squares"))),
    "norm counts the tied matrix twice": ("gpt", "REFUTED", "norm.tp", in_program("pp1", counted_again)),
    "gradient of a norm not summed under sequence parallelism": (
        "llama sp",
        "REFUTED",
        "layers.0.attention_norm.grad.tp",
        skipped("pp0", "layers.0.attention_norm.grad.tp"),
    ),
    "gradients of copies of a key-value head not summed": (
        "llama one key-value head",
        "REFUTED",
        "layers.0.attention.wk.grad.rep",
        skipped("pp0", "layers.0.attention.wk.grad.rep"),
    ),
    "heads not summed, one per rank": (
        "llama one head per rank",
        "REFUTED",
        "mb0/layers.0.attention.out",
        skipped("pp0", "mb0/layers.0.attention.out"),
    ),
    "gradients of a shared key-value head not summed": (
        "llama shared heads",
        "REFUTED",
        "layers.0.attention.wk.grad.rep",
        skipped("pp0", "layers.0.attention.wk.grad.rep"),
    ),
    "tied matrices not synchronised": (
        "gpt",
        "REFUTED",
        "wte.grad.tied",
        together(skipped("pp0", "wte.grad.tied"), skipped("pp1", "wte.grad.tied")),
    ),
    "tied matrices synchronised twice": (
        "gpt",
        "REFUTED",
        "wte.grad.tied.again",
        together(again("pp0", "wte.grad.tied", "group.ends"), again("pp1", "wte.grad.tied", "group.ends")),
    ),
    "bias added on every rank": ("gpt", "REFUTED", "mb0/h.0.attn.part", in_program("pp0", bias_in_every_part)),
    "micro-batches of tokens exchanged": ("flat", "REFUTED", "mb0/tokens", other_batch("tokens")),
    "activations handed over in the other order": ("llama", "REFUTED", "mb0/received", exchanged_sends("pp0")),
    "stale activation in a backward": (
        "flat",
        "REFUTED",
        "layers.0.feed_forward.w2.grad.1",
        inputs(
            "pp0", "layers.0.feed_forward.w2.grad.1", "mb0/layers.0.ffn.hidden", "layers.0.feed_forward.w2", "mb1/layers.0.ffn.out.grad"
        ),
    ),
    "second gradient overwrites the first": (
        "flat",
        "REFUTED",
        "layers.0.attention.wv.grad.2",
        instead("pp0", "layers.0.attention.wv.grad.2", "identity", "layers.0.attention.wv.grad.1"),
    ),
    "gradient synchronised before the last backward": (
        "flat",
        "REFUTED",
        "layers.0.attention.wo.grad.dp",
        synced_early("pp0", "layers.0.attention.wo"),
    ),
    "one rank with another activation": (
        "flat",
        "REFUTED",
        "mb0/layers.0.ffn.silu",
        on_rank(2, "mb0/layers.0.ffn.silu", lambda op: replace(op, name="relu")),
    ),
    "step number of the optimizer": ("flat", "REFUTED", "layers.0.attention.wq.new", attrs("pp0", "layers.0.attention.wq.new", step=4)),
    "no weight decay on one rank": (
        "flat",
        "REFUTED",
        "tok_embeddings.new",
        on_rank(3, "tok_embeddings.new", lambda op: op.with_attrs(weight_decay=0.0)),
    ),
    "optimizer takes the gradient before clipping": (
        "flat",
        "REFUTED",
        "norm.new",
        inputs("pp0", "norm.new", "norm", "norm.grad.dp", "norm.m", "norm.v"),
    ),
    "one rank leaves out a collective": (
        "llama",
        "INVALID",
        "TV203",
        on_rank(5, "mb0/weight", lambda op: replace(op, name="identity", attrs=())),
    ),
    "sends before receives": ("llama", "INVALID", "TV205", together(in_program("pp0", unbatched), in_program("pp1", unbatched))),
    "an updated moment left out": (
        "gpt",
        "INVALID",
        "TV307",
        in_program("pp1", lambda p: replace(p, outputs=tuple(o for o in p.outputs if o.tensor != "wte.v.new"))),
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug(name: str) -> None:
    plan, verdict, named, change = BUGS[name]
    logical, correct = base(plan)
    report = verify(logical, change(correct), points=1)
    assert report.verdict == verdict, report.reason
    if verdict == "INVALID":
        assert named in {f.code for f in report.findings}, report.findings
        return
    assert report.place is not None
    assert report.place.tensor == named, report.place
    assert named in edited(correct, change(correct))


@pytest.mark.parametrize("name", ["flat", "llama", "llama divided late", "llama sp", "llama one key-value head", "gpt", "gpt sp"])
def test_what_the_bugs_are_planted_into_agrees(name: str) -> None:
    report = evaluated(*base(name))
    assert {o.status for o in report.obligations} == {"agreed"}, report.reason


def test_at_least_twenty_bugs_are_planted() -> None:
    assert len(BUGS) >= 20
