"""Names of modules and parameters, whatever wraps them."""

from __future__ import annotations

from typing import Final

WRAPPERS: Final = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def clean(name: str) -> str:
    """A name without the parts that wrappers add."""
    return ".".join(p for p in name.split(".") if p not in WRAPPERS)
