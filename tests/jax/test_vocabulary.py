"""A vocabulary that ranks cut: ids are shifted, clipped and masked. Exact bounds are proved; each twin that is off by one is refuted."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("jaxlib", reason="JAX is absent: pip install 'trainverify[jax]'")

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jax
import trainverify.jax as tvj
from jax import lax

ARGS = (tvj.Reals((24, 5)), tvj.Ids((6, 7), 24))


def stepped(look: Any) -> Any:
    def step(table: Any, ids: Any) -> Any:
        loss, grad = jax.value_and_grad(lambda t: jnp.sum(jnp.sin(look(t, ids))))(table)
        return table - 0.1 * grad, loss

    return step


def embed(shift: int = 0, low: int = 0, high: int = 0, strict: bool = True, top: int = 0) -> Any:
    def look(table: Any, ids: Any) -> Any:
        rows = table.shape[0]
        local = ids - lax.axis_index("tp") * rows + shift
        above = local < rows + high if strict else local <= rows + high
        here = (local >= low) & above
        return lax.psum(jnp.where(here[..., None], table[jnp.clip(local, 0, rows - 1 + top)], 0.0), "tp")

    return look


def chosen(shift: int = 0, low: int = 0, high: int = 0, strict: bool = True, top: int = 0) -> Any:
    """The same with ids that the mask chooses, not clipped ones."""

    def look(table: Any, ids: Any) -> Any:
        rows = table.shape[0]
        local = ids - lax.axis_index("tp") * rows + shift
        above = local < rows + high if strict else local <= rows + high
        here = (local >= low) & above
        found = jnp.take(table, jnp.where(here, local, top), axis=0, mode="clip")
        return lax.psum(jnp.where(here[..., None], found, 0.0), "tp")

    return look


def pick(shift: int = 0, low: int = 0, high: int = 0, strict: bool = True, top: int = 0) -> Any:
    """One score of every row, by an id; the scores are cut along the vocabulary."""

    def look(table: Any, ids: Any) -> Any:
        scores = jnp.cos(table[:, 0] + ids[..., None])
        rows = table.shape[0]
        local = ids - lax.axis_index("tp") * rows + shift
        above = local < rows + high if strict else local <= rows + high
        here = (local >= low) & above
        found = jnp.take_along_axis(scores, jnp.clip(local, 0, rows - 1 + top)[..., None], -1)[..., 0]
        return lax.psum(jnp.where(here, found, 0.0), "tp")

    return look


def hot(shift: int = 0, low: int = 0, high: int = 0, strict: bool = True, top: int = 0) -> Any:
    """The same by one-hots."""

    def look(table: Any, ids: Any) -> Any:
        rows = table.shape[0]
        local = ids - lax.axis_index("tp") * rows + shift
        return lax.psum(jnp.einsum("bsv,vx->bsx", jax.nn.one_hot(local, rows), table), "tp")

    return look


def picked(table: Any, ids: Any) -> Any:
    return jnp.take_along_axis(jnp.cos(table[:, 0] + ids[..., None]), ids[..., None], -1)[..., 0]


REFERENCES = {embed: lambda t, ids: t[ids], chosen: lambda t, ids: t[ids], pick: picked, hot: lambda t, ids: t[ids]}


def report(kind: Any, **wrong: Any) -> Any:
    def distributed(mesh: Any) -> Any:
        specs = {"in_specs": (P("tp"), P()), "out_specs": (P("tp"), P())}
        return jax.shard_map(stepped(kind(**wrong)), mesh=mesh, **specs)

    return tvj.verify(stepped(REFERENCES[kind]), distributed, ARGS, {"tp": 4})


@pytest.mark.parametrize("kind", [embed, chosen, pick, hot])
def test_exact_bounds_are_proved(kind: Any) -> None:
    assert report(kind).verdict == "PROVED"


def test_bounds_written_otherwise_are_proved() -> None:
    assert report(embed, high=-1, strict=False).verdict == "PROVED"


@pytest.mark.parametrize("kind", [embed, pick])
@pytest.mark.parametrize("wrong", [{"low": 1}, {"high": -1}, {"strict": False}, {"low": -1}, {"shift": 1}, {"top": -1}])
def test_a_twin_that_is_off_by_one_is_refuted(kind: Any, wrong: Any) -> None:
    found = report(kind, **wrong)
    assert found.verdict == "REFUTED", found.reason
    assert found.place.op.source.file.endswith("test_vocabulary.py")


@pytest.mark.parametrize(
    ("wrong", "verdict"),
    [
        ({"low": 1}, "REFUTED"),
        ({"high": -1}, "REFUTED"),
        ({"shift": 1}, "REFUTED"),
        ({"strict": False}, "UNKNOWN"),
        ({"low": -1}, "UNKNOWN"),
    ],
)
def test_chosen_ids_that_are_off_by_one_are_not_proved(wrong: Any, verdict: str) -> None:
    """UNKNOWN where the id that is one too many is no row of this rank."""
    assert report(chosen, **wrong).verdict == verdict


def test_what_is_masked_may_be_any_row() -> None:
    assert report(chosen, top=5).verdict == "PROVED"


def test_a_mask_of_columns_says_nothing_about_rows() -> None:
    """UNKNOWN: here[i, j] is about ids[j], and row ids[i] is looked up."""

    def one(table: Any, ids: Any) -> Any:
        wide = jnp.where((ids[None, :] >= 0) & (ids[None, :] < 4), ids[:, None], 0)
        return table, jnp.sum(jnp.sin(table[:4][wide]))

    def made(mesh: Any) -> Any:
        return jax.shard_map(one, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)

    assert tvj.verify(one, made, (tvj.Reals((6, 5)), tvj.Ids((6,), 6)), {"tp": 2}).verdict == "UNKNOWN"


def test_shifted_one_hots_are_refuted() -> None:
    assert report(hot, shift=1).verdict == "REFUTED"
