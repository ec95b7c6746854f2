"""Answers as they leave for real: unseeded silos and an unseeded server, spoken to in bytes.

The rest of an audit runs the compiled simulation, whose noise comes from a seed. Here the coordinator, the wire and the
silos are those of a run in message mode, and every random number is the operating system's. Silos of one row are
processes of their own; those of the others run in this process (`SiloHere`), which saves their start and changes none
of their answers. A silo answers no round twice, so many answers are a run of many rounds at (nearly) one point.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from silodp.audit import attack
from silodp.audit.lowbits import reached
from silodp.audit.rows import CORRELATED, EXCEEDED, OK, REPEATED, Further, Row, attained_row
from silodp.channels.channel import std_of
from silodp.core import Silo, Site
from silodp.data import FederatedData, Note, SiloData
from silodp.deploy.links import SiloProcess
from silodp.deploy.pipes import joined
from silodp.deploy.silo import SiloServer
from silodp.deploy.silo_process import reply
from silodp.deploy.wire import decode, encode
from silodp.errors import Refused
from silodp.parse import parse_config
from silodp.plan.certificate import settle
from silodp.privacy import accountant
from silodp.randomness import SERVER, SeededRandomness, SystemRandomness, party_key
from silodp.releases import Account
from silodp.run.prepare import Prepared, prepare

CANARIES, BLANK, ROUNDS, LOCAL_STEPS = 1500, 1000, 4, 3
EPSILON, DELTA = 30.0, 1e-5  # what leaks is large against the standard error of so few runs
STILL = 1e-6  # a step so short that all answers are about one point
LOW_ROUNDS, LOW_RECORDS, LOW_PARAMETERS = 200, 40, 100
BATCH_ROUNDS, BATCH = 60, 16  # of twice as many records
FEWEST = 0.4  # of the variance that fresh batches have: a chance of 1e-5 over BATCH_ROUNDS


class SiloHere(AbstractContextManager["SiloHere"]):
    """A silo's whole program behind its wire, without a process of its own."""

    def __init__(self) -> None:
        self.server: SiloServer | None = None
        self.answer = b""

    def send(self, header: dict[str, Any], arrays: Any) -> None:
        self.server, self.answer = reply(self.server, encode(header, dict(arrays)))

    def receive(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        header, arrays = decode(self.answer)
        if header.get("kind") == "refused":
            raise Refused(f"a silo refused: {header['reason']}")
        return header, arrays

    def __exit__(self, *exc: object) -> None:
        """There is nothing to end."""


class Tap:
    """The server's end, with a copy of what arrives and of what comes out."""

    def __init__(self, end: Any):
        self.end, self.bits = end, 0.0
        self.arrived: list[list[np.ndarray]] = []
        self.means: list[np.ndarray] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.end, name)

    def mean(self, packed: Sequence[Any], *rest: Any) -> tuple[Any, Any]:
        value, accounts = self.end.mean(packed, *rest)
        self.means.append(np.asarray(value, np.float64))
        if "value" in packed[0].arrays:
            self.arrived.append([np.asarray(self.end.channel.unpack(each).value, np.float64) for each in packed])
        return value, accounts


def rows() -> list[Further]:
    return [
        Further("untrusted", lambda: noise_row("dp-gd", "untrusted", 2, in_processes=True)),
        Further("untrusted", low_bits_row),
        Further("shuffled", batches_row),
        Further("trusted", lambda: noise_row("dp-gd", "trusted", 2, at_server=True)),
        Further("aggregated", lambda: noise_row("dp-gd", "aggregated", 2, at_server=True, colluding=0)),
        Further("untrusted", lambda: noise_row("local-sgd", "untrusted", 1)),
    ]


def prepared_for(
    algorithm: dict[str, Any], trust: str, silos: Sequence[SiloData], epsilon: float, **privacy: Any
) -> Prepared:
    tree = {
        "privacy": {"trust": trust, "epsilon": epsilon, "delta": DELTA} | privacy,
        "algorithm": {"clip": 1.0} | algorithm,
        "model": {"kind": "logistic", "bias": False},
        "run": {"mode": "messages"},
    }
    notes = (Note(True, "made for an audit"),)
    return prepare(parse_config(tree), FederatedData("real", tuple(silos), None, "classification", ("0", "1"), notes))


