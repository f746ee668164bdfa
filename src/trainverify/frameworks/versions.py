"""Versions of frameworks that are known to work: those that `make frameworks` installs."""

from __future__ import annotations

from typing import Final

KNOWN: Final = {
    "torchtitan": ("0.3.0",),
    "megatron-core": ("0.16.1",),
    "transformers": ("5.23.0",),
    "accelerate": ("1.15.0",),
    "deepspeed": ("0.19.8",),
}
TORCH: Final = "2.13.0"


def remark(framework: str, version: str) -> tuple[str, ...]:
    """For the verdict line: nothing if the version is a known one."""
    return () if version in KNOWN[framework] else (f"a version that was never tried ({framework} {', '.join(KNOWN[framework])} was)",)
