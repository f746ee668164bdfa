"""Run every distinct call for real on random numbers, and what it was translated to in our arithmetic: both must give the same.

Calls are distinct by operator, shapes, dtypes, arguments that are no tensors, and what is known of tensors. A call runs at its own sizes up
to a million elements; a larger one at small sizes, where PyTorch takes these too; else it is listed as unchecked. Results are compared, and
all arguments afterwards: a call that changes one which its schema does not name disagrees.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from trainverify.domains.arrays import Array
from trainverify.ops import OPS
from trainverify.torch.agreed import AGREED, digest
from trainverify.torch.checks import CHECKS, WHOLE
from trainverify.torch.constants import ancestors, computed, value_of, work
from trainverify.torch.drawn import Drawing, smaller, wide
from trainverify.torch.integers import never_negative
from trainverify.torch.mappings import MAPPINGS
from trainverify.torch.private import _disable_current_modes
from trainverify.torch.values import DTYPES, Unknown
from trainverify.translate.emit import Emitter

if TYPE_CHECKING:
    from trainverify.torch.translate import Translator

CLOSE: Final = 1e-7  # relative error of an element, and of a tensor's largest element: some kernels have constants in float32
TINY: Final = 1e-11  # absolute error where numbers cancel
MOST: Final = 1_000_000  # elements of arguments and results
WORK: Final = 60_000_000  # elements of all arrays that the translated call computes, one-hots of ids among them
FAR: Final = 1 << 40  # an integer beyond this is no size: the end of a slice
FEW: Final = 256  # elements of arguments, below which one point may lack ties, zeros or negative numbers
POINTS: Final = 6  # that are tried then
LIMITS: Final = (MOST, 100_000, 1000)  # a call at its own sizes; a larger one, and then smaller still
# Memory without a value: the call writes it, and another one writes all of it before it is read
WITHOUT_VALUE: Final = frozenset((("fsdp::all_gather_copy_in", "all_gather_output"),))
RAISES: Final = "a real run raises an error in {}, {}, though PyTorch's fake tensors do not"
ELSEWHERE: Final = ("not implemented", "cuda", "backend", "not compiled")  # of an error that another device may not raise
Key = tuple[Any, ...]
_NUMPY: Final = torch.Tensor.numpy  # as PyTorch has it: the user's code is refused it in a step


def array(t: torch.Tensor) -> Array:
    plain = t.detach().resolve_neg().resolve_conj().cpu()
    return np.array(_NUMPY(torch.view_as_real(plain) if plain.is_complex() else plain))


def difference(ours: Array, theirs: Array, close: float = CLOSE) -> str:
    """How two results differ, or nothing. No number equals no number."""
    if ours.shape != theirs.shape:
        return f"shape {list(ours.shape)} for {list(theirs.shape)}"
    if not theirs.size:
        return ""
    a, b = (np.asarray(v, dtype=np.float64) for v in (ours, theirs))
    finite = np.isfinite(b)
    scale = float(np.abs(b[finite]).max(initial=0.0))
    with np.errstate(all="ignore"):
        near = (np.abs(a - b) <= close * (np.abs(b) + scale) + TINY) & finite
    bad = ~(near | (a == b) | (np.isnan(a) & np.isnan(b)))
    if not bad.any():
        return ""
    at = tuple(int(i) for i in np.argwhere(bad)[0])
    return f"{a[at]:.6g} for {b[at]:.6g} at {list(at)}, {int(bad.sum())} of {bad.size} elements"


class NotRun(Exception):
    """A call that was not compared, and why."""


class Refused(NotRun):
    """PyTorch raises an error."""


class TooLarge(Exception):
    """A call with too many elements at these sizes."""


@dataclass(frozen=True)
class Known:
    """What a translator knows of a tensor, besides shape and dtype."""

    value: Any = None  # the number that it is
    constant: str = ""  # the tensor of its program, of integers that follow from constants
    print: str = ""  # of that constant
    nonnegative: bool = False

    @property
    def key(self) -> Key:
        return repr(self.value), self.print, self.nonnegative


@dataclass
class Leaf:
    """One tensor of a call."""

    tensor: torch.Tensor
    argument: str
    known: Known
    same: int | None = None  # the number of an earlier one that is the identical view


@dataclass
class Call:
    """A call and all that its translation may depend on."""

    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    leaves: list[Leaf] = field(default_factory=list)

    def replaced(self, tensors: Sequence[torch.Tensor], plain: Callable[[Any], Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with other tensors, in the order of the leaves."""
        rest = iter(tensors)

        def real(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return next(rest)
            if isinstance(value, list | tuple) and any(isinstance(v, torch.Tensor) for v in value):
                return type(value)(real(v) for v in value)
            return plain(value)

        return [real(v) for v in self.args], {k: real(v) for k, v in self.kwargs.items()}

    def named(self) -> Iterator[tuple[str, Any]]:
        schema = self.func._schema.arguments
        yield from zip((a.name for a in schema), self.args, strict=False)
        yield from self.kwargs.items()

    @property
    def key(self) -> Key:
        plain = [(n, type(v), repr(v)) for n, v in self.named() if not _has_tensors(v)]
        return (
            self.func,
            tuple((leaf.argument, *leaf.tensor.shape, leaf.tensor.dtype, leaf.same, *leaf.known.key) for leaf in self.leaves),
            tuple(plain),
        )


def _has_tensors(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, list | tuple) and any(isinstance(v, torch.Tensor) for v in value))


