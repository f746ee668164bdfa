"""Models by name: the step on one device at real size, and the plan that runs it as asked for."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from trainverify.build.tape import BuildError
from trainverify.graph.lineage import Layout, Placements
from trainverify.graph.mesh import Mesh
from trainverify.graph.plan import Plan, Template
from trainverify.graph.program import Program
from trainverify.zoo import deepseek, gpt, llama, resnet
from trainverify.zoo.parallel.deepseek import deepseek_plan, deepseek_step
from trainverify.zoo.parallel.degrees import Degrees
from trainverify.zoo.parallel.deviations import NONE, Deviations
from trainverify.zoo.parallel.gpt import gpt_plan, gpt_step
from trainverify.zoo.parallel.llama import llama_plan, llama_step
from trainverify.zoo.parallel.resnet import resnet_plan, resnet_step
from trainverify.zoo.unproved import unproved

Config = Any  # of one of the models
MOST_RANKS: Final = 1 << 20  # as of a file
MOST_PASSES: Final = 100_000  # of micro-batches through layers; each is some fifty ops


@dataclass(frozen=True)
class Family:
    """What is known about models of one kind."""

    title: str
    presets: Mapping[str, Config]
    step: Callable[..., Program]  # (config, master=…) → the step on one device
    plan: Callable[..., Plan]  # (config, degrees, master=…, deviations=…) → the same step on the ranks of a mesh


def _llama_plan(config: Config, how: Degrees, master: bool = False, deviations: Deviations = NONE) -> Plan:
    deviations.only("Llama")
    return llama_plan(config, how, master=master)


def _gpt_plan(config: Config, how: Degrees, master: bool = False, deviations: Deviations = NONE) -> Plan:
    deviations.only("GPT")
    return gpt_plan(config, how, master=master)


def _deepseek_plan(config: Config, how: Degrees, master: bool = False, deviations: Deviations = NONE) -> Plan:
    """Tokens are counted first, so that the balance of experts has the same weight everywhere."""
    return deepseek_plan(config, replace(how, normalise="loss"), master=master, deviations=deviations)


def _resnet_plan(config: Config, how: Degrees, master: bool = False, deviations: Deviations = NONE) -> Plan:
    """On one device it is the step itself."""
    deviations.only("ResNet", "local_batch_norm")
    if how == Degrees():
        if deviations != NONE:
            raise BuildError("on one device the batch of a rank is the whole batch: --local-batch-norm goes with --dp")
        return one_device(resnet_step(config, master=master))
    return resnet_plan(config, how, master=master, synchronised=not deviations.local_batch_norm)


FAMILIES: Final[tuple[Family, ...]] = (
    Family("Llama", llama.PRESETS, llama_step, _llama_plan),
    Family("GPT", gpt.PRESETS, gpt_step, _gpt_plan),
    Family("DeepSeek", deepseek.PRESETS, deepseek_step, _deepseek_plan),
    Family("ResNet", resnet.PRESETS, resnet_step, _resnet_plan),
)
NAMES: Final[Mapping[str, Family]] = {name: family for family in FAMILIES for name in family.presets}


@dataclass(frozen=True)
class Wish:
    """A model by name, how it is divided, and what is to differ from its preset (None: nothing)."""

    name: str
    how: Degrees = field(default_factory=Degrees)
    layers: int | None = None
    batch: int | None = None  # rows of the whole batch; one for every data-parallel rank and micro-batch by default
    sequence: int | None = None
    vocabulary: int | None = None
    loss: str | None = None
    capacity: int | None = None  # places of an expert for each sequence
    packed: bool = False
    master: bool = False  # weights in bf16, with f32 copies that the optimizer updates
    deviations: Deviations = NONE

    def config(self) -> Config:
        family = family_of(self.name)
        preset = family.presets[self.name]
        known = {f.name for f in fields(preset)}
        changes: dict[str, Any] = {}
        for name in ("layers", "sequence", "vocabulary", "loss", "capacity"):
            if getattr(self, name) is not None:
                changes[name] = getattr(self, name)
        changes |= {"packed": True} if self.packed else {}
        changes |= {"dtype": "bf16"} if self.master else {}
        for name in changes:
            if name not in known:
                raise BuildError(f"{family.title} has no {name} to choose")
        if self.layers is not None and self.layers < 1:
            raise BuildError("a model has 1 layer or more")
        if self.layers is not None and "dense_layers" in known:
            changes["dense_layers"] = min(preset.dense_layers, self.layers)
        if self.how.ranks > MOST_RANKS:
            raise BuildError(f"{self.how.ranks} ranks; the limit is {MOST_RANKS}")
        passes = changes.get("layers", getattr(preset, "layers", 1)) * self.how.microbatches
        if passes > MOST_PASSES:
            raise BuildError(f"layers × micro-batches are {passes}; the limit is {MOST_PASSES}")
        rows = self.how.dp * self.how.microbatches
        if self.batch is not None or family.title != "ResNet" or rows > preset.batch:  # images are many, sequences one for each rank
            changes["batch"] = rows if self.batch is None else self.batch
        return replace(preset, **changes)

    def build(self) -> tuple[Program, Plan]:
        """The step on one device, and the plan; BuildError where sizes do not allow it, or no engine proves such a plan."""
        family, config = family_of(self.name), self.config()
        plan = family.plan(config, self.how, master=self.master, deviations=self.deviations)
        if (why := unproved(family.title, self.how, plan)) is not None:
            raise BuildError(why)
        return family.step(config, master=self.master), plan


def family_of(name: str) -> Family:
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise BuildError(f"no model {name!r}{hint} (`trainverify zoo` lists all)")
    return NAMES[name]


def one_device(step: Program) -> Plan:
    """A step as a plan on one rank."""
    lineage = tuple(Layout(n, n, Placements(())) for n in step.sources)
    return Plan(step.name, Mesh(one=1), (Template(step, (0,)),), {}, lineage)


def described(name: str) -> str:
    """A preset in one line."""
    config = NAMES[name].presets[name]
    shown = ("layers", "hidden", "heads", "kv_heads", "vocabulary", "sequence", "blocks", "size")
    found = [f"{n.replace('_', '-')} {getattr(config, n)}" for n in shown if getattr(config, n, None) is not None]
    if hasattr(config, "gate"):
        found.append(f"experts {config.gate.experts} ({config.gate.active} active)")
    return ", ".join(found)
