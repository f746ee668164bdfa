"""Small tensors of which the values are followed beside the program: they are read, and never written out as literals.

These are counts in int32 (DDP's used parameters), and what ranks make of the same numbers by communication before the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from trainverify.torch.private import _disable_current_modes, unset_fake_temporarily

MOST: Final = 4096  # elements


class Followed:
    """The values, by memory."""

    def __init__(self, keep: Callable[[torch.Tensor], int], known: Callable[[torch.Tensor], torch.Tensor | None]):
        self.keep, self.known = keep, known  # the memory of a tensor, and its values where they follow from constants
        self.values: dict[int, torch.Tensor] = {}
        self.relied: list[Callable[[], None]] = []  # what has to hold if one of them is read

    def of(self, t: torch.Tensor) -> torch.Tensor | None:
        found = self.values.get(self.keep(t))
        if found is None:
            return None
        with unset_fake_temporarily():
            return found.as_strided(t.shape, t.stride(), t.storage_offset())

    def read(self, t: torch.Tensor) -> torch.Tensor | None:
        """The values, for code that goes on with them."""
        if (found := self.of(t)) is not None:
            for holds in self.relied:
                holds()
            self.relied.clear()
        return found

    def take(self, t: torch.Tensor) -> torch.Tensor | None:
        """The values of a tensor that others take part in from now on."""
        return self.values.pop(self.keep(t), None)

    def put(self, t: torch.Tensor, values: torch.Tensor) -> None:
        self.values[self.keep(t)] = values

    def copies(self) -> dict[int, torch.Tensor]:
        with _disable_current_modes():
            return {key: values.clone() for key, values in self.values.items()}

    def unchanged(self, key: int, before: Mapping[int, torch.Tensor]) -> bool:
        """Whether values are what they were before the step."""
        one, other = before.get(key), self.values.get(key)
        with _disable_current_modes():
            return one is not None and other is not None and torch.equal(one, other)

    def numbers(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """The values of small tensors, if those of all are known."""
        found = [v for t in tensors if t.numel() <= MOST and (v := self.of(t) if self.of(t) is not None else self.known(t)) is not None]
        return found if len(found) == len(tensors) else None

    def made(self, outputs: Sequence[torch.Tensor], values: Sequence[torch.Tensor], holds: Callable[[], None]) -> None:
        """Communication before the step gives these values if something holds."""
        whole = all(t.untyped_storage().nbytes() == t.numel() * t.itemsize for t in outputs)
        for t, v in zip(outputs, values, strict=True) if whole else ():
            with _disable_current_modes():
                self.put(t, v.to(t.dtype).reshape(-1).clone())
        if whole:
            self.relied.append(holds)

    def call(
        self, began: bool, name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Sequence[Any], out: Any
    ) -> None:
        """A call that has run, after the step `began` or before; `name` is empty where its results are followed no more."""
        made = [x for x in targets if isinstance(x, torch.Tensor)]
        counts = all(x.dtype == torch.int32 for x in made)
        if (not counts and (began or not self.values)) or any(x.numel() > MOST for x in made):
            for x in made if self.values else ():
                self.take(x)  # what is written is not what it was
            return
        tensors = [x for v in (*args, *kwargs.values()) for x in _flat(v) if isinstance(x, torch.Tensor)]
        if name == "copy" and self.of(made[0]) is None and made[0].untyped_storage().nbytes() == made[0].itemsize * made[0].numel():
            with unset_fake_temporarily():  # written as a whole: what was there before does not matter
                self.put(made[0], torch.empty(made[0].numel(), dtype=made[0].dtype))
        followed = {id(x): found for x in tensors if (found := self.of(x)) is not None}
        real = followed | {id(x): found for x in tensors if id(x) not in followed and (found := self.known(x)) is not None}
        if not name or any(id(x) not in real for x in tensors) or not (counts or followed):
            for x in made:
                self.take(x)
            return

        def given(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return real[id(value)]
            if isinstance(value, torch.device):
                return torch.device("cpu")
            return type(value)(given(v) for v in value) if isinstance(value, list | tuple) else value

        with unset_fake_temporarily():
            done = func(*[given(v) for v in args], **{k: given(v) for k, v in kwargs.items()})
            for x, r in zip(_flat(out), _flat(done), strict=True):
                if isinstance(x, torch.Tensor) and self.keep(x) not in self.values:
                    self.values[self.keep(x)] = torch.empty(0, dtype=r.dtype).set_(r.untyped_storage())


def _flat(value: Any) -> list[Any]:
    return [x for v in value for x in _flat(v)] if isinstance(value, list | tuple) else [value]


__all__ = ["MOST", "Followed"]
