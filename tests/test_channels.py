"""What each trust model answers for: accounts, noise, protection, both ends of the wire, and what an auditor sees."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from silodp.channels import Channel, Compressed, Shuffled, Summed, Trusted, Untrusted
from silodp.channels.channel import Packed, ServerEnd, SiloEnd
from silodp.channels.pvec import Part
from silodp.channels.sealed import OVERHEAD, Terms
from silodp.compressors import Identity, RandK
from silodp.config import ModelConfig
from silodp.core import Silo, Site
from silodp.errors import ConfigError, Refused
from silodp.facts import Declared, Facts, Stream
from silodp.models import model_of
from silodp.objective import build_objective, example_record
from silodp.parse import parse_config
from silodp.plan.make import make_plan
from silodp.plan.plan import Plan
from silodp.privacy import accountant
from silodp.privacy.clones import Messages
from silodp.privacy.coins import ROUNDED, beyond, sensitivity
from silodp.privacy.kinds import Full as Gaussian
from silodp.privacy.kinds import Masked, Releases, Spent
from silodp.randomness import SeededRandomness
from silodp.releases import Account, Public, Release
from silodp.sampling import MOVES, FixedSize, Full
from tests.cases import case
from tests.outside.topk import TopK

SIZES, WEIGHTS, D = (40, 25, 31), (0.5, 0.3, 0.2), 6
FACTS = Facts(
    SIZES,
    ("a", "b", "c"),
    record=("float32[5]", "int32[]"),
    outputs=2,
    task="classification",
    parameters=D,
    weights=WEIGHTS,
    rounds=4,
)
VALUE, LOCAL = Stream("value", 4, Full()), Stream("local", 2, Full(), local=True)
NOMINAL = np.array([2.0, 3.0, 5.0])
PLAIN = [Trusted(), Untrusted(), Compressed(compressor=RandK(2)), Shuffled(), Summed()]
OWN_NOISE = [Untrusted(), Compressed(compressor=RandK(2))]


def declared(*streams: Stream, together: int = 1, **changes: Any) -> Declared:
    return Declared(replace(FACTS, **changes), (streams or (VALUE, LOCAL),) * 3, together)


def named(channel: Channel) -> str:
    return type(channel).__name__


# --- the promise --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channel", [Trusted(), *OWN_NOISE, Summed()], ids=named)
def test_streams_are_accounted_as_they_are(channel):
    lines = channel.accounted(declared(), 1, declared().streams[1])
    value = Releases("value", 4, Gaussian())
    if isinstance(channel, Summed):
        value = replace(value, coins=D, lost=2 * ROUNDED * D * 3)
    assert lines == [value, Releases("local", 2, Gaussian())]
    assert channel.accounted_as(LOCAL) == "local" and channel.accounted_as(VALUE) == "value"


def test_a_mask_is_accounted_where_the_message_passes_it():
    channel = Compressed(compressor=RandK(2), mask_amplification=True)
    lines = channel.accounted(declared(), 1, declared().streams[1])
    assert lines == [Releases("value", 4, Masked(2, D)), Releases("local", 2, Gaussian())]
    sampled = Stream("value", 4, FixedSize(5))
    with pytest.raises(ValueError, match="only known for full batches"):
        channel.accounted(declared(sampled), 0, [sampled])
    with pytest.raises(ConfigError, match=r"model\.parameters is missing"):
        channel.accounted(declared(parameters=None), 0, [VALUE])


def test_messages_of_a_shuffler_are_one_line():
    own = (VALUE, Stream("difference", 3, Full()), Stream("first", 1, FixedSize(5), alone=True), LOCAL)
    message, local = Shuffled().accounted(declared(*own, together=2), 1, own)
    assert message.stream == "message" and message.count == 4 + 3 + 1
    hiding = message.sampling
    assert isinstance(hiding, Messages) and hiding.first is not None
    assert (hiding.round.messages, hiding.round.own, hiding.round.together) == (96, 25, 2)
    assert (hiding.first.messages, hiding.first.own, hiding.first.rate) == (15, 5, 5 / 25)
    assert local == Releases("local", 2, Gaussian())
    assert [Shuffled().accounted_as(s) for s in own] == ["message", "message", "message", "local"]


def test_a_shuffler_counts_on_the_smallest_silos_only():
    line = Shuffled().accounted(declared(VALUE, participation=2), 0, [VALUE])[0]
    assert isinstance(line.sampling, Messages) and line.sampling.round.messages == 40 + 25


@pytest.mark.parametrize("channel", [Shuffled(), Summed()], ids=named)
def test_a_shuffler_needs_the_dimension(channel):
    with pytest.raises(ConfigError, match=r"model\.parameters is missing"):
        channel.accounted(declared(VALUE, parameters=None), 0, [VALUE])


@pytest.mark.parametrize("channel", [Shuffled(), Summed()], ids=named)
def test_under_a_shuffler_silos_weigh_what_they_send(channel):
    by_size = tuple(n / sum(SIZES) for n in SIZES)
    channel.check(declared(VALUE, weights=by_size), SimpleNamespace(weights="size"))
    with pytest.raises(ConfigError, match=r"algorithm\.weights = 'equal'"):
        channel.check(declared(VALUE), SimpleNamespace(weights="equal"))


@pytest.mark.parametrize("channel", OWN_NOISE, ids=named)
def test_noise_of_a_silos_own_protects_that_silo(channel):
    for name in ("value", "local"):
        np.testing.assert_array_equal(channel.joint(name, NOMINAL, declared()), NOMINAL)
        np.testing.assert_array_equal(channel.protecting(name, NOMINAL, declared()), NOMINAL)
        np.testing.assert_allclose(channel.std_over_clip(name, NOMINAL, declared()), NOMINAL * MOVES / np.array(SIZES))
    assert channel.averaged(4) == 2.0


def test_trusted_noise_is_what_the_worst_silo_needs():
    moves = np.array(WEIGHTS) * MOVES / np.array(SIZES)
    joint = Trusted().joint("value", NOMINAL, declared())
    np.testing.assert_allclose(joint, np.max(NOMINAL * moves / moves.max()))
    protecting = Trusted().protecting("value", joint, declared())
    np.testing.assert_allclose(protecting, joint[0] * moves.max() / moves)
    assert (protecting >= NOMINAL * (1 - 1e-12)).all()
    # The same noise on the average, whoever is asked about it.
    np.testing.assert_allclose(Trusted().std_over_clip("value", joint, declared()), joint[0] * moves.max())
    assert Trusted().averaged(4) == 4


def test_trusted_noise_with_absent_silos_is_nominal():
    some = declared(participation=2)
    np.testing.assert_array_equal(Trusted().joint("value", NOMINAL, some), [5.0] * 3)
    np.testing.assert_array_equal(Trusted().protecting("value", NOMINAL, some), NOMINAL)
    heaviest = np.max(np.array(WEIGHTS) / (0.2 + 0.3) * MOVES / np.array(SIZES))
    np.testing.assert_allclose(Trusted().std_over_clip("value", NOMINAL, some), NOMINAL * heaviest)


def trusted_account(bounds: Any, weights: Any = WEIGHTS, multiplier: float = 2.0) -> np.ndarray:
    """The multipliers that a trusted server counts for the silos of one release."""
    channel = Trusted(multipliers={"value": jnp.full(3, multiplier)})
    bounds = jnp.asarray(bounds, jnp.float32)
    messages = jax.vmap(lambda bound: Release(jnp.zeros(D), bound, "value"))(bounds)
    accounts, coins = Account.empty(["value"], (len(bounds),)), SeededRandomness(jax.random.key(0))
    spent = eqx.filter_jit(channel.receive)(messages, jnp.asarray(weights), accounts, coins, ())[1]
    return np.asarray(spent.tallies["value"].multiplier)


def test_a_trusted_server_counts_for_each_silo_what_its_records_are_hidden_by():
    """Noise over the distance that one record of the silo moves the average: no more for a silo of little weight."""
    bounds = 2 / np.array(SIZES)
    moves = np.array(WEIGHTS) * bounds
    np.testing.assert_allclose(trusted_account(bounds), 2.0 * moves.max() / moves, rtol=1e-6)
    np.testing.assert_allclose(
        trusted_account(bounds), Trusted().protecting("value", np.full(3, 2.0), declared()), rtol=1e-6
    )
    np.testing.assert_allclose(
        trusted_account(bounds[:2], WEIGHTS[:2])[1], 2.0 * max(1, moves[0] / moves[1]), rtol=1e-6
    )


def test_a_release_that_moves_nothing_does_not_count_as_less_noise():
    """Two equal points have a difference of bound 0: with silos of unequal size the run was refused for it."""
    assert np.isinf(trusted_account([0.0, 0.0, 0.0])).all()
    assert np.isinf(trusted_account([np.inf, np.inf, np.inf])).all()
    assert (trusted_account([0.0, 1.0, np.inf], multiplier=0.0) == 0).all()


@pytest.mark.parametrize("channel", PLAIN, ids=named)
def test_local_noise_is_the_silos_own_under_every_trust(channel):
    np.testing.assert_array_equal(channel.joint("local", NOMINAL, declared()), NOMINAL)
    np.testing.assert_array_equal(channel.protecting("local", NOMINAL, declared()), NOMINAL)
    np.testing.assert_allclose(channel.std_over_clip("local", NOMINAL, declared()), NOMINAL * MOVES / np.array(SIZES))


@pytest.mark.parametrize(
    ("channel", "line"), [(Trusted(), "value"), (Shuffled(), "message"), (Summed(), "value")], ids=str
)
def test_a_silo_that_never_sends_asks_for_no_noise(channel, line):
    joint = channel.joint(line, np.array([2.0, math.inf, 2.0]), declared(weights=(0.4, 0.2, 0.4)))
    assert np.isfinite(joint).all() and len(set(joint)) == 1
    assert np.isinf(channel.joint(line, np.full(3, math.inf), declared())).all()


@pytest.mark.parametrize(("channel", "line"), [(Shuffled(), "message"), (Summed(), "value")], ids=str)
def test_one_level_serves_all_under_a_shuffler(channel, line):
    np.testing.assert_array_equal(channel.joint(line, NOMINAL, declared()), [5.0] * 3)
    np.testing.assert_array_equal(channel.protecting(line, NOMINAL, declared()), NOMINAL)


def test_noise_of_the_average_under_a_shuffler():
    one = Shuffled().randomizer(1 / 2.0).variance(D, 1.0) / D
    std = Shuffled().std_over_clip("message", np.full(3, 2.0), declared())
    np.testing.assert_allclose(std, math.sqrt(one / sum(SIZES)))
    std = Summed(grid=200).std_over_clip("value", NOMINAL, declared())
    np.testing.assert_allclose(std, NOMINAL * sensitivity(200, D) * 2 / 200 / sum(SIZES))


def epsilons_left(plan: Plan, silo: int = 0) -> tuple[float, dict[str, float] | None]:
    left = plan.channel.left_if(plan.spent(silo), silo, plan.declared, plan.config.privacy.delta)
    return plan.epsilon(silo), left


def test_what_is_left_when_others_collude():
    facts = Facts(SIZES, ("a", "b", "c"), parameters=D)
    for name, trust in [("dp-gd", "trusted"), ("dp-gd", "untrusted"), ("soteria-gd", "untrusted")]:
        assert epsilons_left(make_plan(case(name, trust), facts))[1] is None
    whole, left = epsilons_left(make_plan(case("dp-gd", "shuffled"), facts))
    assert left is not None and whole < left["other_silos_collude"] < left["shuffler_colludes"]
    whole, left = epsilons_left(make_plan(case("dp-gd", "shuffled", randomizer="pvec"), facts))
    assert left is not None and left.keys() == {"other_silos_collude", "masks_are_broken"}
    assert whole < left["other_silos_collude"] == left["masks_are_broken"] < math.inf


def test_few_coins_of_ones_own_leave_nothing():
    spent = [Spent(Releases("value", 4, Gaussian()), 1e-3)]
    left = Summed(grid=2).left_if(spent, 0, declared(VALUE), 1e-4)
    assert left == {"other_silos_collude": math.inf, "masks_are_broken": math.inf}
    local = [Spent(Releases("local", 2, Gaussian()), 3.0)]
    left = Summed().left_if(local, 0, declared(), 1e-4)  # noise that nobody else has a part in
    assert left == dict.fromkeys(("other_silos_collude", "masks_are_broken"), accountant.epsilon(local, 1e-4))


@pytest.mark.parametrize("epsilon", [4.0, 40.0])
def test_the_far_tail_of_few_coins_is_not_forgotten(epsilon):
    """Coins are no worse than their Gaussian but for a mass far out, which grows with a loose target."""
    config = case("dp-gd", "shuffled", randomizer="pvec").model_dump(exclude_unset=True)
    config["privacy"] |= {"epsilon": epsilon, "delta": 1e-8}
    plan = make_plan(parse_config(config), Facts(SIZES, ("a", "b", "c"), parameters=D))
    own = plan.spent(0)
    far = sum(s.releases.count * s.releases.coins * beyond(1 / s.multiplier) for s in own)
    assert {s.releases.coins for s in own} == {D} and far > 0
    ideal = [replace(s, releases=replace(s.releases, coins=0)) for s in own]
    level = plan.epsilon(0)
    assert level <= epsilon
    assert accountant.delta(own, level) == pytest.approx(accountant.delta(ideal, level) + far, rel=1e-9)


# --- a run, and between machines ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def objective():
    return build_objective(model_of(ModelConfig(kind="logistic"), FACTS), example_record(FACTS))


def silo_of(channel: Channel, objective: Any, index: int = 0) -> Silo:
    records = (jnp.ones((10, 5)), jnp.zeros(10, jnp.int32))
    site = Site(objective, channel, records, jnp.int32(10), jnp.int32(index))
    return Silo(site, jnp.int32(0), SeededRandomness(jax.random.key(index)), (), Account.empty(["value"]))


def release(value: Any, bound: float = 1.0) -> Release:
    return Release(jnp.asarray(value, jnp.float32), jnp.float32(bound), "value")


@pytest.mark.parametrize("channel", [Trusted(), *OWN_NOISE, Summed()], ids=named)
def test_only_a_shuffler_has_terms_and_shares_a_batch(channel):
    assert channel.terms(declared(), {"value": "value"}) is None
    assert channel.shared_batch is None and channel.batch_name("value") == "value"
    assert channel.alone() is channel
    channel.check_round([VALUE] * 5, together=1)


def test_terms_of_a_shuffler():
    size = 4 * D + OVERHEAD
    terms = Shuffled().terms(declared(), {"value": "value", "walk": "local"})
    assert terms == {"value": Terms(size, (40, 25, 31), 3)} and terms["value"].messages == 96
    some = Shuffled().terms(declared(Stream("value", 4, FixedSize(5)), participation=2), {"value": "value"})
    assert some == {"value": Terms(size, (5, 5, 5), 2)} and some["value"].messages == 10


def test_a_shuffler_refuses_a_further_message_of_a_round():
    channel, first = Shuffled(), Stream("first", 1, Full(), alone=True)
    channel.check_round([VALUE, LOCAL, LOCAL], together=1)
    channel.check_round([VALUE, VALUE], together=2)
    channel.check_round([first, LOCAL], together=2)
    for sent, together in [([VALUE, VALUE], 1), ([VALUE] * 3, 2), ([first, VALUE], 2)]:
        with pytest.raises(Refused, match="no further message in this round"):
            channel.check_round(sent, together)


@pytest.mark.parametrize("channel", [Trusted(), Untrusted(), Compressed(compressor=Identity())], ids=named)
def test_plain_ends_carry_messages_as_they_are(channel, objective):
    end, server = channel.silo_end(declared(), 0, b"", None), channel.server_end({"value": D}, None)
    assert type(end) is SiloEnd and type(server) is ServerEnd and end.key is None
    with pytest.raises(ValueError, match="none to agree on"):
        end.agree([])
    rows = np.arange(2 * D, dtype=np.float32).reshape(2, D)
    sent = [channel.send(release(row), silo_of(channel, objective, i), {})[0] for i, row in enumerate(rows)]
    packed = [end.send(0, "value", message) for message in sent]
    accounts = Account.empty(["value"], (2,))
    mean, _ = server.mean(packed, jnp.array([0.1, 0.3]), accounts, SeededRandomness(jax.random.key(0)))
    np.testing.assert_allclose(mean, 0.25 * rows[0] + 0.75 * rows[1], rtol=1e-6)
    # A trusted server is sent all that a silo knows, and the bound.
    assert channel.message_bits(sent[0]) == (64 * D + 32 if type(channel) is Trusted else 32 * D)


def test_a_public_answer_gets_no_noise(objective):
    for plain in (Trusted(), Untrusted()):
        channel = replace(plain, multipliers={"value": jnp.full(3, 1e6)})
        silo = silo_of(channel, objective)
        message, _ = channel.send(Public(jnp.ones(D)), silo, ())
        stacked = jax.tree.map(lambda leaf: leaf[None], message)
        coins, account = SeededRandomness(jax.random.key(0)), Account.empty(["value"], (1,))
        mean, spent, _ = channel.receive(stacked, jnp.ones(1), account, coins, ())
        np.testing.assert_array_equal(mean, jnp.ones(D))
        assert int(spent.tallies["value"].count[0]) == int(silo.account.tallies["value"].count) == 0


def masked_ends(facts: Facts) -> list[Any]:
    ends = [Summed().silo_end(Declared(facts, ((VALUE,),) * 3), i, b"plan", None) for i in range(3)]
    with pytest.raises(Refused, match="not agreed yet"):
        ends[0].check(0)
    fingerprints = {end.agree([each.key for each in ends]) for end in ends}
    assert len(fingerprints) == 1
    return ends


def test_masked_parts_show_their_sum_only():
    ends, totals = masked_ends(FACTS), np.arange(3 * D, dtype=np.int32).reshape(3, D) - 7
    parts = [Part(jnp.asarray(total), jnp.float32(1), jnp.float32(40), "value") for total in totals]
    sent = [end.send(0, "value", part).arrays["total"] for end, part in zip(ends, parts, strict=True)]
    assert not any((hidden == total.view(np.uint32)).any() for hidden, total in zip(sent, totals, strict=True))
    np.testing.assert_array_equal(sum(sent).view(np.int32), totals.sum(0))  # type: ignore[union-attr]


def test_a_masked_silo_answers_in_its_own_rounds_only():
    facts = replace(FACTS, participation=2, seed=5)
    ends, absent = masked_ends(facts), ({0, 1, 2} - set(facts.present(0))).pop()
    for i, end in enumerate(ends):
        if i != absent:
            end.check(0)
    with pytest.raises(Refused, match=rf"not this one \({absent}\)"):
        ends[absent].check(0)


@pytest.mark.parametrize("other", [2.0, np.nan, 0.0, -1.0])
def test_parts_of_one_sum_have_one_clip_norm(other):
    end = Summed().server_end({}, None)
    packed = [Packed({}, {"clip": np.float32(clip)}) for clip in (1.0, other)]
    with pytest.raises(Refused, match="different clip norms"):
        end.mean(packed, jnp.ones(2), Account.empty([]), SeededRandomness(jax.random.key(0)))


class Desk:
    """A shuffler in this process: it keeps what it was given and hands it out backwards."""

    def __init__(self) -> None:
        self.private_key, self.kept, self.terms = X25519PrivateKey.generate(), list[bytes](), {}
        self.server_key = self.private_key.public_key().public_bytes_raw()

    def open(self, name: str, terms: Terms) -> None:
        self.terms[name] = terms

    def submit(self, name: str, sealed: list[bytes]) -> dict[str, np.ndarray]:
        self.kept += sealed
        return {}

    def release(self, name: str, size: int, carried: list[dict[str, np.ndarray]]) -> list[bytes]:
        assert {len(each) for each in self.kept} == {size}
        return self.kept[::-1]


def test_sealed_messages_pass_a_shuffler():
    desk, rows = Desk(), np.random.default_rng(0).normal(size=(7, D)).astype(np.float32)
    end, server = Shuffled().silo_end(declared(), 0, b"", desk), Shuffled().server_end({}, desk)
    server.expect(2, "value", [5, 0, 2], D)
    assert desk.terms == {"2/value": Terms(4 * D + OVERHEAD, (5, 0, 2), 2)}
    packed = [end.send(2, "value", rows[:5]), end.send(2, "value", rows[5:])]
    assert all(each.facts == {} and each.arrays == {} for each in packed)  # the server gets them from the shuffler
    assert not any(rows[0].tobytes() in each for each in desk.kept)
    mean, _ = server.mean(packed, jnp.ones(2), Account.empty([]), SeededRandomness(jax.random.key(0)))
    np.testing.assert_allclose(mean, rows.mean(0), rtol=1e-6)
    assert server.bits == 8 * 7 * (4 * D + OVERHEAD)
    desk.kept[3] = desk.kept[3][:-1] + bytes([desk.kept[3][-1] ^ 1])
    with pytest.raises(Refused, match="1 messages refused"):
        server.mean(packed, jnp.ones(2), Account.empty([]), SeededRandomness(jax.random.key(0)))


# --- an auditor ---------------------------------------------------------------------------------------------


def test_an_auditor_sees_what_leaves_the_noise():
    released, mean = [jnp.ones((3, D)), jnp.zeros((3, D))], jnp.full(D, 7.0)
    for channel in PLAIN:
        seen = channel.seen(None, mean, released)
        assert [each is row for each, row in zip(seen, released, strict=True)] == [True, True]
    for channel in (Trusted(), Summed()):  # no silo noises anything: the mean is all that is seen
        (only,) = channel.seen(None, mean, [])
        np.testing.assert_array_equal(only, mean[None])


def test_where_a_mask_is_claimed_to_hide_an_auditor_does_not_look_behind_it():
    channel = Compressed(compressor=RandK(2), mask_amplification=True)
    decoded = jnp.array([[0.0, 3.0, 0.0]])
    (seen,) = channel.seen(SimpleNamespace(decoded=decoded), jnp.zeros(3), [jnp.array([[5.0, 1.0, 6.0]])])
    np.testing.assert_array_equal(seen, [[0.0, 1.0, 0.0]])


# --- error feedback -----------------------------------------------------------------------------------------


def decoded_of(channel: Compressed, rows: np.ndarray, objective: Any) -> tuple[np.ndarray, Any]:
    """What the server reads of these releases, one a round, and the silo's end afterwards."""
    memory, out = channel.remember({"value": rows.shape[1]}), []
    for row in rows:
        message, memory = channel.send(release(row), silo_of(channel, objective), memory)
        out.append(np.asarray(message.decoded))
    return np.array(out), memory


