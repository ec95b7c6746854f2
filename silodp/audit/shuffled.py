"""Attacks on shuffled messages, drawn by the real channel at the level its plan gives it.

Whatever an algorithm asks, a record's message is its clipped vector through the randomizer, so one pair of opposite
records is the worst case for all of them. Many batches are drawn with either of the pair as the first sender; then

- locally the half-space that a message falls into betrays its record: the log ratio is at most eps0, and exactly that
  for the half-space that the randomizer raises;
- in a batch the majority of such half-spaces, and the side of the first message that a real shuffler releases, betray
  the first sender at most as often as the plan's one-round pair admits.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree
from scipy.stats import norm as gaussian

from silodp.audit import attack
from silodp.audit.attack import Reading
from silodp.channels.shuffled import MESSAGE, Shuffled, message_bytes, message_vector
from silodp.core import Silo, Site
from silodp.data import FederatedData, Note, SiloData
from silodp.deploy import shuffler
from silodp.models import Model, from_loss
from silodp.plan.plan import Plan
from silodp.privacy import halfspace
from silodp.privacy.clones import Messages
from silodp.privacy.clones import Shuffled as Hiding
from silodp.randomness import SeededRandomness, party_key
from silodp.releases import Account
from silodp.run.prepare import Prepared

SIZES = (2, 2)  # among few messages the claim is nearly attained; among many the proof gives away more
BATCH = 1  # of a silo, where batches are drawn
DIMENSION, CLIP = 4, 1.0
TRIALS = 150_000  # batches for either of the two records
POSITIONS = 2_000  # of them through a shuffler
DIRECTION = np.eye(DIMENSION)[0]

Batches = Float[np.ndarray, "t n d"]


@dataclass(frozen=True)
class Found:
    """Claims of one round and what the attacks read; the central ones as the mu of a Gaussian release."""

    claim_eps0: float
    attained: bool  # a message of the plan's level really reaches it
    local: Reading
    claim_mu: float
    central: Reading
    correlation_rounds: float
    correlation_silos: float
    draws: int


def message_data() -> FederatedData:
    """Silos of the sizes that the plan is made for; what their records are does not matter to a plan."""
    silos = tuple(
        SiloData(f"silo {i}", np.ones((n, 1), np.float32), np.zeros(n, np.float32)) for i, n in enumerate(SIZES)
    )
    return FederatedData("messages", silos, None, "regression", (), (Note(True, "made for an audit"),))


def message_model() -> Model:
    """A record is a sign, its gradient that sign along one axis and longer than any clip."""

    def loss(params: PyTree, record: tuple[Array, Array]) -> Array:
        return 1e3 * record[0][0] * params["w"][0]

    return from_loss(loss, lambda key: {"w": jnp.zeros(DIMENSION)}, name="messages")


class Attacks:
    """Algorithms with the same level and the same number of messages are one case: it is attacked once."""

    def __init__(self) -> None:
        self.found: dict[Any, Found] = {}

    def on(self, prepared: Prepared) -> Found:
        plan = prepared.plan
        case = hiding_of(plan), plan.multipliers[MESSAGE]
        if case not in self.found:
            self.found[case] = attack_messages(prepared)
        return self.found[case]


def attack_messages(prepared: Prepared) -> Found:
    plan = prepared.plan
    hiding = hiding_of(plan)
    eps0 = 1 / plan.multipliers[MESSAGE][0]
    own = [hiding.own, hiding.messages - hiding.own]
    signs = [silo_signs(own, victim) for victim in (1.0, -1.0)]
    drawn = draw(prepared, signs)
    batches = [np.concatenate(silos, axis=1) for silos in drawn]
    channel = plan.channel
    assert isinstance(channel, Shuffled)
    edge = edge_of(channel.randomizer.hides, eps0)
    raised = on_side(np.stack(batches), DIRECTION, edge)
    positive = np.stack([np.tile(np.concatenate(each), (TRIALS, 1)) for each in signs]) > 0
    admitted = float(hiding.pld(eps0, 1).get_delta_for_epsilon(0.0))
    count = advantage(*many_on_side(np.stack(batches), DIRECTION, edge))
    first = advantage(*(first_on_side(released(b), DIRECTION) for b in batches))
    noise = np.array([[silo[:, :, 1].ravel()[: TRIALS * min(own)] for silo in silos] for silos in drawn])
    return Found(
        eps0,
        channel.randomizer.hides in ("duchi", "privunit"),
        local_level(raised[positive], raised[~positive]),
        as_mu(admitted),
        max((central(count), central(first)), key=lambda reading: reading.least),
        max(attack.repeated_noise(noise[:, silo]) for silo in range(len(own))),
        max(attack.repeated_noise(each) for each in noise),
        noise.shape[-1],
    )


def edge_of(randomizer: str, eps0: float) -> float:
    """Beyond this component along its record a message is e^eps0 times likelier than for the opposite record."""
    if randomizer != "privunit":
        return 0.0
    threshold = halfspace.best_threshold(eps0, DIMENSION)
    return CLIP * threshold / halfspace.mean_component(eps0, threshold)


def hiding_of(plan: Plan) -> Hiding:
    """What hides one message whose record is in the batch."""
    sampling = next(s.releases.sampling for s in plan.spent(0) if s.releases.stream == MESSAGE)
    assert isinstance(sampling, Messages)
    return dataclasses.replace(sampling.round, rate=1.0, together=1)


def silo_signs(own: list[int], victim: float) -> list[np.ndarray]:
    """The first sender holds the victim's record; all others alternate between the two."""
    alternating = np.where(np.arange(sum(own)) % 2, 1.0, -1.0)
    alternating[0] = victim
    return np.split(alternating, np.cumsum(own)[:-1])


