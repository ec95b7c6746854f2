"""Sums under masks between parties: what the server can read, what it cannot, and what silos refuse."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import silodp
from silodp.channels import summing
from silodp.channels.grids import Part, exponent_of
from silodp.channels.recovery import Public, joined, split
from silodp.channels.summing import packed_bits, sum_of, unpacked_bits
from silodp.config import Config
from silodp.errors import Refused, Undecided
from silodp.facts import Facts
from silodp.plan.make import make_plan
from silodp.privacy.sums import ROUNDING
from silodp.randomness import SystemRandomness
from silodp.releases import Account

D, SIZES = 4000, (100, 200, 300, 400, 400)
NAMES = ("silo 0", "silo 1", "silo 2")


def planned(
    parameters: int = D,
    weights: str = "equal",
    options: dict | None = None,
    sizes: tuple[int, ...] = SIZES,
    **privacy: Any,
):
    algorithm = {"name": "dp-gd", "rounds": 6, "step_size": 0.1, "clip": 1.0, "weights": weights} | (options or {})
    config = Config(algorithm=algorithm, privacy={"trust": "aggregated", "epsilon": 2.0} | privacy)  # type: ignore[arg-type]
    return make_plan(config, Facts(sizes, tuple(f"silo {i}" for i in range(len(sizes))), parameters=parameters))


def ends_of(plan: Any, seed: int | None = None) -> list[Any]:
    ends = [plan.noised.silo_end(plan.declared, i, b"plan", None, seed) for i in range(plan.facts.silos)]
    assert len({end.agree([each.key for each in ends]) for end in ends}) == 1
    return ends


def parts_of(plan: Any, values: np.ndarray, clip: float = 1.0, round: int = 0) -> list[Part]:
    """What each silo's program would hand to its end."""
    channel, lattice = plan.noised, plan.noised.grids["value"]
    made = []
    for i, value in enumerate(values):
        bound = jnp.float32(plan.declared.bounds_over_clip("value")[i] * clip)
        std = bound * channel.multipliers["value"][i] * (1 + 2.0**-20)
        step = jnp.float32(2.0 ** math.floor(math.log2(float(lattice.step) * clip)))
        made.append(Part(jnp.asarray(value, jnp.float32), bound, None, std, step, jnp.int32(round), "value"))
    return made


def mean_of(plan: Any, sent: list[Any], end: Any = None, silos: Any = range(5), round: int = 0) -> np.ndarray:
    server = end or plan.noised.server_end({"value": D}, None)
    server.expect(round, "value", SIZES, D)
    weights = jnp.asarray(np.asarray(plan.facts.weights)[list(silos)], jnp.float32)
    return np.asarray(server.mean(sent, weights, Account.empty(["value"], (5,)), SystemRandomness())[0])


SIX = np.random.default_rng(0).uniform(-0.01, 0.01, (6, D)).astype(np.float32)
VALUES = SIX[:5]


# By chance each of the next two tests fails once in a million runs. Tests of several things at once share that out.
FALSE_ALARM = 1e-6


def has_std(noise: np.ndarray, std: float, false_alarm: float) -> bool:
    """A chi-square test of the variance, both tails."""
    least, most = stats.chi2.ppf([false_alarm / 2, 1 - false_alarm / 2], noise.size)
    return least < np.sum(noise**2) / std**2 < most


def test_a_tenth_of_the_variance_too_little_or_too_much_is_noticed():
    """The power of the tests below, in 24,000 numbers: it is missed once in a million draws."""
    for factor in (0.9, 1.1):
        limits = stats.chi2.ppf([FALSE_ALARM / 40, 1 - FALSE_ALARM / 40], 24_000)
        below, above = stats.chi2.cdf(limits / factor, 24_000)
        assert above - below < 1e-6
    drawn = np.random.default_rng(0).normal(size=24_000)
    assert has_std(drawn, 1.0, FALSE_ALARM)
    assert not has_std(drawn, math.sqrt(1 / 0.9), FALSE_ALARM / 20)


@pytest.mark.parametrize("weights", ["equal", "size"])
def test_the_server_reads_the_mean_with_the_noise_of_all_shares(weights):
    """Share too small, or not drawn by one silo: the variance would say so."""
    plan = planned(weights=weights)
    ends = ends_of(plan)

    def noise(round: int) -> np.ndarray:
        parts = parts_of(plan, VALUES, round=round)
        sent = [end.send(round, "value", part) for end, part in zip(ends, parts, strict=True)]
        return mean_of(plan, sent, round=round) - np.asarray(plan.facts.weights) @ VALUES

    drawn, expected = np.concatenate([noise(round) for round in range(6)]), plan.std_of_average("value")
    assert abs(np.mean(drawn)) < stats.norm.isf(FALSE_ALARM / 8) * expected / math.sqrt(drawn.size)
    assert has_std(drawn, expected, FALSE_ALARM / 4)


