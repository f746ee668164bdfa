"""Context, pipeline and expert parallelism, and flax with optax as they are: proved at real widths, replayed at small ones."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytest.importorskip("jaxlib", reason="JAX is absent: pip install 'trainverify[jax]'")

import context
import experts
import pipeline
from running import proved

import trainverify.jax as tvj

MESH = {"dp": 2, "cp": 4}


def around(kind: Any, **options: Any) -> Any:
    def distributed(mesh: Any) -> Any:
        return kind(mesh, **options)

    return distributed


RING = {
    "no mask": {"causal": False},
    "minus infinity": {"fill": -math.inf},
    "minus infinity, by scan": {"fill": -math.inf, "scan": True},
}


@pytest.mark.parametrize("name", RING)
def test_ring_attention(name: str) -> None:
    options = RING[name]
    plain = {k: v for k, v in options.items() if k != "scan"}
    proved(context.reference(**plain), around(context.ring, **options), context.shapes(), MESH)
    one, many = context.reference(heads=4, **plain), around(context.ring, heads=4, **options)
    small = context.shapes(**context.SMALL)
    assert tvj.replay(one, many, small, tvj.pair(one, many, small, MESH)).agrees


def test_ring_attention_with_a_finite_mask_agrees_and_is_replayed() -> None:
    """Not proved: the maximum of a running maximum and masked scores does not come to one form."""
    one, many = context.reference(heads=4), around(context.ring, heads=4)
    small = context.shapes(**context.SMALL)
    report = tvj.verify(one, many, small, MESH)
    assert report.verdict == "UNKNOWN"
    assert "agreed on 3 random points" in report.reason
    assert tvj.replay(one, many, small, tvj.pair(one, many, small, MESH)).agrees


@pytest.mark.parametrize("fill", [-1e30, -math.inf])
def test_ulysses(fill: float) -> None:
    proved(context.reference(fill=fill), around(context.ulysses, fill=fill), context.shapes(), MESH)
    one, many = context.reference(heads=4, fill=fill), around(context.ulysses, heads=4, fill=fill)
    small = context.shapes(**context.SMALL)
    assert tvj.replay(one, many, small, tvj.pair(one, many, small, MESH)).agrees


@pytest.mark.capture
def test_flax_by_the_compiler() -> None:
    gpt = pytest.importorskip("flax_gpt", reason="flax and optax are absent: pip install flax optax")
    mesh = {"dp": 4}
    report = tvj.verify(gpt.reference, gpt.by_compiler, gpt.args(gpt.Config()), mesh, reader="hlo")
    assert report.verdict == "PROVED", report.reason
    small = gpt.args(gpt.SMALL)
    assert tvj.replay(gpt.reference, gpt.by_compiler, small, tvj.pair(gpt.reference, gpt.by_compiler, small, mesh, reader="hlo")).agrees


COMPILED = {
    "ring": (context.reference(fill=-math.inf), around(context.ring, fill=-math.inf), context.shapes(), MESH),
    "ulysses": (context.reference(fill=-math.inf), around(context.ulysses, fill=-math.inf), context.shapes(), MESH),
    "pipeline": (pipeline.reference, pipeline.gpipe, pipeline.shapes(), {"dp": 2, "pp": 4}),
    "experts": (experts.reference, experts.expert_parallel_whole, experts.shapes(), {"ep": 4}),
}
COMPILED_SMALL = {
    "ring": (context.reference(heads=4, fill=-math.inf), around(context.ring, heads=4, fill=-math.inf), context.shapes(**context.SMALL)),
    "ulysses": (
        context.reference(heads=4, fill=-math.inf),
        around(context.ulysses, heads=4, fill=-math.inf),
        context.shapes(**context.SMALL),
    ),
    "pipeline": (pipeline.reference, pipeline.gpipe, pipeline.shapes(**pipeline.SMALL)),
    "experts": (experts.reference, experts.expert_parallel_whole, experts.shapes(**experts.SMALL)),
}


@pytest.mark.parametrize("name", ["pipeline", *(pytest.param(n, marks=pytest.mark.capture) for n in ("ring", "ulysses", "experts"))])
def test_what_xla_makes_of_shard_map(name: str) -> None:
    """Expected: PROVED from XLA's partitioned program too, and the translation agrees with JAX on numbers."""
    one, many, args, mesh = COMPILED[name]
    report = tvj.verify(one, many, args, mesh, reader="hlo")
    assert report.verdict == "PROVED", report.reason
    one, many, small = COMPILED_SMALL[name]
    found = tvj.replay(one, many, small, tvj.pair(one, many, small, mesh, reader="hlo"))
    assert found.agrees, str(found)


def test_a_pipeline_without_its_last_step_is_refuted_by_hlo() -> None:
    many = around(pipeline.pipelined, skip_last=True)
    report = tvj.verify(pipeline.reference, many, pipeline.shapes(), {"dp": 2, "pp": 4}, reader="hlo")
    assert report.verdict == "REFUTED", report.reason


def test_pipeline() -> None:
    proved(pipeline.reference, pipeline.gpipe, pipeline.shapes(), {"dp": 2, "pp": 4}, pipeline.shapes(**pipeline.SMALL))


def test_a_pipeline_without_its_last_step_is_refuted() -> None:
    report = tvj.verify(pipeline.reference, around(pipeline.pipelined, skip_last=True), pipeline.shapes(), {"dp": 2, "pp": 4})
    assert report.verdict == "REFUTED", report.reason


def test_experts() -> None:
    proved(experts.reference, experts.expert_parallel_whole, experts.shapes(), {"ep": 4}, experts.shapes(**experts.SMALL))


@pytest.mark.parametrize("kind", ["linen", pytest.param("nnx", marks=pytest.mark.capture)])
def test_flax_and_optax_as_they_are(kind: str) -> None:
    pytest.importorskip("optax", reason="flax and optax are absent: pip install flax optax")
    gpt = pytest.importorskip("flax_gpt", reason="flax and optax are absent: pip install flax optax")
    if kind == "linen":
        proved(gpt.reference, gpt.data_parallel, gpt.args(gpt.Config()), {"dp": 8}, gpt.args(gpt.SMALL))
        return
    one, many, args = gpt.nnx_case(gpt.Config())
    proved(one, many, args, {"dp": 8})
    one, many, small = gpt.nnx_case(gpt.SMALL)
    assert tvj.replay(one, many, small, tvj.pair(one, many, small, {"dp": 8})).agrees
