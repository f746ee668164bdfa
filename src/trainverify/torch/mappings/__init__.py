"""What ATen ops mean: one row each, over our operators."""

from __future__ import annotations

from trainverify.torch.mappings import (
    arithmetic,
    complex,
    convolution,
    creation,
    indexing,
    linear,
    losses,
    neural,
    optimizers,
    reductions,
    scaling,
    shaping,
    sharded,
)
from trainverify.torch.mappings.table import Row, Table

_MODULES = (arithmetic, convolution, creation, indexing, linear, losses, neural, optimizers, reductions, scaling, sharded, shaping)
MAPPINGS: Table = {name: row for m in _MODULES for name, row in m.ROWS.items()}
COMPLEX: Table = complex.ROWS  # of calls with complex tensors

__all__ = ["COMPLEX", "MAPPINGS", "Row", "Table"]
