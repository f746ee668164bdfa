"""The operator library. `OPS` is complete after import and never changes."""

from __future__ import annotations

from types import ModuleType

from trainverify.ops import arithmetic, communication, neural, shaping
from trainverify.ops.table import OpDef, OpTable


def declared(module: ModuleType) -> list[OpDef]:
    """The operators that a module declares, in its order."""
    return [v for v in vars(module).values() if isinstance(v, OpDef)]


_MODULES = (arithmetic, shaping, neural, communication)
OPS = OpTable({d.name: d for m in _MODULES for d in declared(m)})

__all__ = ["OPS", "OpDef", "OpTable", "declared"]
