"""The whole runs of the benchmark: real data, the papers' settings, one config each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from silodp.config import Config
from silodp.data import read_data
from silodp.parse import parse_config
from silodp.run.prepare import Prepared, prepare

MNIST_INPUTS = 785


@dataclass(frozen=True)
class Case:
    """A run: its config as a tree, and what a hand-written loop must know about the model."""

    name: str
    tree: dict[str, Any]
    loss: str
    rounds: int
    activation: str = "relu"
    penalty: float = 0.0

    def config(self, *, noise: bool = True, rounds: int | None = None, **algorithm: Any) -> Config:
        length = rounds or self.rounds
        options = self.tree["algorithm"] | {"rounds": length} | algorithm
        privacy = self.tree["privacy"] if noise else {"trust": self.tree["privacy"]["trust"]}
        tree = self.tree | {"algorithm": options, "privacy": privacy, "run": {"every": length, "seed": 1}}
        return parse_config({key: {k: v for k, v in part.items() if v is not None} for key, part in tree.items()})

    def prepared(self, **changes: Any) -> Prepared:
        config = self.config(**changes)
        return prepare(config, data_of(config))


_read: dict[str, Any] = {}


def data_of(config: Config) -> Any:
    key = config.data.model_dump_json()
    if key not in _read:
        _read[key] = read_data(config.data)
    return _read[key]


def diff2() -> Case:
    return Case(
        "DIFF2-GD, California, 10 silos x 1,651, MLP 8-10-1",
        {
            "data": {
                "source": "california", "silos": 10, "test": 0.2, "records": 1651,
                "preprocess": ["standardise", "target-max"],
            },
            "model": {"kind": "mlp", "hidden": [10], "activation": "softplus"},
            "privacy": {"trust": "trusted", "epsilon": 3.0},
            "algorithm": {
                "name": "diff2-gd", "step_size": 0.125, "clip": 1.0, "clip_difference": 3.0, "restart": 20,
            },
        },
        "squared", 2000, "softplus",
    )  # fmt: skip


def mu2(silos: int) -> Case:
    rounds = 60_000 // silos
    constants = {"gradient_bound": math.sqrt(2 * MNIST_INPUTS), "smoothness": MNIST_INPUTS / 2, "diameter": 0.1}
    return Case(
        f"mu2, MNIST, M = {silos}, d = 7,850",
        {
            "data": {
                "source": "mnist", "silos": silos, "partition": "round-robin",
                "preprocess": ["flatten", "divide:255", "bias"],
            },
            "model": {"kind": "softmax", "bias": False, "initial": "zeros"},
            "privacy": {"trust": "untrusted", "gdp": 4.0},
            "algorithm": {"name": "mu2", "batch": 1} | constants,
        },
        "cross-entropy", rounds,
    )  # fmt: skip


def soteria() -> Case:
    return Case(
        "Soteria-SGD, a9a, 10 silos x 3,256, rand-k",
        {
            "data": {"source": "a9a", "silos": 10, "preprocess": ["bias"], "records": 3256},
            "model": {"kind": "logistic", "bias": False, "regulariser": 0.2, "regulariser_clip": "inside"},
            "privacy": {"trust": "untrusted", "epsilon": 10.0},
            "algorithm": {
                "name": "soteria-sgd", "step_size": 0.6, "clip": 0.5, "batch": 103, "compressor": "rand-k", "keep": 6,
            },
        },
        "logistic", 2000, penalty=0.2,
    )  # fmt: skip


def spider() -> Case:
    return Case(
        "SPIDER, MNIST, 25 silos, MLP 50-64-2",
        {
            "data": {
                "source": "mnist", "silos": 25, "partition": "label-pairs-shared", "per_class": 774,
                "preprocess": ["flatten", "divide:255", "pca:50", "target-parity"],
            },
            "model": {"kind": "mlp", "hidden": [64], "activation": "relu"},
            "privacy": {"trust": "untrusted", "epsilon": 6.0},
            "algorithm": {"name": "spider", "step_size": 0.1, "clip": 1.0, "clip_difference": 1.0, "restart": 2},
        },
        "cross-entropy", 50, "relu",
    )  # fmt: skip


def all_cases() -> list[Case]:
    return [diff2(), mu2(1), mu2(100), soteria(), spider()]


def silo_arrays(prepared: Prepared) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(np.ascontiguousarray(silo.features), silo.targets) for silo in prepared.data.silos]
