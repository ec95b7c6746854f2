"""RECORDS: readers, named datasets, partitions into silos, and recorded preprocessing."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from silodp.data.datasets import DATASETS as DATASETS
    from silodp.data.datasets import load_dataset as load_dataset
    from silodp.data.load import load_data as load_data
    from silodp.data.load import read_data as read_data
    from silodp.data.partition import PARTITIONS as PARTITIONS
    from silodp.data.preprocess import STEPS as STEPS
    from silodp.data.schema import Schema as Schema
    from silodp.data.types import FederatedData as FederatedData
    from silodp.data.types import Note as Note
    from silodp.data.types import SiloData as SiloData
    from silodp.data.types import Table as Table
    from silodp.data.types import Task as Task

# Loaded on first use: a silo gets its records through a pipe, and needs no reader of files.
_HOMES = {
    "DATASETS": "datasets", "PARTITIONS": "partition", "STEPS": "preprocess", "FederatedData": "types", "Note": "types",
    "Schema": "schema", "SiloData": "types", "Table": "types", "Task": "types", "load_data": "load",
    "load_dataset": "datasets", "read_data": "load",
}  # fmt: skip

__all__ = [*_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'silodp.data' has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
