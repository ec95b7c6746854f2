"""Sampled releases, read with the coins on the table.

A release whose batch or mask is drawn is a mixture, and its claim has two parts: how often a record is exposed, and by
how much it shows when it is. An adversary sees neither apart. The auditor runs the silo, so it knows the coins: given
that a canary is as exposed as the proof's worst record, its release is Gaussian and has exactly the mu of its noise
multiplier. Such a release is a trial of its own, and what is read of it is as sharp as for a plain Gaussian.

    masked (rand-k)    the canary's coordinate is kept
    SVRG, SAGA         the record is drawn, and the gradient that enters is the opposite of the one that it replaces
"""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from silodp.algorithms.soteria import SVRG
from silodp.audit.attack import Reading, Scores, frequency, separation
from silodp.audit.canaries import STEADY, TURNING, Canaries, turned
from silodp.audit.observe import View, run_key
from silodp.plan.plan import Plan
from silodp.privacy.kinds import Masked, Sampling, TwoLevel
from silodp.randomness import SeededRandomness, party_key
from silodp.run.prepare import Prepared

Exposed = Float[np.ndarray, "r runs d"]  # 0: not in the worst way; else the side of the canary's sign it shows


def sampling_of(plan: Plan, silo: int) -> Sampling:
    return plan.spent(silo)[0].releases.sampling


def is_read_by_coins(plan: Plan) -> bool:
    """The mixtures that a linear score over a whole run reads badly; the others it reads at their claim."""
    return isinstance(sampling_of(plan, 0), Masked | TwoLevel)


def given_coins(prepared: Prepared, views: list[View], canaries: Canaries) -> tuple[float, Reading, bool]:
    """Claim and reading of a release given the worst coins, and whether such coins are more frequent than planned."""
    read = masked if isinstance(sampling_of(prepared.plan, 0), Masked) else two_level
    groups, claims, frequent = [], [], False
    for silo, view in enumerate(views):
        exposed, happened, rate = read(prepared, view, canaries, silo)
        groups.append(exposed_scores(view, canaries, exposed))
        claims.append(1 / prepared.plan.spent(silo)[0].multiplier)
        frequent = frequent or frequency(happened).least > rate
    sizes = np.array([group.size for group in groups])
    return float(sizes @ claims / sizes.sum()), separation(groups), frequent


def exposed_scores(view: View, canaries: Canaries, exposed: Exposed) -> Scores:
    """score * sign of every exposed release, in units of its noise."""
    noise = np.where(view.releases != 0, view.releases, np.nan)[:, :, canaries.blank]
    spread = np.nanstd(noise, axis=(1, 2))[:, None, None]
    return (view.releases * exposed * canaries.sign / spread)[exposed != 0]


def masked(
    prepared: Prepared, view: View, canaries: Canaries, silo: int
) -> tuple[Exposed, Bool[np.ndarray, "..."], float]:
    own = (canaries.silo == silo) & (canaries.kind == STEADY)
    kept = view.releases != 0
    sampling = sampling_of(prepared.plan, silo)
    assert isinstance(sampling, Masked)
    return np.where(kept & own, 1.0, 0.0), kept[:, :, own], sampling.keep / sampling.parameters


def two_level(
    prepared: Prepared, view: View, canaries: Canaries, silo: int
) -> tuple[Exposed, Bool[np.ndarray, "..."], float]:
    own = canaries.silo == silo
    size = int(own.sum())
    drawn = drawn_in(prepared, canaries.runs, silo)[:, :, :size]
    entering = np.broadcast_to(turned(view.clocks[:, :, :1]), drawn.shape)
    opposite = drawn & (replaced(prepared, view, drawn, entering) == -entering) & (canaries.kind[own] == TURNING)
    exposed = np.zeros(view.releases.shape)
    exposed[:, :, own] = np.where(opposite, entering, 0.0)
    sampling = sampling_of(prepared.plan, silo)
    assert isinstance(sampling, TwoLevel)
    return exposed, drawn, sampling.batch / sampling.records


def replaced(prepared: Prepared, view: View, drawn: np.ndarray, entering: np.ndarray) -> Float[np.ndarray, "r runs n"]:
    """The side of the gradient that a drawn record's new one replaces: at the anchor, or when it was last drawn."""
    if isinstance(prepared.setting.algorithm, SVRG):
        return np.broadcast_to(turned(view.clocks[:, :, 1:2]), drawn.shape)
    table, sides = np.ones(drawn.shape[1:]), []
    for joins, new in zip(drawn, entering, strict=True):
        sides.append(table)
        table = np.where(joins, new, table)
    return np.stack(sides)


def drawn_in(prepared: Prepared, runs: int, silo: int) -> Bool[np.ndarray, "r runs n"]:
    """Who was drawn in each round: the silo's own coins, tossed again."""
    rule, problem = prepared.setting.algorithm.batch, prepared.problem  # type: ignore[attr-defined]
    records = jax.tree.map(lambda leaf: leaf[silo], problem.silos.records)
    length = jax.tree.leaves(records)[0].shape[0]

    def joins(round: Array, key: Array) -> Array:
        coins = SeededRandomness(party_key(key, round, silo))
        drawer = SimpleNamespace(records=records, size=problem.silos.sizes[silo], round=round, randomness=coins)
        return jnp.zeros(length, bool).at[rule.draw(drawer, "value").rows].set(True, mode="drop")

    keys = jnp.stack([run_key(prepared, run) for run in range(runs)])
    each_run = jax.vmap(joins, in_axes=(None, 0))
    return np.asarray(jax.jit(jax.vmap(each_run, in_axes=(0, None)))(jnp.arange(problem.rounds), keys))
