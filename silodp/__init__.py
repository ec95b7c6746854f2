"""silodp: one model across silos, record-level differential privacy, no trusted server needed."""

from silodp.config import Config, ConfigError
from silodp.data import FederatedData, load_data
from silodp.models import Model, build_model, from_loss
from silodp.run.runner import Run, resume, run
from silodp.run.sweep import sweep

__all__ = [
    "Config",
    "ConfigError",
    "FederatedData",
    "Model",
    "Run",
    "build_model",
    "from_loss",
    "load_data",
    "resume",
    "run",
    "sweep",
]
