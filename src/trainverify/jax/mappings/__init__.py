"""The mapping from primitives of JAX to our operators, one row for each."""

from __future__ import annotations

from trainverify.jax.mappings import communication, elementwise, formulas, indexing, linear, reductions, shaping
from trainverify.jax.mappings.table import Row

MAPPINGS: dict[str, Row] = {
    **elementwise.ROWS,
    **shaping.ROWS,
    **reductions.ROWS,
    **linear.ROWS,
    **indexing.ROWS,
    **communication.ROWS,
    **formulas.ROWS,
}

__all__ = ["MAPPINGS"]
