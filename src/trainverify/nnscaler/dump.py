"""Plans of nnScaler as plain data (`nnsdump/1`): what a dump holds, and its strict reader.

Names are nnScaler's own. Whatever is missing, dangling or unknown is a `FileError` that names the file, the cell and the field.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from trainverify.files.errors import Bad, FileError, expected, show
from trainverify.files.limits import Limits
from trainverify.files.text import load
from trainverify.graph.types import TensorType

FORMAT: Final = "nnsdump/1"
FUSED: Final = (
    "AllReduceIdentityPrim",
    "IdentityAllreducePrim",
    "AllReduceAllReducePrim",
    "ReduceScatterAllGatherPrim",
    "AllGatherReduceScatterPrim",
    "AllGatherSplitPrim",
    "SplitAllGatherPrim",
    "AllToAllAllToAllPrim",
)
# kind → what its kwargs must have
PRIMS: Final[Mapping[str, tuple[str, ...]]] = {
    "IdentityPrim": (),
    "SelectPrim": ("indmap", "valmap"),
    "MergeDimPrim": ("dim",),
    "SumPrim": (),
    "MovePrim": ("src", "dst"),
    "AllReducePrim": ("ranks",),
    "AllGatherPrim": ("dim", "ranks"),
    "ReduceScatterPrim": ("dim", "ranks"),
    "ChunkPrim": ("dim", "ranks"),
    "AllToAllPrim": ("idim", "odim", "ranks"),
    "BroadcastPrim": ("src", "ranks"),
    "RDScatterPrim": ("dim", "src", "dsts"),
    "RDGatherPrim": ("dim", "srcs", "dst"),
    "RVScatterPrim": ("src", "dsts"),
    "RVGatherPrim": ("srcs", "dst"),
    "ReducePrim": ("dst", "ranks"),
    "VChunkPrim": (),
    "AllReduceIdentityPrim": ("ranks",),
    "IdentityAllreducePrim": ("ranks",),
    "AllReduceAllReducePrim": ("ranks",),
    "ReduceScatterAllGatherPrim": ("dim", "ranks"),
    "AllGatherReduceScatterPrim": ("dim", "ranks"),
    "AllGatherSplitPrim": ("dim", "ranks"),
    "SplitAllGatherPrim": ("dim", "ranks"),
    "AllToAllAllToAllPrim": ("idim", "odim", "ranks"),
}
OPERATIONS: Final = ("IRDimops", "IRFwOperation")
KINDS: Final = (*OPERATIONS, "IRBpOperation", "IRDataOperation", "IRSegment", "IRAdapter", "IRWeightReducer")
DTYPES: Final[Mapping[str, str]] = {
    "torch.float64": "f64",
    "torch.float32": "f32",
    "torch.bfloat16": "bf16",
    "torch.float16": "f16",
    "torch.int64": "i64",
    "torch.int32": "i32",
    "torch.int16": "i16",
    "torch.int8": "i8",
    "torch.uint8": "u8",
    "torch.bool": "bool",
    "torch.complex64": "f32",  # two real numbers for each element, in a last dimension of size 2
    "torch.complex128": "f64",
}
COMPLEX: Final = ("torch.complex64", "torch.complex128")


@dataclass(frozen=True, slots=True)
class Full:
    """`IRFullTensor`: the tensor that sub-tensors are slices of."""

    tid: int
    shape: tuple[int, ...]
    dtype: str
    name: str
    param: bool
    buffer: bool
    grad: bool
    loss: bool
    scalar: bool

    @property
    def weight(self) -> bool:
        """A parameter or buffer of the module (a gradient of one is none)."""
        return (self.param or self.buffer) and not self.grad

    def type(self, shape: tuple[int, ...]) -> TensorType:
        """What we take a slice of this shape for: scalars have no dimension, complex numbers one more."""
        if self.scalar and shape == (1,):
            shape = ()
        return TensorType((*shape, 2) if self.dtype in COMPLEX else shape, DTYPES[self.dtype])


@dataclass(frozen=True, slots=True)
class Slice:
    """`IRSubTensor`: a reference to a slice (`indmap`) or summand (`valmap`) of a full tensor. Both are claims."""

    tid: int
    full: Full
    indmap: tuple[tuple[int, int], ...]
    valmap: tuple[int, int]
    grad: Slice | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in self.indmap)

    @property
    def type(self) -> TensorType:
        return self.full.type(self.shape)

    def __str__(self) -> str:
        whole = all(a == 0 and b == n for (a, b), n in zip(self.indmap, self.full.shape, strict=True))
        cut = "" if whole else "[" + ", ".join(f"{a}:{b}" for a, b in self.indmap) + "]"
        return f"{self.full.name}{cut}" + ("" if self.valmap == (0, 1) else f" part {self.valmap[0]} of {self.valmap[1]}")


@dataclass(frozen=True, slots=True)
class Prim:
    kind: str
    inputs: tuple[Slice, ...]
    outputs: tuple[Slice, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Cell:
    """An operation, adapter, segment or reducer. `inputs` mixes tensors and constants, as nnScaler does."""

    kind: str
    cid: int
    name: str
    signature: str
    isfw: bool
    device: tuple[int, ...]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    mirror: int | None
    anno: str = ""
    comment: str = ""
    module: str = ""
    nodes: tuple[Cell, ...] = ()
    prims: tuple[Prim, ...] = ()
    fused: bool = False
    scaled: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # global rank → the reducer's ranks

    def tensors(self) -> list[Slice]:
        return [t for t in self.inputs if isinstance(t, Slice)]

    def results(self) -> list[Slice]:
        return [t for t in self.outputs if isinstance(t, Slice)]


@dataclass(frozen=True, slots=True)
class Step:
    """An entry of a device's sequence: a cell, with the tensors that stand for its own (`ExeReuseCell`)."""

    cell: Cell
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]


