"""Tensors from nothing: literals, ranges. Random numbers and fresh memory have no value."""

from __future__ import annotations

from functools import partial

import torch

from trainverify.torch.mappings.table import Arguments, Number, rows
from trainverify.torch.values import Unknown, Unmapped

ROWS, row = rows()

_PLACE = ("device", "layout", "pin_memory", "memory_format", "dtype", "names", "generator", "requires_grad")


def filled(a: Arguments, value: Number) -> str:
    a.ignore(*_PLACE)
    kind = a.out[0]
    assert kind is not None
    return a.e.full(kind.shape, value, kind.dtype, a.e.place)


@row("aten::zeros", "aten::new_zeros", "aten::zeros_like", "aten::zero", "aten::_efficientzerotensor")
def zeros(a: Arguments) -> str:
    a.ignore("size", "self")
    return filled(a, 0)


@row("aten::ones", "aten::new_ones", "aten::ones_like")
def ones(a: Arguments) -> str:
    a.ignore("size", "self")
    return filled(a, 1)


@row("aten::full", "aten::new_full", "aten::full_like")
def full(a: Arguments) -> str:
    a.ignore("size", "self")
    return filled(a, a.number("fill_value"))


@row("aten::fill")
def fill(a: Arguments) -> str:
    a.ignore("self")
    value = a.operand("value")
    if not isinstance(value, str):
        return filled(a, value)
    kind = a.out[0]
    assert kind is not None
    return a.e.op("expand", (value,), {"shape": kind.shape})


@row("aten::scalar_tensor")
def scalar_tensor(a: Arguments) -> str:
    return filled(a, a.number("s"))


@row("aten::arange")
def arange(a: Arguments) -> str:
    a.ignore(*_PLACE)
    kind = a.out[0]
    assert kind is not None
    start, stop, step = (a.raw(n) for n in ("start", "end", "step"))
    start, step = start or 0, 1 if step is None else step
    if any(not float(v).is_integer() for v in (start, stop, step)):
        raise Unmapped("a range of fractions")
    made = a.e.op("arange", (), {"start": int(start), "stop": int(stop), "step": int(step), "dtype": "i64"})
    return a.e.cast(made, kind.dtype)


@row("aten::empty", "aten::new_empty", "aten::empty_like", "aten::new_empty_strided", "aten::empty_strided")
def empty(a: Arguments) -> Unknown:
    a.ignore(*_PLACE, "size", "self", "stride")
    return Unknown("memory that was never written is read", a.e.place.source)


def random(name: str, a: Arguments) -> Unknown:
    a.ignore(*a.given)
    numbers = [f"{n}={v:.6g}" for n, v in sorted(a.given.items()) if isinstance(v, int | float)]
    generator = a.given.get("generator")
    seed = torch.initial_seed() if generator is None else generator.initial_seed()
    return Unknown("a random number", a.e.place.source, None, (f"{name}({', '.join(numbers)})", seed))


RANDOM = (
    "normal",
    "uniform",
    "rand",
    "randn",
    "randint",
    "rand_like",
    "randn_like",
    "randint_like",
    "randperm",
    "bernoulli",
    "multinomial",
    "exponential",
    "trunc_normal",
    "log_normal",
    "random",
    "native_dropout",
)
for _name in RANDOM:
    if _name != "bernoulli":
        row(f"aten::{_name}")(partial(random, _name))


@row("aten::bernoulli")
def bernoulli(a: Arguments) -> str | Unknown:
    """Which elements dropout keeps: an input of the program, 0 or 1, where one probability is given for all."""
    a.ignore("self", "generator")
    kind, p = a.out[0], a.raw("p")
    made = a.e.mask(kind, p) if kind is not None and kind.kind == "real" and isinstance(p, float) and 0 < p < 1 else None
    return Unknown("a random number", a.e.place.source) if made is None else made
