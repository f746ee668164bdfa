"""What a step starts with, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from trainverify.check.findings import Finding
from trainverify.graph.program import Output, Source
from trainverify.torch.discover import Copy, Found, Named, counted, flat_copies, kept
from trainverify.torch.placed import Described
from trainverify.torch.translate import Translator
from trainverify.torch.values import Unknown, Value


@dataclass
class Started:
    """What there is when a step begins, by name, and what is noted while it runs."""

    named: list[Named] = field(default_factory=list)
    by_tensor: dict[int, str] = field(default_factory=dict)
    copies: dict[int, list[Copy]] = field(default_factory=dict)
    said: dict[str, Described] = field(default_factory=dict)  # how tensors lie of which an adapter says it
    shapes: dict[str, list[int]] = field(default_factory=dict)  # of gradients that an optimizer holds in another shape
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    trained: set[str] = field(default_factory=set)
    counts: dict[str, torch.Tensor] = field(default_factory=dict)  # steps that optimizers count, by parameter
    numbers: dict[str, tuple[float, ...]] = field(default_factory=dict)  # small known tensors, and their values
    tied: dict[str, str] = field(default_factory=dict)  # other names of a tensor → the first one
    made: dict[str, Value] = field(default_factory=dict)  # buffers that follow from constants
    tables: set[str] = field(default_factory=set)  # of these, those that a checkpoint keeps
    left: dict[str, Named] = field(default_factory=dict)  # gradients that the step before left
    structure: dict[str, object] = field(default_factory=dict)
    gradients: dict[str, tuple[Value, torch.Tensor]] = field(default_factory=dict)
    stepped: dict[str, Any] = field(default_factory=dict)  # parameter → the optimizer that has updated it
    used: dict[str, Source | None] = field(default_factory=dict)  # parameter → where its gradient is used
    compared: set[str] = field(default_factory=set)  # parameters with a gradient that is an output


class Outputs:
    """What a step leaves behind, as outputs of its program; what has no meaning is a problem."""

    def __init__(self, translator: Translator, rank: int | None, sources: Collection[str]):
        self.translator, self.rank, self.sources = translator, rank, sources
        self.outputs: list[Output] = []
        self.problems: list[Finding] = []

    def add(self, tensor: Value, role: Any, of: str | None, what: str) -> str | None:
        emitter = self.translator.emitter
        if isinstance(tensor, Unknown):
            if tensor.pending is None:
                self.problem(of, f"{what}: {tensor.reason}", tensor.source)
            else:
                self.translator.notes.early.append((tensor, emitter.place.source))
            return None
        if tensor in self.sources:
            tensor = emitter.op("identity", (tensor,), label=f"{of}.unchanged")
        self.outputs.append(Output(tensor, role, of))
        return tensor

    def problem(self, of: str | None, why: str, source: Source | None) -> None:
        self.problems.append(Finding("TV504", why, self.rank, of, source, None, "unsupported"))


class After:
    """What there is after a step, by name."""

    def __init__(self, found: Found):
        self.found = found
        named, names = kept(found)
        self.tensors = {n.name: n for n in named}
        copies = flat_copies(found)
        self.counts = {n: t for optimizer in found.optimizers for n, t in counted(optimizer, names, copies)}
