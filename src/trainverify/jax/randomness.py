"""Random numbers: uniform ones are an opaque function of a key and a position, the same wherever both are the same.

A key is followed by how it was derived. Uniform numbers become inputs named by key and type: a rank that draws its own rows with the
same key does not draw rows of what one device draws, and a key folded with the rank is another key. Both are differences.

Of several keys each has a name of its own, and so have the integers that a key consists of: moving them about moves the names. Laws of
JAX's default generator (`jax_threefry_partitionable`): key i of a split is the key folded with i, however many keys there are; and
number i of a draw is the same, however many numbers are drawn. Many keys at once give what each of them gives by itself, if they are
threefry's; of others only as `_ONE_BY_ONE` says: XLA's generator draws by the first of several keys.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Final

import numpy as np
from jax.extend.core import jaxprs_in_params

import jax
from trainverify.graph.program import Domain
from trainverify.graph.types import TensorType
from trainverify.jax.emit import RankEmitter
from trainverify.jax.values import Array, Divergent, Grid, Key, Number, Opaque, Real, Table, Value, table_of
from trainverify.translate.emit import Unmapped

UNIFORM: Final = "_uniform"  # JAX's names of functions that make numbers from bits
TRUNCATED: Final = "_truncated_normal"
INTEGERS: Final = "_randint"
SHUFFLE: Final = "_shuffle"
DRAWS: Final = {UNIFORM: "uniform", "_normal_real": "normal", "_gumbel": "gumbel", TRUNCATED: "truncated_normal", INTEGERS: "randint"}
THREEFRY: Final = "threefry2x32"
_ONE_BY_ONE: Final = {  # what several keys at once give as each by itself
    THREEFRY: frozenset(("draw", "split", "fold_in", "seed")),
    "rbg": frozenset(("split", "fold_in", "seed")),
}
MOST_KEYS: Final = 4096
MANTISSAS: Final = {"f64": 52, "f32": 23, "f16": 10, "bf16": 7}  # bits of a dtype
RAW: Final = 2  # integers of a key of this generator


def key_of(names: Array, impl: str | None, raw: bool = False) -> Key:
    if names.size > MOST_KEYS:
        raise Unmapped(f"{names.size} random keys")
    return Key(names=tuple(map(str, names.reshape(-1).tolist())), shape=tuple(names.shape), impl=impl, raw=raw)


def names_of(key: Key) -> Array:
    found = np.empty(len(key.names), object)
    found[:] = key.names
    return found.reshape(key.shape)


def numbered(name: str, shape: Sequence[int]) -> Array:
    """Names of the elements of an array of keys."""
    found = np.array([f"{name}[{n}]" if shape else name for n in range(math.prod(shape))], object)
    return found.reshape(tuple(shape))


def argument_key(name: str, dtype: Any, shape: Sequence[int]) -> Key | None:
    """An argument that is a key, or that may be the integers of one: they have no other meaning."""
    if math.prod(shape) > MOST_KEYS:
        return None
    if is_key(dtype):
        return key_of(numbered(name, shape), dtype._impl.name)
    if str(dtype) != "uint32" or not shape or shape[-1] != RAW:
        return None
    return key_of(_integers(numbered(name, shape[:-1]), RAW), None, raw=True)


def _integers(names: Array, count: int) -> Array:
    """The integers that keys consist of, along a new last dimension."""
    flat = np.array([f"{n}#{k}" for n in names.reshape(-1).tolist() for k in range(count)], object)
    return flat.reshape((*names.shape, count))


def partitionable(impl: str | None) -> bool:
    return impl == THREEFRY and bool(jax.config.jax_threefry_partitionable)


def _require_one_by_one(what: str, impl: str | None, shape: Sequence[int]) -> None:
    if shape and what not in _ONE_BY_ONE.get(impl or THREEFRY, ()):
        raise Unmapped(f"{what} with several keys of {impl} at once: each need not give what it gives by itself")


@dataclass(frozen=True)
class Draw:
    """A function of JAX's own that makes random numbers of keys, key after key: its name, and the operands that are numbers."""

    name: str
    low: int = 1
    high: int = 2


@dataclass(frozen=True)
class Stream:
    """The numbers that one key draws by a function of JAX's."""

    name: str  # of the function
    what: str  # it draws: its name here, with bounds that are not a matter of scaling
    key: str
    impl: str | None
    kind: TensorType
    low: Real | None = None
    high: Real | None = None

    def __str__(self) -> str:
        return f"{self.what}.{self.key}.{self.kind.dtype if partitionable(self.impl) else self.kind}"


