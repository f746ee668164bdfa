"""Tensors that are never negative, by how they were made: a sum of exponentials, a running mean of squares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from trainverify.graph.program import Op
from trainverify.translate.emit import Emitter

_NEVER: Final = frozenset(("exp", "sigmoid", "softplus", "square", "sqrt", "rsqrt", "abs", "relu", "norm", "grad_norm", "one_hot"))
_KEEPS: Final = frozenset(
    (
        *("reshape", "expand", "permute", "slice", "select", "flip", "identity", "to", "sum", "mean", "amax", "amin", "prod", "cumsum"),
        *("concat", "stack", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "add", "mul", "div", "minimum", "index_select"),
        "reciprocal",
    )
)
_ACROSS: Final = frozenset(("all_reduce", "all_gather", "reduce_scatter", "all_to_all"))
Literals = Callable[[Any], Sequence[Any]]


class Signs:
    """What is never negative, given sources that are not.

    `literals` gives the values that an attribute has on the ranks that run the program. Results of communication count only if all ranks
    that take part run this program (`shared`)."""

    def __init__(self, e: Emitter, sources: Callable[[str], bool], literals: Literals = lambda v: (v,), shared: bool = False):
        self.e, self.sources, self.literals, self.shared = e, sources, literals, shared
        self._known: dict[str, bool] = {}

    def never_negative(self, name: str) -> bool:
        """Whether no element of a real tensor is below 0, wherever it is defined."""
        waiting = [name]
        while waiting:  # inputs first, without a recursion as deep as the program
            op = self.e.made.get(waiting[-1])
            more = [i for i in (op.inputs if op is not None else ()) if i is not None and i not in self._known]
            if more:
                waiting += more
            else:
                at = waiting.pop()
                self._known[at] = self._never(at, op)
        return self._known[name]

    def _never(self, name: str, op: Op | None) -> bool:
        if self.e.kind(name) == "bool":
            return True
        if op is None:
            return self.sources(name)
        given = [i for i in op.inputs if i is not None]
        match op.name:
            case "full":
                return all(v >= 0 for v in self.literals(op.get("value")))
            case "pow":
                exponent = op.get("exponent")
                return (isinstance(exponent, int) and exponent % 2 == 0) or self._known[given[0]]
            case "maximum":
                return any(self._known[i] for i in given)
            case "where":
                return all(self._known[i] for i in given[1:])
            case "pad":
                return op.get("value", 0) >= 0 and self._known[given[0]]
            case "mul":
                return self._product(op)
        if op.name in _NEVER:
            return True
        if op.name not in _KEEPS or op.get("alpha", 1) != 1 or (op.name in _ACROSS and not self.shared):
            return False
        return all(v is None or v >= 0 for v in self.literals(op.get("value"))) and all(self._known[i] for i in given)

    def _product(self, op: Op) -> bool:
        """Whether every factor is never negative, or stands there an even number of times: c·g·g."""
        odd, waiting = set[str](), [op]
        while waiting:
            at = waiting.pop()
            if any(v is not None and v < 0 for v in self.literals(at.get("value"))):
                return False
            for i in (i for i in at.inputs if i is not None and not self._known[i]):
                inner = self.e.made.get(i)
                if inner is not None and inner.name == "mul":
                    waiting.append(inner)
                else:
                    odd ^= {i}
        return not odd
