"""Combinations of options that the algebra does not prove: each with the reason, and what works instead."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from trainverify.graph.lineage import Parts
from trainverify.graph.plan import Plan
from trainverify.zoo.parallel.degrees import Degrees


def unproved(title: str, how: Degrees, plan: Plan) -> str | None:
    """Why a plan of the zoo is refused though it can be built; None if it is not."""
    return next(chain(_reasons(how), _sharded(title, how, plan)), None)


def _reasons(how: Degrees) -> Iterator[str]:
    if _unlike(how) and how.sp:
        why = "a rank has two chunks of the sequence, and how tensor-parallel ranks cut these once more has no form"
        yield f"--cp-kind {how.cp_kind} with --sp is not supported: {why}; --cp-kind ulysses goes with --sp, {how.cp_kind} without it"


def _unlike(how: Degrees) -> bool:
    """Whether ranks along cp run different programs."""
    return how.cp > 1 and how.cp_kind != "ulysses"


def _sharded(title: str, how: Degrees, plan: Plan) -> Iterator[str]:
    if not how.zero or how.shards == "parameter":
        return
    shards, ranks = f"--shards {how.shards}", how.dp * how.cp
    if title == "DeepSeek":
        why = "rows of latent attention are pieces of unequal size, and shards would end inside of them"
        yield f"{shards} with DeepSeek is not supported: {why}; --shards parameter cuts other dimensions there"
    uneven = next((name for name, _ in _listed(plan)), None)
    if uneven is not None:
        rows = "flattened tensors" if how.shards == "flat" else f"the rows of {uneven}, which do not divide among {ranks} ranks,"
        also = " (so does --shards chunk where all rows divide)" if how.shards == "flat" else ""
        if how.tp > 1:
            why = f"{rows} are cut in a way that does not align with tensor parallelism"
            yield f"{shards} with --tp is not supported: {why}; --shards parameter goes with --tp{also}"
        if _unlike(how):
            why = f"{rows} are cut among ranks that run different programs"
            instead = f"--shards parameter goes with it{also}, or --cp-kind ulysses"
            yield f"{shards} with --cp-kind {how.cp_kind} is not supported: {why}; {instead}"
    if title == "GPT" and how.shards == "chunk" and (even := _stacked(plan)):
        why = f"the rows of {even} divide among them, and shards do not end where its queries, keys and values do, or tell these apart"
        yield f"{shards} with GPT on {ranks} data-parallel ranks is not supported: {why}; --shards parameter and --shards flat work"
    padded = next((name for name, form in _listed(plan) if _padded(form) > 1), None)
    if padded is not None:
        why = f"after the end of {padded} there is padding on several ranks"
        yield f"{shards} on {ranks} data-parallel ranks is not supported: {why}; --shards parameter works, or another number of ranks"


def _listed(plan: Plan) -> Iterator[tuple[str, Parts]]:
    """Parameters whose optimizer state is cut flat, or unevenly: its parts are listed rank by rank."""
    for lay in plan.lineage:
        if lay.logical.endswith(".m") and isinstance(lay.form, Parts):
            yield lay.logical.removesuffix(".m"), lay.form


def _padded(form: Parts) -> int:
    """On how many ranks there is padding."""
    return sum(any(p.padding for p in parts) for _, parts in form.by_rank)


def _stacked(plan: Plan) -> str | None:
    """Queries, keys and values one above the other, if shards of them need no padding."""
    return next((name for name, form in _listed(plan) if name.endswith("c_attn.weight") and not _padded(form)), None)
