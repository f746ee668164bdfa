"""The program of a seed: a file with a reference and a distributed step, right for even seeds, with one planted mistake for odd ones."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Final

from tools.jax_steps import data_parallel, exchanges, partitioned, sequence, sharded, tensor_parallel, updates
from tools.jax_steps.code import Draft, Side, indented, rendered, side_of, tokens
from tools.jax_steps.cores import Core
from tools.jax_steps.data_parallel import helpers
from tools.jax_steps.extras import Extra, clip, extras
from tools.jax_steps.updates import Update
from tools.steps.code import Planted

HEAD: Final = """from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import trainverify.jax as tvj"""
WHEN: Final = (
    *("",) * 8,
    "{n} % 2 == 0",
    "{n} % 2 == 0",
    "{n} % 2 == 1",
    "{n} > 1",
    "{n} >= 2",
    "{n} >= 3",
    "{n} == 2",
    "{n} == 3",
    "{n} > 5",
)
WHERE: Final = ("", "", "{rank} == 0", "{rank} == 1", "{rank} > 0")
FAMILIES: Final = (  # name, weight, axis, chance of check_vma
    ("data parallel", 20, "dp", 0.45),
    ("two axes", 4, "dp", 0.0),
    ("batch norm", 4, "dp", 0.5),
    ("fsdp", 12, "dp", 0.35),
    ("zero", 6, "dp", 0.0),
    ("tensor parallel", 17, "tp", 0.35),
    ("sequence parallel", 13, "sp", 0.4),
    ("pipeline", 6, "pp", 0.0),
    ("ring", 5, "dp", 0.3),
    ("experts", 5, "ep", 0.4),
    ("partitioned", 8, "dp", 1.0),
)


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
class Shape:
    """How the step is written down."""

    outside: bool  # the optimizer runs on whole arrays, outside of shard_map
    counting: str  # where the number of the step comes from: "", "argument" or "state"
    order: str  # of the results: "last" or "first" for the loss, or "dict"
    wide: bool  # float64 in the file, too
    donates: bool


@dataclass(frozen=True)
class Step:
    """Everything that was chosen, with tokens where a mistake can be."""

    core: Core
    update: Update
    extras: tuple[Extra, ...]
    shape: Shape
    rate: str
    late: str  # lines of ranks after the update


def program(seed: int) -> Program:
    rng = Random(f"jax steps {seed}")
    name, _, axis, chance = rng.choices(FAMILIES, [weight for _, weight, *_ in FAMILIES])[0]
    draft, step = _drafted(rng, name, axis, rng.random() < chance)
    text = _Text(draft, step)
    if step.shape.counting == "argument" and rng.random() < 0.9 and not _reads_count(text.everything(), draft):
        text = text.uncounted()
        draft.sites = [replace(site, gated=False) for site in draft.sites]
    planted = _plant(rng, draft, text.everything()) if seed % 2 else None
    core = step.core
    names = (
        *core.names,
        *(("check_vma",) if draft.vma and not core.partitioned else ()),
        step.update.name,
        *(extra.name for extra in step.extras),
        *(("optimizer outside",) if step.shape.outside else ()),
    )
    return Program(seed, core.family, names, planted, text.written(planted))


def _drafted(rng: Random, family: str, axis: str, vma: bool) -> tuple[Draft, Step]:
    size = (
        4
        if family in ("data parallel", "fsdp", "zero", "tensor parallel", "sequence parallel", "pipeline", "ring") and rng.random() < 0.2
        else 2
    )
    counting = rng.choice(("", "", "argument", "state", "state", "state"))
    xla = family == "partitioned"
    draft = Draft(rng, axis, size, vma or xla, bool(counting), xla or rng.random() < 0.4)
    outside = not xla and family not in ("zero", "two axes") and rng.random() < (0.35 if vma else 0.06)
    kind = rng.random()
    if family == "zero":
        update = Update("flat momentum", (), "")
    else:
        whole = outside or xla or family in ("data parallel", "batch norm", "two axes")
        draft.apart = outside
        update = updates.by_optax(draft, whole) if kind < 0.4 else updates.by_hand(draft)
        draft.apart = False
    draft.nonlinear = not update.linear and family == "data parallel" and not outside and not draft.vma
    clips = family not in ("zero", "partitioned") and "clip" not in update.name and rng.random() < 0.2
    draft.clips = clips and not outside
    core = _core(draft, family, rng.random() < 0.2)
    draft.apart = outside
    rate = "" if update.top else updates.rate(draft)  # optax has its own
    some = [*([clip(draft, core)] if clips else []), *extras(draft, core, rng.choices((0, 1, 2, 3), (2, 5, 3, 1))[0], bool(rate))]
    if family == "zero":
        some = [extra for extra in some if not extra.reduced]  # gradients stay those of a rank
    late = draft.lines("", {"parameters-averaged-instead": f'params = lax.pmean(params, "{axis}")'}) if draft.nonlinear else ""
    donates, order = rng.random() < 0.15, rng.choice(("last", "last", "first", "dict"))
    shape = Shape(outside, counting, order, rng.random() < 0.4, donates)
    return draft, Step(core, update, tuple(some), shape, rate, late)


def _core(draft: Draft, family: str, accumulates: bool) -> Core:
    if family == "data parallel":
        return data_parallel.core(draft, accumulates)
    if family in ("fsdp", "tensor parallel", "sequence parallel", "partitioned"):
        module = {"fsdp": sharded, "tensor parallel": tensor_parallel, "sequence parallel": sequence, "partitioned": partitioned}[family]
        made: Core = module.core(draft, accumulates)
        return made
    if family in ("zero", "two axes", "batch norm"):
        return {"zero": data_parallel.flat, "two axes": data_parallel.two_axes, "batch norm": data_parallel.normalized}[family](draft)
    return {"pipeline": exchanges.pipeline, "ring": exchanges.ring, "experts": exchanges.experts}[family](draft, accumulates)


def _reads_count(text: str, draft: Draft) -> bool:
    if re.search(r"\bn\b", text.replace("n = step + 1", "")):
        return True
    return any(re.search(r"\bn\b", site.good) for site in tokens(text, draft.sites))


def _plant(rng: Random, draft: Draft, text: str) -> Planted:
    """One of the mistakes that the text has places for."""
    found = [site for site in tokens(text, draft.sites) if site.bad]
    weights = [min(4, len(site.bad)) for site in found]
    name = rng.choice(sorted(rng.choices(found, weights)[0].bad))
    every = [site for site in found if name in site.bad]
    when = rng.choice(WHEN) if all(site.gated for site in every) else ""
    where = rng.choice(WHERE) if all(site.lone for site in every) else ""
    return Planted(name, when, where)


class _Text:
    """The text of a program, with tokens until it is written."""

    def __init__(self, draft: Draft, step: Step) -> None:
        self.draft, self.step = draft, step
        core, update, shape = step.core, step.update, step.shape
        self.functions = list(core.functions)
        clipped = any("clipped(" in s.good for s in draft.sites)
        if clipped:
            ranks = "sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))" if core.whole or shape.outside else core.squares
            one = "sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))"
            norm = f"1|    norm = jnp.sqrt({one})\nR|    norm = jnp.sqrt({ranks})"
            self.functions.append(
                (
                    "clipped",
                    f"def clipped(grads):\n{norm}\n    return jax.tree.map(lambda g: g * jnp.minimum(1.0, 0.1 / (norm + 1e-2)), grads)",
                )
            )
        self.keeps = [entry for extra in step.extras for entry in extra.keeps]
        if shape.counting == "state":
            self.keeps.append(("step", "tvj.Count()", "P()"))
        self.carried = self._carried(core, update)
        self.given = [("step", "tvj.Count()", "P()")] if shape.counting == "argument" else []
        self.given += [(a.name, a.declared, a.spec) for a in core.batch]

    def _carried(self, core: Core, update: Update) -> list[tuple[str, str, str]]:
        found = [("params", core.params.declared(), core.params.cut())]
        if update.top:
            found.append(("opt", "OPT", "OPT_SPECS"))
        elif update.keeps:
            tree, specs = core.params.declared(), core.params.cut()
            kinds = {
                "tree": (tree, specs),
                "squares": (tree.replace(", REAL)", ", REAL, nonnegative=True)"), specs),
                "count": ("tvj.Count()", "P()"),
            }
            declared = ", ".join(f'"{name}": {kinds[kind][0]}' for name, kind in update.keeps)
            found.append(("opt", f"{{{declared}}}", "{" + ", ".join(f'"{name}": {kinds[kind][1]}' for name, kind in update.keeps) + "}"))
        if core.flat:
            found.append(("velocity", core.extra["velocity"], core.extra["spec"]))
        if self.keeps:
            declared = ", ".join(f'"{name}": {text}' for name, text, _ in self.keeps)
            found.append(("state", f"{{{declared}}}", "{" + ", ".join(f'"{name}": {spec}' for name, _, spec in self.keeps) + "}"))
        return found

    def uncounted(self) -> _Text:
        """The text of a step whose number nothing reads."""
        return _Text(self.draft, replace(self.step, shape=replace(self.step.shape, counting="")))

    def begin(self) -> str:
        if not self.step.shape.counting:
            return self.step.rate
        rate = f"\n{self.step.rate}" if self.step.rate else ""
        count = "step" if self.step.shape.counting == "argument" else 'state["step"]'
        return f"n = {count} + 1{rate}"

    def after(self) -> str:
        core, step = self.step.core, self.step
        parts = [extra.reduced for extra in step.extras]
        parts.append(core.extra["update"] if core.flat else step.update.lines)
        parts += [f"R|{step.late}"] if step.late else []
        parts += [extra.after for extra in step.extras]
        parts += ['state = {**state, "step": n}'] if step.shape.counting == "state" else []
        return "\n".join(part for part in parts if part)

    def results(self) -> list[tuple[str, str]]:
        """Names in a dictionary, expressions."""
        metrics = [(name, expression) for extra in self.step.extras for name, expression in extra.metrics]
        carried = [(name, name) for name, *_ in self.carried]
        loss = [("loss", "loss")]
        return [*loss, *carried, *metrics] if self.step.shape.order == "first" else [*carried, *loss, *metrics]

    def returned(self, wrap: str = "{}") -> str:
        if self.step.shape.order == "dict":
            return "{" + ", ".join(f'"{name}": {text}' for name, text in self.results()) + "}"
        return ", ".join(text for _, text in self.results())

    def everything(self) -> str:
        texts = [text for _, text in self.functions]
        specs = [spec for *_, spec in (*self.carried, *self.given)]
        return "\n".join([*texts, self.begin(), self.step.core.grads, self.after(), self.returned(), *specs])

    def _side(self, text: str, side: Side, planted: Planted | None) -> str:
        found = rendered(side_of(text, side), self.draft.sites, planted if side == "ranks" else None, self.draft.axis)
        return "\n".join(line for line in found.split("\n") if line.strip())

    def written(self, planted: Planted | None) -> str:
        one = [(name, self._side(text, "one", None)) for name, text in self.functions]
        many = [(name, self._side(text, "ranks", planted)) for name, text in self.functions]
        differ = _differing(one, many)
        own = {name: f"{name}_on_rank" for name in differ}
        reference = self._reference()
        ranks = self._ranks([text for name, text in many if name in differ], planted, own)
        top = [text for _, text in one]
        if not self.draft.nested:
            top += [_renamed(text, own) for name, text in many if name in differ]
        used = "\n".join([*top, reference, ranks])
        called = [text for name, text in helpers(used) if name not in dict(self.functions)]
        if "but_last_of(" in used:
            called.append(BUT_LAST_OF)
        blocks = [HEAD, self._declared(), *called, *top, reference, ranks]
        return "\n\n\n".join(_tidy(block) for block in blocks if block.strip()) + "\n"

    def _declared(self) -> str:
        core, update, shape = self.step.core, self.step.update, self.step.shape
        rows = ['jax.config.update("jax_enable_x64", True)'] if shape.wide else []
        rows += ["REAL = jnp.result_type(float)"]
        if core.params.top():
            rows += ["", "", core.params.top(), "", ""]
        rows += [f"mesh = {dict(core.mesh)}", f'reader = "{"hlo" if core.partitioned else "jaxpr"}"']
        keys = [name for name, _ in self.results()]
        places = {at: (f'"{name}"' if shape.order == "dict" else keys.index(name)) for at, (name, *_) in enumerate(self.carried)}
        rows.append(
            "new = {" + ", ".join(f"{at}: {key}" for at, key in places.items()) + "}  # arguments, and which result is their new value"
        )
        if core.params.specs:
            rows.append(f"specs = {core.params.every_spec()}")
        if update.top:
            rows += [update.top, *([update.one] if update.one else [])]
            rows += [
                f"params = {core.params.declared()}",
                "shapes = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype), params)",
            ]
            if core.params.specs:
                specs = "lambda _, spec: spec, opt, SPECS, transform_non_params=lambda _: P()"
                rows += ["opt = jax.eval_shape(optimizer.init, shapes)"]
                rows += [f"opt_specs = optax.tree_map_params(optimizer, {specs.replace('SPECS', core.params.cut())})"]
            rows += ["initial = optimizer.init"]
        args = ", ".join(self._declaration(name, text) for name, text, _ in (*self.carried, *self.given))
        rows.append(f"args = ({args})")
        return "\n".join(rows)

    def _declaration(self, name: str, text: str) -> str:
        if text == "OPT":
            return "opt" if self.step.core.params.specs else "jax.eval_shape(optimizer.init, shapes)"
        return "params" if name == "params" and self.step.update.top else text

    def _specs(self, rows: Sequence[tuple[str, str, str]]) -> list[str]:
        cut = bool(self.step.core.params.specs)
        return [("opt_specs" if cut else "P()") if spec == "OPT_SPECS" else spec for *_, spec in rows]

    def _reference(self) -> str:
        text = "\n".join([self.begin(), self.step.core.grads, self.after()])
        names = ", ".join(name for name, *_ in (*self.carried, *self.given))
        body = self._side(text, "one", None)
        result = self._side(self.returned(), "one", None)
        return f"def reference({names}):\n{indented(body)}\n    return {result}"

    def _ranks(self, functions: list[str], planted: Planted | None, own: dict[str, str]) -> str:
        core, shape = self.step.core, self.step.shape
        inner = [_renamed(text, own) for text in functions] if self.draft.nested else []
        begin, grads, after = (_renamed(self._side(text, "ranks", planted), own) for text in (self.begin(), core.grads, self.after()))
        result = _renamed(self._side(self.returned(), "ranks", planted), own)
        rows = (*self.carried, *self.given)
        names = ", ".join(name for name, *_ in rows)
        specs = [self._side(spec, "ranks", planted) for spec in self._specs(rows)]
        out = self._out(dict(zip((name for name, *_ in rows), specs, strict=True)))
        vma = "" if self.draft.vma else ", check_vma=False"
        donated = f", donate_argnums={tuple(range(len(self.carried)))}" if shape.donates else ""
        if core.partitioned:
            body = "\n".join([begin, *inner, grads, after, f"return {result}"])
            cut = "lambda tree: jax.tree.map(lambda spec: NamedSharding(mesh, spec), tree, is_leaf=lambda spec: isinstance(spec, P))"
            jitted = f"jax.jit(step, in_shardings=placed(({', '.join(specs)},)), out_shardings=placed({out}), keep_unused=True{donated})"
            text = f"placed = {cut}\n\ndef step({names}):\n{indented(body)}\n\nreturn {jitted}"
        elif shape.outside:
            text = self._outside(
                begin, inner, grads, after, result, names, dict(zip((name for name, *_ in rows), specs, strict=True)), vma + "", donated
            )
        else:
            body = "\n".join([begin, *inner, grads, after, f"return {result}"])
            mapped = f"jax.shard_map(step, mesh=mesh, in_specs=({', '.join(specs)},), out_specs={out}{vma})"
            text = f"def step({names}):\n{indented(body)}\n\nreturn jax.jit({mapped}{donated})"
        return f"def distributed(mesh):\n{indented(text)}"

    def _out(self, specs: dict[str, str]) -> str:
        found = [(name, specs.get(name, "P()")) for name, _ in self.results()]
        if self.step.shape.order == "dict":
            return "{" + ", ".join(f'"{name}": {spec}' for name, spec in found) + "}"
        return f"({', '.join(spec for _, spec in found)},)"

    def _outside(
        self, begin: str, inner: list[str], grads: str, after: str, result: str, names: str, specs: dict[str, str], vma: str, donated: str
    ) -> str:
        batch = [a.name for a in self.step.core.batch]
        given = ["params", *(["n"] if self.step.shape.counting else []), *batch]
        body = "\n".join([*inner, grads, "return loss, grads"])
        cut = ", ".join(specs.get(name, "P()") for name in given)
        mapped = f"jax.shard_map(local, mesh=mesh, in_specs=({cut},), out_specs=(P(), {specs['params']}){vma})"
        step = "\n".join([begin, f"loss, grads = parallel({', '.join(given)})", after, f"return {result}"])
        local = f"def local({', '.join(given)}):\n{indented(body)}\n\nparallel = {mapped}"
        return f"{local}\n\ndef step({names}):\n{indented(step)}\n\nreturn jax.jit(step{donated})"


BUT_LAST_OF: Final = """def but_last_of(f, tree, other):
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, [*map(f, leaves[:-1], jax.tree.leaves(other)), leaves[-1]])"""


def _differing(one: list[tuple[str, str]], many: list[tuple[str, str]]) -> set[str]:
    """Functions that are not the same on both sides, or call such."""
    texts = dict(many)
    found = {name for name, text in one if text != texts[name]}
    while True:
        more = {name for name, text in many if any(re.search(rf"\b{other}\b", text) for other in found)} - found
        if not more:
            return found
        found |= more


def _renamed(text: str, own: dict[str, str]) -> str:
    for name, new in own.items():
        text = re.sub(rf"\b{name}\b", new, text)
    return text


def _tidy(block: str) -> str:
    """A block without marks."""
    return "\n".join(line.rstrip() for line in block.split("\n")).strip("\n")
