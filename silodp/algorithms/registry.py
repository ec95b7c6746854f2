"""Every algorithm by name. A line here is enough for it to be listed, run, accounted, audited and tested."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from silodp.algorithms.bvr import LocalDifference
from silodp.algorithms.differences import RecursiveDifference
from silodp.algorithms.gradient import GradientDescent
from silodp.algorithms.local import LocalSGD
from silodp.algorithms.mu2 import Mu2
from silodp.algorithms.psgm import MomentumDifference
from silodp.algorithms.soteria import SAGA, SVRG
from silodp.algorithms.svrg import ProxSVRG
from silodp.config import ConfigError
from silodp.core import Algorithm
from silodp.sampling import Full

LOWY = "Lowy, Ghafelebashi, Razaviyayn 2023"
DIFF2 = "Murata, Suzuki 2023 (DIFF2)"
SOTERIA = "Li, Zhao, Li, Chi 2022 (SoteriaFL)"
MU2 = "Reshef, Levy 2024 (DP-mu2-FL)"
PSGM = "Efficient Private Federated Non-Convex Optimization with Shuffled Model"


@dataclass(frozen=True)
class Entry:
    """One registered algorithm: its class, what a config may not change, and what is known about it."""

    build: type[Algorithm]
    trusts: tuple[str, ...]
    summary: str
    paper: str = "folklore"
    proved: dict[str, str] = field(default_factory=dict)  # trust model -> theorem that covers it
    example: dict[str, Any] = field(default_factory=dict)  # least options, for tests and audits on small data
    private: bool = True
    fixed: dict[str, Any] = field(default_factory=dict)  # options that make the name what it is
    sampling: str | None = None  # how a batch is drawn unless the config says otherwise
    samplings: tuple[str, ...] = ("full", "poisson", "fixed", "one-pass")
    compression: str = "optional"  # "optional", "plain" or "shifted": what the name implies, or "none"
    any_prox: bool = False  # whether the theorem covers any prox
    randomizer: str = "duchi"  # what hides a record before a shuffler, unless the config says otherwise
    everyone: bool = False  # every silo must take part in every round
    rate: str = ""  # of the squared gradient norm, or of the excess loss for convex and PL losses
    cost: str = ""  # record gradients of a silo in a round
    bits: str = "32 d"  # that a silo sends in a round

    def theorem(self, trust: str, prox: str, compressor: str | None, *, usual: bool = True) -> str | None:
        """The theorem that covers this combination, or None: private all the same, but of unproved utility.

        `usual`: the batches of the paper, silos that weigh alike and all take part.
        """
        covers_prox = prox == "none" or self.any_prox
        covers_compression = (compressor is not None) == (self.compression in ("plain", "shifted"))
        return self.proved.get(trust) if usual and covers_prox and covers_compression else None


BOTH = ("trusted", "untrusted")
ALL = (*BOTH, "shuffled")
SHUFFLED = ("shuffled",)
DIFFERENCES = {"clip": 1.0, "clip_difference": 0.7, "restart": 3}
TWO_LEVEL: dict[str, Any] = {"sampling": "two-level", "samplings": ("two-level",)}
FULL: dict[str, Any] = {"sampling": "full", "samplings": ("full",)}
ONE_STEP: dict[str, Any] = {"local_steps": 1, "clip_local": None, "batch_local": Full()}
ONE_BATCH: dict[str, Any] = {"batch_first": None}
NONCONVEX = "(sqrt(d) / (n sqrt(N) eps))^(4/3) untrusted"
CONVEX = "sqrt(d) / (n N eps) trusted, sqrt(d) / (n sqrt(N) eps) untrusted"
ANCHORED = "32 d (+ 32 d at an anchor)"
SUMS = "32 (d + 1)"
COMPRESSED: dict[str, Any] = {
    "rate": "sqrt((1+omega) d) / (n sqrt(N) eps)", "bits": "the compressor's: rand-k 32 k + 64"
}  # fmt: skip

REGISTRY: dict[str, Entry] = {
    "gd": Entry(GradientDescent, BOTH, "gradient descent", private=False, samplings=("full",), cost="n"),
    "dp-gd": Entry(
        GradientDescent, ALL, "full-batch clipped gradients, noised", DIFF2,
        example={"clip": 1.0}, samplings=("full",), rate=CONVEX, cost="n",
    ),
    "mb-sgd": Entry(
        GradientDescent, BOTH, "minibatch SGD", private=False, sampling="poisson", example={"batch": 8}, cost="b"
    ),
    "dp-sgd": Entry(
        GradientDescent, ALL, "minibatch clipped gradients, noised", LOWY,
        example={"clip": 1.0, "batch": 8}, sampling="poisson", rate=CONVEX, cost="b",
    ),
    "local-sgd": Entry(
        LocalSGD, ("untrusted",), "silos train locally with noise, models are averaged", LOWY,
        example={"clip": 1.0, "batch": 8, "local_steps": 3}, sampling="poisson",
        samplings=("full", "poisson", "fixed"), cost="K b",
    ),
    "diff2-gd": Entry(
        RecursiveDifference, ALL, "private gradient differences with restarts", DIFF2, {"trusted": "Thm 4.3"},
        example=DIFFERENCES, fixed={"capped": False}, rate="(sqrt(d) / (n N eps))^(4/3)", cost="2n (n at a restart)",
    ),
    "diff2-bvr-l-sgd": Entry(
        LocalDifference, BOTH, "DIFF2 with local steps of one silo a round", DIFF2, {"trusted": "Thm 5.3"},
        example=DIFFERENCES | {"clip_local": 0.7, "local_steps": 3, "batch_local": 8}, fixed={"capped": False},
        everyone=True, rate="(sqrt(d) / (n N eps))^(4/3), fewer rounds", cost="2n, and 2 K b for one silo",
        bits="32 d, and 32 d for one silo",
    ),
    "spider": Entry(
        RecursiveDifference, ALL, "private gradient differences with restarts, any prox", LOWY,
        {"untrusted": "Thm 3.1"}, example=DIFFERENCES | {"prox": {"kind": "l1", "strength": 0.01}}, any_prox=True,
        rate=NONCONVEX, cost="2n (n at a restart)",
    ),
    "spider-alt": Entry(
        RecursiveDifference, BOTH, "spider in pairs of rounds on Poisson batches", LOWY,
        example={"clip": 1.0, "clip_difference": 0.7, "batch": 8}, fixed={"restart": 2}, sampling="poisson",
        cost="b, then 2b",
    ),
    "prox-sgd": Entry(
        GradientDescent, BOTH, "one pass of clipped gradients, noised, any prox", LOWY, {"untrusted": "Thm 2.1"},
        example={"clip": 1.0}, sampling="one-pass", samplings=("one-pass",), any_prox=True,
        rate="kappa^2 d / (mu n^2 N eps^2) + kappa / (mu n N) for proximal PL", cost="n/R",
    ),
    "prox-svrg": Entry(
        ProxSVRG, BOTH, "differences to an anchor, any prox", LOWY, {"untrusted": "Thm 2.2 (one stage)"},
        example={"clip": 1.0, "clip_difference": 0.7, "batch": 8, "restart": 3}, sampling="poisson", any_prox=True,
        cost="2b (+ n at an anchor)", bits=ANCHORED,
    ),
    "prox-pl-svrg": Entry(
        ProxSVRG, BOTH, "stages of prox-svrg for proximal PL losses", LOWY, {"untrusted": "Thm 2.2"},
        example={"clip": 1.0, "clip_difference": 0.7, "batch": 8, "restart": 2, "epochs": 1}, sampling="poisson",
        any_prox=True, rate="kappa d / (mu n^2 N eps^2) for proximal PL", cost="2b (+ n at an anchor)", bits=ANCHORED,
    ),
    "soteria-gd": Entry(
        GradientDescent, ("untrusted",), "shifted compression of noised gradients", SOTERIA, {"untrusted": "Cor. 1"},
        example={"clip": 1.0, "compressor": "rand-k", "keep": 3}, samplings=("full",), compression="shifted",
        cost="n", **COMPRESSED,
    ),
    "soteria-sgd": Entry(
        GradientDescent, ("untrusted",), "shifted compression of noised minibatch gradients", SOTERIA,
        {"untrusted": "Cor. 1"}, example={"clip": 1.0, "batch": 8, "compressor": "rand-k", "keep": 3},
        sampling="poisson", compression="shifted", cost="b", **COMPRESSED,
    ),
    "soteria-svrg": Entry(
        SVRG, ("untrusted",), "shifted compression, SVRG in the silos", SOTERIA, {"untrusted": "Cor. 2"},
        example={"clip": 1.0, "batch": 8, "snapshot_probability": 0.3, "compressor": "rand-k", "keep": 3},
        compression="shifted", cost="2b (+ n at a snapshot)", **COMPRESSED,
        **TWO_LEVEL,
    ),
    "soteria-saga": Entry(
        SAGA, ("untrusted",), "shifted compression, SAGA in the silos", SOTERIA, {"untrusted": "Cor. 3"},
        example={"clip": 1.0, "batch": 8, "compressor": "rand-k", "keep": 3}, compression="shifted",
        cost="b", **COMPRESSED, **TWO_LEVEL,
    ),
    "cdp-sgd": Entry(
        GradientDescent, ("untrusted",), "plain compression of noised minibatch gradients", SOTERIA,
        {"untrusted": "Thm 1"}, example={"clip": 1.0, "batch": 8, "compressor": "rand-k", "keep": 3},
        sampling="poisson", compression="plain", cost="b", **COMPRESSED,
    ),
    "ldp-sgd": Entry(
        GradientDescent, ("untrusted",), "noised minibatch gradients, uncompressed", SOTERIA,
        example={"clip": 1.0, "batch": 8}, sampling="poisson", compression="none", rate="sqrt(d) / (n sqrt(N) eps)",
        cost="b",
    ),
    "ldp-svrg": Entry(
        SVRG, ("untrusted",), "SVRG in the silos, uncompressed", SOTERIA,
        example={"clip": 1.0, "batch": 8, "snapshot_probability": 0.3}, compression="none",
        rate="sqrt(d) / (n sqrt(N) eps)", cost="2b (+ n at a snapshot)", **TWO_LEVEL,
    ),
    "mu2": Entry(
        Mu2, BOTH, "corrected momentum, one pass, convex, on a ball", MU2,
        {"untrusted": "Thm 5.2", "trusted": "Thm 6.2"},
        example={"clip": 1.0, "diameter": 4.0, "batch": 2}, sampling="cumulative", samplings=("cumulative",),
        everyone=True, rate="1/sqrt(N n) + sqrt(d) / (n sqrt(N) eps) untrusted (n N eps trusted)",
        cost="2 per record of the chunk",
    ),
    "mb-psgm": Entry(
        MomentumDifference, ALL, "momentum with private differences (STORM)", PSGM, {"shuffled": "Thm A.3"},
        example={"clip": 1.0, "clip_difference": 0.7, "momentum": 0.3}, fixed=ONE_STEP,
        rate="1/R + (sqrt(d) / (n N eps))^(4/3) shuffled", cost="3b", bits="64 d (fused: 32 d)",
    ),
    "ce-psgm": Entry(
        MomentumDifference, ALL, "momentum with private differences and local steps of one silo a round", PSGM,
        {"shuffled": "Thm 4.2"},
        example={"clip": 1.0, "clip_difference": 0.7, "momentum": 0.3, "clip_local": 0.7, "local_steps": 3,
                 "batch_local": 8}, everyone=True, rate="1/R + (sqrt(d) / (n N eps))^(4/3) shuffled",
        cost="3b, and 2 K b for one silo", bits="64 d (fused: 32 d), and 32 d for one silo",
    ),
    "mb-psgm-fg": Entry(
        MomentumDifference, ALL, "mb-psgm on full gradients", PSGM, {"shuffled": "Thm A.4"},
        example={"clip": 1.0, "clip_difference": 0.7, "momentum": 0.3}, fixed=ONE_STEP | ONE_BATCH, **FULL,
        rate="1/R + (sqrt(d) / (n N eps))^(4/3) shuffled", cost="3n", bits="64 d (fused: 32 d)",
    ),
    "ce-psgm-fg": Entry(
        MomentumDifference, ALL, "ce-psgm on full gradients", PSGM, {"shuffled": "Thm A.2"},
        example={"clip": 1.0, "clip_difference": 0.7, "momentum": 0.3, "clip_local": 0.7, "local_steps": 3,
                 "batch_local": 8}, fixed=ONE_BATCH, everyone=True, **FULL,
        rate="1/R + (sqrt(d) / (n N eps))^(4/3) shuffled", cost="3n, and 2 K b for one silo",
        bits="64 d (fused: 32 d), and 32 d for one silo",
    ),
    "sdp-prox-sgd": Entry(
        GradientDescent, SHUFFLED, "prox-sgd on P_vec's sums", LOWY, {"shuffled": "Thm 2.1"},
        example={"clip": 1.0, "batch": 4}, sampling="one-pass", samplings=("one-pass",), any_prox=True,
        randomizer="pvec", cost="n/R", bits=SUMS,
    ),
    "sdp-prox-svrg": Entry(
        ProxSVRG, SHUFFLED, "prox-svrg on P_vec's sums", LOWY, {"shuffled": "Thm 2.2 (one stage)"},
        example={"clip": 1.0, "clip_difference": 0.7, "restart": 3}, any_prox=True, randomizer="pvec",
        cost="2b (+ n at an anchor)", bits=SUMS,
    ),
    "sdp-prox-pl-svrg": Entry(
        ProxSVRG, SHUFFLED, "prox-pl-svrg on P_vec's sums", LOWY, {"shuffled": "Thm 2.2"},
        example={"clip": 1.0, "clip_difference": 0.7, "restart": 2, "epochs": 1}, any_prox=True, randomizer="pvec",
        cost="2b (+ n at an anchor)", bits=SUMS,
    ),
    "sdp-spider": Entry(
        RecursiveDifference, SHUFFLED, "spider on P_vec's sums", LOWY, {"shuffled": "Thm 3.2"}, example=DIFFERENCES,
        any_prox=True, randomizer="pvec", cost="2n (n at a restart)", bits=SUMS,
    ),
}  # fmt: skip


def find(name: str) -> Entry:
    if name not in REGISTRY:
        raise ConfigError(f"algorithm.name = {name!r}: unknown; known: {', '.join(REGISTRY)}")
    return REGISTRY[name]
