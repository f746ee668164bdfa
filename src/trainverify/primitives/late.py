"""Modules that take long to import, imported when one of their names is first used."""

from __future__ import annotations

import importlib
from typing import Any


class Late:
    """A module by its name. Its attributes are kept here once they were asked for."""

    def __init__(self, name: str):
        self.__name__ = name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(importlib.import_module(self.__name__), attribute)
        setattr(self, attribute, value)
        return value