def drawn(e: RankEmitter, draw: Draw, given: Sequence[Any], kind: TensorType) -> Value:
    """As many random numbers for every key."""
    key, shape = given[0], kind.shape
    if key.raw or shape[: len(key.shape)] != key.shape or not key.names:
        raise Unmapped(f"{list(shape)} random numbers by {list(key.shape)} keys")
    _require_one_by_one("draw", key.impl, key.shape)
    if draw.name == SHUFFLE:
        return _shuffled(e, key, e.tensor(given[1]), shape)
    what, low, high = DRAWS[draw.name], None, None
    if len(given) > 1:
        low, high = _bound(given[draw.low]), _bound(given[draw.high])
        if not low < high or math.isinf(high - low):
            raise Unmapped(f"{what} random numbers that are not between two numbers")
    limits = f"({low}, {high})" if draw.name in (TRUNCATED, INTEGERS) else ""
    of_all = TensorType((math.prod(shape[len(key.shape) :]),), kind.dtype)
    below = int(high - low) if draw.name == INTEGERS and low is not None and high is not None else None
    parts = [_drawn_by(e, Stream(draw.name, what + limits, name, key.impl, of_all, low, high), below) for name in key.names]
    made = e.reshape(parts[0] if len(parts) == 1 else e.op("concat", parts, {"dim": 0}), shape)
    if low is None or high is None:
        return made
    if high - low != 1 and below is None:
        made = e.op("mul", (made,), {"value": high - low})
    return made if low == 0 else e.op("add", (made,), {"value": low})


def _shuffled(e: RankEmitter, key: Key, x: str, shape: tuple[int, ...]) -> str:
    """An order for every key: that of numbers of its own."""
    if len(shape) != len(key.shape) + 1:
        raise Unmapped("an order of several dimensions")
    kind = TensorType(shape[-1:], "f32")
    parts = [_drawn_by(e, Stream(SHUFFLE, f"{SHUFFLE[1:]}({shape[-1]})", name, key.impl, kind)) for name in key.names]
    numbers = e.reshape(parts[0] if len(parts) == 1 else e.op("concat", parts, {"dim": 0}), shape)
    order = e.op("argsort", (numbers,), {"dim": len(shape) - 1})
    wide = x if e.shape(x) == shape else e.op("expand", (x,), {"shape": shape})
    return e.op("take_along_dim", (wide, order), {"dim": len(shape) - 1})


def _bound(value: Any) -> Real:
    found = value.value if isinstance(value, Number) else value.literal if isinstance(value, Grid) else None
    if found is None:
        raise Unmapped("random numbers that are not between two numbers")
    return found


def _drawn_by(e: RankEmitter, stream: Stream, below: int | None = None) -> str:
    """As many numbers as one key draws: the first of those that the longest draw in any program has."""
    kind = stream.kind
    (size,) = kind.shape
    longest = e.streams.get(str(stream), size)
    name = f"{stream}[{longest}]"
    if name not in e.tensors:
        e.draws[name] = replace(stream, kind=TensorType((longest,), kind.dtype))
        e.declare(name, e.draws[name].kind)
        if (bits := _bits(stream)) is not None:
            e.nonnegative.add(name)
            e.limits[name] = Fraction(0), 1 - Fraction(1, 2**bits) if stream.name == UNIFORM else Fraction(1)
        if below is not None:
            e.bounds[name] = 0, below - 1
    return name if longest == size else e.op("slice", (name,), {"dim": 0, "start": 0, "stop": size})


def _bits(stream: Stream) -> int | None:
    """Of numbers from 0 up to 1, without it: those of a mantissa. Truncated normal ones count from the lower bound to the upper one."""
    return MANTISSAS.get(stream.kind.dtype) if stream.name in (UNIFORM, TRUNCATED) else None


def draw_domain(e: RankEmitter, name: str) -> Domain | None:
    """What is known of random numbers."""
    if name in e.limits:
        return Domain("nonnegative", bits=_bits(e.draws[name]))
    return Domain("ids", e.bounds[name][1] + 1) if name in e.bounds else None


def streams_of(draws: Iterable[Mapping[str, Stream]]) -> dict[str, int]:
    """Of what programs draw in several lengths, the longest."""
    lengths: dict[str, set[int]] = {}
    for one in draws:
        for name, stream in one.items():
            lengths.setdefault(name.rpartition("[")[0], set()).add(stream.kind.shape[0])
    return {stream: max(found) for stream, found in lengths.items() if len(found) > 1}