@dataclass
class Beside:
    """The checks of one capture."""

    unchecked: dict[str, str] = field(default_factory=dict)  # operator → why one of its calls was not run
    faults: dict[Key, str] = field(default_factory=dict)
    seen: set[Key] = field(default_factory=set)

    def fault(self, call: Call, translator: Translator) -> str | None:
        """What PyTorch computes otherwise, if anything."""
        key = call.key
        if key in self.seen:
            return self.faults.get(key)
        self.seen.add(key)
        name = str(call.func._schema.name)
        row = translator.mappings.get(name) or translator.mappings.get(name.removesuffix("_"))
        ours = row is None or (row in MAPPINGS.values() and getattr(row, "__module__", "").startswith("trainverify."))
        own = ours and translator.emitter.table is OPS
        whose = tuple(str(getattr(row, n, "")) for n in ("__module__", "__qualname__"))
        named = digest(str(call.func), key[1:], whose if own else (os.getpid(), id(row), id(translator.emitter.table)))
        if named in AGREED:
            return None
        try:
            if why := _tried(call, translator, int(named[:8], 16)):
                self.faults[key] = why
                return why
            AGREED.add(named)
        except NotRun as error:
            self.unchecked.setdefault(name, str(error))
            if isinstance(error, Refused) and (why := raised(call, translator)):
                translator.boundary.note(RAISES.format(name, why))
        return None

    def said(self) -> list[str]:
        """What a verdict assumes of calls."""
        if not self.unchecked:
            return []
        return ["calls that were not run beside their mapping: " + ", ".join(f"{n} ({why})" for n, why in sorted(self.unchecked.items()))]


def raised(call: Call, translator: Translator) -> str:
    """What PyTorch says of a call with tensors of its own types and sizes, full of 0, or nothing. Errors by data do not count."""
    name = str(call.func._schema.name)
    if name in CHECKS or name in WHOLE or sum(leaf.tensor.numel() for leaf in call.leaves) > MOST:
        return ""
    tensors: list[torch.Tensor] = []
    with _disable_current_modes(), torch.no_grad():
        for leaf in call.leaves:
            value = leaf.known.value or 0
            tensors.append(torch.full(leaf.tensor.shape, value, dtype=leaf.tensor.dtype) if leaf.same is None else tensors[leaf.same])
        args, kwargs = call.replaced(tensors, lambda v: torch.device("cpu") if isinstance(v, torch.device) else v)
        try:
            call.func(*args, **kwargs)
        except NotImplementedError:
            return ""
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            said = str(error).splitlines()[0][:100] if str(error) else type(error).__name__
            return "" if any(word in said.lower() for word in ELSEWHERE) else said
    return ""


def _tried(call: Call, translator: Translator, seed: int) -> str:
    """How a call and its translation differ, at one point, or at a second one without negative numbers where the first tells little."""
    few = sum(leaf.tensor.numel() for leaf in call.leaves) < FEW
    for most in LIMITS:
        try:
            for point in range(POINTS if few else 1):
                why, decided = Trial(call, translator, seed + 2 * point, False, most).difference()
                if why or not decided:
                    return why or Trial(call, translator, seed + 2 * point + 1, True, most).difference()[0]
            return ""
        except TooLarge:
            continue
        except NotRun:
            if most != LIMITS[0]:
                raise
            return Trial(call, translator, seed + 1, True, most).difference()[0]  # say, integers by which nothing can be divided
    raise NotRun("too large to be run here")