def answers(prepared: Prepared, in_processes: bool = False) -> Tap:
    """A whole run in message mode without a seed, settled against its plan; what reached the server."""
    plan, x0 = prepared.plan, prepared.setting.x0
    with ExitStack() as stack:
        kind: Any = SiloProcess if in_processes else SiloHere
        silos = [stack.enter_context(kind()) for _ in prepared.data.silos]
        records = [silo.named() for silo in prepared.data.silos]
        fed = stack.enter_context(joined(plan, silos, records, None))
        tap: Any = Tap(fed.end)
        fed.end = tap
        for _ in fed.rounds(plan.algorithm, x0):
            pass
        settle(plan, fed.final_accounts())
    return tap


# --- the noise of silos, local steps and the server -------------------------------------------------------


def noise_row(
    name: str, trust: str, silos: int, in_processes: bool = False, at_server: bool = False, **privacy: Any
) -> Row:
    """The noise of real answers (or the server's), on records that each pull a coordinate of their own."""
    signs = np.random.default_rng(1).choice([-1.0, 1.0], (silos, CANARIES))
    options = {"local_steps": LOCAL_STEPS, "sampling": "full"} if name == "local-sgd" else {}
    algorithm = {"name": name, "rounds": ROUNDS, "step_size": STILL} | options
    prepared = prepared_for(algorithm, trust, [one_hot(i, signs) for i in range(silos)], EPSILON, **privacy)
    views = views_of(prepared, answers(prepared, in_processes), name, at_server)
    groups = [seen_by(view, i, signs) for i, view in enumerate(views)]
    noise = [view[:, -BLANK:] for view in views]
    claim = float(np.mean([accountant.nearest_gdp(prepared.plan.spent(i)) for i in range(silos)]))  # type: ignore[arg-type]
    reading = attack.separation(groups)
    rounds = max(attack.repeated_noise(each) for each in noise)
    shared = attack.shared_noise(noise[0], noise[1]) if silos > 1 and not at_server else None
    known = max(attack.shared_noise(each, seeded_noise(prepared, silos)) for each in noise)
    repeated = max(rounds, shared or 0.0, known) > CORRELATED / math.sqrt(BLANK)
    where = "processes" if in_processes else "bytes"
    return attained_row((name, trust, f"real noise ({where})"), claim, reading, repeated, rounds, shared)


def seeded_noise(prepared: Prepared, silos: int) -> Float[np.ndarray, "k b"]:
    """What anybody can compute from the config's seed: none of it may be in a real answer."""
    key, (stream,) = jax.random.key(prepared.config.run.seed), prepared.plan.streams
    size = prepared.setting.x0.size

    def noise(round: Array, party: Array, step: Array) -> Array:
        return SeededRandomness(party_key(key, round, party)).normal(f"noise/{stream}", (size,), step)[-BLANK:]

    each = jnp.meshgrid(jnp.arange(ROUNDS), jnp.array([SERVER, *range(silos)]), jnp.arange(LOCAL_STEPS))
    return np.asarray(jax.vmap(noise)(*(axis.ravel() for axis in each)))


def one_hot(silo: int, signs: Float[np.ndarray, "silos n"]) -> SiloData:
    """At 0 a record's gradient is -label/2 of its features: far beyond the clip, along its own coordinate."""
    silos, count = signs.shape
    features = np.zeros((count, silos * count + BLANK), np.float32)
    features[np.arange(count), silo * count + np.arange(count)] = 1e3
    return SiloData(f"silo {silo}", features, (signs[silo] < 0).astype(np.int32))


def views_of(prepared: Prepared, tap: Tap, name: str, at_server: bool) -> list[Float[np.ndarray, "r d"]]:
    """The releases about each silo. A local model is the point it began at, minus the steps along its releases."""
    if at_server:
        return [np.stack(tap.means)] * len(prepared.data.silos)
    views = [np.stack(own) for own in zip(*tap.arrived, strict=True)]
    if name != "local-sgd":
        return views
    began = np.stack([np.zeros_like(tap.means[0]), *tap.means[:-1]])
    return [(began - view) / STILL for view in views]


def seen_by(view: Float[np.ndarray, "r d"], silo: int, signs: Float[np.ndarray, "silos n"]) -> attack.Scores:
    own = slice(silo * CANARIES, (silo + 1) * CANARIES)
    return attack.agreement(view[:, own], signs[silo], view[:, -BLANK:])


# --- batches between machines -----------------------------------------------------------------------------