def test_every_silo_draws_its_share_and_draws_it_afresh():
    plan = planned()
    shares = plan.multipliers["value"] * plan.declared.bounds_over_clip("value") * np.asarray(plan.facts.weights)
    for i, end in enumerate(ends_of(plan)):
        part = parts_of(plan, np.zeros((5, D)))[i]
        first, second = (np.concatenate([end._noise(part, float(part.step), 0) for _ in range(3)]) for _ in range(2))
        drawn = np.concatenate([first, second]) * float(part.step)
        assert has_std(drawn, shares[i], FALSE_ALARM / 10)
        alike = stats.norm.isf(FALSE_ALARM / 20) / math.sqrt(first.size)
        assert abs(np.corrcoef(first, second)[0, 1]) < alike


def test_parts_and_their_partial_sums_are_uniform():
    plan = planned()
    ends, parts = ends_of(plan), parts_of(plan, VALUES)
    width = int(plan.noised.grids["value"].width)
    sent = [unpacked_bits(end.send(0, "value", p).arrays["part"], width, D) for end, p in zip(ends, parts, strict=True)]
    for count in range(1, 5):
        for some in combinations(sent, count):
            top = sum_of(some) >> np.array(width - 6, some[0].dtype) & np.array(63, some[0].dtype)
            assert stats.chisquare(np.bincount(top.astype(np.int64), minlength=64)).pvalue > 1e-5


def test_silos_that_were_asked_different_questions_do_not_add_up():
    """Else a server tells the others of points that lie closer, so that they hide a silo with less noise."""
    plan = planned()
    ends, parts = ends_of(plan), parts_of(plan, VALUES)
    told = [b"x", b"x", b"y", b"x", b"x"]
    sent = [end.send(0, "value", part, told[i]) for i, (end, part) in enumerate(zip(ends, parts, strict=True))]
    with pytest.raises(Refused, match="different grids or questions"):
        mean_of(plan, sent)
    lied = [each._replace(facts=each.facts | {"asked": ""}) for each in sent]
    assert np.abs(mean_of(plan, lied)).mean() > 0.5  # nothing like a mean of clipped vectors


def test_the_widest_sum_does_not_wrap_around_and_a_wider_one_is_cut():
    """Every silo at its longest mean, and noise of twelve stds on top."""
    plan = planned()
    channel = plan.noised
    server, end = channel.server_end({"value": D}, None), ends_of(plan)
    width = int(channel.grids["value"].width)
    parts = parts_of(plan, np.full((5, D), 5.0))  # five clip norms in one coordinate: no clipped mean
    whole = sum(e._rounded(p, float(p.step)) for e, p in zip(end, parts, strict=True))
    step, noise = float(parts[0].step), 12 * plan.std_of_average("value")
    assert whole.max() * step == pytest.approx(1.0, rel=2e-2)  # cut to the clip norm
    assert whole.max() + noise / step + 5 < 2 ** (width - 1)
    assert whole.max() + noise / step > 2 ** (width - 4)  # and no bits are wasted
    del server


def test_a_silo_near_a_border_asks_for_the_grid_and_takes_one_of_the_two():
    for coarsest in (2.0**-20 * 1.001, 2.0**-20 * 1.5, 2.0**-20 * 1.999):
        assert exponent_of(coarsest, None) == exponent_of(coarsest, -20) == -20
        for other in (-21, -19, 5):
            with pytest.raises(Refused, match="not that of the question"):
                exponent_of(coarsest, other)
    for near in (1 - 2.0**-13, 1.0, 1 + 2.0**-13):
        with pytest.raises(Undecided) as told:
            exponent_of(near * 2.0**-20, None)
        assert told.value.either == (-21, -20)
        assert [exponent_of(near * 2.0**-20, e) for e in told.value.either] == [-21, -20]
        for other in (-22, -19):
            with pytest.raises(Refused, match="not that of the question"):
                exponent_of(near * 2.0**-20, other)
    for none in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(Refused, match="without a grid"):
            exponent_of(none, None)