class Trial:
    """One run of a call on random numbers."""

    def __init__(self, call: Call, translator: Translator, seed: int, positive: bool, most: int):
        self.call, self.translator = call, translator
        shapes = [leaf.tensor.shape for leaf in call.leaves]
        sizes = {int(s) for shape in shapes for s in shape}
        kept = {int(s) for leaf in call.leaves if leaf.known.constant for s in leaf.tensor.shape}
        numbers = [v for _, v in call.named() if isinstance(v, list | tuple) and all(type(n) is int for n in v)]
        plain = {n for v in numbers for n in v} | {v for _, v in call.named() if type(v) is int and v < FAR}

        def elements(by: Mapping[int, int]) -> int:
            return sum(math.prod(by.get(int(s), int(s)) for s in shape) for shape in shapes)

        most = most if elements({}) <= MOST else min(most, LIMITS[1])
        small = smaller((sizes | plain) - kept, {sum(v): v for v in numbers if v}, elements, most)
        if elements(small) > MOST:
            raise TooLarge
        self.small = bool(small)
        arguments = call.func._schema.arguments
        self.received = {a.name for a in arguments if a.kwarg_only and a.alias_info is not None and a.alias_info.is_write}
        self.name = str(call.func._schema.name)
        ignored = next((v for n, v in call.named() if n == "ignore_index"), None)
        below = max(1, min((small.get(s, s) for s in sizes if s), default=1))
        self.drawing = Drawing(self.name, seed, positive, small, below, ignored)
        self.tensors: list[torch.Tensor] = []

    def _drawn(self) -> None:
        for leaf in self.call.leaves:
            t, known = leaf.tensor, leaf.known
            if leaf.same is not None:
                made = self.tensors[leaf.same]
            elif known.constant:
                value = value_of(self.translator.emitter, known.constant)
                made = torch.from_numpy(np.array(value)).to(t.dtype).reshape(t.shape)
            elif known.value is not None:
                made = torch.full(t.shape, known.value, dtype=wide(t.dtype))
            elif self.small and leaf.argument in self.received:
                made = torch.empty(0, dtype=wide(t.dtype))  # it gets its shape from the call
            else:
                made = self.drawing.tensor(leaf.argument, self.drawing.shape(t.shape), t.dtype, known.nonnegative)
            self.tensors.append(made)

    def _copies(self) -> list[torch.Tensor]:
        made: list[torch.Tensor] = []
        for leaf, t in zip(self.call.leaves, self.tensors, strict=True):
            made.append(t.clone() if leaf.same is None else made[leaf.same])
        return made

    def _run(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        args, kwargs = self.call.replaced(tensors, lambda v: self.drawing.plain(v, self.translator.literals))
        return _flat(self.call.func(*args, **kwargs))

    def difference(self) -> tuple[str, bool]:
        """How both runs differ; and whether all results are finite, so that one point tells."""
        with _disable_current_modes(), torch.no_grad(), np.errstate(all="ignore"):
            self._drawn()
            theirs = self._copies()
            try:
                results = self._run(theirs)
            except (RuntimeError, IndexError, ValueError, TypeError) as error:
                raise Refused(f"PyTorch: {error}".splitlines()[0][:100]) from error
            e, names, given = self._translated()
            found = list(zip(names, [*results, *theirs], strict=True))
            pairs = [(n, t) for n, t in found if isinstance(n, str) and isinstance(t, torch.Tensor)]
            told = [n for n, t in found[: len(results)] if isinstance(t, torch.Tensor)] or names
            if not any(isinstance(n, str) for n in told):
                raise NotRun(next((str(n) for n, _ in found if isinstance(n, Unknown)), "no results")[:100])
            wanted = [n for n, _ in pairs]
            if work(e, wanted) > WORK:
                raise TooLarge
            made = computed(e, wanted, given)
            for n, t in pairs:
                if why := difference(np.asarray(made[n]), array(t)):
                    return why, True
            return "", all(bool(torch.isfinite(t).all()) for _, t in pairs)

    def _translated(self) -> tuple[Emitter, list[str | Unknown | None], dict[str, Array]]:
        """The call as a program of its own: names of its results and of its arguments afterwards, and values of its sources."""
        from trainverify.torch.translate import Translator, memory_of, parts_type
        from trainverify.translate.emit import Place

        t = Translator(Place, self.translator.emitter.table, self.translator.mappings)
        tensors, given = self._copies(), dict[str, Array]()
        t.begin()
        for i, (leaf, x) in enumerate(zip(self.call.leaves, tensors, strict=True)):
            if leaf.known.value is not None:
                t.known(x)  # as it is before the call
            if leaf.same is not None or leaf.known.value is not None or not x.numel() or (self.name, leaf.argument) in WITHOUT_VALUE:
                continue
            if leaf.known.constant:
                name = copied(self.translator.emitter, leaf.known.constant, t.emitter)
            else:
                name = t.emitter.declare(f"x{i}", parts_type(x))
                given[name] = array(x)
                if leaf.known.nonnegative:
                    t.emitter.nonnegative.add(name)
            t.memory.write(t.keep(x), *memory_of(x), name)
        try:
            with type(self.translator.again)(t):  # a recorder of its own
                results = self._run(tensors)
            return t.emitter, [t.read_parts(r) if isinstance(r, torch.Tensor) else None for r in (*results, *tensors)], given
        except Exception as error:  # where the call was made it is translated again, and that error shows there
            raise NotRun(f"{type(error).__name__}: {error}".splitlines()[0][:100]) from error


def _flat(value: Any) -> list[Any]:
    return [t for v in value for t in _flat(v)] if isinstance(value, list | tuple) else [value]


def copied(e: Emitter, name: str, to: Emitter) -> str:
    """A constant of one program in another one."""
    names: dict[str | None, str] = {}
    for op in ancestors(e, name) or []:
        made = to.several(op.name, [names[i] for i in op.inputs], dict(op.attrs))
        names.update(zip(op.outputs, made, strict=True))
    return names[name]


def described(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], translator: Translator) -> Call | None:
    """A call with what is known of its tensors; None if nothing of it needs to be run: all of it is known already."""
    if func._schema.name.startswith(("aten::_foreach_", "aten::_fused_")):
        args, kwargs = _fewer(args, kwargs, translator)
    call = Call(func, args, kwargs)
    seen: dict[Key, int] = {}
    unknown = False
    for name, value in call.named():
        for t in value if isinstance(value, list | tuple) else (value,):
            if not isinstance(t, torch.Tensor):
                continue
            if t.layout != torch.strided or t.is_neg() or t.is_conj():
                return None
            where = (int(t.untyped_storage()._cdata), t.storage_offset(), tuple(t.shape), tuple(t.stride()), t.dtype)
            leaf = Leaf(t, name, _known(t, translator), seen.get(where) if t.numel() else None)
            seen.setdefault(where, len(call.leaves))
            unknown = unknown or leaf.known.value is None
            call.leaves.append(leaf)
    return call if unknown else None


