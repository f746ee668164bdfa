"""What a step returns: its loss and metrics, as tensors, as numbers that were read of them, and as plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from trainverify.torch.discover import NotSupported
from trainverify.torch.reading import Number


def losses(returned: Any) -> dict[str, torch.Tensor]:
    """The loss, and metrics by name, that are computed."""
    if isinstance(returned, Mapping):
        return {str(k): t for k, v in returned.items() if (t := _computed(v)) is not None}
    if (loss := _computed(returned)) is not None:
        return {"loss": loss}
    if isinstance(returned, list | tuple) and any(_computed(v) is not None for v in returned):
        raise NotSupported(f"the step returns a {type(returned).__name__}: return its loss, or a dictionary with `loss` and metrics")
    return {}


def plain_numbers(returned: Any) -> dict[str, float]:
    """Those that no tensor leads to: sizes, rates, counts."""
    named = returned if isinstance(returned, Mapping) else {"loss": returned}
    kinds = (bool, int, float, np.bool_, np.integer, np.floating)
    return {str(k): float(v) for k, v in named.items() if isinstance(v, kinds) and not _is_computed(v)}


def _is_computed(value: Any) -> bool:
    return type(value) is Number


def _computed(value: Any) -> torch.Tensor | None:
    """A tensor, or that of a computed number; None of anything else."""
    if _is_computed(value):
        return value._tensor.reshape(())
    return value if isinstance(value, torch.Tensor) else None