@pytest.mark.parametrize("weights", ["equal", "size"])
def test_rounding_moves_a_sum_by_no_more_than_every_sensitivity_counts_with(weights):
    """The worst neighbours: every number of the moved record just crosses to the next multiple of the step."""
    plan = planned(weights=weights)
    ends, moves = ends_of(plan), np.asarray(plan.facts.weights) * plan.declared.bounds_over_clip("value")
    parts = parts_of(plan, np.zeros((5, D)))
    step = float(parts[0].step)
    for i, end in enumerate(ends):
        weight = plan.facts.weights[i]
        far = moves[i] / math.sqrt(D)
        for aside in (0.5 - 1e-4, 0.5 - (far / step) % 1 + 1e-4):
            before = np.full(D, aside) * step / weight
            values = [np.asarray(v, np.float32) for v in (before, before + far / weight)]
            one, other = (end._rounded(replace(parts[i], value=jnp.asarray(v)), step) for v in values)
            apart = np.linalg.norm(one - other) * step
            assert apart <= (1 + ROUNDING) * moves[i]
        assert math.ceil(far / step) * step * math.sqrt(D) <= (1 + ROUNDING) * moves[i]


@pytest.mark.parametrize("width", [1, 7, 8, 31, 32, 33, 48, 63])
def test_packed_numbers_come_back(width):
    dtype = np.uint32 if width <= 32 else np.uint64
    words = np.random.default_rng(width).integers(0, 2**width, 70_001, dtype=np.uint64).astype(dtype)
    packed = packed_bits(words, width)
    assert packed.nbytes == -(-width * words.size // 8)
    np.testing.assert_array_equal(unpacked_bits(packed, width, words.size), words)
    with pytest.raises(Refused, match="bits are needed"):
        unpacked_bits(packed[:-1], width, words.size)


def test_a_plan_whose_sums_do_not_fit_names_a_setting_that_does():
    facts = Facts((2, 2**22, 2**22), NAMES, parameters=10**7)
    options = {"name": "dp-gd", "rounds": 6, "step_size": 0.1, "clip": 1.0, "weights": "equal"}
    config = Config(algorithm=options, privacy={"trust": "aggregated", "epsilon": 2.0})  # type: ignore[arg-type]
    with pytest.raises(silodp.ConfigError, match=r"algorithm\.weights = 'size'"):
        _ = make_plan(config, facts).noised
    by_size = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"weights": "size"})})
    assert int(make_plan(by_size, facts).noised.grids["value"].width) <= 64


def test_noise_that_is_not_the_plans_is_not_sent():
    plan = planned()
    end, part = ends_of(plan)[0], parts_of(plan, VALUES)[0]
    for broken in (replace(part, std=part.std / 4), replace(part, std=part.std * np.nan)):
        with pytest.raises(Refused, match="not be what the plan accounts"):
            end.send(0, "value", broken)
    with pytest.raises(Refused, match="has no grid"):
        end.send(0, "value", replace(part, step=part.step * jnp.inf))
    with pytest.raises(Refused, match="not finite"):
        end.send(0, "value", replace(part, value=part.value * jnp.nan))


