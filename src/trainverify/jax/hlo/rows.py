"""HLO instructions as primitives of JAX: one row for each opcode gives the primitive's name, its operands and its parameters."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from jax.lax import ConvDimensionNumbers, GatherDimensionNumbers, GatherScatterMode, ScatterDimensionNumbers

from trainverify.jax.hlo.text import Instruction, integers
from trainverify.translate.emit import Unmapped

Call = tuple[str, list[int], dict[str, Any]]  # primitive, which operands, parameters

SAME: Final = {
    **{
        n: n
        for n in (
            "add",
            "log",
            "tanh",
            "sqrt",
            "rsqrt",
            "abs",
            "sign",
            "floor",
            "logistic",
            "and",
            "or",
            "xor",
            "not",
            "clamp",
            "copy",
            "erf",
        )
    },
    "subtract": "sub",
    "multiply": "mul",
    "divide": "div",
    "maximum": "max",
    "minimum": "min",
    "negate": "neg",
    "exponential": "exp",
    "exponential-minus-one": "expm1",
    "log-plus-one": "log1p",
    "sine": "sin",
    "cosine": "cos",
    "power": "pow",
    "remainder": "rem",
    "is-finite": "is_finite",
    "dynamic-update-slice": "dynamic_update_slice",
    "bitcast": "reshape",
}
REDUCTIONS: Final = {
    "add": "reduce_sum",
    "maximum": "reduce_max",
    "minimum": "reduce_min",
    "and": "reduce_and",
    "or": "reduce_or",
    "multiply": "reduce_prod",
}
_READ: Final = frozenset(("metadata", "sharding", "frontend_attributes", "backend_config", "origin", "statistics", "result_accuracy"))


def _everything(i: Instruction) -> list[int]:
    return list(range(len(i.operands)))


def _compare(i: Instruction) -> Call:
    return i.attrs["direction"].lower(), [0, 1], {}


def _select(i: Instruction) -> Call:
    return "select_n", [0, 2, 1], {}


def _convert(i: Instruction) -> Call:
    return "convert_element_type", [0], {"new_dtype": i.types[0].dtype}


def _broadcast(i: Instruction) -> Call:
    return "broadcast_in_dim", [0], {"shape": i.types[0].shape, "broadcast_dimensions": integers(i.attrs.get("dimensions"))}


def _reshape(i: Instruction) -> Call:
    return "reshape", [0], {"new_sizes": i.types[0].shape, "dimensions": None}


def _transpose(i: Instruction) -> Call:
    return "transpose", [0], {"permutation": integers(i.attrs["dimensions"])}


def _slice(i: Instruction) -> Call:
    parts = [[int(n) for n in p.split(":")] for p in re.findall(r"\[([\d:]+)\]", i.attrs["slice"])]
    steps = tuple(p[2] if len(p) > 2 else 1 for p in parts)
    return "slice", [0], {"start_indices": tuple(p[0] for p in parts), "limit_indices": tuple(p[1] for p in parts), "strides": steps}


def _reverse(i: Instruction) -> Call:
    return "rev", [0], {"dimensions": integers(i.attrs["dimensions"])}


def _concatenate(i: Instruction) -> Call:
    return "concatenate", _everything(i), {"dimension": integers(i.attrs["dimensions"])[0]}


def _pad(i: Instruction) -> Call:
    config = []
    for part in i.attrs["padding"].split("x"):
        n = [int(x) for x in part.split("_")]
        config.append((n[0], n[1], n[2] if len(n) > 2 else 0))
    return "pad", [0, 1], {"padding_config": tuple(config)}


def _iota(i: Instruction) -> Call:
    return "iota", [], {"shape": i.types[0].shape, "dimension": int(i.attrs["iota_dimension"]), "dtype": i.types[0].dtype}


def _dynamic_slice(i: Instruction) -> Call:
    return "dynamic_slice", _everything(i), {"slice_sizes": integers(i.attrs["dynamic_slice_sizes"])}


def _dot(i: Instruction) -> Call:
    sides = [tuple(integers(i.attrs.get(f"{s}_{k}_dims")) for s in ("lhs", "rhs")) for k in ("contracting", "batch")]
    return "dot_general", [0, 1], {"dimension_numbers": tuple(sides)}


def _gather(i: Instruction) -> Call:
    a = i.attrs
    numbers = GatherDimensionNumbers(
        offset_dims=integers(a.get("offset_dims")),
        collapsed_slice_dims=integers(a.get("collapsed_slice_dims")),
        start_index_map=integers(a.get("start_index_map")),
        operand_batching_dims=integers(a.get("operand_batching_dims")),
        start_indices_batching_dims=integers(a.get("start_indices_batching_dims")),
    )
    params = {"dimension_numbers": numbers, "slice_sizes": integers(a["slice_sizes"]), "mode": GatherScatterMode.CLIP}
    return "gather", [0, 1], params


def _scatter(i: Instruction) -> Call:
    a = i.attrs
    numbers = ScatterDimensionNumbers(
        update_window_dims=integers(a.get("update_window_dims")),
        inserted_window_dims=integers(a.get("inserted_window_dims")),
        scatter_dims_to_operand_dims=integers(a.get("scatter_dims_to_operand_dims")),
        operand_batching_dims=integers(a.get("input_batching_dims")),
        scatter_indices_batching_dims=integers(a.get("scatter_indices_batching_dims")),
    )
    unique = a.get("unique_indices") == "true"
    return "scatter-add", [0, 1, 2], {"dimension_numbers": numbers, "unique_indices": unique, "mode": GatherScatterMode.FILL_OR_DROP}


def _convolution(i: Instruction) -> Call:
    labels = re.fullmatch(r"(\w+)_(\w+)->(\w+)", i.attrs["dim_labels"])
    if labels is None:
        raise Unmapped(f"dim_labels={i.attrs['dim_labels']}")
    left, kernel, out = labels.groups()
    n = len(left) - 2
    window = dict(p.split("=") for p in i.attrs.get("window", "{}").strip("{}").split())

    def each(name: str) -> tuple[int, ...]:
        return tuple(int(x) for x in window[name].split("x")) if name in window else (1,) * n

    if "rhs_reversal" in window:
        raise Unmapped("a reversed window")
    pads = tuple(tuple(int(y) for y in x.split("_")) for x in window["pad"].split("x")) if "pad" in window else ((0, 0),) * n
    digits = [str(d) for d in range(n)]
    numbers = ConvDimensionNumbers(
        tuple(left.index(c) for c in ("b", "f", *digits)),
        tuple(kernel.index(c) for c in ("o", "i", *digits)),
        tuple(out.index(c) for c in ("b", "f", *digits)),
    )
    params = {
        "dimension_numbers": numbers,
        "window_strides": each("stride"),
        "padding": pads,
        "lhs_dilation": each("lhs_dilate"),
        "rhs_dilation": each("rhs_dilate"),
        "feature_group_count": int(i.attrs.get("feature_group_count", 1)),
        "batch_group_count": int(i.attrs.get("batch_group_count", 1)),
    }
    return "conv_general_dilated", [0, 1], params


ROWS: Final[dict[str, tuple[Callable[[Instruction], Call], tuple[str, ...]]]] = {
    "compare": (_compare, ("direction", "type")),
    "select": (_select, ()),
    "convert": (_convert, ()),
    "broadcast": (_broadcast, ("dimensions",)),
    "reshape": (_reshape, ()),
    "bitcast": (_reshape, ()),
    "transpose": (_transpose, ("dimensions",)),
    "slice": (_slice, ("slice",)),
    "reverse": (_reverse, ("dimensions",)),
    "concatenate": (_concatenate, ("dimensions",)),
    "pad": (_pad, ("padding",)),
    "iota": (_iota, ("iota_dimension",)),
    "dynamic-slice": (_dynamic_slice, ("dynamic_slice_sizes",)),
    "dot": (
        _dot,
        ("lhs_contracting_dims", "rhs_contracting_dims", "lhs_batch_dims", "rhs_batch_dims", "operand_precision", "algorithm"),
    ),
    "gather": (
        _gather,
        (
            *("offset_dims", "collapsed_slice_dims", "start_index_map", "index_vector_dim", "slice_sizes", "indices_are_sorted"),
            *("operand_batching_dims", "start_indices_batching_dims"),
        ),
    ),
    "scatter": (
        _scatter,
        (
            *("update_window_dims", "inserted_window_dims", "scatter_dims_to_operand_dims", "index_vector_dim", "to_apply"),
            *("input_batching_dims", "scatter_indices_batching_dims", "unique_indices", "indices_are_sorted"),
        ),
    ),
    "convolution": (_convolution, ("dim_labels", "window", "feature_group_count", "batch_group_count", "operand_precision")),
}


def call_of(i: Instruction) -> Call:
    """The primitive that an instruction is; an attribute that no row reads is refused."""
    if i.opcode in ROWS:
        row, read = ROWS[i.opcode]
    elif i.opcode in SAME:
        row, read = (lambda i: (SAME[i.opcode], _everything(i), {})), ()
    else:
        raise Unmapped("no mapping")
    unread = [a for a in i.attrs if a not in _READ and a not in read]
    if unread:
        raise Unmapped(f"attribute {unread[0]}={i.attrs[unread[0]]}")
    return row(i)


__all__ = ["REDUCTIONS", "call_of"]
