"""RECORDS: readers, named datasets, partitions into silos, and recorded preprocessing."""

from silodp.data.datasets import DATASETS, load_dataset
from silodp.data.load import load_data, read_data
from silodp.data.partition import PARTITIONS
from silodp.data.preprocess import STEPS
from silodp.data.schema import Schema
from silodp.data.types import FederatedData, Note, SiloData, Table, Task

__all__ = [
    "DATASETS",
    "PARTITIONS",
    "STEPS",
    "FederatedData",
    "Note",
    "Schema",
    "SiloData",
    "Table",
    "Task",
    "load_data",
    "load_dataset",
    "read_data",
]
