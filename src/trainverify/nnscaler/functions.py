"""What nnScaler's functions mean: every signature as one of our operators with its arguments.

A function of the user's is looked up in the operator table by its dotted name, or by the last part of it: tensors in the
order of the call, then constants in the order of the operator's attributes; keyword arguments go by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from trainverify.graph.program import frozen
from trainverify.nnscaler.dump import COMPLEX, DTYPES, Cell, Slice, Thing
from trainverify.ops.table import OpTable


class Unsupported(Exception):
    """A function or argument that has no meaning here: never skipped, the verdict is UNKNOWN."""


@dataclass(frozen=True)
class Call:
    """An operator of ours on tensors of the plan. `ids` = (position, number of rows): that tensor indexes rows of a table."""

    op: str
    tensors: tuple[Slice | None, ...]
    attrs: Mapping[str, Any]
    ids: tuple[int, int] | None = None
    ignore: int | None = None


class _Arguments:
    """The arguments of a call by the names of the function's parameters."""

    def __init__(self, cell: Cell, names: str):
        self.values: dict[str, Any] = {}
        wanted = names.split()
        if len(cell.inputs) > len(wanted):
            raise Unsupported(f"{len(cell.inputs)} positional arguments; known are {', '.join(wanted)}")
        self.values.update(zip(wanted, cell.inputs, strict=False))
        for key, value in cell.kwargs.items():
            if key not in wanted:
                raise Unsupported(f"argument {key} = {value!r}")
            self.values[key] = value

    def tensor(self, name: str) -> Slice:
        value = self.values.get(name)
        if not isinstance(value, Slice):
            raise Unsupported(f"argument {name} is no tensor: {value!r}")
        return value

    def maybe(self, name: str) -> Slice | None:
        return None if self.values.get(name) is None else self.tensor(name)

    def constant(self, name: str, default: Any = None) -> Any:
        value = self.values.get(name, default)
        if isinstance(value, Slice | Thing):
            raise Unsupported(f"argument {name} is no constant")
        return value

    def only(self, **wanted: Any) -> None:
        """Arguments that we know one value of."""
        for name, value in wanted.items():
            if self.constant(name, value) != value:
                raise Unsupported(f"argument {name} = {self.values[name]!r}")


_Meaning = Callable[[Cell], Call]


def _same(op: str, names: str = "input", **only: Any) -> _Meaning:
    """An operator of one tensor; other arguments must have the values given."""

    def meaning(cell: Cell) -> Call:
        args = _Arguments(cell, names)
        args.only(**only)
        return Call(op, (args.tensor("input"),), {})

    return meaning


def _binary(op: str, swaps: bool, names: str = "input other", **only: Any) -> _Meaning:
    def meaning(cell: Cell) -> Call:
        args = _Arguments(cell, names)
        args.only(**only)
        x, y = args.values.get("input"), args.values.get("other")
        if swaps and not isinstance(x, Slice):
            x, y = y, x
        if not isinstance(x, Slice):
            raise Unsupported(f"{op} of the constant {x!r}")
        return Call(op, (x, y), {}) if isinstance(y, Slice) else Call(op, (x,), {"value": y})

    return meaning


def _add(cell: Cell) -> Call:
    args = _Arguments(cell, "input other alpha")
    alpha = args.constant("alpha", 1)
    x, y = args.values.get("input"), args.values.get("other")
    if not isinstance(x, Slice) and alpha == 1:
        x, y = y, x
    if not isinstance(x, Slice):
        raise Unsupported(f"add of the constant {x!r}")
    extra = {} if alpha == 1 else {"alpha": alpha}
    return Call("add", (x, y), extra) if isinstance(y, Slice) else Call("add", (x,), {"value": y, **extra})


def _linear(cell: Cell) -> Call:
    args = _Arguments(cell, "input weight bias")
    bias = args.maybe("bias")
    return Call("linear", (args.tensor("input"), args.tensor("weight"), *(() if bias is None else (bias,))), {})


def _matmul(cell: Cell) -> Call:
    args = _Arguments(cell, "input other")
    return Call("matmul", (args.tensor("input"), args.tensor("other")), {})


def _pow(cell: Cell) -> Call:
    args = _Arguments(cell, "input exponent")
    return Call("pow", (args.tensor("input"),), {"exponent": args.constant("exponent")})


def _reduction(op: str) -> _Meaning:
    def meaning(cell: Cell) -> Call:
        args = _Arguments(cell, "input dim keepdim dtype")
        args.only(dtype=None)
        attrs = {"dim": args.constant("dim"), "keepdim": args.constant("keepdim", False)}
        return Call(op, (args.tensor("input"),), {k: v for k, v in attrs.items() if v is not None and v is not False})

    return meaning


