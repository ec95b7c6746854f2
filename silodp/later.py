"""Libraries that only some runs need, imported when something of theirs is first used."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any


class Later(ModuleType):
    """Stands for a module of that name until one of its names is asked for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)
