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


@pytest.mark.parametrize("wrong", [{"low": 1}, {"high": -1}, {"shift": 1}, {"strict": False}, {"low": -1}])
def test_chosen_ids_that_are_off_by_one_are_refuted(wrong: Any) -> None:
    """Also where the id that is one too many is no row of this rank: it is clipped to the nearest one."""
    assert report(chosen, **wrong).verdict == "REFUTED"


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


def joined(shift: int = 0, low: int = 0, high: int = 0, strict: bool = True, top: int = 0) -> Any:
    """Conditions joined by or and not; ids multiplied by the mask, and rows too."""

    def look(table: Any, ids: Any) -> Any:
        rows = table.shape[0]
        local = ids - lax.axis_index("tp") * rows + shift
        elsewhere = (local < low) | ~((local < rows + high) if strict else (local <= rows + high))
        found = jnp.take(table, local * ~elsewhere, axis=0, mode="clip")
        return lax.psum(found * (1 - elsewhere.astype(found.dtype))[..., None], "tp")

    return look


def around(shift: int = 0, low: int = 0, high: int = 0, strict: bool = True, top: int = 0) -> Any:
    """Negative positions count from the end, as JAX's indices do; what is beyond the end is clipped."""

    def look(table: Any, ids: Any) -> Any:
        rows = table.shape[0]
        local = ids - lax.axis_index("tp") * rows + shift
        here = jnp.logical_and(local >= low, local <= rows - 1 + high)
        return lax.psum(jnp.where(here[..., None], table.at[local].get(mode="clip"), 0.0), "tp")

    return look


def quotients(shift: int = 0, low: int = 0, high: int = 0, strict: bool = True, top: int = 0) -> Any:
    """The rank that has an id is its quotient by the number of rows, the row its remainder."""

    def look(table: Any, ids: Any) -> Any:
        rows = table.shape[0]
        here = (ids + shift) // rows == lax.axis_index("tp")
        return lax.psum(jnp.where(here[..., None], table[(ids + shift) % rows + top], 0.0), "tp")

    return look


def truncated(shift: int = 0, low: int = 0, high: int = 0, strict: bool = True, top: int = 0) -> Any:
    """The same by quotients that are truncated: from −5 to 5 they are 0."""

    def look(table: Any, ids: Any) -> Any:
        rows = table.shape[0]
        local = ids - lax.axis_index("tp") * rows
        here = lax.div(local, jnp.int32(rows)) == 0
        return lax.psum(jnp.where(here[..., None], table[jnp.clip(local, 0, rows - 1)], 0.0), "tp")

    return look


REFERENCES |= dict.fromkeys((joined, around, quotients, truncated), lambda t, ids: t[ids])


@pytest.mark.parametrize("kind", [joined, around, quotients])
def test_other_spellings_are_proved(kind: Any) -> None:
    found = report(kind)
    assert found.verdict == "PROVED", found.reason


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [(joined, {"low": 1}), (joined, {"high": -1}), (around, {"high": -1}), (around, {"low": 1}), (quotients, {"shift": 1})],
)
def test_other_spellings_that_are_off_by_one_are_refuted(kind: Any, wrong: Any) -> None:
    assert report(kind, **wrong).verdict == "REFUTED"


def test_rows_that_are_clipped_too_late_are_not_proved() -> None:
    """Ids just below the rows of a rank truncate to quotient 0, and are clipped to row 0."""
    assert report(truncated).verdict == "REFUTED"
    assert report(joined, strict=False).verdict in ("REFUTED", "UNKNOWN")
    assert report(around, high=1).verdict in ("REFUTED", "UNKNOWN")


def test_a_table_by_remainders() -> None:
    """Table of 6 rows for 24 ids: cut over tokens, not over the table."""

    def step(table: Any, ids: Any, by: int = 6) -> Any:
        loss, grad = jax.value_and_grad(lambda t: jnp.sum(jnp.sin(t[ids % by] * t[ids // 4])))(table)
        return table - 0.1 * grad, loss

    def made(by: int) -> Any:
        def cut(table: Any, ids: Any) -> Any:
            loss, grad = jax.value_and_grad(lambda t: jnp.sum(jnp.sin(t[ids % by] * t[ids // 4])))(table)
            return table - 0.1 * lax.psum(grad, "dp"), lax.psum(loss, "dp")

        specs = {"in_specs": (P(), P("dp")), "out_specs": P(), "check_vma": False}
        return lambda mesh: jax.shard_map(cut, mesh=mesh, **specs)

    args = (tvj.Reals((6, 5)), tvj.Ids((6, 7), 24))
    found = tvj.verify(step, made(6), args, {"dp": 2})
    assert found.verdict == "PROVED", found.reason
    assert tvj.verify(step, made(5), args, {"dp": 2}).verdict == "REFUTED"
