"""Every algorithm by name, and how a config becomes one."""

from silodp.algorithms.options import build_algorithm
from silodp.algorithms.registry import REGISTRY, Entry, find

__all__ = ["REGISTRY", "Entry", "build_algorithm", "find"]
