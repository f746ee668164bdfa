"""Calls of PyTorch, translated and computed in our numeric domain, beside PyTorch's own results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from trainverify.domains.numeric import NUMERIC
from trainverify.graph.program import Output, Program
from trainverify.ops import OPS
from trainverify.torch.mappings.table import _same
from trainverify.torch.record import Recorder
from trainverify.torch.translate import Translator, flat, type_of
from trainverify.torch.values import Unknown
from trainverify.translate.emit import Place


class Watched(Translator):
    """Notes which arguments of every op were given, and not as their default."""

    def __init__(self) -> None:
        super().__init__(Place)
        self.given: dict[str, set[str]] = {}

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, fault: str | None = None) -> None:
        schema = func._schema
        given = {a.name: v for a, v in zip(schema.arguments, args, strict=False)} | dict(kwargs)
        noted = self.given.setdefault(schema.name, set())
        for a in schema.arguments:
            if a.name in given and not (a.has_default_value() and _same(given[a.name], a.default_value)):
                noted.add(a.name)
        super().call(func, args, kwargs, out, fault)


def traced(fn: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> tuple[Watched, list[torch.Tensor]]:
    """What a function does to its inputs `x0`, `x1`, …, and its results."""
    translator = Watched()
    for t in inputs:
        translator.keep(t)
    translator.begin()
    for i, t in enumerate(inputs):
        translator.emitter.declare(f"x{i}", type_of(t))
        translator.define(t, f"x{i}")
        if not t.is_floating_point() and bool((t >= 0).all()):
            translator.emitter.nonnegative.add(f"x{i}")
    with Recorder(translator):
        results = [t for t in flat(fn(*inputs)) if isinstance(t, torch.Tensor)]
    return translator, results


def value(translator: Translator, t: torch.Tensor) -> str:
    found = translator.read(t)
    assert not isinstance(found, Unknown), found
    return found


def computed(program: Program, inputs: dict[str, Any]) -> dict[str, Any]:
    values = dict(inputs)
    for op in program.ops:
        types = tuple(None if i is None else program.tensors[i] for i in op.inputs)
        lowered = OPS.lower(op.name, op.attributes, types)
        with np.errstate(all="ignore"):
            made = NUMERIC.run(lowered.outputs, [None if i is None else values[i] for i in op.inputs])
        values.update(zip(op.outputs, made, strict=True))
    return values


def agree(fn: Callable[..., Any], *inputs: torch.Tensor, also: Sequence[int] = ()) -> Watched:
    """Results, and the inputs numbered in `also` (written in place), are what the translated program computes."""
    given = {f"x{i}": t.detach().clone().numpy() for i, t in enumerate(inputs)}
    translator, results = traced(fn, inputs)
    results = [*results, *(inputs[i] for i in also)]
    names = [value(translator, t) for t in results]
    outputs = [Output(n, "metric", str(i)) for i, n in enumerate(names)]
    program = translator.emitter.program("op", list(given), (), (), outputs, {})
    values = computed(program, given)
    assert results
    for name, t in zip(names, results, strict=True):
        want = t.detach().numpy()
        assert values[name].shape == want.shape
        np.testing.assert_allclose(values[name], want, rtol=1e-6, atol=1e-7)
    return translator


def real(*shape: int, low: float = -0.9) -> Any:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape) + len(shape)), dtype=torch.float64) * (0.9 - low) + low


def positive(*shape: int) -> Any:
    return real(*shape, low=0.1)


def ids(below: int, *shape: int) -> Any:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(3))


def mask(*shape: int) -> Any:
    return real(*shape) > 0
