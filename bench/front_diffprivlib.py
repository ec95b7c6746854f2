"""diffprivlib's models for `python -m bench.front`, in an interpreter of their own: they need an older scikit-learn.

    python -m venv DIR && DIR/bin/pip install diffprivlib==0.6.6 scikit-learn==1.5.2
    SILODP_DIFFPRIVLIB=DIR/bin/python python -m bench.front

Called with an .npz of train, targets, test, truth, classes, epsilon, seed, lengths, bound; prints the scores of every
setting as JSON.
"""

import itertools
import json
import sys
import warnings

import numpy as np
from diffprivlib.models import LinearRegression, LogisticRegression

STRENGTHS = (0.01, 1.0, 100.0)


def shortened(features: np.ndarray, length: float) -> np.ndarray:
    return features * np.minimum(1, length / np.maximum(np.linalg.norm(features, axis=1), 1e-12))[:, None]


def main() -> None:
    given = np.load(sys.argv[1])
    train, targets, test, truth = (given[name].astype(np.float64) for name in ("train", "targets", "test", "truth"))
    epsilon, seed, bound = float(given["epsilon"]), int(given["seed"]), float(given["bound"])
    found = []
    if given["classes"]:
        for length, strength in itertools.product(given["lengths"], STRENGTHS):
            model = LogisticRegression(epsilon=epsilon, data_norm=float(length), C=strength, random_state=seed)
            model.fit(shortened(train, length), targets.astype(int))
            found.append(float(np.mean(model.predict(test) == truth)))
    else:
        model = LinearRegression(epsilon=epsilon, bounds_X=(-bound, bound), bounds_y=(-1, 1), random_state=seed)
        model.fit(np.clip(train, -bound, bound), targets)
        answers = model.predict(np.clip(test, -bound, bound))
        found.append(float(1 - np.mean((answers - truth) ** 2) / np.var(truth)))
    print(json.dumps(found))


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main()
