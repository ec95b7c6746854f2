"""diffprivlib's models for `python -m bench.front` and `bench.utility`, in an interpreter of their own: they need an
older scikit-learn.

    python -m venv DIR && DIR/bin/pip install diffprivlib==0.6.6 scikit-learn==1.5.2
    SILODP_DIFFPRIVLIB=DIR/bin/python python -m bench.front

Called with an .npz of train and test (two encodings of each), targets, truth, classes, epsilons, seed, lengths, bound;
prints the scores of every setting as JSON, a row for each epsilon.
"""

import json
import sys
import warnings

import numpy as np
from diffprivlib.models import LinearRegression, LogisticRegression


def shortened(features: np.ndarray, length: float) -> np.ndarray:
    return features * np.minimum(1, length / np.maximum(np.linalg.norm(features, axis=1), 1e-12))[:, None]


def scores(given: dict[str, np.ndarray], epsilon: float, train: np.ndarray, test: np.ndarray) -> list[float]:
    targets, truth = given["targets"].astype(np.float64), given["truth"].astype(np.float64)
    seed, bound = int(given["seed"]), float(given["bound"])
    if not given["classes"]:
        model = LinearRegression(epsilon=epsilon, bounds_X=(-bound, bound), bounds_y=(-1, 1), random_state=seed)
        model.fit(np.clip(train, -bound, bound), targets)
        answers = model.predict(np.clip(test, -bound, bound))
        return [float(1 - np.mean((answers - truth) ** 2) / np.var(truth))]
    found = []
    for length in given["lengths"]:
        model = LogisticRegression(epsilon=epsilon, data_norm=float(length), random_state=seed)
        model.fit(shortened(train, length), targets.astype(int))
        found.append(float(np.mean(model.predict(test) == truth)))
    return found


def main() -> None:
    with np.load(sys.argv[1]) as file:
        given = dict(file)
    pairs = [[given[name].astype(np.float64) for name in pair] for pair in (("train", "test"), ("train2", "test2"))]
    told = lambda epsilon: [score for pair in pairs for score in scores(given, epsilon, *pair)]
    print(json.dumps([told(float(epsilon)) for epsilon in given["epsilons"]]))


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main()
