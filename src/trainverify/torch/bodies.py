"""Operators that PyTorch itself writes in Python: what they do is what their bodies call.

These are custom operators (the gathers of context parallelism), and activations and losses by the formulas that its compiler uses."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch._decomp import decomposition_table
from torch._library.custom_ops import OPDEFS

_TORCH: Final = str(Path(torch.__file__).parent) + os.sep

_FORMULAS: Final = frozenset(
    (
        *(f"aten::{n}{e}" for n in ("hardtanh", "leaky_relu", "elu", "mish", "hardswish", "hardsigmoid") for e in ("", "_backward")),
        *("aten::softplus_backward", "aten::log_sigmoid_forward", "aten::log_sigmoid_backward"),
        *(f"aten::{n}{e}" for n in ("huber_loss", "smooth_l1_loss") for e in ("", "_backward")),
        *("aten::native_group_norm", "aten::native_group_norm_backward"),
    )
)


def python_body(func: Any) -> Callable[..., Any] | None:
    """The body of such an operator, if it is the only one for all devices and writes to nothing that it is given."""
    if func._schema.name in _FORMULAS and not func._schema.is_mutable:
        formula: Callable[..., Any] | None = decomposition_table.get(func)
        return formula
    found = OPDEFS.get(func._schema.name) if func._overloadname == "default" else None
    if found is None or func._schema.is_mutable or len(found._backend_fns) != 1:
        return None
    body: Callable[..., Any] = found._init_fn
    return body if body.__code__.co_filename.startswith(_TORCH) else None
