"""Options that say how a model of the zoo is divided, the same for every command that takes one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from trainverify.build.tape import BuildError
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.refusal import Refused
from trainverify.terminal import change
from trainverify.zoo.parallel.degrees import ContextKind, Degrees, Normalise, Schedule, Sharding
from trainverify.zoo.parallel.deviations import Deviations

if TYPE_CHECKING:
    from trainverify.zoo.recipes import Wish


def _number(text: str) -> Any:
    return Annotated[int, typer.Option(min=1, metavar="N", help=text)]


def _choice(kind: Any, text: str) -> Any:
    return Annotated[kind, typer.Option(help=text)]


# Options that say how a model of the zoo is divided, and what differs from its preset: the same for every command.
ZOO: dict[str, tuple[Any, Any]] = {
    "dp": (_number("Data-parallel ranks."), 1),
    "tp": (_number("Tensor-parallel ranks."), 1),
    "pp": (_number("Pipeline stages."), 1),
    "microbatches": (_number("Micro-batches of a data-parallel rank."), 1),
    "sp": (_choice(bool, "Sequence parallel: activations between tensor-parallel regions are cut."), False),
    "cp": (_number("Context-parallel ranks."), 1),
    "cp_kind": (_choice(ContextKind, "How attention sees the whole sequence."), "ring"),
    "ep": (_number("Expert-parallel ranks, some of the data-parallel ones."), 1),
    "zero": (Annotated[int, typer.Option(min=0, max=3, help="ZeRO: 1 optimizer state, 2 also gradients, 3 also parameters.")], 0),
    "shards": (_choice(Sharding, "What ZeRO cuts: a dimension that divides, padded chunks, or flat buckets."), "parameter"),
    "schedule": (_choice(Schedule, "Order of passes on pipeline stages."), "1f1b"),
    "chunks": (change("Chunks of layers on a stage (interleaved: 2)."), None),
    "stages": (Annotated[str | None, typer.Option(metavar="N,N,…", help="Layers of every stage; spread evenly by default.")], None),
    "normalise": (_choice(Normalise, "Where a loss per token is divided by the number of tokens."), "gradients"),
    "layers": (change("Layers, if not all."), None),
    "batch": (change("Rows of the whole batch; one per data-parallel rank and micro-batch by default."), None),
    "sequence": (change("Positions of a row."), None),
    "vocabulary": (change("Ids, if the preset's number does not divide."), None),
    "capacity": (change("Places of an expert for each sequence; without it no token is dropped."), None),
    "loss": (_choice(Literal["per_token", "per_sequence", "sum"] | None, "What a batch's loss is."), None),
    "packed": (_choice(bool, "Several documents in a row: segments and positions are inputs."), False),
    "local_batch_norm": (_choice(bool, "Deviates: every rank normalises by its own images."), False),
    "node_limited": (change("Deviates: the experts of a token lie on N of the expert-parallel ranks."), None),
    "rank_capacity": (change("Deviates: an expert takes N tokens of a rank's micro-batch, and drops the others."), None),
    "no_auxiliary": (_choice(bool, "Deviates: the balance of experts is not differentiated."), False),
    "master": (_choice(bool, "Weights in bf16, the optimizer updates f32 copies."), False),
}


def with_zoo(command: Callable[..., int]) -> Callable[..., int]:
    """A command whose `model` is a wish (None without a name): the options of a wish are added to its own."""
    own = {n: p for n, p in inspect.signature(command).parameters.items() if n != "model"}
    hints = get_type_hints(command, localns={"Wish": Any}, include_extras=True)
    given = "zoo" if "zoo" in own else "name"

    @functools.wraps(command)
    def complete(**values: Any) -> int:
        chosen = {n: values.pop(n) for n in ZOO}
        name = values[given]
        asked = [n for n, (_, default) in ZOO.items() if chosen[n] != default]
        if name is None and asked:
            raise Refused(f"--{asked[0].replace('_', '-')} goes with a model of the zoo")
        return command(model=None if name is None else wish(name, chosen), **values)

    keyword = inspect.Parameter.KEYWORD_ONLY
    more = [inspect.Parameter(n, keyword, default=default, annotation=kind) for n, (kind, default) in ZOO.items()]
    plain = [p.replace(kind=keyword, annotation=hints[n]) for n, p in own.items()]
    vars(complete)["__signature__"] = inspect.Signature([*plain, *more], return_annotation=int)
    complete.__annotations__ = {n: hints[n] for n in own} | {n: kind for n, (kind, _) in ZOO.items()} | {"return": int}
    del vars(complete)["__wrapped__"]
    return complete


def wish(name: str, chosen: dict[str, Any]) -> Wish:
    from trainverify.zoo.recipes import Wish

    names = ("layers", "batch", "sequence", "vocabulary", "capacity", "loss", "packed", "master")
    changes = {n: chosen.pop(n) for n in names}
    deviations = Deviations(**{f.name: chosen.pop(f.name) for f in fields(Deviations)})
    stages, chunks = chosen.pop("stages"), chosen.pop("chunks")
    try:
        counts = None if stages is None else tuple(int(n) for n in stages.split(","))
    except ValueError:
        raise Refused(f"--stages {stages}: numbers of layers separated by commas") from None
    several = 2 if chosen["schedule"] == "interleaved" else 1
    return Wish(name, Degrees(**chosen, stages=counts, chunks=chunks or several), **changes, deviations=deviations)


def built(model: Wish) -> tuple[Program, Plan]:
    from trainverify.zoo.recipes import family_of

    try:
        family_of(model.name)
    except BuildError as error:
        raise Refused(str(error)) from error
    try:
        return model.build()
    except BuildError as error:
        raise Refused(f"{model.name}: {error}") from error
