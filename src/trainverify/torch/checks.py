"""Errors that PyTorch raises by the values of its arguments, which a capture does not have."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Final

import torch

from trainverify.torch.frames import torchs
from trainverify.torch.handlers import handled
from trainverify.torch.lines import is_users
from trainverify.torch.overlap import writes_repeatedly
from trainverify.torch.private import _disable_current_modes
from trainverify.torch.translate import Translator, flat
from trainverify.translate.integers import tensor_bounds

ERRORS: Final = (RuntimeError, IndexError, torch.linalg.LinAlgError)
KERNELS: Final = (*ERRORS, NotImplementedError)
WARNINGS: Final = (UserWarning, RuntimeWarning, DeprecationWarning, FutureWarning)
CAUGHT: Final = "a real run may raise an error in {}, by its data, and the code has a handler for it"
TYPES: Final = "a real run may raise an error in {}, by the types of its tensors, and the code has a handler for it"
WARNED: Final = "a real run may give a warning in {}, which the code makes an error, and it has a handler for it"
REPEATED: Final = "a real run raises an error in {}: it writes memory in which several elements are at one place"
BEYOND: Final = "a real run raises an error in {}: the view would go beyond the memory of its tensor"
NARROW: Final = frozenset((torch.int32, torch.int16, torch.int8, torch.uint8))
PROMOTING: Final = frozenset(f"aten::{n}" for n in ("cat", "stack", "_to_copy", "copy_", "where", "lift_fresh", "detach", "view"))
MOST: Final = 1 << 20  # elements of a call that is tried on zeros
_CHECK: Final = "aten::_linalg_check_errors"  # what functions of torch.linalg call
CHECKS: Final = frozenset(
    (
        _CHECK,
        *(f"aten::{n}" for n in ("_linalg_eigh", "_linalg_svd", "linalg_eig", "linalg_eigvals", "linalg_lstsq", "cholesky", "histc")),
        *(f"aten::{n}" for n in ("_assert_async", "_assert_scalar", "multinomial", "bernoulli", "normal", "binomial", "poisson")),
        *(f"aten::{n}" for n in ("bincount", "repeat_interleave", "masked_scatter", "masked_scatter_", "segment_reduce", "_ctc_loss")),
        *(f"aten::{n}" for n in ("multi_margin_loss", "multilabel_margin_loss_forward", "max_unpool2d", "max_unpool3d")),
        *(f"aten::{n}" for n in ("binary_cross_entropy", "binary_cross_entropy_backward")),
    )
)
# Integers divided by 0, or to a negative power
WHOLE: Final = frozenset(f"aten::{n}{end}" for n in ("floor_divide", "remainder", "fmod", "div", "divide", "pow") for end in ("", "_"))
# Operators that take elements by positions: the argument that has these
POSITIONS: Final = {
    **{f"aten::{n}{end}": "index" for n in ("gather", "index_select", "take", "put", "scatter", "scatter_add") for end in ("", "_")},
    **{
        f"aten::{n}{end}": "index" for n in ("scatter_reduce", "index_add", "index_copy", "index_fill", "index_reduce") for end in ("", "_")
    },
    **{f"aten::{n}": "indices" for n in ("index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_")},
    **{f"aten::{n}": "indices" for n in ("embedding", "embedding_renorm_", "_embedding_bag", "_embedding_bag_forward_only")},
    **{f"aten::{n}": "target" for n in ("nll_loss_forward", "nll_loss2d_forward")},
}
_STRIDED: Final = ("aten::as_strided", "aten::as_strided_")
_FROM_THE_END: Final = ("take", "put", "put_", "index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_")


def check(t: Translator, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """No verdict where the user's code may go on after such an error; elsewhere, that none is raised is assumed."""
    name = func._schema.name
    if name in CHECKS or (name in WHOLE and _whole(args, kwargs)):
        if handled(*ERRORS):
            t.boundary.note(CAUGHT.format(name))
        elif name in CHECKS:
            t.boundary.assume(f"{args[1] if name == _CHECK else name} at {t.boundary.where()} raises no error")
    elif name in POSITIONS and handled(*ERRORS, any_manager=True):
        given, _ = _given(func, args, kwargs)
        first = -1 if name.removeprefix("aten::") in _FROM_THE_END else 0
        if not all(_within(t, ids, first * size, size) for ids, size in _positions(name, given)) and handled(*ERRORS):
            t.boundary.note(CAUGHT.format(name))
    if func._schema.is_mutable and writes_repeatedly(*_given(func, args, kwargs)):
        t.boundary.note(REPEATED.format(name))
    if name in _STRIDED and _beyond(*args[:4], **kwargs):
        t.boundary.note(BEYOND.format(name))
    if _odd(func, args, kwargs) and handled(*KERNELS, any_manager=True) and handled(*KERNELS) and _refuses(func, args, kwargs):
        t.boundary.note(TYPES.format(name))
    elif any(f[0] == "error" for f in warnings.filters) and handled(*WARNINGS) and _refuses(func, args, kwargs):
        t.boundary.note(WARNED.format(name))


