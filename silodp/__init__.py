"""silodp: one model across silos, record-level differential privacy, no trusted server needed.

`SiloClassifier`, `SiloRegressor` and `load` need an epsilon and give a model that can be used; `ImageFeatures` goes
before them.
`train`, `sweep`, `resume`, `account` and `audit` are what one does; `load_data`, `build_model` and `algorithms` make
what they take. `Algorithm`, `Channel`, `Compressor`, `Randomizer` and `register` are for parts of one's own.
"""

import functools
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from silodp import algorithms as algorithms
    from silodp import channels as channels
    from silodp.audit import audit as audit
    from silodp.channels import Channel as Channel
    from silodp.channels import Randomizer as Randomizer
    from silodp.compressors import Compressor as Compressor
    from silodp.config import Config as Config
    from silodp.core import Algorithm as Algorithm
    from silodp.core import Federation as Federation
    from silodp.core import Silo as Silo
    from silodp.data import FederatedData as FederatedData
    from silodp.data import Schema as Schema
    from silodp.data import load_data as load_data
    from silodp.errors import ConfigError as ConfigError
    from silodp.estimators import SiloClassifier as SiloClassifier
    from silodp.estimators import SiloRegressor as SiloRegressor
    from silodp.estimators import load as load
    from silodp.facts import Facts as Facts
    from silodp.facts import Stream as Stream
    from silodp.front.images import ImageFeatures as ImageFeatures
    from silodp.models import Model as Model
    from silodp.models import build_model as build_model
    from silodp.models import from_loss as from_loss
    from silodp.plan.account import account as account
    from silodp.plan.plan import Plan as Plan
    from silodp.registry import register as register
    from silodp.releases import Public as Public
    from silodp.releases import Release as Release
    from silodp.run.directory import load_model as load_model
    from silodp.run.runner import Run as Run
    from silodp.run.runner import resume as resume
    from silodp.run.runner import train as train
    from silodp.run.sweep import sweep as sweep
    from silodp.torch_in import from_torch as from_torch
    from silodp.torch_in import to_torch as to_torch

# The public names and where they live. Loaded on first use: a shuffler process or `silodp --help` needs no JAX.
_HOMES = {
    "train": "silodp.run.runner",
    "sweep": "silodp.run.sweep",
    "resume": "silodp.run.runner",
    "account": "silodp.plan.account",
    "audit": "silodp.audit",
    "SiloClassifier": "silodp.estimators",
    "SiloRegressor": "silodp.estimators",
    "load": "silodp.estimators",
    "ImageFeatures": "silodp.front.images",
    "load_data": "silodp.data",
    "load_model": "silodp.run.directory",
    "build_model": "silodp.models",
    "from_loss": "silodp.models",
    "from_torch": "silodp.torch_in",
    "to_torch": "silodp.torch_in",
    "register": "silodp.registry",
    "Algorithm": "silodp.core",
    "Channel": "silodp.channels",
    "Compressor": "silodp.compressors",
    "Config": "silodp.config",
    "ConfigError": "silodp.errors",
    "Facts": "silodp.facts",
    "FederatedData": "silodp.data",
    "Federation": "silodp.core",
    "Model": "silodp.models",
    "Plan": "silodp.plan.plan",
    "Public": "silodp.releases",
    "Randomizer": "silodp.channels",
    "Release": "silodp.releases",
    "Run": "silodp.run.runner",
    "Schema": "silodp.data",
    "Silo": "silodp.core",
    "Stream": "silodp.facts",
    "algorithms": "silodp.algorithms",
    "channels": "silodp.channels",
}

__all__ = [*_HOMES, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]


@functools.cache  # (the name `cache` is a module's here)
def _version() -> str:
    from importlib import metadata  # here: a tenth of `silodp --help`

    try:
        return metadata.version("silodp")
    except metadata.PackageNotFoundError:  # a clone that was put on the path
        return "0+unknown"


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _HOMES:
        raise AttributeError(f"module 'silodp' has no attribute {name!r}")
    home = importlib.import_module(_HOMES[name])
    # A folder of that name is the public name itself (silodp.audit may be called): importing it binds the folder.
    return home if home.__name__ == f"{__name__}.{name}" else getattr(home, name)


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})
