"""A program evaluated on numbers, at its own sizes; random values for what it starts from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from trainverify.domains.numeric import NUMERIC
from trainverify.graph.program import Domain, Program, inline
from trainverify.ops import OPS

Values = dict[str, Any]


def run(program: Program, values: Mapping[str, Any]) -> Values:
    """Every tensor of the program."""
    flat = inline(program)
    found: Values = {n: np.asarray(values[n]) for n in flat.sources}
    for n in flat.sources:
        assert found[n].shape == flat.tensors[n].shape, n
    for op in flat.ops:
        types = tuple(None if i is None else flat.tensors[i] for i in op.inputs)
        lowered = OPS.lower(op.name, op.attributes, types)
        made = NUMERIC.run(lowered.outputs, [None if i is None else found[i] for i in op.inputs])
        found.update(zip(op.outputs, made, strict=True))
    return found


def outputs(program: Program, values: Mapping[str, Any]) -> Values:
    """What the program reports: `loss`, `gradient of w`, `updated parameter w`, `updated state w.m`, `metric grad_norm`, …"""
    found = run(program, values)
    return {str(o): found[o.tensor] for o in program.outputs}


def after(program: Program, values: Mapping[str, Any], results: Mapping[str, Any]) -> Values:
    """The values that the next step starts from; its inputs stay as they were."""
    new = {str(o.of): results[str(o)] for o in program.outputs if o.role in ("parameter", "state")}
    return {**values, **new}


def draw(program: Program, seed: int) -> Values:
    """Random values within the domains of inputs: repeated ids, some of them ignored."""
    rng = np.random.default_rng(seed)
    return {n: _sample(rng, program.tensors[n].kind, program.tensors[n].shape, program.domains.get(n)) for n in program.sources}


def _sample(rng: np.random.Generator, kind: str, shape: tuple[int, ...], domain: Domain | None) -> Any:
    if kind == "int":
        assert domain is not None
        assert domain.size is not None
        ids = rng.integers(0, domain.size, shape)
        return ids if domain.ignore is None else np.where(rng.random(shape) < 0.3, domain.ignore, ids)
    values = 0.5 * rng.standard_normal(shape)
    return values if domain is None else np.abs(values) + 0.1


def assert_same(results: Mapping[str, Any], wanted: Mapping[str, Any], tolerance: float = 1e-9) -> None:
    """Two sets of outputs: the same names, and values that agree."""
    assert set(results) == set(wanted)
    for name, value in wanted.items():
        np.testing.assert_allclose(results[name], np.asarray(value), rtol=tolerance, atol=tolerance, err_msg=name)


def differing(results: Mapping[str, Any], wanted: Mapping[str, Any], tolerance: float = 1e-9) -> set[str]:
    """Outputs that do not agree."""
    assert set(results) == set(wanted)
    return {n for n, v in wanted.items() if not np.allclose(results[n], np.asarray(v), rtol=tolerance, atol=tolerance)}
