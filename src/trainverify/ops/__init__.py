"""The operator library. `OPS` is complete after import and never changes."""

from __future__ import annotations

from types import ModuleType

from trainverify.ops import (
    arithmetic,
    attention,
    communication,
    convolution,
    indexing,
    linear_algebra,
    losses,
    masks,
    moe,
    neural,
    optimizers,
    random,
    reductions,
    shaping,
)
from trainverify.ops.table import OpDef, OpTable


def declared(module: ModuleType) -> list[OpDef]:
    """The operators that a module declares, in its order."""
    return [v for v in vars(module).values() if isinstance(v, OpDef)]


_MODULES = (
    arithmetic,
    reductions,
    shaping,
    linear_algebra,
    neural,
    attention,
    moe,
    convolution,
    indexing,
    masks,
    random,
    losses,
    optimizers,
    communication,
)
OPS = OpTable({}).extended(d for m in _MODULES for d in declared(m))

__all__ = ["OPS", "OpDef", "OpTable", "declared"]
