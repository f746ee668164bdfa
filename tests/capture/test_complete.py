"""Llama and GPT captured from PyTorch are the programs that `complete` makes of the zoo's: PROVED, with names mapped."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import trainverify.torch as tvt  # noqa: E402
from capture.cases import IGNORE, REAL, SMALL, Config, written  # noqa: E402
from trainverify.completion.step import AdamW, complete  # noqa: E402
from trainverify.graph.mesh import Mesh  # noqa: E402
from trainverify.graph.program import Program  # noqa: E402
from trainverify.report import Report  # noqa: E402
from trainverify.verdicts import verify  # noqa: E402
from trainverify.zoo import gpt as zoo_gpt  # noqa: E402
from trainverify.zoo import llama as zoo_llama  # noqa: E402

ADAMW = AdamW(lr=1e-3, weight_decay=0.1, beta2=0.95, step=2)
LLAMA = {"embedding.weight": "tok_embeddings", "norm.weight": "norm", "head.weight": "lm_head", "cos": "rope.cos", "sin": "rope.sin"}
LLAMA |= {"norm1.weight": "attention_norm", "norm2.weight": "ffn_norm"}
LLAMA |= {f"attention.{w}.weight": f"attention.{w}" for w in ("wq", "wk", "wv", "wo")}
LLAMA |= {f"mlp.{w}.weight": f"feed_forward.{w}" for w in ("w1", "w2", "w3")}
GPT = {"tokens.weight": "wte", "positions.weight": "wpe", "norm.weight": "ln_f.weight", "norm.bias": "ln_f.bias"}
GPT |= {f"norm{i}.{w}": f"ln_{i}.{w}" for i in (1, 2) for w in ("weight", "bias")}
layers = {"qkv": "attn.c_attn", "out": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}
GPT |= {f"{n}.{w}": f"{m}.{w}" for n, m in layers.items() for w in ("weight", "bias")}
EPS: Any = Fraction(1, 100000)  # the number that 1e-05 is captured as
SLOTS = {".exp_avg_sq": ".v", ".exp_avg": ".m"}


def named(name: str, names: dict[str, str], block: str) -> str:
    """The zoo's name of a captured tensor."""
    slot = next((s for s in SLOTS if name.endswith(s)), "")
    base, prefix = name.removesuffix(slot), ""
    if base.startswith("blocks."):
        _, layer, base = base.split(".", 2)
        prefix = f"{block}.{layer}."
    return prefix + names[base] + SLOTS.get(slot, "")


def renamed(program: Program, names: dict[str, str], block: str) -> Program:
    """The captured program with the zoo's names of sources; its other tensors keep theirs."""
    new = {s: named(s, names, block) for s in (*program.parameters, *program.state)}
    new |= {t: f"captured/{t}" for t in program.tensors if t not in new and t not in program.inputs}

    def of(name: str | None) -> str | None:
        return None if name is None else new.get(name, name)

    ops = tuple(replace(op, inputs=tuple(map(of, op.inputs)), outputs=tuple(new[o] for o in op.outputs)) for op in program.ops)
    return replace(
        program,
        tensors={new.get(n, n): t for n, t in program.tensors.items()},
        parameters=tuple(new[n] for n in program.parameters),
        state=tuple(new[n] for n in program.state),
        ops=ops,
        outputs=tuple(replace(o, tensor=new[o.tensor], of=new.get(str(o.of), o.of)) for o in program.outputs),
        domains={new.get(n, n): d for n, d in program.domains.items()},
    )


def captured(build, c: Config) -> Program:
    shape = (c.batch, c.sequence)
    batch = {"tokens": tvt.Ids(shape, below=c.vocab), "labels": tvt.Ids(shape, below=c.vocab, ignore=IGNORE)}
    _, (found, _), _ = tvt.captures(build, build, 1, batch, Mesh(dp=1), ranks=())
    assert not found.findings
    return found.program


def compared(ours: Program, theirs: Program, clipped: bool) -> Report:
    """All outputs of both; with clipping, gradients as the optimizer gets them are compared through the updates."""
    known = {n: d for n, d in theirs.domains.items() if n in ours.state}  # both start from the same states
    ours = replace(ours, domains={**{n: d for n, d in ours.domains.items() if n not in ours.state}, **known})
    if clipped:
        ours = replace(ours, outputs=tuple(o for o in ours.outputs if o.role != "gradient" and o.of != "clip_factor"))
        theirs = replace(theirs, outputs=tuple(o for o in theirs.outputs if o.role != "gradient"))
    ours = replace(ours, outputs=tuple(o for o in ours.outputs if not str(o.of).startswith("rope.")))
    theirs = replace(theirs, outputs=tuple(o for o in theirs.outputs if not str(o.of).startswith("rope.")))
    return verify(ours, theirs, points=1)


def llama(c: Config, clip: float | None = None, bug: str | None = None) -> Report:
    sizes = zoo_llama.Config(c.layers, c.dim, c.heads, c.kv_heads, c.hidden, c.vocab, c.sequence, c.batch, eps=EPS)
    ours = complete(zoo_llama.forward(sizes), ADAMW, clip=clip)
    return compared(ours, renamed(captured(lambda *_: written.llama(c, clip, bug), c), LLAMA, "layers"), clip is not None)


def gpt(c: Config, clip: float | None = None) -> Report:
    sizes = zoo_gpt.Config(c.layers, c.dim, c.heads, c.vocab, c.sequence, c.batch, ffn=c.hidden, eps=EPS)
    ours = complete(zoo_gpt.forward(sizes), ADAMW, clip=clip)
    return compared(ours, renamed(captured(lambda *_: written.gpt(c, clip), c), GPT, "h"), clip is not None)


@pytest.mark.parametrize("sizes", [pytest.param(SMALL, id="small"), pytest.param(REAL, id="real", marks=pytest.mark.capture)])
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("model", [llama, gpt])
def test_proved(model, clip: float | None, sizes: Config) -> None:
    report = model(sizes, clip)
    assert report.verdict == "PROVED", report.reason


def test_ignored_labels_counted() -> None:
    """REFUTED: the captured loss is divided by the number of all labels."""
    report = llama(SMALL, bug="all labels counted")
    assert report.verdict == "REFUTED"
    assert report.reason.startswith("loss differs")
