"""Opacus' DP-SGD for `python -m bench.utility`: linear models on Poisson batches, all records in one place.

Opacus counts records that are added or removed; everything else here promises epsilon when a record is replaced. To
replace one is to remove one and add another, so Opacus' own epsilon is too small for that promise: its noise is
calibrated here by the library's accountant, whose pair for replacement under Poisson batches is tight. Opacus' unit is
the clip norm C, the accountant's is 2 C, how far a sum of drawn records moves.
"""

from __future__ import annotations

import itertools
import warnings

import numpy as np

from bench.averages import DELTA
from bench.tasks import Arrays, Task
from silodp.privacy import accountant
from silodp.privacy.kinds import Poisson, Releases

SHARE, ROUNDS, MOMENTUM = 0.25, 40, 0.9
STEPS, CLIPS = (0.3, 1.0, 4.0), (0.1, 0.5)
UNIT = 0.15  # as bench.families has it


def noise_multiplier(epsilon: float) -> float:
    """In clip norms, for (epsilon, DELTA) when a record is replaced."""
    return 2 * accountant.calibrate([Releases("value", ROUNDS, Poisson(SHARE))], epsilon, DELTA)["value"]


def opacus(task: Task, train: Arrays, test: Arrays, epsilon: float, seed: int) -> list[float]:
    import torch

    torch.manual_seed(seed)
    torch.set_num_threads(1)  # steps are so short that other threads only wait
    unit, multiplier = UNIT if task.kind == "linear" else 1.0, noise_multiplier(epsilon)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus: of hooks and of numbers that are not for cryptography
        return [
            trained(task.kind, train, test, multiplier, unit * step, clip / unit)
            for step, clip in itertools.product(STEPS, CLIPS)
        ]


def trained(kind: str, train: Arrays, test: Arrays, multiplier: float, step: float, clip: float) -> float:
    import torch
    import torch.nn.functional as F
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer
    from torch import nn

    losses = {"linear": F.mse_loss, "logistic": F.binary_cross_entropy_with_logits, "softmax": F.cross_entropy}
    targets = torch.tensor(train[1], dtype=torch.long if kind == "softmax" else torch.float32)
    features, outputs = torch.tensor(train[0]), int(targets.max()) + 1 if kind == "softmax" else 1
    net = nn.Linear(features.shape[1], outputs)
    for parameter in net.parameters():
        nn.init.zeros_(parameter)
    module = GradSampleModule(net)
    plain = torch.optim.SGD(module.parameters(), lr=step, momentum=MOMENTUM, nesterov=True)
    optimiser = DPOptimizer(
        plain, noise_multiplier=multiplier, max_grad_norm=clip, expected_batch_size=int(SHARE * len(features))
    )
    kept = []
    for _ in range(ROUNDS):
        rows = (torch.rand(len(features)) < SHARE).nonzero()[:, 0]
        told = module(features[rows])
        optimiser.zero_grad()
        losses[kind](told if kind == "softmax" else told[:, 0], targets[rows]).backward()
        optimiser.step()
        kept.append(torch.cat([net.weight, net.bias[:, None]], dim=1).detach().clone())
    weights = torch.stack(kept[-(ROUNDS // 4) :]).mean(0).numpy()
    return score(kind, test[0] @ weights[:, :-1].T + weights[:, -1], test[1])


def score(kind: str, told: np.ndarray, truth: np.ndarray) -> float:
    if kind == "softmax":
        return float(np.mean(told.argmax(1) == truth))
    if kind == "logistic":
        return float(np.mean((told[:, 0] > 0) == (truth > 0)))
    return float(np.nan_to_num(1 - np.mean((told[:, 0] - truth) ** 2) / np.var(truth), nan=-9.0, neginf=-9.0))
