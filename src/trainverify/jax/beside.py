"""Every distinct call of a primitive is run beside its mapping: JAX in float64 on random values, against the operators that the row writes.

A call is translated once more by itself, with what the row may know about its operands (bounds, signs, numbers), and both are
evaluated on values with ties, zeros and negatives. Calls of more than `ELEMENTS` are run at smaller sizes where these shrink
consistently. What was found is remembered by signature. Elements without a finite value in JAX (1/0, √−1) are not compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np

import jax
from trainverify.domains.numeric import NUMERIC
from trainverify.graph.mesh import Mesh
from trainverify.graph.program import bind
from trainverify.graph.types import TensorType
from trainverify.jax.emit import RankEmitter
from trainverify.jax.infinities import Infinities, is_number, may_be_infinite
from trainverify.jax.mappings.elementwise import ROWS as ELEMENTWISE
from trainverify.jax.mappings.table import Arguments, Row
from trainverify.jax.meshes import without
from trainverify.jax.signs import never_negative
from trainverify.jax.values import DTYPES, Grid, Known, Number, Opaque, Table, Value, array_of
from trainverify.ops import OPS
from trainverify.translate.emit import Unmapped
from trainverify.translate.integers import RANGES, tensor_bounds
from trainverify.translate.literals import Literals

Array = np.ndarray[Any, Any]
Given = Sequence[Sequence[Array]]  # operands, on every rank
ELEMENTS: Final = 1_000_000  # of all operands and results of a call that is run at its own sizes
PRODUCTS: Final = 100_000_000  # of a contraction that is
AT_ONCE: Final = 10_000_000  # elements of calls that are compiled together
TOLERANCE: Final = 1e-8  # of the largest element
RANKS: Final = 3  # whose values are compared
FEW: Final = 256  # elements of a call that is run at several points
POINTS: Final = 8
_JAX: Final = {ours: np.dtype("float64") if ours.startswith(("f", "bf")) else np.dtype(theirs) for theirs, ours in DTYPES.items()}
_VALUES: Final = np.array([-2, -1, -0.5, -0.25, 0, 0, 0.25, 0.5, 1, 1, 2, 3])


@dataclass(frozen=True)
class Leaf:
    """A tensor that a call takes, and what is known about it."""

    kind: TensorType
    bounds: tuple[int, int] | None = None
    nonnegative: bool = False
    infinite: Infinities = frozenset()
    defined: bool = True
    parts: tuple[Leaf, ...] = ()  # of integers that were joined
    dim: int = 0


Operand = Leaf | Number | Grid | Table


@dataclass(frozen=True, eq=False)
class Call:
    """A primitive with its operands and parameters, on some ranks of a mesh."""

    name: str
    primitive: Any
    row: Row
    operands: tuple[Operand, ...]
    params: Mapping[str, Any]
    out: tuple[TensorType, ...]
    mesh: Mesh
    ranks: tuple[int, ...]

    @property
    def types(self) -> tuple[TensorType, ...]:
        return tuple(x.kind if isinstance(x, Leaf) else TensorType(x.shape, x.dtype) for x in self.operands)

    @property
    def elements(self) -> int:
        return sum(math.prod(t.shape) for t in (*self.types, *self.out))

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.types))})"


@dataclass(frozen=True)
class Found:
    """What running a call beside its mapping has shown."""

    state: Literal["agrees", "differs", "unchecked"]
    why: str = ""


_KNOWN: Final[dict[Any, Found]] = {}  # signature → what was found in this process


# -- what a call is -------------------------------------------------------------------------------------------------------


def leaf(e: RankEmitter, name: str, deep: bool = True) -> Leaf:
    kind = e.tensors[name]
    if kind.kind == "int":
        op = e.made.get(name)
        joined = op is not None and op.name == "concat" and deep and len(op.inputs) <= 8
        parts = tuple(leaf(e, str(i), False) for i in op.inputs) if joined and op is not None else ()
        return Leaf(kind, tensor_bounds(e, name), parts=parts, dim=int(op.get("dim", 0)) if parts and op is not None else 0)
    if kind.kind == "bool":
        return Leaf(kind)
    return Leaf(kind, None, never_negative(e, name), may_be_infinite(e, name), is_number(e, name))


def _of_ranks(value: Grid | Table, rows: Sequence[int], total: int) -> Grid | Table:
    data = value.start if isinstance(value, Grid) else value.data
    picked = data if len(data) != total or total == 1 else data[list(rows)]
    return replace(value, start=picked) if isinstance(value, Grid) else replace(value, data=picked)


def note(e: RankEmitter, name: str, primitive: Any, row: Row, values: Sequence[Value], params: Mapping[str, Any], a: Arguments) -> None:
    """Remember a call that was translated, to be run when the program is finished."""
    noted: dict[Any, Call] = e.kept.setdefault("calls", {})
    primitive = primitive or getattr(jax.lax, f"{name.replace('-', '_')}_p", None)  # of HLO
    total = len(e.ranks)
    rows = sorted({0, total // 2, total - 1})[:RANKS]
    operands: list[Operand] = []
    for v in values:
        match v:
            case str():
                operands.append(leaf(e, v))
            case Number():
                operands.append(v)
            case Grid() | Table():
                operands.append(_of_ranks(v, rows, total))
            case Opaque():
                return
    call = Call(name, primitive, row, tuple(operands), params, a.out, e.mesh, tuple(e.ranks[k] for k in rows))
    noted.setdefault(signature(call), call)


def signature(call: Call) -> Any:
    def key(x: Operand) -> Any:
        match x:
            case Leaf() | Number():
                return x
            case Grid():
                return "grid", tuple(x.start.tolist()), x.strides, x.shape, x.dtype
            case Table():
                return "table", x.data.shape, x.data.tobytes(), x.dtype

    params = tuple(sorted((k, repr(v)) for k, v in call.params.items()))
    return call.name, id(call.row), params, tuple(map(key, call.operands)), call.out, jax.__version__


# -- values ---------------------------------------------------------------------------------------------------------------


def sample(x: Leaf, rng: np.random.Generator) -> Array:
    """Random values with ties, zeros and negatives, as far as they may be."""
    shape = x.kind.shape
    if x.parts:
        return np.concatenate([sample(p, rng) for p in x.parts], x.dim)
    if x.kind.kind == "bool":
        return rng.random(shape) < 0.5
    if x.kind.kind == "int":
        low, high = RANGES[x.kind.dtype] if x.bounds is None else x.bounds
        if x.bounds is None:
            low, high = max(low, -3), min(high, 6)
        near = rng.integers(max(low, min(-3, high)), min(high, max(6, low)) + 1, shape) if low <= 6 and high >= -3 else low
        return np.where(rng.random(shape) < 0.5, near, rng.integers(low, high + 1, shape)).astype(np.int64)
    found = np.where(rng.random(shape) < 0.5, rng.choice(_VALUES, shape), rng.standard_normal(shape))
    found = np.abs(found) if x.nonnegative else found
    for infinity in sorted(x.infinite):
        found = np.where(rng.random(shape) < 0.15, infinity, found)
    return np.asarray(found, np.float64)


def _wide(params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters for float64 on one device."""

    def one(name: str, value: Any) -> Any:
        if name in ("sharding", "out_sharding", "dst_sharding"):
            return None
        if name in ("exponent_bits", "mantissa_bits"):
            return 11 if name == "exponent_bits" else 52
        kind = DTYPES.get(str(value)) if isinstance(value, np.dtype) or (hasattr(value, "dtype") and isinstance(value, type)) else None
        return np.dtype("float64") if kind is not None and kind.startswith(("f", "bf")) else value

    return {k: one(k, v) for k, v in params.items()}


