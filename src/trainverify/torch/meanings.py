"""The user's own kernels: what an op of another library means, given as an ordinary PyTorch function.

The function takes the arguments of the op and returns its results; it is captured in the op's place. It is an assumption of the verdict.
Where the op runs on this machine, both are run on random numbers; a function that gives others is an error.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from trainverify.torch.private import _disable_current_modes

MEANINGS: Final[dict[str, Callable[..., Any]]] = {}  # "lib::op" → function; filled by `meaning`, once per op
ELEMENTS: Final = 20_000_000  # of the arguments of a call that is checked
CHECKS: Final = 3  # calls of one op, with arguments of other shapes, that are checked
TOLERANCE: Final = {torch.float64: 1e-9, torch.float32: 1e-4}  # of the largest element; 2e-2 for shorter floats


class WrongMeaning(Exception):
    """A function that does not compute what its op does."""


def meaning(name: str, function: Callable[..., Any] | None = None) -> Any:
    """Declare what the op `lib::op` means: `tvt.meaning("lib::op", f)`, or as a decorator of f."""
    if function is None:
        return lambda f: meaning(name, f)
    if "::" not in name or name.startswith("aten::"):
        raise ValueError(f"{name!r}: expected lib::op, and not one of PyTorch's own")
    if name in MEANINGS and MEANINGS[name] is not function:
        raise ValueError(f"{name} has a meaning already")
    MEANINGS[name] = function
    return function


@dataclass
class Checked:
    """What is known about the meaning of one op."""

    calls: int = 0
    agreed: int = 0
    why_not: str = ""
    seen: set[Any] = field(default_factory=set)

    def __str__(self) -> str:
        if self.agreed:
            return f"{self.calls} calls; run on random numbers of {self.agreed} shapes, the op gives the same"
        return f"{self.calls} calls; not checked: {self.why_not}"


class Meanings:
    """The checks of one process."""

    def __init__(self) -> None:
        self.ops: dict[str, Checked] = {}

    def check(self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Run an op and its meaning on random numbers, once for arguments like these."""
        known = self.ops.setdefault(name, Checked())
        known.calls += 1
        like = repr(_described((args, dict(kwargs))))
        if like in known.seen or len(known.seen) >= CHECKS:
            return
        known.seen.add(like)
        if sum(t.numel() for t in _tensors((args, kwargs))) > ELEMENTS:
            known.why_not = known.why_not or "its arguments are too large to run it here"
            return
        with _disable_current_modes(), torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(zlib.crc32(like.encode()))
            given = _real((tuple(args), dict(kwargs)))
            first, second = _real_copy(given), _real_copy(given)
            try:
                theirs = func(*first[0], **first[1])
            except Exception as error:  # whatever a kernel says where it cannot run
                known.why_not = known.why_not or f"the op does not run on this machine ({type(error).__name__})"
                return
            written = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
            mine = MEANINGS[name](*second[0], **second[1])
            if written:  # results are what the arguments hold afterwards
                names = {a.name: i for i, a in enumerate(func._schema.arguments)}
                theirs = [first[1][n] if n in first[1] else first[0][names[n]] for n in written]
            _compare(name, list(_tensors(theirs)), list(_tensors(mine)))
            known.agreed += 1


def _compare(name: str, theirs: Sequence[torch.Tensor], mine: Sequence[torch.Tensor]) -> None:
    if [tuple(t.shape) for t in theirs] != [tuple(t.shape) for t in mine]:
        raise WrongMeaning(f"meaning of {name}: {[list(t.shape) for t in mine]} where the op gives {[list(t.shape) for t in theirs]}")
    for i, (a, b) in enumerate(zip(theirs, mine, strict=True)):
        x, y = a.to(torch.float64), b.to(torch.float64)
        scale = max(float(x.abs().nan_to_num(posinf=0.0).max()), 1e-6) if x.numel() else 1.0
        gap = float((x - y).abs().nan_to_num(posinf=0.0).max()) / scale if x.numel() else 0.0
        same = bool(((x == y) | (x.isnan() & y.isnan()) | (x.isfinite() & y.isfinite())).all())
        if not same or gap > TOLERANCE.get(a.dtype, 2e-2):
            raise WrongMeaning(f"meaning of {name}: result {i + 1} differs from the op's by {gap:.2g} of its largest element")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for v in value:
            yield from _tensors(v)
    elif isinstance(value, Mapping):
        for v in value.values():
            yield from _tensors(v)


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), tuple(value.stride()), str(value.dtype)
    if isinstance(value, list | tuple):
        return [_described(v) for v in value]
    return {k: _described(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def _mapped(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)(_mapped(v, function) for v in value)
    return {k: _mapped(v, function) for k, v in value.items()} if isinstance(value, Mapping) else value


def _real(value: Any) -> Any:
    """Random numbers in the place of fake ones; integers and flags are 0 or 1."""

    def drawn(t: torch.Tensor) -> torch.Tensor:
        dtype, shape = t.dtype, tuple(t.shape)
        return torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.randint(0, 2, shape).to(dtype)

    return _mapped(value, drawn)


def _real_copy(value: Any) -> Any:
    return _mapped(value, lambda t: t.clone())