def draw(prepared: Prepared, signs: list[list[np.ndarray]]) -> list[list[Batches]]:
    """TRIALS batches for each victim (a round of its own) and silo."""
    individual = prepared.plan.noised.alone()

    def send(features: Array, round: Array, index: Array) -> Array:
        records = (features, jnp.zeros(features.shape[0]))
        site = Site(prepared.problem.objective, individual, records, jnp.int32(features.shape[0]), index)
        coins = SeededRandomness(party_key(prepared.setting.key, round, index))
        silo = Silo(site, round, coins, (), Account.empty(["value"]))
        return individual.send(silo.mean([prepared.setting.x0], [1.0], CLIP, "value"), silo, ())[0]

    compiled = eqx.filter_jit(send)  # of this audit alone: a program never outlives the code it was compiled from

    def batches(round: int, index: int, own: np.ndarray) -> Batches:
        features = jnp.asarray(np.tile(own, TRIALS)[:, None], jnp.float32)
        sent = compiled(features, jnp.int32(round), jnp.int32(index))
        return np.asarray(sent).reshape(TRIALS, own.size, DIMENSION)

    return [[batches(r, i, own) for i, own in enumerate(silos)] for r, silos in enumerate(signs)]


def released(batches: Batches) -> Batches:
    """Some of the batches as the shuffler hands them on. It works on ciphertexts, so sealing would change nothing."""

    def through(messages: Float[np.ndarray, "n d"]) -> list[np.ndarray]:
        sent = [message_bytes(message) for message in messages]
        return [message_vector(sealed, DIMENSION) for sealed in shuffler.permuted(sent)]

    return np.array([through(batch) for batch in batches[:POSITIONS]])


def as_mu(advantage: float) -> float:
    """The Gaussian release under which two records are told apart with this advantage."""
    return 2 * float(gaussian.ppf((1 + advantage) / 2))


def central(reading: Reading) -> Reading:
    mu = as_mu(min(reading.mu, 1 - 1e-9))
    return Reading(mu, reading.error / float(gaussian.pdf(mu / 2)))


def local_level(event: Bool[np.ndarray, " t"], opposite: Bool[np.ndarray, " t"]) -> Reading:
    """log P(event)/Q(event) from trials under an input and under the opposite one (claim: eps0)."""
    p, q = float(np.mean(event)), float(np.mean(opposite))
    if p == 0 or q == 0:
        return Reading(math.inf if p > 0 else 0.0, 0.0)
    error = math.sqrt((1 - p) / (p * event.size) + (1 - q) / (q * opposite.size))
    return Reading(math.log(p / q), error)


def advantage(event: Bool[np.ndarray, " t"], opposite: Bool[np.ndarray, " t"]) -> Reading:
    """P(event) - Q(event) (claim: delta(0) of the release)."""
    p, q = float(np.mean(event)), float(np.mean(opposite))
    return Reading(p - q, math.sqrt(p * (1 - p) / event.size + q * (1 - q) / opposite.size))


def on_side(
    messages: Float[np.ndarray, "*t d"], direction: Float[np.ndarray, " d"], edge: float = 0.0
) -> Bool[np.ndarray, "*t"]:
    """Sign attack: does a message point to the side of `direction`, and beyond the edge?"""
    return messages @ direction > edge


def many_on_side(
    released: Float[np.ndarray, "2 t n d"], direction: Float[np.ndarray, " d"], edge: float = 0.0
) -> Bool[np.ndarray, "2 t"]:
    """Count attack on shuffled batches: are more of its messages on that side, beyond the edge, than on average?"""
    lead = on_side(released, direction, edge).sum(axis=2) - on_side(released, -direction, edge).sum(axis=2)
    return lead > lead.mean()


def first_on_side(released: Float[np.ndarray, "t n d"], direction: Float[np.ndarray, " d"]) -> Bool[np.ndarray, " t"]:
    """Position attack: the first message is a known sender's if nobody shuffles; its side?"""
    return on_side(released[:, 0], direction)
