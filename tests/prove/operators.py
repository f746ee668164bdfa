"""Programs of one operator, forward and backward, from the samples that are also compared with PyTorch."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from ops.references import REFERENCES
from ops.samples import Sample
from trainverify.graph.program import Domain, Op, Output, Program, attributes
from trainverify.ops import OPS


def one_op(name: str, sample: Sample, seed: int, grad: bool) -> tuple[Program, dict[str, Any]] | None:
    """A program that applies one operator (and its derivative) to a sample, and the sample's numbers."""
    drawn = sample.draw(zlib.crc32(name.encode()) + seed)
    names = [None if t is None else f"a{i}" for i, t in enumerate(sample.tensors)]
    tensors = {n: t.type for n, t in zip(names, sample.tensors, strict=True) if n is not None and t is not None}
    inputs = {n: v for n, v in zip(names, drawn, strict=True) if n is not None}
    made = OPS.lower(name, sample.attrs, sample.types).types
    outputs = tuple(f"o{i}" for i in range(len(made)))
    tensors |= dict(zip(outputs, made, strict=True))
    ops = [Op(name, tuple(names), outputs, attributes(sample.attrs))]
    if grad:
        wrt = tuple(i for i, t in enumerate(sample.tensors) if t is not None and t.type.kind == "real")
        given = tuple(i for i, t in enumerate(made) if t.kind == "real")
        if not wrt or not given:
            return None
        rng = np.random.default_rng(seed)
        for i in given:
            tensors[f"g{i}"] = made[i]
            inputs[f"g{i}"] = rng.uniform(-1, 1, made[i].shape)
        attrs = {**sample.attrs, "wrt": wrt, "given": given}
        lowered = OPS.lower(name + ".grad", attrs, (*sample.types, *(made[i] for i in given)))
        results = tuple(f"d{i}" for i in range(len(lowered.types)))
        tensors |= dict(zip(results, lowered.types, strict=True))
        ops.append(Op(name + ".grad", (*names, *(f"g{i}" for i in given)), results, attributes(attrs), "backward", "o0"))
    domains = {n: _domain(v) for n, v in inputs.items() if v.dtype.kind == "i"}
    return Program(name, tensors, tuple(inputs), (), (), tuple(ops), (Output("o0", "loss"),), {}, domains), inputs


def _domain(v: Any) -> Domain:
    ignore = int(v.min()) if v.size and v.min() < 0 else None
    return Domain("ids", max(int(v.max()) + 1, 1) if v.size else 1, ignore)


def all_samples() -> Iterator[tuple[str, int, Sample, bool]]:
    for d in OPS:
        if not d.point_to_point and not d.collective and d.name in REFERENCES:
            for i, s in enumerate(REFERENCES[d.name][1]):
                yield d.name, i, s, False
                yield d.name, i, s, True