def _given(call: Call, rng: np.random.Generator) -> Given:
    """The operands on every rank, where ranks differ in integers that they know; tensors have the same values on all of them."""
    rows = range(len(call.ranks) if any(isinstance(x, Grid | Table) for x in call.operands) else 1)
    kinds = [_JAX[t.dtype] for t in call.types]
    found = []
    for _ in range(POINTS if call.elements <= FEW and any(isinstance(x, Leaf) for x in call.operands) else 1):
        tensors = {n: sample(x, rng) for n, x in enumerate(call.operands) if isinstance(x, Leaf)}
        for k in rows:
            values = [tensors[n] if isinstance(x, Leaf) else array_of(x, k) for n, x in enumerate(call.operands)]
            found.append([v.astype(d) for v, d in zip(values, kinds, strict=True)])
    return found


def ours(call: Call, given: Given) -> list[list[Array]]:
    """What the operators that the row writes give on every rank."""
    e = RankEmitter(call.mesh, call.ranks, OPS)
    names: dict[int, str] = {}
    values: dict[str, tuple[int, int, int] | int] = {}  # tensor → operand, or a part of one: from, to
    held: list[Value] = []
    for n, x in enumerate(call.operands):
        held.append(_declared(e, n, x, values, names) if isinstance(x, Leaf) else x)
    a = Arguments(e, call.name, tuple(held), call.params, call.types, call.out, Literals())
    made = call.row(a)
    results = [made] if isinstance(made, str | Number | Grid | Table | Opaque) else list(made)
    found = []
    for point, operands in enumerate(given):
        k = point % len(call.ranks) if any(isinstance(x, Grid | Table) for x in call.operands) else 0
        known: dict[str, Array] = {}
        for name, at in values.items():
            whole = operands[at] if isinstance(at, int) else operands[at[0]]
            if not isinstance(at, int):
                dim = call.operands[at[0]].dim  # type: ignore[union-attr]
                whole = np.take(whole, np.arange(at[1], at[2]), dim)
            known[name] = whole.astype({"real": np.float64, "int": np.int64, "bool": np.bool_}[e.kind(name)])
        for c in e.constants.values():
            known[c.name] = np.asarray(c.data)
        columns = {n: c[k] for c, n in e.columns.items()}
        for op in e.ops:
            op = bind(op, columns)
            lowered = OPS.lower(op.name, dict(op.attrs), tuple(None if t is None else e.tensors[t] for t in op.inputs))
            outputs = NUMERIC.run(lowered.outputs, [np.zeros(()) if t is None else known[t] for t in op.inputs])
            known.update(zip(op.outputs, outputs, strict=True))
        found.append([known[r] if isinstance(r, str) else array_of(_known(r), k) for r in results])
    return found


