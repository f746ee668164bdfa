"""The program of a seed: a file with a reference and a distributed builder, right for even seeds, with one planted mistake for odd ones."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from random import Random
from typing import Final

from tools.steps import controls, counters, models, optimizers, reductions, sharded, states, tensor_parallel
from tools.steps.code import Code, One, Planted, Ranks, Site, View, indented, lines, sites
from tools.steps.models import Model
from tools.steps.optimizers import Update
from tools.steps.pieces import Piece, Setting, slot

HEAD: Final = """import contextlib
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trainverify.torch as tvt"""
WHEN: Final = (
    "",
    "",
    "",
    "",
    "",
    "",
    "{n} % 2 == 0",
    "{n} % 2 == 0",
    "{n} % 2 == 1",
    "{n} > 1",
    "{n} > 1",
    "{n} >= 2",
    "{n} >= 3",
    "{n} == 2",
    "{n} == 3",
    "{n} > 5",
)
LINEAR: Final = ("statistics", "level", "counted", "schedule", "rates", "hook", "modes", "metrics")  # right where parameters are averaged
FAMILIES: Final = (("by hand", 45), ("ddp", 22), ("tensor parallel", 15), ("sharded", 18))


@dataclass(frozen=True)
class Program:
    seed: int
    family: str
    names: tuple[str, ...]  # of its pieces
    planted: Planted | None
    source: str

    @property
    def mistake(self) -> str:
        if self.planted is None:
            return ""
        gates = [gate.format(n="n", rank="rank") for gate in (self.planted.when, self.planted.where) if gate]
        return " if ".join([self.planted.name, " and ".join(gates)]) if gates else self.planted.name


@dataclass(frozen=True)
class Plan:
    """Everything that was chosen, before it is written down."""

    family: str
    model: Model
    update: Update
    pieces: tuple[Piece, ...]
    accumulates: bool
    one_whole: bool  # the reference takes the whole batch at once though ranks accumulate
    shared: bool  # one builder for both sides
    reports_whole: bool  # the loss is reduced before it is returned
    zero: Code
    differentiated: bool  # gradients by torch.autograd.grad

    @property
    def cut(self) -> bool:
        return self.family != "tensor parallel"


def program(seed: int) -> Program:
    rng = Random(f"steps {seed}")
    plan = _plan(rng)
    planted = _plant(rng, plan) if seed % 2 else None
    names = (
        plan.model.name,
        *(piece.name for piece in plan.pieces if piece.name != "accidents"),
        *(("accumulation",) if plan.accumulates else ()),
    )
    return Program(seed, plan.family, names, planted, _source(rng, plan, planted))


def _plan(rng: Random) -> Plan:
    family = rng.choices([name for name, _ in FAMILIES], [weight for _, weight in FAMILIES])[0]
    accumulates = family in ("by hand", "ddp") and rng.random() < 0.2
    rows = 8 if accumulates else rng.choice((4, 6))
    shaping: tuple[Piece, ...] = ()
    if family == "tensor parallel":
        made, cutting = tensor_parallel.model(rng, rows)
        shaping = (cutting,)
    else:
        made = models.model(rng, rows)
        if made.classes and not accumulates and rng.random() < 0.35:
            made = models.ignoring(rng, made)
    update = _update(rng, family)
    setting = Setting(family != "tensor parallel", family != "tensor parallel", accumulates, made.hidden, update.linear)
    reduction = _reduction(rng, family, setting)
    features = _features(rng, family, setting, update)
    if any(piece.name == "parameters" for piece in reduction):
        features = tuple(piece for piece in features if piece.name in LINEAR)
    if any(piece.name == "bucket" for piece in reduction):
        features = tuple(piece for piece in features if not (piece.name == "views" and "grad = " in str(piece.slots)))
    if family == "sharded" and update.has_optimizer and update.piece.name != "ZeroRedundancyOptimizer":
        reduction = (*reduction, sharded.owners(rng))
    pieces = (*shaping, *features, controls.accidents(rng, setting), *reduction)
    frozen = any(piece.name == "freeze" for piece in pieces)
    if frozen:
        pieces = tuple(piece for piece in pieces if piece.name != "accidents")
    hooked = any(piece.name in ("hooked", "bucket", "hook", "removed hook") for piece in pieces)
    zero = _zero(rng, update, any(piece.name == "bucket" for piece in reduction))
    order = (update.piece, *pieces)
    shared, chance = rng.random() < 0.5, rng.random()
    by_grad = family != "ddp" and not accumulates and not hooked and rng.random() < 0.15
    return Plan(
        family, made, update, order, accumulates, accumulates and not shared and chance < 0.5, shared, rng.random() < 0.3, zero, by_grad
    )


def _update(rng: Random, family: str) -> Update:
    if family == "sharded":
        kind = rng.random()
        if kind < 0.25:
            return sharded.flat(rng)
        if kind < 0.4:
            return sharded.redundancy(rng)
        made = optimizers.optimizer(rng, False, "mine")
        return replace(made, built=(sharded.OWNED, made.built))
    return optimizers.function(rng) if rng.random() < 0.2 else optimizers.optimizer(rng, rng.random() < 0.3)


def _reduction(rng: Random, family: str, setting: Setting) -> tuple[Piece, ...]:
    if family == "tensor parallel":
        return ()
    if family == "ddp":
        return (reductions.ddp(rng, setting),)
    if family == "by hand" and setting.stateless and rng.random() < 0.15:
        return (reductions.parameters(rng, setting),)
    return (rng.choice(reductions.BY_HAND)(rng, setting),)


def _features(rng: Random, family: str, setting: Setting, update: Update) -> tuple[Piece, ...]:
    used: set[str] = set()
    if not update.has_optimizer:
        used.add("target")  # its parameters have no gradients
    found: list[Piece] = []
    for _ in range(rng.choices((0, 1, 2), (3, 5, 1))[0]):
        if (kept := states.state(rng, setting, used)) is not None:
            found.append(kept)
    if family in ("ddp", "sharded") or used & {"seen", "memory"}:
        used.add("freeze")
    for _ in range(rng.choices((0, 1, 2), (2, 5, 2))[0]):
        found.append(controls.control(rng, setting, used, update.has_optimizer))
    return tuple(sorted(found, key=lambda piece: piece.name.startswith("average")))  # an average is made of the whole model


def _zero(rng: Random, update: Update, bucket: bool) -> Code:
    if bucket:
        return ""
    by_hand = ("for p in model.parameters():\n    p.grad = None", "model.zero_grad()")
    text = rng.choice(
        ("optimizer.zero_grad()", "optimizer.zero_grad()", "optimizer.zero_grad(set_to_none=False)", *by_hand)
        if update.has_optimizer
        else by_hand
    )
    if "optimizer" in text and any("mine" in line for line in lines(update.built, View("both"), None)):
        text = "model.zero_grad()"
    return Site(text, {"gradients-not-cleared": ""}, lone=True)


def _plant(rng: Random, plan: Plan) -> Planted:
    """One mistake of the program: first the piece, then one of its mistakes."""
    own: list[Code] = [
        plan.model.loss,
        (plan.update.built, plan.update.piece.slots.get("update", "")),
        plan.zero,
        _report(plan),
        _synchronised(plan),
    ]
    places = [*own, *(tuple(piece.slots.values()) for piece in plan.pieces)]
    possible = [found for found in (list(sites(code)) for code in places) if any(site.bad for site in found)]
    weights = [min(6, sum(len(site.bad) for site in found)) for found in possible]
    name = rng.choice(sorted({name for site in rng.choices(possible, weights)[0] for name in site.bad}))
    every = [other for found in possible for other in found if name in other.bad]
    when = rng.choice(WHEN) if all(other.gated for other in every) else ""
    where = rng.choice(("", "", "{rank} == 0", "{rank} == 1")) if all(other.lone for other in every) else ""
    return Planted(name, when, where)


def _report(plan: Plan) -> Code:
    if not plan.cut or not plan.reports_whole:
        return ""
    return Ranks(
        (
            "loss = loss.detach().clone()",
            Site("dist.all_reduce(loss)\nloss /= world", {"loss-not-reduced": "", "loss-summed": "dist.all_reduce(loss)"}),
        )
    )


def _synchronised(plan: Plan) -> Code:
    """How ranks with DDP accumulate."""
    if plan.family != "ddp" or not plan.accumulates:
        return ""
    text = "quiet = called.no_sync() if i < {} else contextlib.nullcontext()"
    return (One("quiet = contextlib.nullcontext()"), Ranks(Site(text.format(1), {"never-synchronised": text.format(2)})))


def _source(rng: Random, plan: Plan, planted: Planted | None) -> str:
    counter = counters.counter(rng)
    always = rng.random() < 0.3
    if plan.shared:
        sides = [("def build(rank=0, world=1):", View("both"), "Model(rank, world)")]
    else:
        sides = [("def build_one():", View("one"), "Model()"), ("def build_ranks(rank, world):", View("ranks"), "Model(rank, world)")]
    built = [_builder(head, view, model, plan, planted, counter, always) for head, view, model in sides]
    one, many = ("build()", "build(rank, world)") if plan.shared else ("build_one()", "build_ranks(rank, world)")
    used = any(line.lstrip().startswith(counter_line) for block in built for line in block for counter_line in _last(counter))
    top = lines((slot(plan.pieces, "top"), counter.slots["top"] if used else ""), View("ranks"), planted)
    declared = _declared(plan)
    blocks = [HEAD, *declared, "\n".join(_spaced(top)), "\n".join(_model(plan, planted)), *("\n".join(block) for block in built)]
    blocks += [
        f"def reference():\n    return {one}[0]",
        f"def distributed(rank, world):\n    return {many}[0]",
        f"def parts(rank, world):\n    return {one} if world == 1 else {many}",
    ]
    return "\n\n\n".join(block for block in blocks if block.strip()) + "\n"


def _last(counter: Piece) -> list[str]:
    return lines(counter.slots["begin"], View("both"), None)[-1:]


def _spaced(block: Iterable[str]) -> list[str]:
    """Two empty lines before every class or function at the top of a file."""
    found: list[str] = []
    for line in block:
        starts = line.startswith(("class ", "def ", "@")) and not (found and found[-1].startswith("@"))
        ends = bool(found) and found[-1].startswith(" ") and not line.startswith(" ")
        if starts or ends:
            found += ["", ""]
        found.append(line)
    return found


def _declared(plan: Plan) -> list[str]:
    rows = [f"batch = {{{plan.model.batch}}}", f'mesh = {{"{"dp" if plan.cut else "tp"}": 2}}']
    rows.append('loss = {"dp": "avg"}' if plan.cut and not plan.reports_whole else 'loss = "whole"')
    rows.append(f"cuts = {None if plan.cut else tensor_parallel.CUTS}")
    return ["\n".join(rows)]


def _model(plan: Plan, planted: Planted | None) -> list[str]:
    view = View("both", module=True)
    inner = lines(slot(plan.pieces, "inner"), view, planted)
    init = lines((plan.model.init, slot(plan.pieces, "init")), view, planted)
    before, behind = lines(plan.model.before, view, planted), lines(plan.model.behind, view, planted)
    if any("self.calls" in line for line in inner):
        init.append("self.calls = 0")
        before.insert(0, "self.calls += 1")
    head = [
        "class Model(nn.Module):",
        "    def __init__(self, rank=0, world=1):",
        "        super().__init__()",
        "        self.rank, self.world = rank, world",
    ]
    return [*head, *indented(init, 2), "", "    def forward(self, x):", *indented([*before, *inner, *behind], 2)]


def _builder(head: str, view: View, model: str, plan: Plan, planted: Planted | None, counter: Piece, always: bool) -> list[str]:
    def text(code: Code) -> list[str]:
        return lines(code, view, planted)

    step = _step(plan, view, planted)
    counts = always or any(re.search(r"\bn\b", line) for line in step)
    begin = text(counter.slots["begin"]) if counts else []
    setup = ["torch.manual_seed(0)", f"model = {model}", "called = model", *text(plan.update.built)]
    if counts:
        setup += text(counter.slots["setup"])
    setup += text(slot(plan.pieces, "setup"))
    if view.side == "one" and any(re.search(r"\b(world|rank)\b", line) for line in [*setup, *step]):
        setup.insert(0, "rank, world = 0, 1")
    extra = text(slot(plan.pieces, "extra"))
    kept = ["def extra():", *indented(["return {", *indented(extra), "}"] if extra else ["return {}"])]
    return [
        head,
        *indented([*setup, "", "def step(batch):", *indented([*begin, *step]), "", *kept, "", "return step, model, optimizer, extra"]),
    ]


def _step(plan: Plan, view: View, planted: Planted | None) -> list[str]:
    def text(code: Code) -> list[str]:
        return lines(code, view, planted)

    losses = text(slot(plan.pieces, "losses"))
    scaled = any(line.strip().startswith("scale = ") for line in losses)
    backward = ["(loss * scale).backward()" if scaled else "loss.backward()"]
    if plan.differentiated:
        slopes = f"slopes = torch.autograd.grad({'loss * scale' if scaled else 'loss'}, trained)"
        backward = [
            "trained = [p for p in model.parameters() if p.requires_grad]",
            slopes,
            "for p, g in zip(trained, slopes):",
            "    p.grad = g",
        ]
    forward = [f"out = called({plan.model.inputs})", *text(plan.model.loss), *(["scale = 1.0"] if scaled else []), *losses]
    if plan.accumulates and not (plan.one_whole and view.side == "one"):
        quiet = text(_synchronised(plan))
        body = [*forward, "loss = loss / 2", *backward, "total = total + loss.detach()"]
        body = [*quiet, "with quiet:", *indented(body)] if quiet else body
        forward = [
            "total = 0.0",
            "for i in range(2):",
            *indented(["given = {key: value.chunk(2)[i] for key, value in batch.items()}", *body]),
            "loss = total",
        ]
    else:
        forward = ["given = batch", *forward, *backward]
    rest = [
        *text(slot(plan.pieces, "local")),
        *text(slot(plan.pieces, "reduce")),
        *text(slot(plan.pieces, "reduced")),
        *text(slot(plan.pieces, "update")),
    ]
    metrics = text(slot(plan.pieces, "metrics"))
    result = [f"return {{'loss': loss, {' '.join(metrics)}}}" if metrics else "return loss"]
    return [
        *text(plan.zero),
        *text(slot(plan.pieces, "begin")),
        *forward,
        *rest,
        *text(slot(plan.pieces, "after")),
        *text(_report(plan)),
        *result,
    ]