def test_what_a_biased_compressor_drops_comes_with_the_next_message(objective):
    channel = Compressed(compressor=TopK(2))
    assert channel.feedback and channel.open({"value": 8}) == {} and channel.variance(8) == 0.0
    rows = np.random.default_rng(1).normal(size=(40, 8)).astype(np.float32)
    decoded, memory = decoded_of(channel, rows, objective)
    assert ((decoded != 0).sum(1) == 2).all()
    np.testing.assert_allclose(decoded.sum(0) + memory["value"], rows.sum(0), atol=1e-4)
    # What is still missing does not grow with the rounds, as it does without feedback.
    forgotten = rows.sum(0) - sum(np.asarray(TopK(2)(jnp.asarray(row), None)) for row in rows)
    assert np.linalg.norm(memory["value"]) < 0.5 * np.linalg.norm(forgotten)


def test_the_same_message_again_and_again_arrives_whole(objective):
    row = np.array([8, 4, 2, 1], np.float32)
    decoded, _ = decoded_of(Compressed(compressor=TopK(1)), np.tile(row, (60, 1)), objective)
    np.testing.assert_allclose(decoded.mean(0), row, atol=0.3)
    assert (decoded[0] == [8, 0, 0, 0]).all()  # at first only the largest


def test_feedback_adds_up_in_the_mean_of_the_server(objective):
    """The server's end keeps nothing: it reads the mean of what was decoded."""
    channel = Compressed(compressor=TopK(2))
    message, _ = channel.send(release([3.0, 2.0, 1.0]), silo_of(channel, objective), channel.remember({"value": 3}))
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), message)
    accounts, coins = Account.empty(["value"], (2,)), SeededRandomness(jax.random.key(0))
    mean, _, memory = channel.receive(stacked, jnp.array([0.2, 0.2]), accounts, coins, {})
    np.testing.assert_allclose(mean, [3.0, 2.0, 0.0])
    assert memory == {}


def soteria(**options: Any) -> Plan:
    config = case("soteria-gd", "untrusted", smoothness=0.1, gradient_bound=1.0, weights="equal", **options)
    return make_plan(config, Facts(SIZES, ("a", "b", "c"), parameters=D))


TOPK = {"compressor": "tests.outside.topk:TopK", "largest": 2, "keep": None}


def test_theorems_cover_unbiased_compressors_only():
    unbiased, biased = soteria(compressor="rand-k", keep=2), soteria(**TOPK)
    assert unbiased.theorem.name == "Cor. 1" and unbiased.channel.shifted  # type: ignore[attr-defined]
    assert biased.theorem.fails == "not met: an unbiased compressor" and not biased.channel.shifted  # type: ignore[attr-defined]
    assert biased.epsilon(0) == unbiased.epsilon(0)  # noise comes first: compression costs no privacy


def test_a_biased_compressor_cannot_be_shifted():
    with pytest.raises(ConfigError, match=r"algorithm\.shifted = true: .*TopK' is biased"):
        soteria(**TOPK, shifted=True)