def _softmax(cell: Cell) -> Call:
    args = _Arguments(cell, "input dim _stacklevel dtype")
    args.only(dtype=None)
    return Call("softmax", (args.tensor("input"),), {"dim": args.constant("dim")})


def _view(cell: Cell) -> Call:
    args = _Arguments(cell, "input size shape")
    size = args.constant("size", args.constant("shape"))
    x = args.tensor("input")
    if not isinstance(size, tuple):
        raise Unsupported(f"size {size!r}")
    return Call("view", (x,), {"shape": (*size, 2) if x.full.dtype in COMPLEX else size})


def _transpose(cell: Cell) -> Call:
    args = _Arguments(cell, "input dim0 dim1")
    x = args.tensor("input")
    n = len(x.shape)
    dims = [args.constant(k) for k in ("dim0", "dim1")]
    return Call("transpose", (x,), {"dim0": dims[0] % n, "dim1": dims[1] % n})


def _to(cell: Cell) -> Call:
    args = _Arguments(cell, "input dtype_or_device dtype")
    x = args.tensor("input")
    wish = args.values.get("dtype", args.values.get("dtype_or_device"))
    if (
        not isinstance(wish, Thing)
        or wish.kind != "dtype"
        or wish.value not in DTYPES
        or (wish.value in COMPLEX) != (x.full.dtype in COMPLEX)
    ):
        raise Unsupported(f"to({wish!r})")
    return Call("to", (x,), {"dtype": DTYPES[wish.value]})


def _multiref(cell: Cell) -> Call:
    args = _Arguments(cell, "input times")
    return Call("multiref", (args.tensor("input"),), {"times": args.constant("times")})


def _embedding(cell: Cell) -> Call:
    args = _Arguments(cell, "input weight padding_idx start stop")
    args.only(padding_idx=None)
    ids, weight = args.tensor("input"), args.tensor("weight")
    start, stop = args.constant("start", 0), args.constant("stop", weight.shape[0])
    if stop - start != weight.shape[0]:
        raise Unsupported(f"rows {start} to {stop} of a table with {weight.shape[0]} rows")
    return Call("embedding", (ids, weight), {"start": start}, (0, weight.full.shape[0]))


def _layer_norm(cell: Cell) -> Call:
    args = _Arguments(cell, "input weight bias normalized_shape eps")
    shape = args.constant("normalized_shape")
    tensors = (args.tensor("input"), args.maybe("weight"), args.maybe("bias"))
    return Call("layer_norm", tensors, {"dims": len(shape), "eps": args.constant("eps", 1e-5)})


def _gelu(cell: Cell) -> Call:
    args = _Arguments(cell, "input approximate")
    return Call("gelu", (args.tensor("input"),), {"approximate": args.constant("approximate", "none")})


def _cross_entropy(cell: Cell) -> Call:
    names = "input target weight size_average ignore_index reduce reduction label_smoothing"
    args = _Arguments(cell, names)
    args.only(weight=None, size_average=None, reduce=None)
    logits, target = args.tensor("input"), args.tensor("target")
    if len(logits.shape) != 2:
        raise Unsupported(f"classes in dimension 1 of {list(logits.shape)}")
    reduction, ignore = args.constant("reduction", "mean"), args.constant("ignore_index", -100)
    attrs = {"reduction": reduction, "ignore_index": ignore}
    if args.constant("label_smoothing", 0.0) != 0:
        attrs["label_smoothing"] = args.constant("label_smoothing")
    return Call("cross_entropy", (logits, target), attrs, (1, logits.shape[1]), ignore if reduction == "sum" else None)


# -- functions of the models that the paper verifies --------------------------------------------------------------------


def _create_mask(cell: Cell) -> Call:
    tokens = _Arguments(cell, "tokens h").tensor("tokens")
    return Call("causal_bias", (), {"queries": tokens.shape[1], "keys": tokens.shape[1]})


def _apply_mask(cell: Cell) -> Call:
    args = _Arguments(cell, "x mask")
    return Call("add", (args.tensor("x"), args.tensor("mask")), {})


def _rotary(cell: Cell) -> Call:
    args = _Arguments(cell, "xq xk freqs_cis")
    return Call("rotary_pair", (args.tensor("xq"), args.tensor("xk"), args.tensor("freqs_cis")), {})


