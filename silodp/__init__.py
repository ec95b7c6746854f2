"""silodp: one model across silos, record-level differential privacy, no trusted server needed."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from silodp.config import Config
    from silodp.data import FederatedData, load_data
    from silodp.errors import ConfigError
    from silodp.models import Model, build_model, from_loss
    from silodp.run.directory import load_model
    from silodp.run.runner import Run, resume, train
    from silodp.run.sweep import sweep

# Loaded on first use: a shuffler process or `silodp --help` needs no JAX.
_HOMES = {
    "Config": "silodp.config",
    "ConfigError": "silodp.errors",
    "FederatedData": "silodp.data",
    "Model": "silodp.models",
    "Run": "silodp.run.runner",
    "build_model": "silodp.models",
    "from_loss": "silodp.models",
    "load_data": "silodp.data",
    "load_model": "silodp.run.directory",
    "resume": "silodp.run.runner",
    "sweep": "silodp.run.sweep",
    "train": "silodp.run.runner",
}

__all__ = [
    "Config",
    "ConfigError",
    "FederatedData",
    "Model",
    "Run",
    "build_model",
    "from_loss",
    "load_data",
    "load_model",
    "resume",
    "sweep",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'silodp' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