@dataclass(frozen=True)
class Dump:
    path: str
    version: str
    name: str
    devices: tuple[int, ...]
    ranks: int  # runtime_ndevs
    microbatches: int
    reducer: str
    outputs: tuple[Slice, ...]  # losses, one for each micro-batch
    sequences: Mapping[int, tuple[Step, ...]]
    full: Mapping[int, Full]

    @property
    def replicas(self) -> int:
        """Copies of the plan that data parallelism runs side by side."""
        return self.ranks // len(self.devices)


@dataclass(frozen=True, slots=True)
class Thing:
    """A value that is neither a tensor nor a constant: an `IRObject`, a dtype, a slice of Python."""

    kind: str
    value: Any = None


def read(path: str | os.PathLike[str], limits: Limits | None = None) -> Dump:
    """The plan in a dump."""
    try:
        return parse(load(path, limits or Limits()), os.fsdecode(path))
    except Bad as e:
        raise FileError(path, e.where, e.reason) from None


def parse(tree: Any, path: str) -> Dump:
    """A dump from plain data (the tree of its JSON)."""
    try:
        return _Reader(_object(tree), path).dump()
    except Bad as e:
        raise FileError(path, e.where, e.reason) from None


# -- plain data ---------------------------------------------------------------------------------------------------------