@pytest.mark.parametrize(
    ("options", "privacy", "words"),
    [
        ({"compressor": "qsgd", "levels": 4}, {}, "'qsgd': not under trust 'aggregated', where only sums are read"),
        ({"compressor": "natural"}, {}, "do not add up; use rand-k"),
        ({"compressor": "rand-k", "keep": 9}, {"mask_amplification": True}, "share a mask that the server knows"),
        ({"compressor": "rand-k", "keep": D + 1}, {}, "keep = 4001"),
        ({"name": "ce-psgm", "clip_difference": 1.0, "momentum": 0.5, "local_steps": 2, "clip_local": 1.0},
         {"missing": 1}, "nobody takes a missing silo's local steps"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_sums_is_refused(options, privacy, words):
    with pytest.raises(silodp.ConfigError, match=words):
        planned(options=options, **privacy)


def test_without_noise_nothing_is_sent():
    with pytest.raises(silodp.ConfigError, match=r"privacy\.epsilon is missing"):
        silodp.channels.Aggregated().silo_end(planned().declared, 0, b"", None)


# --- sums that survive missing silos --------------------------------------------------------------------------------


def test_a_secret_takes_as_many_shares_as_the_threshold():
    secret = bytes(range(32))
    shares = split(secret, range(7), 4)
    for some in combinations(shares, 4):
        assert joined({i: shares[i] for i in some}, 4) == secret
    with pytest.raises(Refused, match="3 usable ones, 4 are needed"):
        joined({i: shares[i] for i in range(3)}, 4)
    with pytest.raises(Refused, match="forged"):
        joined({i: shares[i] for i in range(3)} | {3: shares[4]}, 4)
    other = split(secret, range(7), 4)
    assert all(shares[i] != other[i] for i in range(7))


class Parties:
    """Five silos and a server that talk without processes; `gone` silos do not answer any more."""

    def __init__(self, missing: int = 1, colluding: int = 1, sizes: tuple[int, ...] = SIZES):
        self.plan = planned(missing=missing, colluding=colluding, sizes=sizes)
        self.ends, self.gone = ends_of(self.plan), set[int]()
        self.server = self.plan.noised.server_end({"value": D}, None)
        self.server.expect(0, "value", sizes, D)
        self.said: list[tuple[int, dict[str, Any]]] = []

    def talk(self, index: int, header: dict[str, Any]) -> dict[str, Any]:
        self.said.append((index, header))
        told = self.ends[index].step(plain(header))
        return plain(told)

    def talk_to_all(self, said: Mapping[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        return {i: self.talk(i, header) for i, header in said.items() if i not in self.gone}

    def prepare(self) -> list[int]:
        return self.server.prepare(self.talk_to_all, range(len(self.ends)))

    def answers(self, silos: Any) -> dict[int, Any]:
        parts = parts_of(self.plan, SIX[: len(self.ends)])
        return {i: self.ends[i].send(0, "value", parts[i]) for i in silos if i not in self.gone}


def plain(tree: Any) -> Any:
    """As JSON brings it: keys are text."""
    return {str(k): plain(v) for k, v in tree.items()} if isinstance(tree, dict) else tree


def opened(parties: Parties, answers: dict[int, Any]) -> np.ndarray:
    parties.server.open(parties.talk_to_all, list(answers))
    return mean_of(parties.plan, list(answers.values()), parties.server, list(answers))


@pytest.mark.parametrize("when", ["never", "before", "before the answer", "before the opening"])
def test_a_sum_survives_a_missing_silo(when):
    parties = Parties()
    if when == "before":
        parties.gone = {3}
    asked = parties.prepare()
    assert asked == [i for i in range(5) if i not in parties.gone]
    if when == "before the answer":
        parties.gone = {3}
    answers = parties.answers(asked)
    if when == "before the opening":
        parties.gone = {0}
    mean = opened(parties, answers)
    weights = np.asarray(parties.plan.facts.weights)[list(answers)]
    noise = mean - weights @ VALUES[list(answers)] / weights.sum()
    assert np.std(noise) < 1.5 * parties.plan.std_of_average("value")
    assert parties.server.bits > 0


def test_two_missing_silos_are_too_many():
    parties = Parties()
    asked = parties.prepare()
    parties.gone = {1, 3}
    with pytest.raises(Refused, match="3 of 5 silos left, the plan misses 1"):
        opened(parties, parties.answers(asked))


def header(step: str, **more: Any) -> dict[str, Any]:
    return {"round": 0, "query": "value", "step": step} | more


def test_a_sum_is_opened_once_and_over_one_set():
    parties = Parties()
    answers = parties.answers(parties.prepare())
    opened(parties, answers)
    for answered in ([0, 1, 2, 3], [0, 1, 2, 3, 4]):
        with pytest.raises(Refused, match="closed already"):
            parties.ends[0].step(header("close", answered=answered))
    words = next(said["words"] for i, said in reversed(parties.said) if i == 0 and said["step"] == "open")
    with pytest.raises(Refused, match="opened already"):
        parties.ends[0].step(plain(header("open", words=words)))
    with pytest.raises(Refused, match="prepared already"):
        parties.ends[0].step(header("prepare"))


@pytest.mark.parametrize(
    ("answered", "words"),
    [
        ([1, 2, 3, 4], "this silo answered; it is not opened as missing"),
        ([0, 1, 2], "over 3 silos, the plan needs 4"),
        ([0, 1, 2, 2], "not those that take part"),
        ([0, 1, 2, 7], "not those that take part"),
    ],
)
def test_silos_refuse_to_open_what_the_plan_does_not_have(answered, words):
    parties = Parties()
    parties.answers(parties.prepare())
    with pytest.raises(Refused, match=words):
        parties.ends[0].step(header("close", answered=answered))


def confirming(liar: Any, told: Mapping[int, Any], what: str) -> dict[int, dict[str, str]]:
    """What each silo is shown of the others' words, with those of a silo that confirms whatever the server likes."""
    shown: dict[int, dict[str, str]] = {}
    for j in told:
        liar.question._confirmed[what] = told[j]["is"]
        shown[j] = {str(i): each["words"][str(j)] for i, each in told.items() if str(j) in each["words"]}
        shown[j][str(liar.index)] = liar.question._word(what, liar.index, j).hex()
    return shown


# Each honest silo is told of another set, none of more than two missing. Together they would hand out the keys of
# silos 2, 3 and 4, with the shares that the colluding silo 5 holds, and seeds of the others: the sum of silos 0 and 1.
OTHER_SETS = {0: {2, 3}, 1: {2, 4}, 2: {3, 4}, 3: {2, 4}, 4: {2, 3}}


def test_a_server_that_tells_every_silo_another_set_opens_nothing():
    parties = Parties(missing=2, colluding=1, sizes=(300,) * 6)
    parties.answers(parties.prepare())
    told: dict[int, Any] = {}
    for j, left_out in OTHER_SETS.items():
        answered = [i for i in range(6) if i not in left_out]
        told[j] = plain(parties.ends[j].step(header("close", answered=answered)))
        told[j]["is"] = ",".join(map(str, answered))
    for j, words in confirming(parties.ends[5], told, "answered").items():
        with pytest.raises(Refused, match=r"silos were told the same \(answered\), 4 are needed"):
            parties.ends[j].step(header("open", words=words))
        assert not parties.ends[j].question.opened


def test_a_server_that_tells_silos_of_different_partners_gets_no_answer():
    """Two groups with enough colluding silos in each would be two sums, with less noise than is accounted."""
    parties = Parties(missing=2, colluding=1, sizes=(300,) * 6)
    made = {i: plain(parties.ends[i].step(header("prepare"))) for i in range(6)}
    told: dict[int, Any] = {}
    for group in ((0, 1, 4, 5), (2, 3, 4, 5)):
        publics = {str(i): made[i]["public"] for i in group}
        for j in group[:2]:
            boxes = {str(i): made[i]["sealed"][str(j)] for i in group if i != j}
            told[j] = plain(parties.ends[j].step(header("shares", publics=publics, sealed=boxes)))
            told[j]["is"] = ",".join(f"{i}:{''.join(publics[str(i)])}" for i in group)
    for j, words in confirming(parties.ends[5], told, "takers").items():
        with pytest.raises(Refused, match=r"3 silos were told the same \(takers\), 4 are needed"):
            parties.ends[j].step(header("agree", words=words))
        with pytest.raises(Refused, match="not taken and confirmed"):
            parties.answers([j])


def test_a_set_confirmed_in_one_round_is_not_in_another():
    parties = Parties()
    opened(parties, parties.answers(parties.prepare()))
    old = next(said["words"] for i, said in parties.said if i == 0 and said["step"] == "open")
    parties.server.expect(1, "value", SIZES, D)
    parties.prepare()
    parts = parts_of(parties.plan, VALUES, round=1)
    parties.ends[0].send(1, "value", parts[0])
    parties.ends[0].step(header("close", answered=[0, 1, 2, 3, 4]) | {"round": 1})
    with pytest.raises(Refused, match="1 silos were told the same"):
        parties.ends[0].step(plain(header("open", words=old)) | {"round": 1})


@pytest.mark.parametrize(
    "forged", ["another silo's word", "a word of another question", "its own word back", "nothing"]
)
def test_words_that_confirm_are_the_senders_and_for_one_question(forged):
    parties = Parties()
    seen: list[dict[str, Any]] = []
    for round in (0, 1):
        made = {i: plain(parties.ends[i].step(header("prepare") | {"round": round})) for i in range(5)}
        publics = {str(i): made[i]["public"] for i in range(5)}
        boxes = lambda j, made=made: {str(i): made[i]["sealed"][str(j)] for i in range(5) if i != j}
        given = {j: header("shares", publics=publics, sealed=boxes(j)) | {"round": round} for j in range(5)}
        seen.append({j: plain(parties.ends[j].step(given[j]))["words"] for j in range(5)})
    good = {str(i): seen[1][i]["0"] for i in range(1, 5)}
    bad = {
        "another silo's word": {"1": good["2"], "2": good["1"], "3": good["4"], "4": good["3"]},
        "a word of another question": {str(i): seen[0][i]["0"] for i in range(1, 5)},
        "its own word back": seen[1][0],
        "nothing": {"0": good["1"], "7": good["2"]},
    }[forged]
    with pytest.raises(Refused, match=r"1 silos were told the same \(takers\), 4 are needed"):
        parties.ends[0].step(header("agree", words=bad) | {"round": 1})
    parties.ends[0].step(header("agree", words=good) | {"round": 1})


def swapped(told: dict[str, Any], change: str) -> dict[str, Any]:
    boxes, publics = dict(told["sealed"]), dict(told["publics"])
    match change:
        case "key":
            publics["2"] = [Parties().ends[0].key.hex(), publics["2"][1]]
        case "commitment":
            publics["2"] = [publics["2"][0], "00" * 32]
        case "share":
            boxes["2"] = "00" + boxes["2"][2:]
        case "another silo's share":
            boxes["2"] = boxes["3"]
        case "small order":
            publics["2"] = ["00" * 32, publics["2"][1]]
        case "own key":
            publics["0"] = publics["1"]
        case _:
            publics = {i: publics[i] for i in ("0", "1", "2")}
    return told | {"sealed": boxes, "publics": publics}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("key", "those of silo 2 are forged"),
        ("commitment", "those of silo 2 are forged"),
        ("share", "those of silo 2 are forged"),
        ("another silo's share", "those of silo 2 are forged"),
        ("small order", "is no X25519 key"),
        ("own key", "keys of"),
        ("too few", "3 silos take part, 4 are needed"),
    ],
)
def test_what_a_server_swaps_on_the_way_is_refused(change, words):
    parties = Parties()
    parties.prepare()
    told = next(header for index, header in parties.said if index == 0 and header["step"] == "shares")
    fresh = Parties()
    fresh.server.publics = {}
    answers = {i: plain(fresh.talk(i, header("prepare"))) for i in range(5)}
    publics = {str(i): each["public"] for i, each in answers.items()}
    boxes = {str(i): each["sealed"]["0"] for i, each in answers.items() if i != 0}
    told = header("shares", publics=publics, sealed=boxes)
    with pytest.raises(Refused, match=words):
        fresh.ends[0].step(swapped(told, change))
    with pytest.raises(Refused, match="shares were not taken and confirmed"):
        fresh.answers([0])


def test_shares_are_taken_of_all_or_of_none():
    """Else a silo whose keys came with a forged list could be named in a sum that it does not take part in."""
    parties = Parties()
    made = {i: plain(parties.ends[i].step(header("prepare"))) for i in range(5)}
    lists = lambda silos: {
        "publics": {str(i): made[i]["public"] for i in silos},
        "sealed": {str(i): made[i]["sealed"]["0"] for i in silos if i},
    }
    forged = lists(range(5))
    forged["sealed"]["4"] = forged["sealed"]["1"]
    with pytest.raises(Refused, match="those of silo 4 are forged"):
        parties.ends[0].step(header("shares", **forged))
    parties.ends[0].step(header("shares", **lists((0, 1, 2, 4))))
    assert set(parties.ends[0].question._shares) == {0, 1, 2, 4}


def test_a_forged_share_at_the_opening_shows():
    parties = Parties()
    answers = parties.answers(parties.prepare())

    def lying(said: Mapping[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        told = parties.talk_to_all(said)
        if said[1]["step"] == "open":
            told[1]["seeds"]["0"] = f"{int(told[1]['seeds']['0'], 16) ^ 1:0132x}"
        return told

    parties.server.open(lying, list(answers))
    with pytest.raises(Refused, match="forged"):
        mean_of(parties.plan, list(answers.values()), parties.server, list(answers))


def test_a_silo_that_starts_again_opens_what_it_sent():
    parties = Parties()
    answers = parties.answers(parties.prepare())
    fresh = parties.plan.noised.silo_end(parties.plan.declared, 2, b"plan", None)
    fresh.restore(plain(parties.ends[2].state()))
    parties.ends[2] = fresh
    weights = np.asarray(parties.plan.facts.weights)
    noise = opened(parties, answers) - weights @ VALUES
    assert np.std(noise) < 1.5 * parties.plan.std_of_average("value")
    with pytest.raises(Refused, match="closed already"):
        fresh.step(header("close", answered=[0, 1, 2, 3, 4]))


def test_without_missing_silos_there_is_nothing_to_open():
    end = ends_of(planned())[0]
    with pytest.raises(Refused, match="every silo in every sum"):
        end.step(header("close", answered=[0]))
    assert Public.of(["00", "11"]) == (b"\x00", b"\x11")
    assert summing.narrowed(np.array([2**40 + 5], np.uint64), 32).tolist() == [5]
