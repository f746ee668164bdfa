"""How operators may be cut: labels on the dimensions of their tensors.

A mesh axis may cut a label: every dimension with that label is cut, every tensor without it is whole. What becomes
of a result without the label follows from its kind: `free` results do not depend on it, `sum`, `mean` and `max` ones
hold a share. The rules of `NAME.grad` follow from those of NAME.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from trainverify.graph.program import Op
from trainverify.ops.table import GRAD

Kind = Literal["free", "sum", "mean", "max"]
Labels = tuple[str | None, ...]  # one per dimension; None cannot be cut
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Rule:
    inputs: tuple[Labels, ...]
    outputs: tuple[Labels, ...]
    kinds: dict[str, Kind] = field(default_factory=dict)  # labels not listed are free
    linear: tuple[frozenset[int], ...] = ()  # inputs that may be shares of a sum together, the results being shares then
    added: frozenset[int] = frozenset()  # inputs that must be shares where a `sum` label is cut
    shape: bool = False  # the attribute `shape` is that of the (first) result
    start: str | None = None  # the attribute `start` counts positions of this label
    classes: str | None = None  # the attribute `num_classes` is the size of this label
    offset: str | None = None  # the attribute `query_offset` counts positions of this label
    shares: frozenset[tuple[int, str]] = frozenset()  # (result, label) that is a share whatever the kind of the label

    def share(self, output: int, label: str) -> Kind | None:
        """What a result without the label is a share of (None: it is whole)."""
        if (output, label) in self.shares:
            return "sum"
        kind = self.kinds.get(label, "free")
        return None if kind == "free" else "sum" if kind == "mean" else kind


def letters(n: int, first: str = "a") -> tuple[str, ...]:
    return tuple(f"{first}{i}" for i in range(n))


def axis(dim: int, ndim: int) -> int:
    return dim % ndim if ndim else 0


def rule(op: Op, shapes: Sequence[Shape | None], results: Sequence[Shape]) -> Rule | None:
    """The rule of an op at given shapes; None if there is none (then everything stays whole)."""
    if op.name.endswith(GRAD):
        return _gradient(op, shapes)
    make = RULES.get(op.name)
    return None if make is None else make(op, shapes, results)


def _gradient(op: Op, shapes: Sequence[Shape | None]) -> Rule | None:
    given = op.get("given", (0,))
    n = len(shapes) - len(given)
    make = RULES.get(op.name.removesuffix(GRAD))
    if make is None:
        return None
    base = make(op, shapes[:n], ())
    if base is None:
        return None
    wrt = op.get("wrt")
    seeds = [base.outputs[i] for i in given]
    outputs = tuple(base.inputs[i] for i in wrt)
    labels = {x for s in seeds for x in s if x is not None}
    shares = frozenset((o, x) for o, own in enumerate(outputs) for x in labels if x not in own)
    kinds: dict[str, Kind] = {x: "free" for x, k in base.kinds.items() if k != "max"}
    kinds |= {x: "mean" for x, k in base.kinds.items() if k == "mean"}
    cut = {x: None for x, k in base.kinds.items() if k == "max"}
    inputs = tuple(tuple(cut.get(x, x) if x is not None else None for x in labels) for labels in (*base.inputs, *seeds))
    linear = (frozenset(range(n, n + len(given))),)
    return Rule(inputs, outputs, kinds, linear, frozenset(), base.shape, base.start, base.classes, base.offset, shares)


Make = Callable[[Op, Sequence[Any], Sequence[Any]], Rule | None]


def _elementwise(linear: Callable[[Op, int], tuple[frozenset[int], ...]]) -> Make:
    def make(op: Op, shapes: Sequence[Any], results: Sequence[Any]) -> Rule:
        ndim = max(len(s) for s in shapes if s is not None)
        whole = [max(s[len(s) - ndim + d] for s in shapes if s is not None and len(s) - ndim + d >= 0) for d in range(ndim)]
        inputs = []
        for s in shapes:
            lead = ndim - len(s)
            inputs.append(tuple(f"a{lead + d}" if size == whole[lead + d] else None for d, size in enumerate(s)))
        outputs = (letters(ndim),) * max(1, len(results))
        return Rule(tuple(inputs), outputs, linear=linear(op, len(shapes)))

    return make


def _never(op: Op, n: int) -> tuple[frozenset[int], ...]:
    return ()


def _together(op: Op, n: int) -> tuple[frozenset[int], ...]:
    return () if op.get("value") is not None else (frozenset(range(n)),)


def _either(op: Op, n: int) -> tuple[frozenset[int], ...]:
    return tuple(frozenset((i,)) for i in range(n))


def _first(op: Op, n: int) -> tuple[frozenset[int], ...]:
    return (frozenset((0,)),)


def _update(op: Op, shapes: Sequence[Any], results: Sequence[Any]) -> Rule:
    labels = letters(len(shapes[0]))
    return Rule((labels,) * len(shapes), (labels,) * len(results))


def _linear(op: Op, shapes: Sequence[Any], results: Sequence[Any]) -> Rule:
    lead = letters(len(shapes[0]) - 1, "b")
    inputs: tuple[Labels, ...] = ((*lead, "k"), ("o", "k"))
    bias = len(shapes) > 2
    linear = (frozenset((0, 2)), frozenset((1, 2))) if bias else (frozenset((0,)), frozenset((1,)))
    return Rule((*inputs, ("o",)) if bias else inputs, ((*lead, "o"),), {"k": "sum"}, linear, frozenset((2,)) if bias else frozenset())


def _matmul(op: Op, shapes: Sequence[Any], results: Sequence[Any]) -> Rule:
    x, y = shapes
    n = max(len(x), len(y)) - 2
    left = letters(n, "b")[n - len(x) + 2 :]
    right = letters(n, "b")[n - len(y) + 2 :]
    return Rule(((*left, "m", "k"), (*right, "k", "n")), ((*letters(n, "b"), "m", "n"),), {"k": "sum"}, (frozenset((0,)), frozenset((1,))))


def _reduction(kind: Kind) -> Make:
    def make(op: Op, shapes: Sequence[Any], results: Sequence[Any]) -> Rule:
        n = len(shapes[0])
        dim = op.get("dim")
        dims = set(range(n)) if dim is None else {axis(d, n) for d in ((dim,) if isinstance(dim, int) else dim)}
        keep = op.get("keepdim", False)
        labels = letters(n)
        out = tuple(None if d in dims else x for d, x in enumerate(labels) if keep or d not in dims)
        linear = () if kind == "max" else (frozenset((0,)),)
        return Rule((labels,), (out,), {labels[d]: kind for d in dims}, linear)

    return make


def _along(op: Op, shapes: Sequence[Any], results: Sequence[Any]) -> Rule:
    n = len(shapes[0])
    whole = axis(op.get("dim", -1), n)
    labels = tuple(None if d == whole else x for d, x in enumerate(letters(n)))
    return Rule((labels,), (labels,))


def _norm(op: Op, shapes: Sequence[Any], results: Sequence[Any]) -> Rule:
    labels = (*letters(len(shapes[0]) - 1), None)
    return Rule((labels, *(((None,),) * (len(shapes) - 1))), (labels,))


def _attention(op: Op, shapes: Sequence[Any], results: Sequence[Any]) -> Rule:
    q, k, v = ("b", "h", "s", None), ("b", "h", None, None), ("b", "h", None, "e")
    return Rule((q, k, v), (("b", "h", "s", "e"), ("b", "h", "s")), offset="s" if op.get("is_causal") else None)


def _embedding(op: Op, shapes: Sequence[Any], results: Sequence[Any]) -> Rule:
    lead = letters(len(shapes[0]))
    return Rule((lead, ("v", "h")), ((*lead, "h"),), {"v": "sum"}, (frozenset((1,)),), start="v")


def _one_hot(op: Op, shapes: Sequence[Any], results: Sequence[Any]) -> Rule:
    lead = letters(len(shapes[0]))
    return Rule((lead,), ((*lead, "v"),), start="v", classes="v")


def _cross_entropy(op: Op, shapes: Sequence[Any], results: Sequence[Any]) -> Rule | None:
    lead = letters(len(shapes[0]) - 1)
    if op.get("reduction", "mean") != "sum":
        return None
    return Rule(((*lead, None), lead), ((),), dict.fromkeys([x for x in lead if x is not None], "sum"))


def _mse(op: Op, shapes: Sequence[Any], results: Sequence[Any]) -> Rule:
    labels = letters(len(shapes[0]))
    kind: Kind = "sum" if op.get("reduction", "mean") == "sum" else "mean"
    return Rule((labels, labels), ((),), {x: kind for x in labels if x is not None})


def _reshape(op: Op, shapes: Sequence[Any], results: Sequence[Any]) -> Rule:
    old = shapes[0]
    new = tuple(op.get("shape"))
    if -1 in new:
        rest = math.prod(old) // math.prod(s for s in new if s != -1)
        new = tuple(rest if s == -1 else s for s in new)
    left: list[str | None] = [None] * len(old)
    right: list[str | None] = [None] * len(new)
    i = j = 0
    while i < len(old) and j < len(new):  # dimensions that hold the same elements; the slowest of each side has the label
        a, b, i0, j0 = old[i], new[j], i, j
        while a != b:
            if a < b:
                i += 1
                a *= old[i]
            else:
                j += 1
                b *= new[j]
        left[i0] = right[j0] = f"g{i0}"
        i, j = i + 1, j + 1
    return Rule((tuple(left),), (tuple(right),), linear=(frozenset((0,)),), shape=True)


def _transpose(op: Op, shapes: Sequence[Any], results: Sequence[Any]) -> Rule:
    labels = letters(len(shapes[0]))
    order = list(range(len(labels)))
    a, b = axis(op.get("dim0", 0), len(order)), axis(op.get("dim1", 1), len(order))
    order[a], order[b] = b, a
    return Rule((labels,), (tuple(labels[d] for d in order),), linear=(frozenset((0,)),))


def _permute(op: Op, shapes: Sequence[Any], results: Sequence[Any]) -> Rule:
    labels = letters(len(shapes[0]))
    return Rule((labels,), (tuple(labels[d] for d in op.get("dims")),), linear=(frozenset((0,)),))


def _pieces(op: Op, shapes: Sequence[Any], results: Sequence[Any]) -> Rule:
    n = len(shapes[0])
    whole = axis(op.get("dim", 0), n)
    labels = tuple(None if d == whole else x for d, x in enumerate(letters(n)))
    count = len(op.get("sizes", (0,)))
    return Rule((labels,) * len(shapes), (labels,) * count, linear=(frozenset(range(len(shapes))),))


_FUNCTIONS: Final = "silu relu gelu tanh sigmoid square exp log sqrt rsqrt ne eq float clip_factor reciprocal"
RULES: Final[dict[str, Make]] = {
    **{name: _elementwise(_never) for name in _FUNCTIONS.split()},
    **{name: _elementwise(_together) for name in ("add", "sub", "identity", "neg", "detach")},
    "mul": _elementwise(_either),
    "div": _elementwise(_first),
    "linear": _linear,
    "matmul": _matmul,
    "sum": _reduction("sum"),
    "mean": _reduction("mean"),
    "amax": _reduction("max"),
    "softmax": _along,
    "rms_norm": _norm,
    "layer_norm": _norm,
    "attention": _attention,
    "embedding": _embedding,
    "one_hot": _one_hot,
    "cross_entropy": _cross_entropy,
    "mse_loss": _mse,
    "reshape": _reshape,
    "transpose": _transpose,
    "permute": _permute,
    "slice": _pieces,
    "split": _pieces,
    "concat": _pieces,
    "sgd": _update,
    "adamw": _update,
}