def _known(value: Value) -> Known:
    if isinstance(value, str | Opaque):
        raise Unmapped("a result without a meaning")
    return value


def _declared(e: RankEmitter, n: int, x: Leaf, values: dict[str, Any], names: dict[int, str]) -> str:
    """The operand as a tensor about which as much is known."""
    if x.parts:
        made, at = [], 0
        for m, part in enumerate(x.parts):
            name = e.declare(f"x{n}.{m}", part.kind)
            if part.bounds is not None:
                e.bounds[name] = part.bounds
            size = part.kind.shape[x.dim]
            values[name] = (n, at, at + size)
            at += size
            made.append(name)
        return e.op("concat", made, {"dim": x.dim})
    name = e.declare(f"x{n}", x.kind)
    values[name] = n
    if x.bounds is not None:
        e.bounds[name] = x.bounds
    if x.nonnegative:
        e.nonnegative.add(name)
    e.kept["infinite", name], e.kept["defined", name] = x.infinite, x.defined
    return name


# -- comparing ------------------------------------------------------------------------------------------------------------


def difference(ours: Array, theirs: Array, infinite: bool, tolerance: float = TOLERANCE) -> tuple[str | None, int]:
    """What is different where JAX has a value, and how many elements were compared."""
    if ours.shape != theirs.shape:
        return f"shape {list(ours.shape)} for {list(theirs.shape)}", 0
    if theirs.dtype.kind != "f":
        theirs = theirs.astype(ours.dtype) if ours.dtype.kind == "b" or theirs.dtype.kind == "b" else theirs
        wrong = np.asarray(ours != theirs)
        return (_shown(ours, theirs, wrong) if wrong.any() else None), theirs.size
    theirs = theirs.astype(np.float64)
    kept = np.isfinite(theirs) | (np.isinf(theirs) & infinite)
    finite = np.isfinite(theirs)
    scale = max(float(np.abs(theirs[finite]).max(initial=0.0)), 1.0)
    with np.errstate(all="ignore"):
        near = np.abs(np.asarray(ours, np.float64) - theirs) <= tolerance * scale
    wrong = kept & ~(near | (ours == theirs))
    return (_shown(ours, theirs, wrong) if wrong.any() else None), int(kept.sum())


def _shown(ours: Array, theirs: Array, wrong: Array) -> str:
    at = tuple(int(k[0]) for k in np.nonzero(wrong)) if wrong.ndim else ()
    return f"{ours[at]!s} for {theirs[at]!s} at {list(at)}"


# -- running --------------------------------------------------------------------------------------------------------------


