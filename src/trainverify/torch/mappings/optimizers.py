"""Fused optimizers. (The for-loop and foreach ones are ordinary arithmetic.)"""

from __future__ import annotations

from trainverify.torch.mappings.table import Arguments, Number, rows
from trainverify.torch.values import Unknown, Unmapped

ROWS, row = rows()


@row("aten::_fused_adamw", "aten::_fused_adam")
def fused_adam(a: Arguments) -> list[str | Unknown]:
    raise Unmapped("a fused optimizer: use foreach=True")


__all__ = ["ROWS", "Number"]
