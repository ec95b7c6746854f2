"""`python -m bench.intercepts [TASK ...]`: what intercepts of silos bring, and where they do harm.

Records of a task are given to silos in four ways: at random; each class by shares that are drawn (Dirichlet: the
smaller alpha, the more silos differ in their label rates, and in nothing else); by the value of the feature that tells
most about the label, so that rates differ because features do. Test records get silos in the same way. Features are
standardised by the training records, which no epsilon covers, for all columns alike.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable

import numpy as np

import silodp
from bench.tasks import TASKS, Split, split
from silodp.errors import SilodpWarning

EPSILON, SEEDS, SILOS = 1.0, 2, 5
Places = tuple[np.ndarray, np.ndarray]  # of training and of test records
Given = Callable[[Split, np.random.Generator], Places]


def by_class(alpha: float) -> Given:
    def given(made: Split, rng: np.random.Generator) -> Places:
        classes = len(made.classes)
        shares = np.cumsum(rng.dirichlet(np.full(SILOS, alpha), classes), axis=1)
        draw = lambda labels: np.minimum((rng.random(len(labels))[:, None] > shares[labels]).sum(axis=1), SILOS - 1)
        return draw(made.train[1]), draw(made.test[1])

    return given


def at_random(made: Split, rng: np.random.Generator) -> Places:
    train, test = (rng.integers(0, SILOS, len(labels)) for labels in (made.train[1], made.test[1]))
    return train, test


def by_feature(made: Split, rng: np.random.Generator) -> Places:
    x, y = made.train
    told = np.nan_to_num([abs(np.corrcoef(column, y)[0, 1]) if column.std() else 0.0 for column in x.T])
    best = int(np.argmax(told))
    limits = np.quantile(x[:, best], np.arange(1, SILOS) / SILOS)
    return np.searchsorted(limits, x[:, best]), np.searchsorted(limits, made.test[0][:, best])


WAYS: dict[str, Given] = {
    "by class, alpha 0.2": by_class(0.2),
    "by a feature": by_feature,
    "by class, alpha 1": by_class(1.0),
    "at random": at_random,
}


def measured(name: str, way: str, seed: int) -> list[float]:
    """Accuracy of a fit without intercepts, and of one with them: its common model, and that of every row's silo."""
    made = split(TASKS[name], seed)
    train, test = WAYS[way](made, np.random.default_rng(seed))
    big = np.flatnonzero(np.bincount(train, minlength=SILOS) >= 50)
    kept, told = np.isin(train, big), np.isin(test, big)
    (x, y), (tests, truth) = made.train, made.test
    fit = lambda own: silodp.SiloClassifier(
        epsilon=EPSILON, delta=1e-5, held_out=None, silo_intercepts=own, random_state=seed
    ).fit(x[kept] * np.sqrt(x.shape[1]), y[kept], silo=train[kept])
    tests, truth, whose = tests[told] * np.sqrt(x.shape[1]), truth[told], test[told]
    plain, own = fit(False), fit(True)
    return [plain.score(tests, truth), own.score(tests, truth), own.score(tests, truth, silo=whose)]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*", default=["covtype"])
    asked = parser.parse_args(arguments)
    warnings.simplefilter("ignore", SilodpWarning)
    print(f"{SILOS} silos (fewer where one has less than 50 records), untrusted, epsilon {EPSILON:g}, {SEEDS} splits")
    print("| accuracy | silos' records | without | with, no silo given | with, for each row's silo |")
    print("|---|---|---|---|---|")
    for name in asked.tasks:
        for way in WAYS:
            found = np.mean([measured(name, way, seed) for seed in range(SEEDS)], axis=0)
            cells = " | ".join(f"{value:.3f}".removeprefix("0") for value in found)
            print(f"| {name} | {way} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
