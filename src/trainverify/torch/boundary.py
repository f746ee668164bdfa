"""The boundary of a capture: errors of ours that user code goes on after, ops that the recorder does not see, memory that others write.

Each of them is noted before the user's code goes on, and then there is no verdict.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from trainverify.check.findings import Finding
from trainverify.graph.program import Source
from trainverify.torch.private import FakeTensorMode, _disable_current_modes

E = TypeVar("E", bound=Exception)
SWALLOWED = "the code goes on after an error that only the capture raises, {}"
UNSEEN = "{} is called where the capture does not see it, in another thread or with dispatch modes switched off"
ZERO = "the factor of 0 at {} stays 0: what acts through it alone is not compared"
UNCALLED = "a callback of communication (then), of which the step does not wait for the future: when it runs, nothing decides"
TEXT = "text that is made of computed numbers, for a log, decides on nothing"
OUTSIDE = "memory that PyTorch shares with NumPy, or with other code outside it, is written"


class Boundary:
    """What a process does that its capture cannot follow. It is noted once, and holds for all steps."""

    def __init__(self, where: Callable[[], Source | None]):
        self.where = where
        self._noted: dict[str, Source | None] = {}
        self.assumed: list[str] = []
        self.callbacks: list[tuple[Callable[[], bool], Source | None]] = []  # of futures of communication: whether they have run
        self.chance: Any = None  # what draws numbers that another process would have otherwise
        self._zeros: set[Source | None] | None = None
        self._inside = threading.local()  # whether this thread is in a call that the recorder passes on
        self._shared: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # storage → real memory that it stands for, and what that held

    def note(self, text: str, source: Source | None = None) -> None:
        self._noted.setdefault(text.replace(": ", ", "), source or self.where())  # a finding's text is `what: why`

    def refused(self, error: E) -> E:
        """An error that is about to be raised."""
        self.note(SWALLOWED.format(str(error).removeprefix(f"{self.where()}: ")))
        return error

    def assume(self, text: str) -> None:
        if text not in self.assumed:
            self.assumed.append(text)

    def shown(self) -> None:
        """Python makes text of a computed number."""
        self.assume(TEXT)

    def multiplied(self, lines: set[Source | None], last: bool) -> None:
        """A step multiplies by 0 at some lines. Those where all steps do so are assumed to go on."""
        self._zeros = lines if self._zeros is None else self._zeros & lines
        if last:
            self.assumed += [ZERO.format(line) for line in sorted(self._zeros, key=str)]

    def _called(self) -> None:
        """A step ends: callbacks that nothing has waited for run at some time or other."""
        for run, source in self.callbacks:
            if not run():
                self.note(UNCALLED, source)
        self.callbacks.clear()

    def findings(self, rank: int | None) -> list[Finding]:
        """What was noted, when a step ends."""
        self._called()
        return [Finding("TV512", text, rank, None, source, None, "unsupported") for text, source in self._noted.items()]

    # -- calls ----------------------------------------------------------------------------------------------------------

    @contextmanager
    def passing(self) -> Iterator[None]:
        """The recorder has seen the call that runs now, and all that it calls in turn. An error that leaves it is noted."""
        before, self._inside.call = self.inside, True
        try:
            yield
        except Exception as error:
            if not before:
                self.note(SWALLOWED.format(f"{type(error).__name__}: {error}"))
            raise
        finally:
            self._inside.call = before

    @property
    def inside(self) -> bool:
        return getattr(self._inside, "call", False)

    # -- memory that others may write -----------------------------------------------------------------------------------

    def share(self, key: int, real: torch.Tensor) -> None:
        """A storage stands for memory that is there for real; it is to stay as it is."""
        if key not in self._shared:
            with _disable_current_modes():
                self._shared[key] = real, _raw(real).clone()

    def read(self, key: int) -> None:
        """Memory is read: it must be what it was when it was first read."""
        if key in self._shared:
            real, held = self._shared[key]
            with _disable_current_modes():
                same = torch.equal(_raw(real), held)
            if not same:
                self.note(OUTSIDE)

    def written(self, key: int) -> None:
        """An op has written memory: code outside PyTorch would see that. PyTorch's own has what the op wrote where all it read was real."""
        if key not in self._shared:
            return
        real, _ = self._shared[key]
        if not real.untyped_storage().resizable():
            self.note(OUTSIDE)
        with _disable_current_modes():
            self._shared[key] = real, _raw(real).clone()

    def drop(self, keys: set[int]) -> None:
        for key in keys & self._shared.keys():
            del self._shared[key]


def _raw(t: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor's memory."""
    return torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage())


class Watched(FakeTensorMode):
    """Fake tensors that tell which ops on them the recorder does not see: dispatch modes hold for one thread, fake tensors for all."""

    def __init__(self, boundary: Boundary):
        super().__init__(allow_non_fake_inputs=True)
        self.boundary = boundary

    def dispatch(self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if self.boundary.inside:
            return super().dispatch(func, types, args, kwargs or {})
        if func._schema.is_mutable or func.namespace not in ("aten", "prim", "prims"):
            self.boundary.note(UNSEEN.format(func._schema.name))
        with self.boundary.passing():
            return super().dispatch(func, types, args, kwargs or {})


__all__ = ["Boundary", "Watched"]
