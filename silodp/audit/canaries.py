"""Records made to be found: each pulls its own coordinate to the side of its secret sign, as hard as clipping allows.

    f(x; z) = sign * x[coordinate] * (steady * (1 + clock) + turning * cos(pi * clock / DRIFT)) - drive * clock

`clock` is one more parameter. Drivers push it on by about DRIFT in every step, so that canaries have differences of
gradients too; all of a canary's gradients and differences lie (nearly) along its own coordinate and exceed every clip.
There are two kinds. The gradient of a STEADY canary grows: what it does to several steps adds up. That of a TURNING one
changes sides with every step: two gradients, each clipped, then differ by twice the clip, which shows whether it is the
difference that is clipped. A driver's own coordinate carries nothing but noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from silodp.data import FederatedData, Note, SiloData
from silodp.gradients import embed
from silodp.models import Model, from_loss

SIZES = (2000, 1600)  # unequal, because silos are
STEADY, TURNING, DRIVER = 0, 1, 2
PATTERN = (STEADY, TURNING, STEADY, DRIVER)  # repeated, so that every chunk of records has all kinds
FEATURES = {STEADY: (1e3, 0.0, 0.0), TURNING: (0.0, 1e3, 0.0), DRIVER: (0.0, 0.0, 1e3)}  # steady, turning, drive
STEP_SIZE, CLIP = 0.3, 1.0
DRIFT = STEP_SIZE * CLIP / len(PATTERN)  # of the clock in one step of plain gradient descent


@dataclass(frozen=True)
class Canaries:
    """All silos' records in order: who they are, whose they are, and the signs an adversary is to guess in each run."""

    kind: Int[np.ndarray, " d"]
    silo: Int[np.ndarray, " d"]
    position: Int[np.ndarray, " d"]
    sign: Float[np.ndarray, "runs d"]

    @property
    def runs(self) -> int:
        return self.sign.shape[0]

    @property
    def blank(self) -> Bool[np.ndarray, " d"]:
        """Coordinates in which only noise is released."""
        return self.kind == DRIVER


def make_canaries(seed: int, sizes: tuple[int, ...] = SIZES, runs: int = 1) -> Canaries:
    position = np.concatenate([np.arange(n) for n in sizes])
    sign = np.random.default_rng(seed).choice([-1.0, 1.0], (runs, position.size))
    return Canaries(np.array(PATTERN)[position % len(PATTERN)], np.repeat(np.arange(len(sizes)), sizes), position, sign)


def canary_data(canaries: Canaries, run: int = 0) -> FederatedData:
    rows = np.array([FEATURES[k] for k in canaries.kind])
    spare = np.zeros(canaries.kind.size)  # five features, as the example options of algorithms expect
    features = np.column_stack([np.arange(canaries.kind.size), rows, spare]).astype(np.float32)
    sign = canaries.sign[run].astype(np.float32)

    def silo(i: int) -> SiloData:
        own = canaries.silo == i
        return SiloData(f"silo {i}", features[own], sign[own])

    silos = tuple(silo(i) for i in range(canaries.silo.max() + 1))
    return FederatedData("canaries", silos, None, "regression", (), (Note(True, "made for an audit"),))


def turned(clocks: Float[np.ndarray, "*n"]) -> Float[np.ndarray, "*n"]:
    """To which side a turning canary pulls at such a time: 1 or -1."""
    return np.where(np.cos(np.pi * clocks / DRIFT) > 0, 1.0, -1.0)


@cache
def canary_model(coordinates: int) -> Model:
    """One object for all: programs are shared between runs of the same model."""

    def init(key: Key[Array, ""]) -> PyTree:
        return {"canary": jnp.zeros((coordinates, 1)), "clock": jnp.zeros((1, 1))}

    return from_loss(canary_loss, init, name="canaries")


def canary_loss(params: PyTree, record: tuple[Array, Array]) -> Array:
    features, sign = record
    coordinate, steady, turning, drive, _ = features
    own = embed(params["canary"], coordinate.astype(jnp.int32))[0]
    clock = embed(params["clock"], jnp.int32(0))[0]
    pull = steady * (1 + clock) + turning * jnp.cos(jnp.pi * clock / DRIFT)
    return sign * own * pull - drive * clock
