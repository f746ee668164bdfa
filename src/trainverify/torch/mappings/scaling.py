"""Loss scaling of `torch.amp.GradScaler`. Over the real numbers no gradient overflows: no step is skipped, which a verdict assumes."""

from __future__ import annotations

from trainverify.torch.mappings.table import Arguments, rows

ROWS, row = rows()


@row("aten::_amp_foreach_non_finite_check_and_unscale")
def unscale(a: Arguments) -> list[str | None]:
    """g ← g · inv_scale; `found_inf` stays what it is."""
    a.ignore("found_inf")
    factor = a.operand("inv_scale")

    def scaled(g: str) -> str:
        return a.e.op("mul", (g, a.e.reshape(factor, ()))) if isinstance(factor, str) else a.times(g, factor)

    return [*(scaled(g) for g in a.tensors("self")), None]