def _object(data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise expected("an object", data)
    return data


def _list(data: Any) -> list[Any]:
    if not isinstance(data, list):
        raise expected("a list", data)
    return data


def _integer(data: Any) -> int:
    if not isinstance(data, int) or isinstance(data, bool):
        raise expected("an integer", data)
    return data


def _text(data: Any) -> str:
    if not isinstance(data, str):
        raise expected("a string", data)
    return data


def _flag(data: Any) -> bool:
    if not isinstance(data, bool):
        raise expected("true or false", data)
    return data


def _get(data: Mapping[str, Any], key: str) -> Any:
    if key not in data:
        raise Bad("missing", key)
    return data[key]


def _integers(data: Any) -> tuple[int, ...]:
    return tuple(_integer(v) for v in _list(data))


class _Reader:
    def __init__(self, tree: dict[str, Any], path: str):
        self.tree = tree
        self.path = path
        self.full: dict[int, Full] = {}

    def field(self, data: Mapping[str, Any], key: str, reader: Any) -> Any:
        """One field, its name on the way out of an error."""
        value = _get(data, key)
        try:
            return reader(value)
        except Bad as e:
            raise e.inside(key) from None

    def dump(self) -> Dump:
        tree = self.tree
        if tree.get("format") != FORMAT:
            raise Bad(f"expected {show(FORMAT)}, got {show(tree.get('format'))}; not a dump of an nnScaler plan", "format")
        for key, value in self.field(tree, "full_tensors", _object).items():
            try:
                self.full[int(key)] = self.full_tensor(int(key), _object(value))
            except Bad as e:
                raise e.inside("full_tensors", key) from None
            except ValueError:
                raise Bad("the key is no tensor id", "full_tensors", key) from None
        devices = self.field(tree, "devices", _integers)
        ranks = self.field(tree, "runtime_ndevs", _integer)
        if not devices or sorted(devices) != list(range(len(devices))) or ranks < 1 or ranks % len(devices):
            raise Bad(f"{ranks} ranks run the devices {list(devices)[:8]}: expected 0, 1, …, and a whole number of replicas", "devices")
        plans = self.field(tree, "execplan", _object)
        sequences = {}
        for d in sorted(devices):
            if str(d) not in plans:
                raise Bad("missing", "execplan", str(d))
            try:
                sequences[d] = self.sequence(_object(plans[str(d)]))
            except Bad as e:
                raise e.inside("execplan", str(d)) from None
        flags = self.field(tree, "compile_flags", _object)
        graph = self.field(tree, "graph", _object)
        schedule = tree.get("schedule")
        micro = 1 if schedule is None else self.field(_object(schedule), "nmicros", _integer)
        if micro < 1:
            raise Bad(f"{micro} micro-batches", "schedule", "nmicros")
        outputs = self.field(tree, "execplan_outputs", lambda v: self.values(v))
        return Dump(
            self.path,
            str(tree.get("nnscaler_version", "?")),
            str(graph.get("name", "plan")),
            tuple(sorted(devices)),
            ranks,
            micro,
            str(flags.get("reducer_op", "sum")),
            tuple(t for t in outputs if isinstance(t, Slice)),
            sequences,
            self.full,
        )

    def full_tensor(self, tid: int, data: dict[str, Any]) -> Full:
        shape = self.field(data, "shape", _integers)
        dtype = self.field(data, "dtype", _text)
        if dtype not in DTYPES:
            raise Bad(f"unknown dtype {show(dtype)}", "dtype")
        loss = self.field(data, "is_loss", _flag)
        scalar = bool(data.get("is_scalar_tensor")) or data.get("origin_shape") == [] or (loss and shape == (1,))
        param, buffer, grad = (self.field(data, key, _flag) for key in ("is_param", "is_buffer", "is_grad"))
        return Full(tid, shape, dtype, self.field(data, "name", _text), param, buffer, grad, loss, scalar)

    # -- tensors and values -------------------------------------------------------------------------------------------

    def slice(self, data: dict[str, Any]) -> Slice:
        parent = self.field(data, "parent", _integer)
        full = self.full.get(parent)
        if full is None:
            raise Bad(f"tensor {data.get('tid')} belongs to {parent}, which is not in full_tensors", "parent")
        pairs = self.field(data, "indmap", lambda v: tuple(_integers(p) for p in _list(v)))
        fits = len(pairs) == len(full.shape) and all(len(p) == 2 and 0 <= p[0] < p[1] <= n for p, n in zip(pairs, full.shape, strict=True))
        if not fits:
            raise Bad(f"{[list(p) for p in pairs]} is no region of {full.name} {list(full.shape)}", "indmap")
        part = self.field(data, "valmap", _integers)
        if len(part) != 2 or not 0 <= part[0] < part[1]:
            raise Bad(f"{list(part)} is no (part, parts)", "valmap")
        grad = data.get("grad")
        tid = self.field(data, "tid", _integer)
        return Slice(
            tid, full, pairs, (part[0], part[1]), None if grad is None else self.field(data, "grad", lambda v: self.slice(_object(v)))
        )

    def value(self, data: Any) -> Any:
        """A tensor, a constant, or something else that stands in a list of arguments."""
        if isinstance(data, list):
            return tuple(self.values(data))
        if not isinstance(data, dict):
            if data is None or isinstance(data, bool | int | float | str):
                return data
            raise expected("a value", data)
        if "tid" in data:
            return self.slice(data)
        if "float" in data:
            if data["float"] not in ("inf", "-inf", "nan"):
                raise Bad(f"unknown number {show(data['float'])}", "float")
            return float(data["float"])
        for key in ("object", "dtype", "slice", "dict", "opaque"):
            if key in data:
                return Thing(key, data.get("value") if key == "object" else data[key])
        raise Bad(f"unknown kind of value with the keys {', '.join(map(show, data))}")

    def values(self, data: Any) -> list[Any]:
        result = []
        for i, v in enumerate(_list(data)):
            try:
                result.append(self.value(v))
            except Bad as e:
                raise e.inside(i) from None
        return result

    def tensors(self, data: Any) -> tuple[Slice, ...]:
        found = self.values(data)
        for i, t in enumerate(found):
            if not isinstance(t, Slice):
                raise Bad("expected a tensor", i)
        return tuple(found)

    # -- cells --------------------------------------------------------------------------------------------------------

    def sequence(self, data: dict[str, Any]) -> tuple[Step, ...]:
        cells = {}
        for key, value in self.field(data, "cells", _object).items():
            try:
                cells[key] = self.cell(_object(value))
            except Bad as e:
                raise e.inside("cells", key) from None
        steps = []
        for i, item in enumerate(self.field(data, "seq", _list)):
            try:
                steps.append(self.step(_object(item), cells))
            except Bad as e:
                raise e.inside("seq", i) from None
        return tuple(steps)

    def step(self, data: dict[str, Any], cells: Mapping[str, Cell]) -> Step:
        key = self.field(data, "cell", _text)
        if key not in cells:
            raise Bad(f"there is no cell {show(key)} on this device", "cell")
        cell = cells[key]
        if self.field(data, "kind", _text) != "ExeReuseCell":
            return Step(cell, cell.inputs, cell.outputs)
        inputs = tuple(self.field(data, "inputs", self.values))
        outputs = tuple(self.field(data, "outputs", self.values))
        for what, given, own in (("inputs", inputs, cell.inputs), ("outputs", outputs, cell.outputs)):
            if len(given) != len(own):
                raise Bad(f"{len(given)} for the {len(own)} of cell {key}", what)
        return Step(cell, inputs, outputs)

    def cell(self, data: dict[str, Any]) -> Cell:
        kind = self.field(data, "kind", _text)
        if kind not in KINDS:
            raise Bad(f"unknown kind of cell {show(kind)}", "kind")
        nodes = []
        if kind == "IRSegment":
            for i, n in enumerate(self.field(data, "nodes", _list)):
                try:
                    nodes.append(self.cell(_object(n)))
                except Bad as e:
                    cid = n.get("cid") if isinstance(n, dict) else None
                    raise e.inside("nodes", i if cid is None else f"{i}: cell {cid}") from None
        prims = []
        if kind == "IRAdapter":
            for i, p in enumerate(self.field(data, "prims", _list)):
                try:
                    prims.append(self.prim(_object(p)))
                except Bad as e:
                    raise e.inside("prims", i) from None
        scaled = {}
        if kind == "IRWeightReducer" and "_scaled_device" in data:
            scaled = {int(r): _integers(v) for r, v in self.field(data, "_scaled_device", _object).items()}
        mirror = data.get("mirror")
        if kind == "IRBpOperation" and mirror is None:
            raise Bad("a backward operation needs the cell id of its forward operation", "mirror")
        kwargs = self.field(data, "kwargs", _object)
        return Cell(
            kind,
            self.field(data, "cid", _integer),
            str(data.get("name") or ""),
            str(data.get("signature") or ""),
            self.field(data, "isfw", _flag),
            self.field(data, "device", _integers),
            tuple(self.field(data, "inputs", self.values)),
            tuple(self.field(data, "outputs", self.values)),
            {k: self.value(v) for k, v in kwargs.items()},
            None if mirror is None else self.field(data, "mirror", _integer),
            str(data.get("anno") or ""),
            str(data.get("comment") or ""),
            str(data.get("module_stack") or ""),
            tuple(nodes),
            tuple(prims),
            kind == "IRAdapter" and self.field(data, "differentiable", _flag) and not self.field(data, "custom", _flag),
            scaled,
        )

    def prim(self, data: dict[str, Any]) -> Prim:
        kind = self.field(data, "kind", _text)
        if kind not in PRIMS:
            raise Bad(f"unknown prim {show(kind)}", "kind")
        kwargs = self.field(data, "kwargs", _object)
        if kind == "RVScatterPrim" and "dsts" not in kwargs and "dst" in kwargs:  # nnScaler stores the receivers under this name
            kwargs = {**kwargs, "dsts": kwargs["dst"]}
        for key in PRIMS[kind]:
            _get(kwargs, key) if key in kwargs else _missing(key)
            if key in ("ranks", "srcs", "dsts"):
                if not self.field(kwargs, key, _integers):
                    raise Bad("expected at least one device", key)
            elif key in ("dim", "idim", "odim", "src", "dst"):
                self.field(kwargs, key, _integer)
        tensors = [self.field(data, key, self.tensors) for key in ("inputs", "outputs")]
        return Prim(kind, tensors[0], tensors[1], {k: self.value(v) for k, v in kwargs.items()})


def _missing(key: str) -> None:
    raise Bad("missing", "kwargs", key)


def positions(members: Sequence[int]) -> tuple[int, ...]:
    """A group as the run time makes it: `torch.distributed.new_group` sorts its ranks."""
    return tuple(sorted(set(members)))