def _given(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """The arguments of a call by name, and those that it writes."""
    arguments = func._schema.arguments
    written = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
    return dict(zip((a.name for a in arguments), args, strict=False)) | dict(kwargs), written


def _beyond(of: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> bool:
    """Whether a view of some sizes and strides has elements that its memory has not."""
    first = of.storage_offset() if storage_offset is None else storage_offset
    last = first + sum((s - 1) * d for s, d in zip(size, stride, strict=True))
    return math.prod(size) > 0 and (last + 1) * of.element_size() > of.untyped_storage().nbytes()


def _unlike(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether tensors have floats of several types or narrow integers, which kernels may refuse and fake tensors do not."""
    name = func._schema.name
    if torch.Tag.pointwise in func.tags or name in PROMOTING or "_backward" in name:
        return False
    types = {v.dtype for v in flat((*args, *kwargs.values())) if isinstance(v, torch.Tensor) and v.ndim}
    return (bool(types & NARROW) or sum(t.is_floating_point for t in types) > 1) and not _by_pytorch()


def _by_pytorch() -> bool:
    """Whether PyTorch's distributed code or an optimizer calls: it chooses types that its kernels take."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not is_users(frame.f_code.co_filename):
        if (torchs(frame.f_code.co_filename) or "").startswith(("distributed", "optim", "amp")):
            return True
        frame = frame.f_back
    return False


def _tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    yield from (v for v in flat((*args, *kwargs.values())) if isinstance(v, torch.Tensor))


def _odd(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call has tensors of other types than those that all kernels are written for."""
    return any(v.dtype not in (torch.float32, torch.float64) for v in _tensors(args, kwargs)) or _unlike(func, args, kwargs)


def _refuses(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the kernel may raise an error for these types: it is said to, or does so on zeros of these shapes."""
    if _unlike(func, args, kwargs):
        return True
    there = list(_tensors(args, kwargs))
    if sum(v.numel() for v in there) > MOST or any(v.device.type != "cpu" or v.layout is not torch.strided for v in there):
        return False

    def zeros(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(zeros(v) for v in value)
        if not isinstance(value, torch.Tensor):
            return torch.device("cpu") if isinstance(value, torch.device) else value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).zero_()

    with _disable_current_modes():
        try:
            func(*zeros(tuple(args)), **{k: zeros(v) for k, v in kwargs.items()})
        except Exception:  # whatever it says: it is raised in a real run too, or its values are not zeros there
            return True
    return False


def _whole(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether integers are divided, or raised to a power, by one that may be 0 or negative."""
    if kwargs.get("rounding_mode", "") is None or (isinstance(args[1], int) and args[1] > 0):
        return False
    return not any(v.is_floating_point() if isinstance(v, torch.Tensor) else isinstance(v, float) for v in args[:2])


def _positions(name: str, given: Mapping[str, Any]) -> Iterator[tuple[torch.Tensor, int]]:
    """Positions, and how many there are."""
    ids, of = given[POSITIONS[name]], given.get("self", given.get("weight"))
    assert isinstance(of, torch.Tensor)
    if isinstance(ids, list | tuple):
        d = 0
        for i in ids:
            mask = i is not None and i.dtype in (torch.bool, torch.uint8)
            if i is not None and not mask:
                yield i, of.shape[d]
            d += i.ndim if mask else 1
    elif name in ("aten::take", "aten::put", "aten::put_"):
        yield ids, of.numel()
    elif POSITIONS[name] == "target":
        yield ids, of.shape[min(1, of.ndim - 1)]
    else:
        yield ids, of.shape[given.get("dim", 0)] if of.ndim else 1


def _within(t: Translator, ids: torch.Tensor, first: int, stop: int) -> bool:
    """Whether it follows from how positions were made that they are some of these."""
    if not ids.numel():
        return True
    if (found := t.known(ids)) is not None:
        with _disable_current_modes():
            return bool(((found >= first) & (found < stop)).all())
    if t.step is None:
        return False
    with t.memory.unnoted():
        value = t.read(ids)
    bounds = tensor_bounds(t.emitter, value) if isinstance(value, str) else None
    return bounds is not None and first <= bounds[0] and bounds[1] < stop


__all__ = ["CHECKS", "POSITIONS", "WHOLE", "check"]
