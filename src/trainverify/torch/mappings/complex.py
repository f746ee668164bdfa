"""Complex tensors: each is a real one with a last dimension of 2, the real and the imaginary part.

Only these rows see complex tensors. `Arguments.read` gives the parts; indices and real factors are read as they are.
"""

from __future__ import annotations

import torch

from trainverify.torch.mappings import indexing
from trainverify.torch.mappings.table import Arguments, Result, rows
from trainverify.torch.values import Unmapped
from trainverify.translate.emit import Emitter

ROWS, row = rows()


def _parts(e: Emitter, x: str) -> tuple[str, str]:
    """Real and imaginary part, with the last dimension kept."""
    last = len(e.shape(x)) - 1
    first, second = (e.op("slice", (x,), {"dim": last, "start": i, "stop": i + 1}) for i in (0, 1))
    return first, second


def _joined(e: Emitter, real: str, imaginary: str) -> str:
    return e.op("concat", (real, imaginary), {"dim": len(e.shape(real)) - 1})


def conjugate(e: Emitter, x: str) -> str:
    """The same with the imaginary part negated."""
    real, imaginary = _parts(e, x)
    return _joined(e, real, e.op("neg", (imaginary,)))


def _column(a: Arguments, x: str) -> str:
    return a.e.reshape(x, (*a.e.shape(x), 1))


def _is_complex(a: Arguments, name: str) -> bool:
    value = a.raw(name)
    return isinstance(value, torch.Tensor) and value.is_complex()


@row("aten::polar")
def polar(a: Arguments) -> str:
    size, angle = _column(a, a.tensor("abs")), _column(a, a.tensor("angle"))
    return _joined(a.e, *(a.e.op("mul", (size, a.e.op(f, (angle,)))) for f in ("cos", "sin")))


@row("aten::complex")
def cartesian(a: Arguments) -> str:
    kind = a.out[0]
    assert kind is not None
    shape = (*kind.shape[:-1], 1)
    parts = (_column(a, a.tensor(n)) for n in ("real", "imag"))
    return _joined(a.e, *(x if a.e.shape(x) == shape else a.e.op("expand", (x,), {"shape": shape}) for x in parts))


@row("aten::sgn")
def sgn(a: Arguments) -> str:
    """z / |z|, and 0 where z is."""
    x = a.tensor("self")
    p, q = (a.e.op("square", (part,)) for part in _parts(a.e, x))
    size = a.e.op("sqrt", (a.e.op("add", (p, q)),))
    return a.e.op("where", (a.e.op("eq", (size,), {"value": 0}), a.e.full((), 0, "f32"), a.e.op("div", (x, size))))


@row("aten::mul")
def mul(a: Arguments) -> str:
    """(p + iq)(r + is) = (pr − qs) + i(ps + qr); a real factor multiplies both parts."""
    x, other = a.tensor("self"), a.raw("other")
    if not isinstance(other, torch.Tensor) and not _is_complex(a, "self"):
        raise Unmapped(f"a real tensor times {other}")
    if isinstance(other, complex):
        r, s = (a.e.full((1,), a.literal(part), "f32") for part in (other.real, other.imag))
    elif isinstance(other, int | float):
        return a.times(x, a.number("other"))
    elif not _is_complex(a, "self"):
        return a.e.op("mul", (_column(a, x), a.tensor("other")))
    elif not _is_complex(a, "other"):
        return a.e.op("mul", (x, _column(a, a.tensor("other"))))
    else:
        r, s = _parts(a.e, a.tensor("other"))
    p, q = _parts(a.e, x)
    real = a.e.op("sub", (a.e.op("mul", (p, r)), a.e.op("mul", (q, s))))
    return _joined(a.e, real, a.e.op("add", (a.e.op("mul", (p, s)), a.e.op("mul", (q, r)))))


@row("aten::add")
def add(a: Arguments) -> str:
    if not (_is_complex(a, "self") and _is_complex(a, "other")):
        raise Unmapped("a sum of a complex and a real tensor")
    return a.e.op("add", (a.tensor("self"), a.tensor("other")))


@row("aten::neg")
def neg(a: Arguments) -> str:
    return a.e.op("neg", (a.tensor("self"),))


@row("aten::clone", "aten::_to_copy", "aten::alias_copy")
def copy_of(a: Arguments) -> str:
    a.ignore("memory_format", "device", "layout", "pin_memory", "non_blocking", "dtype")
    x, kind = a.tensor("self"), a.out[0]
    if kind is not None and not _is_complex(a, "self") and a.e.kind(x) == "real":  # it becomes complex
        return _joined(a.e, _column(a, x), a.e.full((*a.e.shape(x), 1), 0, a.e.tensors[x].dtype))
    if not _is_complex(a, "self") or kind is None or kind.shape != a.e.shape(x):
        raise Unmapped("integers that become complex, or the real part of a complex tensor")
    return x


@row("aten::_conj_physical", "aten::conj_physical")
def conjugated(a: Arguments) -> str:
    return conjugate(a.e, a.tensor("self"))


@row("aten::gather")
def gather(a: Arguments) -> str:
    a.ignore("sparse_grad")
    x, ids = a.tensor("self"), a.tensor("index")
    dim = a.integer("dim") % len(a.e.shape(ids))
    both = a.e.op("expand", (_column(a, ids),), {"shape": (*a.e.shape(ids), 2)})
    return a.e.op("take_along_dim", (x, both), {"dim": dim})


@row("aten::index")
def index(a: Arguments) -> Result:
    """x[:, ids]: the parts come along."""
    if sum(t is not None for t in a.raw("indices")) != 1:
        raise Unmapped("several dimensions indexed at once")
    return indexing.index(a)