def draw_of(eqn: Any) -> Draw | None:
    """The draw that a call of JAX's own function is, if every key draws by itself."""
    name, body = eqn.params.get("name"), getattr(eqn.params.get("jaxpr"), "jaxpr", None)
    source = str(getattr(getattr(body, "debug_info", None), "func_src_info", ""))
    if body is None or name not in (*DRAWS, SHUFFLE) or "/jax/_src/random" not in source.replace(os.sep, "/"):
        return None
    every = list(_equations(body))
    key, out = body.invars[0].aval.shape, eqn.outvars[0].aval.shape
    shapes = {(*q.invars[0].aval.shape, *q.params["shape"]) for q in every if q.primitive.name == "random_bits"}
    if shapes != {out} or out[: len(key)] != key or any(q.primitive.name == "transpose" for q in every):
        return None
    low = _lowest(body) if name == UNIFORM else 1
    return Draw(name, low, 3 - low)


def _equations(body: Any) -> Iterator[Any]:
    for q in body.eqns:
        yield q
        for inner in jaxprs_in_params(q.params):
            yield from _equations(inner)


def _lowest(body: Any) -> int:
    """The operand that uniform numbers are not below: JAX takes the maximum with it at last."""
    made = {v: q for q in body.eqns for v in q.outvars}
    at = body.outvars[0]
    while at in made:
        at = made[at].invars[0]
    return body.invars.index(at) if at in body.invars[1:3] else 1


def _numbers(e: RankEmitter, value: Any) -> Array:
    """Integers that go into keys: numbers, or one input by name. A rank's share of an input has no name of its own."""
    if isinstance(value, Grid | Table):
        data = table_of(value)
        if data is None:
            raise Unmapped("keys from too many numbers")
        if any((row != data[0]).any() for row in data[1:]):
            answers = np.unique(data.reshape(len(data), -1), axis=0, return_inverse=True)[1]
            raise Divergent(np.broadcast_to(answers.reshape(-1), (len(e.ranks),)))
        return np.asarray(data[0])
    if isinstance(value, str) and value not in e.made and not e.shape(value):
        return np.array(value, object)
    raise Unmapped("a key from a computed number")


def seeded(e: RankEmitter, given: Sequence[Any], params: Mapping[str, Any]) -> Key:
    seeds, impl = _numbers(e, given[0]), params["impl"].name
    _require_one_by_one("seed", impl, seeds.shape)
    return key_of(_each(lambda s: f"key({s}, {impl})", seeds), impl)


def folded_in(e: RankEmitter, given: Sequence[Any], params: Mapping[str, Any]) -> Key:
    key = _key(given[0])
    names, numbers = np.broadcast_arrays(names_of(key), _numbers(e, given[1]))
    _require_one_by_one("fold_in", key.impl, names.shape)
    return key_of(_each(lambda k, n: f"fold_in({k}, {n})", names, numbers), key.impl)


def split(e: RankEmitter, given: Sequence[Any], params: Mapping[str, Any]) -> Key:
    key, shape = _key(given[0]), tuple(params["shape"])
    _require_one_by_one("split", key.impl, key.shape)
    names = names_of(key)
    if names.size * math.prod(shape) > MOST_KEYS:
        raise Unmapped(f"{names.size * math.prod(shape)} random keys")
    form = "fold_in({0}, {1})" if partitionable(key.impl) else f"split({{0}}, {list(shape)})[{{1}}]"
    numbers = np.arange(math.prod(shape)).reshape(shape)
    wide = names.reshape(names.shape + (1,) * len(shape))
    return key_of(_each(form.format, *np.broadcast_arrays(wide, numbers)), key.impl)


def _each(f: Callable[..., str], *arrays: Array) -> Array:
    found = np.empty(arrays[0].size, object)
    found[:] = [f(*values) for values in zip(*(a.reshape(-1).tolist() for a in arrays), strict=True)]
    return found.reshape(arrays[0].shape)


def wrapped(e: RankEmitter, given: Sequence[Any], params: Mapping[str, Any]) -> Key:
    """Integers as keys: those of one key, all of them, in order."""
    key, impl = given[0], params["impl"].name
    names = names_of(key)
    first = _each(lambda n: n.rpartition("#")[0], names[..., 0]) if key.raw and names.ndim else None
    if first is None or key.impl not in (None, impl) or not (_integers(first, names.shape[-1]) == names).all():
        raise Unmapped("a key from computed integers")
    return key_of(first if key.impl is not None else _each(lambda n: f"wrap({n}, {impl})", first), impl)


def unwrapped(e: RankEmitter, given: Sequence[Any], params: Mapping[str, Any]) -> Key:
    key = _key(given[0])
    if key.impl != THREEFRY:
        raise Unmapped(f"the integers of a key of {key.impl}")
    return key_of(_integers(names_of(key), RAW), key.impl, raw=True)


