"""Plans for the models of the zoo, with explicit collectives, transfers and backward ops."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # each is imported when it is first used: options need the degrees, and no plan
    from trainverify.zoo.parallel.deepseek import deepseek_plan, deepseek_step
    from trainverify.zoo.parallel.degrees import Degrees
    from trainverify.zoo.parallel.gpt import gpt_plan, gpt_step
    from trainverify.zoo.parallel.llama import llama_plan, llama_step

__all__ = ["Degrees", "deepseek_plan", "deepseek_step", "gpt_plan", "gpt_step", "llama_plan", "llama_step"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "degrees" if name == "Degrees" else name.partition("_")[0]
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