QUICKLY: Final = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True, "xla_cpu_use_fusion_emitters": False}
_PLACED: Final = {"sharding": None}
_CUT: Final = {"out_sharding": None}
_EXACT: Final = {"accuracy": None}
_UNSAID: Final[dict[str, dict[str, Any]]] = {  # parameters of JAX's that HLO does not have
    **dict.fromkeys(("exp", "log", "sin", "cos", "tanh", "sqrt", "rsqrt", "logistic", "expm1", "log1p"), _EXACT),
    **dict.fromkeys(("iota", "broadcast_in_dim", "reshape"), _PLACED),
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"), _CUT),
    "convert_element_type": {"weak_type": False, **_PLACED},
    "dot_general": {"precision": None, "preferred_element_type": None, "out_sharding": None},
    "conv_general_dilated": {"precision": None, "preferred_element_type": None},
    "gather": {"indices_are_sorted": False, "unique_indices": False, "fill_value": None},
}
_SCATTERS: Final[dict[str, Callable[..., Any]]] = {
    "scatter": jax.lax.scatter,
    "scatter-add": jax.lax.scatter_add,
    "scatter-sub": jax.lax.scatter_sub,
}


def _bound(call: Call, arrays: Sequence[Any]) -> list[Any]:
    p = call.params
    if call.name in _SCATTERS:  # whose parameters contain a program for their dtype
        named = {n: p[n] for n in ("indices_are_sorted", "unique_indices", "mode") if n in p}
        return [_SCATTERS[call.name](*arrays, p["dimension_numbers"], **named)]
    made = call.primitive.bind(*arrays, **_wide({**_UNSAID.get(call.name, {}), **p}))
    return list(made) if call.primitive.multiple_results else [made]


def _flat(call: Call) -> bool:
    """Whether every element of the result is the same function of the elements of the operands at its place."""
    plain = call.name in ELEMENTWISE and not getattr(call.primitive, "multiple_results", True)
    return plain and all(t.shape in ((), call.out[0].shape) for t in call.types)


def _alike(waiting: Sequence[tuple[Call, Given]]) -> list[list[int]]:
    """Calls that JAX compiles once: those that differ in their numbers only, elementwise ones of any shape."""
    found: dict[Any, list[int]] = {}
    for n, (call, _) in enumerate(waiting):
        shapes = () if _flat(call) else tuple(t.shape for t in call.types)
        params = tuple(sorted((k, repr(v)) for k, v in _wide(call.params).items()))
        key = _flat(call), call.name, params, shapes, tuple(_JAX[t.dtype] for t in call.types)
        found.setdefault(key, []).append(n)
    return list(found.values())


def theirs(waiting: Sequence[tuple[Call, Given]]) -> list[list[list[Array]] | Exception]:
    """What JAX gives on every rank."""
    kinds = _alike(waiting)
    calls = [waiting[k[0]][0] for k in kinds]
    with jax.enable_x64(True), without(), jax.default_device(jax.devices("cpu")[0]):
        made = _run_together(calls, [_stacks([waiting[n] for n in kind]) for kind in kinds])
    found: list[list[list[Array]] | Exception] = [[] for _ in waiting]
    for kind, call, result in zip(kinds, calls, made, strict=True):
        at = 0
        for n in kind:
            rows, shape = len(waiting[n][1]), waiting[n][0].out[0].shape if _flat(call) else ()
            size = rows * math.prod(shape)
            if isinstance(result, Exception):
                found[n] = result
            elif _flat(call):
                found[n] = [[x] for x in result[0][at : at + size].reshape(rows, *shape)]
            else:
                found[n] = [[x[k] for x in result] for k in range(at, at + rows)]
            at += size if _flat(call) else rows
    return found


def _stacks(calls: Sequence[tuple[Call, Given]]) -> list[Array]:
    """The operands of calls that are compiled once, joined: all elements of elementwise ones, else one call after the other."""
    if not _flat(calls[0][0]):
        return [np.stack(x) for x in zip(*(row for _, given in calls for row in given), strict=True)] or [np.zeros(len(calls))]
    wide = [[np.broadcast_to(x, call.out[0].shape).reshape(-1) for x in row] for call, given in calls for row in given]
    return [np.concatenate(x) for x in zip(*wide, strict=True)]