def batches_row() -> Row:
    """Are shuffled batches drawn anew? Half of the records pull up, half down: how many of either are in a batch
    changes from round to round, unless it is always the same batch. Few messages are randomised at this epsilon."""
    half = np.repeat([0, 1], BATCH).astype(np.int32)
    silos = [SiloData(f"silo {i}", np.full((2 * BATCH, 1), 1e3, np.float32), half) for i in range(2)]
    algorithm = {"name": "dp-sgd", "rounds": BATCH_ROUNDS, "step_size": STILL, "batch": BATCH}
    prepared = prepared_for(algorithm | {"randomizer": "duchi"}, "shuffled", silos, 10 * EPSILON)
    eps0 = 1 / float(prepared.plan.spent(0)[0].multiplier)
    means = np.concatenate(answers(prepared).means) * math.tanh(eps0 / 2)  # of +1 and -1, wrong ones among them
    messages, flipped = 2 * BATCH, 1 / (1 + math.exp(eps0))
    lies = 4 * flipped * (1 - flipped) / messages
    fresh = (1 - 2 * flipped) ** 2 / messages * BATCH / (2 * BATCH - 1)  # drawn without replacement
    measured = float(np.var(means, ddof=1)) / (fresh + lies)
    frozen = measured < FEWEST
    error = math.sqrt(2 / (BATCH_ROUNDS - 1))
    return Row(
        "dp-sgd", "shuffled", ("real batches: variance",), 1.0, measured, error, REPEATED if frozen else OK, 0.0, None
    )


# --- the lowest bits ----------------------------------------------------------------------------------------


def low_bits_row() -> Row:
    """Two silos whose records differ in one: whose is an answer, judged by which float32 numbers either can reach?"""
    claim, scores = low_bits()
    reading = attack.guessing([scores])
    verdict = EXCEEDED if reading.least > claim else OK
    return Row("dp-gd", "untrusted", ("real low bits",), claim, reading.mu, reading.error, verdict, 0.0, None)


def low_bits(
    rounds: int = LOW_ROUNDS, epsilon: float = 8.0, parameters: int = LOW_PARAMETERS
) -> tuple[float, attack.Scores]:
    """mu of one answer, and for each answer by how many coordinates more it is reachable from its own silo's mean."""
    prepared, values = low_bits_run(rounds, epsilon, parameters)
    score = lambda answer, own: reached(answer, *values[own]) - reached(answer, *values[1 - own])
    pairs = answers(prepared).arrived
    scores = np.array([score(each, own) for pair in pairs for own, each in enumerate(pair)], float)
    return 1 / prepared.plan.spent(0)[0].multiplier, scores


def low_bits_run(
    rounds: int, epsilon: float, parameters: int = LOW_PARAMETERS
) -> tuple[Prepared, list[tuple[np.ndarray, np.float32]]]:
    """Two silos whose records differ in one, with each one's mean and the std of its noise."""
    rng = np.random.default_rng(2)
    features = rng.normal(size=(LOW_RECORDS, parameters)).astype(np.float32)
    other = np.concatenate([-features[:1], features[1:]])
    silos = [SiloData(f"silo {i}", each, np.ones(LOW_RECORDS, np.int32)) for i, each in enumerate((features, other))]
    algorithm = {"name": "dp-gd", "rounds": rounds, "step_size": 1e-30}
    prepared = prepared_for(algorithm, "untrusted", silos, epsilon)
    return prepared, [mean_of(prepared, i) for i in range(2)]


def mean_of(prepared: Prepared, silo: int) -> tuple[np.ndarray, np.float32]:
    """A silo's clipped mean as its program computes it, bit for bit, and the std of its noise."""
    data, channel = prepared.data.silos[silo], prepared.plan.noised
    records = (jnp.asarray(data.features), jnp.asarray(data.targets))

    def release(x: Array, records: PyTree) -> tuple[Array, Array]:
        site = Site(
            prepared.ground.objective, channel, records, jnp.int32(len(data.targets)), jnp.int32(silo), alone=True
        )
        asked = Silo(site, jnp.int32(0), SystemRandomness(), (), Account.empty(["value"]))
        made = asked.mean([x], [1.0], 1.0, "value").release()
        return made.value, std_of(made, channel.multiplier("value", asked))

    # Records are arguments, as in a silo's own program: compiled in, they would be summed in another order.
    value, std = jax.jit(release)(prepared.setting.x0, records)
    return np.asarray(value), np.float32(std)
