"""Llama's training step, and plans that run it: data, tensor, sequence and pipeline parallel."""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from trainverify.build.plan import plan
from trainverify.build.tape import BuildError
from trainverify.completion.optimizers import AdamW, Optimizer
from trainverify.completion.step import complete
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.zoo.llama import Config, forward
from trainverify.zoo.parallel.context import context_plan
from trainverify.zoo.parallel.degrees import Degrees, axes_for
from trainverify.zoo.parallel.llama_model import LlamaModel
from trainverify.zoo.parallel.model import gradients, run
from trainverify.zoo.parallel.stage import Stage

ADAMW = AdamW(lr=0.01, weight_decay=0.1, step=3)


def llama_step(config: Config, optimizer: Optimizer | None = ADAMW, clip: float | None = 1.0, master: bool = False) -> Program:
    """The step on one device: the whole batch in one forward pass. `master` keeps weights in f32 beside their working copies."""
    return complete(forward(config), optimizer, clip=clip, master=master)


def llama_plan(config: Config, how: Degrees, optimizer: Optimizer | None = ADAMW, clip: float | None = 1.0, master: bool = False) -> Plan:
    """The same step on dp·tp·pp ranks; `config.batch` counts the rows of the whole batch, in the order (dp micro-batch row)."""
    context = ("cp", "cp_kind") if how.cp > 1 else ()
    how.only("Llama", *context, "zero", "shards", "chunks")
    if how.cp > 1 and (config.packed or config.loss == "per_sequence"):
        raise BuildError("plans of Llama with context parallelism have neither packed rows nor a loss per sequence")
    if how.cp > 1 and how.cp_kind != "ulysses":
        return context_plan(config, how, optimizer, clip, master)
    axes = axes_for(how, config.kv_heads)
    names = gradients(forward(config)) if how.zero else {}
    p = plan("llama", axes.mesh)
    for index, layers in enumerate(how.layers(config.layers)):
        with p.ranks(pp=index) as r:
            r.dtype = config.dtype
            run(LlamaModel(Stage(r, how, axes, index, names), config, layers), optimizer, clip, master)
    return p.build()