def same(e: RankEmitter, given: Sequence[Any], params: Mapping[str, Any]) -> Key:
    return _key(given[0], raw=None)


def joined(e: RankEmitter, given: Sequence[Any], params: Mapping[str, Any]) -> Key:
    keys = [_key(v, raw=None) for v in given]
    if len({(k.impl, k.raw) for k in keys}) > 1:
        raise Unmapped("keys of several kinds")
    return key_of(np.concatenate([names_of(k) for k in keys], params["dimension"]), keys[0].impl, keys[0].raw)


def one_slice(e: RankEmitter, given: Sequence[Any], params: Mapping[str, Any]) -> Key:
    """A slice from where every rank says; JAX moves a start so that the slice is inside."""
    key = _key(given[0], raw=None)
    at = [int(_numbers(e, v)) for v in given[1:]] if all(isinstance(v, Grid) for v in given[1:]) else None
    if at is None:
        raise Unmapped("a key that data chooses")
    sizes = params["slice_sizes"]
    start = [min(max(p, 0), n - s) for p, n, s in zip(at, key.shape, sizes, strict=True)]
    return key_of(names_of(key)[tuple(slice(p, p + s) for p, s in zip(start, sizes, strict=True))], key.impl, key.raw)


def _moving(f: Callable[[Array, Mapping[str, Any]], Array]) -> Callable[..., Key]:
    def row(e: RankEmitter, given: Sequence[Any], params: Mapping[str, Any]) -> Key:
        key = _key(given[0], raw=None)
        return key_of(f(names_of(key), params), key.impl, key.raw)

    return row


def _sliced(x: Array, p: Mapping[str, Any]) -> Array:
    steps = p["strides"] or (1,) * x.ndim
    return x[tuple(slice(*at) for at in zip(p["start_indices"], p["limit_indices"], steps, strict=True))]


def _broadcast(x: Array, p: Mapping[str, Any]) -> Array:
    dims, shape = list(p["broadcast_dimensions"]), p["shape"]
    return np.broadcast_to(x.reshape([x.shape[dims.index(d)] if d in dims else 1 for d in range(len(shape))]), shape)


def _key(value: Any, raw: bool | None = False) -> Key:
    if not isinstance(value, Key) or (raw is not None and value.raw != raw):
        raise Unmapped(value.reason if isinstance(value, Opaque) else "a key that is not followed")
    return value


OF_KEYS: Final[dict[str, Callable[..., Key]]] = {
    **dict.fromkeys(("pvary", "pcast", "copy", "copy_p", "random_clone", "mesh_cast", "sharding_constraint"), same),
    "random_seed": seeded,
    "random_fold_in": folded_in,
    "random_split": split,
    "random_wrap": wrapped,
    "random_unwrap": unwrapped,
    "concatenate": joined,
    "dynamic_slice": one_slice,
    "slice": _moving(_sliced),
    "squeeze": _moving(lambda x, p: np.squeeze(x, tuple(p["dimensions"]))),
    "expand_dims": _moving(lambda x, p: np.expand_dims(x, tuple(p["dimensions"]))),
    "transpose": _moving(lambda x, p: np.transpose(x, p["permutation"])),
    "rev": _moving(lambda x, p: np.flip(x, tuple(p["dimensions"]))),
    "broadcast_in_dim": _moving(_broadcast),
}


def key_result(e: RankEmitter, name: str, given: Sequence[Any], eqn: Any) -> Key | None:
    """The keys that a primitive makes; None if it has nothing to do with keys."""
    row = OF_KEYS.get(name)
    if row is None or not (name == "random_seed" or any(isinstance(v, Key) for v in given)):
        return None
    found, shape = row(e, given, eqn.params), tuple(eqn.outvars[0].aval.shape)
    if found.shape != shape:
        raise Unmapped(f"{list(found.shape)} keys where JAX has {list(shape)}")
    return found


def refuse_other_laws(eqn: Any, given: Sequence[Any]) -> None:
    """Within `jax.threefry_partitionable(…)` keys may be split, and numbers drawn, by other laws than where the program is read."""
    here = getattr(getattr(eqn, "ctx", None), "threefry_partitionable", None)
    if here is not None and here != bool(jax.config.jax_threefry_partitionable) and any(isinstance(v, Key) for v in given):
        raise Unmapped(f"random numbers within jax.threefry_partitionable({here})")


def is_key(dtype: Any) -> bool:
    return str(dtype).startswith("key<")


__all__ = ["Stream", "argument_key", "draw_domain", "draw_of", "drawn", "is_key", "key_of", "key_result", "names_of"]
__all__ += ["refuse_other_laws", "streams_of"]