def _run_together(calls: Sequence[Call], stacks: Sequence[Sequence[Array]]) -> list[list[Array] | Exception]:
    """Compiled as one program, without those that JAX does not lower."""

    def each(call: Call, stack: Sequence[Any]) -> Any:
        def one(row: Any) -> Any:
            return _bound(call, row if call.operands else ())

        if _flat(call):
            return one(stack)
        if len(stack[0]) == 1:
            return [x[None] for x in one([s[0] for s in stack])]
        try:
            return jax.vmap(one)(list(stack))
        except NotImplementedError:  # a primitive without a rule for batches
            return jax.lax.map(one, list(stack))

    def program(some: Sequence[int]) -> Any:
        run = jax.jit(lambda given: [each(calls[n], s) for n, s in zip(some, given, strict=True)])
        return run.lower([list(stacks[n]) for n in some])

    every = list(range(len(calls)))
    found: list[list[Array] | Exception] = [[] for _ in calls]
    try:
        lowered = program(every)
    except Exception:  # whatever JAX raises: some cannot be lowered
        for n in every:
            try:
                program([n])
            except Exception as error:
                found[n] = error
        every = [n for n in every if not isinstance(found[n], Exception)]
        lowered = program(every)
    compiled = lowered.compile(compiler_options=QUICKLY)
    for n, result in zip(every, compiled([list(stacks[n]) for n in every]), strict=True):
        found[n] = [np.asarray(x) for x in result]
    return found


def _found(call: Call, given: Given, result: list[list[Array]] | Exception) -> Found:
    if isinstance(result, Exception):
        return Found("unchecked", f"JAX does not run it alone: {type(result).__name__}")
    try:
        mine = ours(call, given)
    except Unmapped as error:
        return Found("unchecked", f"by itself it has no mapping: {error}")
    infinite = any(isinstance(x, Leaf) and x.infinite for x in call.operands)
    infinite = infinite or any(isinstance(x, Number) and math.isinf(x.value) for x in call.operands)
    compared = 0
    for row, other in zip(mine, result, strict=True):
        if len(row) != len(other):
            return Found("differs", f"{len(row)} results for {len(other)}")
        for x, y in zip(row, other, strict=True):
            wrong, count = difference(np.asarray(x), y, infinite)
            compared += count
            if wrong is not None:
                return Found("differs", wrong)
    empty = all(y.size == 0 for other in result for y in other)
    return Found("agrees") if compared or empty else Found("unchecked", "no element has a finite value")


@dataclass(frozen=True)
class Beside:
    """What running the calls of a pair has shown."""

    agreed: int = 0
    differs: tuple[tuple[str, str], ...] = ()  # a call, and what is different
    unchecked: tuple[tuple[str, str], ...] = ()


def run(calls: Mapping[Any, Call], small: Callable[[Call], Call | None]) -> Beside:
    """Run what is not known yet, in groups of moderate size."""
    waiting: list[tuple[Any, Call, Given]] = []
    size = 0
    for key, call in calls.items():
        if key in _KNOWN:
            continue
        chosen = call if call.elements <= ELEMENTS and products(call) <= PRODUCTS else small(call)
        if chosen is None:
            _KNOWN[key] = Found("unchecked", f"{call.elements:,} elements")
            continue
        waiting.append((key, chosen, _given(chosen, np.random.default_rng(len(_KNOWN)))))
        size += chosen.elements
        if size > AT_ONCE:
            _run(waiting)
            waiting, size = [], 0
    _run(waiting)
    found = [(str(c), _KNOWN[k]) for k, c in calls.items()]
    listed = {s: tuple((c, f.why) for c, f in found if f.state == s) for s in ("differs", "unchecked")}
    return Beside(sum(f.state == "agrees" for _, f in found), listed["differs"], listed["unchecked"])


def _run(waiting: Sequence[tuple[Any, Call, Given]]) -> None:
    if not waiting:
        return
    for (key, call, given), result in zip(waiting, theirs([(c, g) for _, c, g in waiting]), strict=True):
        _KNOWN[key] = _found(call, given, result)


def products(call: Call) -> int:
    """How many products a contraction adds up."""
    if call.name not in ("dot_general", "conv_general_dilated"):
        return 0
    return math.prod(call.types[0].shape) * math.prod(call.types[1].shape) // max(1, _common(call))


def _common(call: Call) -> int:
    if call.name == "dot_general":
        (left, _), (batch, _) = call.params["dimension_numbers"]
        return math.prod(call.types[0].shape[int(d)] for d in (*left, *batch))
    return math.prod(call.types[1].shape) // max(1, math.prod(call.types[1].shape[2:]))


__all__ = ["ELEMENTS", "QUICKLY", "Beside", "Call", "Leaf", "difference", "note", "run", "sample"]