def _fewer(args: Sequence[Any], kwargs: Mapping[str, Any], translator: Translator) -> tuple[list[Any], dict[str, Any]]:
    """An op over lists does the same for every entry: one of every kind is enough."""
    lists = [v for v in (*args, *kwargs.values()) if isinstance(v, list | tuple)]
    count = len(lists[0]) if lists else 0
    lists = [v for v in lists if len(v) == count]

    def kind(value: Any) -> Any:
        return (
            (*value.shape, value.dtype, *_known(value, translator).key) if isinstance(value, torch.Tensor) else (type(value), repr(value))
        )

    first: dict[Any, int] = {}
    for i in range(count):
        first.setdefault(tuple(kind(v[i]) for v in lists), i)

    def cut(value: Any) -> Any:
        return [value[i] for i in first.values()] if isinstance(value, list | tuple) and len(value) == count else value

    return [cut(v) for v in args], {k: cut(v) for k, v in kwargs.items()}


def _known(t: torch.Tensor, translator: Translator) -> Known:
    if t.numel() <= 1 and (found := translator.known(t)) is not None:
        with _disable_current_modes():
            number = found.reshape(-1).tolist()
            if number:
                return Known(float(translator.literals(number[0])) if isinstance(number[0], float) else number[0])
    name = str(t.dtype)
    if t.is_floating_point() or t.is_complex() or t.dtype == torch.bool or name not in DTYPES:
        return Known()
    e = translator.emitter
    with translator.memory.unnoted():
        value = translator.read(t)
    if isinstance(value, Unknown):
        return Known()
    if ancestors(e, value) is not None:
        return Known(None, value, e.fingerprint(value))
    return Known(None, "", "", never_negative(e, value))


__all__ = ["Beside", "Call", "array", "described", "difference"]
