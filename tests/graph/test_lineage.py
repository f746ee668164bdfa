"""merge(parts) is the logical tensor, whatever the spelling."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trainverify.graph.lineage import Layout, LineageError, Part, Partial, Parts, Run, Shard, layout, merge, positions, region
from trainverify.graph.mesh import Mesh

MESH = Mesh(dp=2, tp=3)


def cut(lay: Layout, mesh: Mesh, whole: np.ndarray[Any, Any]) -> dict[tuple[int, str], np.ndarray[Any, Any]]:
    """What every rank holds of a tensor, from the parts alone."""
    values = {}
    for rank in lay.holders(mesh):
        (part,) = lay.parts(mesh, rank, whole.shape)
        values[rank, lay.local] = whole.reshape(-1)[positions(part, whole.shape)]
    return values


@pytest.mark.parametrize(
    "form",
    ["(tp a) b", "(dp a) (tp b)", "(tp dp a) b", "(a tp) b", "a b", {"tp": Shard(0)}, {"dp": Shard(1), "tp": Shard(0)}, {"tp": Shard(1)}],
    ids=str,
)
def test_merge_of_whole_values(form: Any) -> None:
    whole = np.arange(12 * 30).reshape(12, 30) * 1.5
    lay = layout("w", form)
    assert (merge([lay], MESH, whole.shape, cut(lay, MESH, whole)) == whole).all()


def test_spellings_mean_the_same_parts() -> None:
    shape = (12, 30)
    for text, placements in (
        ("(tp a) b", {"tp": Shard(0)}),
        ("a (dp b)", {"dp": Shard(1)}),
        ("(dp tp a) b", {"dp": Shard(0), "tp": Shard(0)}),
        ("(tp dp a) b", {"tp": Shard(0), "dp": Shard(0)}),
    ):
        for rank in range(MESH.size):
            assert layout("w", text).parts(MESH, rank, shape) == layout("w", placements).parts(MESH, rank, shape)


def test_uneven_shards_are_cut_as_chunk_does() -> None:
    sizes = [layout("w", {"tp": Shard(0)}).parts(MESH, r, (7, 2))[0].logical[0].size for r in range(3)]
    assert sizes == [3, 3, 1]
    mesh = Mesh(dp=5)
    sizes = [layout("w", {"dp": Shard(0)}).parts(mesh, r, (7,))[0].logical[0].size for r in range(5)]
    assert sizes == [2, 2, 2, 1, 0]


@pytest.mark.parametrize(("op", "factor"), [("sum", 1.0), ("avg", 3.0)])
def test_merge_of_partial_values(op: Any, factor: float) -> None:
    whole = np.arange(10.0).reshape(2, 5)
    lay = layout("w", {"dp": Shard(0), "tp": Partial(op)})
    values = {}
    for rank in range(6):
        row = whole[rank // 3 : rank // 3 + 1]
        values[rank, "w"] = factor * row * (0.5 if rank % 3 == 0 else 0.25)
    assert np.allclose(merge([lay], MESH, whole.shape, values), whole)


def test_merge_of_flat_parts_with_padding() -> None:
    whole = np.arange(14.0).reshape(2, 7)
    parts = Parts(tuple((r, (Part((0,), (Run(5 * r, min(5, 14 - 5 * r)),), flat=True),)) for r in range(3)))
    padded = np.concatenate([whole.reshape(-1), [99.0]])
    values = {(r, "w"): padded[5 * r : 5 * r + 5] for r in range(3)}
    assert (merge([layout("w", parts)], Mesh(dp=3), whole.shape, values) == whole).all()
    assert region(Part((1,), (Run(0, 3),), flat=True), np.arange(6.0).reshape(2, 3)).tolist() == [1, 2, 3]


def test_merge_of_micro_batches() -> None:
    whole = np.arange(24.0).reshape(12, 2)
    layouts = [layout("x", "(dp mb b) k", f"x{m}", fixed={"mb": (m, 2)}) for m in range(2)]
    mesh = Mesh(dp=3)
    values = {k: v for lay in layouts for k, v in cut(lay, mesh, whole).items()}
    assert (merge(layouts, mesh, whole.shape, values) == whole).all()
    with pytest.raises(LineageError, match="12 of 24 elements are held by no rank"):
        merge(layouts[:1], mesh, whole.shape, values)


def test_missing_share() -> None:
    lay = layout("w", {"tp": Partial()}, where={"tp": 0})
    with pytest.raises(LineageError, match="held by no rank"):
        merge([lay], MESH, (4,), {(r, "w"): np.ones(4) for r in range(6)})


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("(tp a) (tp b)", "repeats a name"),
        ("(a tp b) c", "one size must be a number"),
        ("(dp tp) b", "more than its named axes"),
        ("(tp a)) b", "names and"),
        ({"xp": Shard(0)}, "no axis 'xp'"),
        ({"tp": Shard(2)}, "2 dimensions"),
        ({"tp": Partial("sum"), "dp": Partial("avg")}, "cannot be mixed"),
    ],
)
def test_layouts_that_do_not_fit(form: Any, message: str) -> None:
    with pytest.raises(LineageError, match=message):
        layout("w", form).parts(MESH, 0, (12, 30))
