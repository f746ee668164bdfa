"""Every operator of the library, forward and derivative, against PyTorch; enclosures against numbers."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
import torch

from ops.references import REFERENCES
from ops.samples import Sample
from trainverify.domains.ball import Ball, balls, precision
from trainverify.domains.numeric import NUMERIC
from trainverify.graph.types import TensorType
from trainverify.ops import OPS
from trainverify.ops.table import Lowered

TOLERANCE = 1e-9
BALL_SIZE = 80  # gradients are enclosed for tensors up to this many elements
_KINDS = {"f": "real", "i": "int", "b": "bool"}


COMPARED = [d for d in OPS if not d.point_to_point]  # a send or a recv alone computes nothing


def cases() -> list[Any]:
    found = []
    for definition in COMPARED:
        samples: tuple[Sample | None, ...] = REFERENCES[definition.name][1] if definition.name in REFERENCES else (None,)
        found += [pytest.param(definition.name, s, id=f"{definition.name}-{i}") for i, s in enumerate(samples)]
    return found


def arrays(value: Any) -> list[Any]:
    return [v.detach().numpy() for v in (value if isinstance(value, tuple | list) else [value])]


def assert_encloses(outputs: Any, inputs: list[Any], numbers: list[Any]) -> None:
    with precision(160):
        enclosures = Ball().run(outputs, [None if v is None else balls(v) for v in inputs])
        for enclosure, number in zip(enclosures, numbers, strict=True):
            assert enclosure.shape == number.shape
            for b, v in zip(enclosure.flat, number.flat, strict=True):
                if not np.isfinite(v) or number.dtype.kind != "f":
                    assert float(b) == float(v)
                else:
                    assert abs(float(b.mid()) - v) <= TOLERANCE * (1 + abs(v))
                    assert float(b.rad()) < 1e-30 * (1 + abs(v))


def loss(lowered: Lowered, inputs: list[Any], weights: dict[int, Any]) -> float:
    results = NUMERIC.run(lowered.outputs, inputs)
    return float(sum(np.sum(results[i] * w) for i, w in weights.items()))


def test_every_operator_has_a_reference_and_samples() -> None:
    assert {d.name for d in COMPARED} == set(REFERENCES)
    assert [name for name, (_, samples) in REFERENCES.items() if len(samples) < 3] == []


@pytest.mark.parametrize(("name", "sample"), cases())
def test_operator(name: str, sample: Sample | None) -> None:
    assert sample is not None, f"operator {name} has no reference in tests/ops/references.py"
    reference = REFERENCES[name][0]
    definition = OPS[name]
    senders = sample.members if definition.senders == "all" else 1
    lead = (senders,) if definition.collective else ()
    inputs = sample.draw(zlib.crc32(name.encode()), lead)
    lowered = OPS.lower(name, sample.attrs, sample.types, sample.members)
    results = NUMERIC.run(lowered.outputs, inputs)

    reals = [i for i, v in enumerate(inputs) if v is not None and v.dtype.kind == "f"]
    tensors = [None if v is None else torch.from_numpy(v.copy()).requires_grad_(i in reals) for i, v in enumerate(inputs)]
    extra = {"members": sample.members} if definition.collective else {}
    expected = reference(*tensors, **sample.attrs, **extra)
    expected = list(expected) if isinstance(expected, tuple | list) else [expected]
    assert len(results) == len(expected)
    for result, want, kind in zip(results, arrays(expected), lowered.types, strict=True):
        assert result.shape == want.shape
        assert result.shape[len(lead) :] == kind.shape
        assert _KINDS[want.dtype.kind] == kind.kind
        np.testing.assert_allclose(result, want, rtol=TOLERANCE, atol=TOLERANCE)
    assert_encloses(lowered.outputs, inputs, results)
    if definition.collective or not reals:
        return

    # derivative: along random directions at the outputs
    given = tuple(i for i, o in enumerate(lowered.outputs) if o.kind == "real")
    if not given:
        return
    rng = np.random.default_rng(7)
    weights = {i: rng.standard_normal(results[i].shape) for i in given}
    gradient = OPS.lower(
        name + ".grad",
        {**sample.attrs, "wrt": tuple(reals), "given": given},
        (*sample.types, *(TensorType(results[i].shape, "f64") for i in given)),
    )
    everything = [*inputs, *weights.values()]
    found = NUMERIC.run(gradient.outputs, everything)
    differentiable = [(expected[i], torch.from_numpy(w)) for i, w in weights.items() if expected[i].requires_grad]
    sources = [tensors[i] for i in reals]
    if differentiable:
        heads, seeds = zip(*differentiable, strict=True)
        wanted = torch.autograd.grad(heads, sources, seeds, allow_unused=True)
    else:
        wanted = [None] * len(sources)
    for i, result, want in zip(reals, found, wanted, strict=True):
        assert result.shape == inputs[i].shape
        np.testing.assert_allclose(result, np.zeros_like(result) if want is None else want.numpy(), rtol=TOLERANCE, atol=TOLERANCE)
    if sum(v.size for v in everything if v is not None) <= BALL_SIZE:
        assert_encloses(gradient.outputs, everything, found)


# Functions that jump, or that are not differentiable at the very points that a sample is about.
_KINKS = {"sign", "floor", "relu-3", "abs-3", "clamp-3", "minimum-3", "maximum-3", "amax-5", "amin-5", "detach", "to-1", "to-2"}


@pytest.mark.parametrize(("name", "sample"), cases())
def test_gradient_is_the_slope(name: str, sample: Sample | None, request: pytest.FixtureRequest) -> None:
    """The derivative against a central difference along a random direction; independent of PyTorch."""
    assert sample is not None
    case = request.node.callspec.id
    inputs = sample.draw(3)
    reals = tuple(i for i, v in enumerate(inputs) if v is not None and v.dtype.kind == "f" and np.all(np.isfinite(v)))
    if OPS[name].collective or not reals or name in _KINKS or case in _KINKS:
        return
    lowered = OPS.lower(name, sample.attrs, sample.types)
    rng = np.random.default_rng(5)
    results = NUMERIC.run(lowered.outputs, inputs)
    weights = {
        i: rng.standard_normal(r.shape)
        for i, (r, o) in enumerate(zip(results, lowered.outputs, strict=True))
        if o.kind == "real" and np.all(np.isfinite(r))
    }
    if not weights:
        return
    if name == "batch_norm":  # running statistics are not differentiated with respect to the batch
        weights = {i: w for i, w in weights.items() if i < 3}
    types = (*sample.types, *(TensorType(w.shape, "f64") for w in weights.values()))
    gradient = OPS.lower(name + ".grad", {**sample.attrs, "wrt": reals, "given": tuple(weights)}, types)
    slopes = NUMERIC.run(gradient.outputs, [*inputs, *weights.values()])
    direction = {i: rng.standard_normal(inputs[i].shape) for i in reals}
    step = 1e-6
    ahead = [v if i not in direction else v + step * direction[i] for i, v in enumerate(inputs)]
    behind = [v if i not in direction else v - step * direction[i] for i, v in enumerate(inputs)]
    difference = (loss(lowered, ahead, weights) - loss(lowered, behind, weights)) / (2 * step)
    slope = sum(float(np.sum(s * direction[i])) for i, s in zip(reals, slopes, strict=True))
    assert slope == pytest.approx(difference, rel=1e-5, abs=1e-6)