def _gate(cell: Cell) -> Call:
    args = _Arguments(cell, "x weight score_func bias n_groups topk_groups topk route_scale")
    args.only(bias=None)
    attrs = {
        "top_k": args.constant("topk"),
        "scoring": args.constant("score_func"),
        "scale": args.constant("route_scale"),
        "groups": args.constant("n_groups"),
        "top_groups": args.constant("topk_groups"),
    }
    return Call("moe_route", (args.tensor("x"), args.tensor("weight")), attrs)


def _experts(cell: Cell) -> Call:
    names = "hidden_states topk_idx topk_weight gate_projs up_projs down_projs n_routed_experts local_expert_start local_expert_end"
    args = _Arguments(cell, names)
    tensors = tuple(args.tensor(n) for n in names.split()[:6])
    start, stop = args.constant("local_expert_start"), args.constant("local_expert_end")
    if stop - start != tensors[3].shape[0]:
        raise Unsupported(f"experts {start} to {stop} with the weights of {tensors[3].shape[0]}")
    return Call("moe_experts", tensors, {"start": start})


_MODEL: Final[Mapping[str, _Meaning]] = {
    "create_mask": _create_mask,
    "apply_mask": _apply_mask,
    "apply_rotary_emb": _rotary,
    "gate_fw": _gate,
    "nnscaler_moe_gmm": _experts,
}
MODEL_MODULES: Final = ("gmodels.llama3", "genmodel.model.llama3_adpt.model", "genmodel.model.llama3_moe.model")

FUNCTIONS: Final[Mapping[str, _Meaning]] = {
    "torch.nn.functional.linear": _linear,
    "torch.matmul": _matmul,
    "torch.add": _add,
    "torch.sub": _binary("sub", False, "input other alpha", alpha=1),
    "torch.mul": _binary("mul", True),
    "torch.div": _binary("div", False, "input other rounding_mode", rounding_mode=None),
    "torch.pow": _pow,
    "torch.neg": _same("neg"),
    "torch.exp": _same("exp"),
    "torch.sqrt": _same("sqrt"),
    "torch.rsqrt": _same("rsqrt"),
    "torch.tanh": _same("tanh"),
    "torch.sin": _same("sin"),
    "torch.cos": _same("cos"),
    "torch.relu": _same("relu"),
    "torch.nn.functional.relu": _same("relu", "input inplace", inplace=False),
    "torch.nn.functional.silu": _same("silu", "input inplace", inplace=False),
    "torch.nn.functional.gelu": _gelu,
    "torch.sigmoid": _same("sigmoid"),
    "torch.sum": _reduction("sum"),
    "torch.mean": _reduction("mean"),
    "torch.softmax": _softmax,
    "torch.nn.functional.softmax": _softmax,
    "torch.nn.functional.cross_entropy": _cross_entropy,
    "torch.transpose": _transpose,
    "torch.Tensor.view": _view,
    "torch.Tensor.reshape": _view,
    "torch.Tensor.contiguous": _same("contiguous"),
    "torch.Tensor.float": _same("float"),
    "torch.Tensor.to": _to,
    "nnscaler.runtime.function.to": _to,
    "nnscaler.runtime.function.identity": _same("identity"),
    "nnscaler.runtime.function.multiref": _multiref,
    "nnscaler.runtime.function.embedding": _embedding,
    "nnscaler.runtime.function.layer_norm": _layer_norm,
    **{f"{module}.{name}": meaning for module in MODEL_MODULES for name, meaning in _MODEL.items()},
}


def call_of(cell: Cell, table: OpTable) -> Call:
    """The operator that a forward operation applies. A user's operator goes before our own meaning of a function."""
    last = cell.signature.rsplit(".", 1)[-1]
    if cell.signature in table.definitions:
        return _users(cell, table, cell.signature)
    if cell.signature in FUNCTIONS:
        return FUNCTIONS[cell.signature](cell)
    if not cell.signature.startswith(("torch.", "nnscaler.")) and last in table.definitions and table[last].family == "custom":
        return _users(cell, table, last)
    raise Unsupported("no meaning is known for this function; give one with --ops FILE")


def _users(cell: Cell, table: OpTable, name: str) -> Call:
    tensors = tuple(v for v in cell.inputs if isinstance(v, Slice))
    constants = [v for v in cell.inputs if not isinstance(v, Slice)]
    names = [a.name for a in table[name].attributes]
    if len(constants) > len(names):
        raise Unsupported(f"{len(constants)} constants for the attributes {', '.join(names) or 'none'} of operator {name}")
    attrs = {**dict(zip(names, constants, strict=False)), **cell.kwargs}
    try:
        return Call(name, tensors, {k: frozen(v) for k, v in attrs.items()})
    except TypeError as error:
        raise Unsupported(str(error)) from error
