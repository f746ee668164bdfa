"""What a script does between its steps: a step is to find what the one before it left, since no program has what changes it there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

from trainverify.check.findings import Finding
from trainverify.torch.constants import numbers_of
from trainverify.torch.discover import Found, counted, flat_copies, kept
from trainverify.torch.placed import local
from trainverify.torch.translate import Translator, memory_of
from trainverify.torch.values import COMPLEX_PARTS, DTYPES, Value

CHANGED: Final = "{} is changed between the steps, by code of the script that is not compared"
HINT: Final = "let `with tvt.step` hold all that changes what the next step starts from"


class Between:
    """The time between two steps: what the first of them left in parameters, buffers, optimizer state and gradients."""

    def __init__(self, translator: Translator, found: Found):
        self.translator = translator
        self.left = {name: self._value(t) for name, t in _tensors(found)}

    def changes(self, found: Found, rank: int | None) -> Iterator[Finding]:
        """What the next step finds otherwise. Gradients may be set to zero, and what is gone shows in the next step."""
        for name, t in _tensors(found):
            before, now = self.left.get(name), self._value(t)
            if self._same(before, now) or (name.endswith(".grad") and self._zero(now)):
                continue
            place = self.translator.memory.written(self.translator.keep(local(t)), memory_of(local(t))[0])
            yield Finding("TV505", CHANGED.format(name), rank, name, None if place is None else place.source, HINT, "unsupported")

    def _value(self, t: torch.Tensor) -> Value | None:
        here = local(t)
        if not here.numel() or not {str(here.dtype)} & {*DTYPES, *COMPLEX_PARTS}:
            return None
        with self.translator.memory.unnoted():
            return self.translator.read_parts(here)

    def _same(self, before: Value | None, now: Value | None) -> bool:
        if not isinstance(before, str) or not isinstance(now, str):
            return before == now
        e = self.translator.emitter
        return before == now or e.fingerprint(before) == e.fingerprint(now)

    def _zero(self, value: Value | None) -> bool:
        e = self.translator.emitter
        return isinstance(value, str) and e.is_constant(value) and not any(numbers_of(e, value) or (1.0,))


def _tensors(found: Found) -> Iterator[tuple[str, torch.Tensor]]:
    """All that lives from step to step, by name, with gradients."""
    named, names = kept(found)
    copies = flat_copies(found)
    for n in named:
        yield n.name, n.tensor
        if n.tensor.grad is not None:
            yield f"{n.name}.grad", n.tensor.grad
    for optimizer in found.optimizers:
        yield from counted(optimizer, names, copies)


__all__ = ["Between"]
