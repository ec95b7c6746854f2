"""The rounded Gaussian has exactly its distribution, and its words are never used twice."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from scipy import stats
from scipy.special import ndtri

from silodp import noise
from silodp.channels.channel import SMALLEST_STD
from silodp.noise import Entropy, rounded_gaussian
from silodp.randomness import GRID_STEPS, SystemRandomness
from tests.repeatable import GivenWords, RepeatableEntropy

SPREADS = [1, 16, 256, 1024]
DIGITS = 60

# --- a slow reference of its own: quantiles by Newton's method in many digits, rounded as fractions --------------


def tail_quantile(p: Fraction) -> mpmath.mpf:
    """The z > 0 with P(Z > z) = p."""
    with mpmath.workdps(DIGITS):
        wanted = mpmath.mpf(p.numerator) / p.denominator
        z = mpmath.mpf(-float(ndtri(float(p))))
        for _ in range(3):  # each doubles the digits, of which float64 gives 15
            density = mpmath.exp(-z * z / 2) / mpmath.sqrt(2 * mpmath.pi)
            z += (mpmath.erfc(z / mpmath.sqrt(2)) / 2 - wanted) / density
        return z


def as_fraction(z: mpmath.mpf) -> Fraction:
    return Fraction(int(mpmath.floor(mpmath.ldexp(z, 150))), 2**150)


def reference(words: list[int], value: float, std: float, step: float) -> set[int]:
    """What the words (the first, and further bits of the same number) leave possible: one k, as a rule."""
    tail = words[0] if words[0] >= 0 else ~words[0]
    for word in words[1:]:
        tail = 2**64 * tail + word % 2**64
    ends = [max(Fraction(end, 2 ** (64 * len(words))), Fraction(1, 2**200)) for end in (tail, tail + 1)]
    sign = -1 if words[0] < 0 else 1
    at = lambda p: (Fraction(value) + sign * Fraction(std) * as_fraction(tail_quantile(p))) / Fraction(step)
    return {math.floor(at(p) + Fraction(1, 2)) for p in ends}


def mixed_values(count: int, step: float) -> np.ndarray:
    """Of all sizes up to 2^40 steps, on the grid, half-way between and anywhere."""
    rng = np.random.default_rng(3)
    size = rng.normal(size=count) * 2.0 ** rng.uniform(-3, 40, count)
    place = rng.integers(0, 3, count)
    return np.where(place == 0, size, np.rint(size) + np.where(place == 1, 0.5, 0.0)) * step


def differing(count: int, std: float, step: float) -> list[int]:
    words, value = RepeatableEntropy(5).words(count), mixed_values(count, step)
    found = rounded_gaussian(value, std, step, GivenWords(np.concatenate([words, RepeatableEntropy(6).words(100)])))
    wrong = []
    for i in range(count):
        possible = reference([int(words[i])], value[i], std, step)
        if int(found[i]) not in possible or len(possible) > 1:
            wrong.append(i)
    return wrong


@pytest.mark.parametrize("spread", [1.0, 300.5, 1024.0, 2.0**20 / 3])
def test_every_draw_is_the_slow_exact_one(spread):
    assert differing(500, spread * 0.25, 0.25) == []


@pytest.mark.slow
def test_a_hundred_thousand_draws_are_the_slow_exact_ones():
    assert differing(100_000, 0.3, 2.0**-10) == []


# --- the distribution --------------------------------------------------------------------------------------------


def chances(edges: np.ndarray, value: float, std: float, step: float, at_least: float = 0.0) -> np.ndarray:
    """Of edges[i] <= k < edges[i + 1] together with |Z| > at_least."""
    bounds = ((edges - 0.5) * step - value) / std
    low, high = np.minimum(bounds, -at_least), np.maximum(bounds, at_least)
    return np.diff(stats.norm.cdf(low)) - np.diff(stats.norm.sf(high))


def p_value(found: np.ndarray, edges: np.ndarray, expected: np.ndarray) -> float:
    """Of a chi-square test over the cells in which at least ten are expected; the rest is one cell."""
    inner = np.histogram(found, edges - 0.5)[0]
    full = expected * found.size >= 10
    counts = np.append(inner[full], found.size - inner[full].sum())
    mean = np.append(expected[full], 1 - expected[full].sum()) * found.size
    kept = mean > 1e-3
    assert counts[~kept].sum() == 0
    return float(stats.chi2.sf(((counts - mean)[kept] ** 2 / mean[kept]).sum(), kept.sum() - 1))


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("value", [0.0, 0.3, 12345.5])
def test_a_million_draws_follow_the_rounded_gaussian(spread, value):
    step = 2.0**-7
    found = rounded_gaussian(np.full(1_000_000, value * step), spread * step, step, RepeatableEntropy(spread))
    width = max(1, spread // 32)
    edges = np.arange(-200, 201) * width + int(value)
    expected = chances(edges, value * step, spread * step, step)
    assert p_value(found, edges, expected) > 1e-3


def words_beyond(size: float, count: int) -> np.ndarray:
    """Words of numbers that are larger than `size`, of both signs."""
    rng = np.random.default_rng(8)
    tails = rng.integers(0, int(mpmath.floor(mpmath.mpf(2) ** 64 * mpmath.ncdf(-size))), count)
    return np.where(rng.random(count) < 0.5, tails, ~tails)


@pytest.mark.parametrize("spread", SPREADS)
def test_tails_beyond_five_standard_deviations(spread):
    """Given that |Z| > 5: a share of these draws is decided exactly, the others in float64."""
    words = words_beyond(5.0, 4000)
    further = RepeatableEntropy(9).words(4000)
    found = rounded_gaussian(np.full(4000, 0.3), float(spread), 1.0, GivenWords(np.concatenate([words, further])))
    near = np.unique(np.rint(spread * np.array([4.9, 5, 5.02, 5.05, 5.1, 5.15, 5.2, 5.3, 5.4, 5.5, 5.7, 6, 7])))
    edges = np.concatenate([-near[::-1], near])
    expected = chances(edges, 0.3, spread, 1.0, at_least=5.0) / (2 * stats.norm.sf(5))
    assert p_value(found, edges, expected) > 1e-3


# --- what float64 cannot decide ----------------------------------------------------------------------------------


@pytest.fixture
def decided(monkeypatch) -> list[int]:
    """What was decided exactly."""
    found, honest = [], noise._decided
    monkeypatch.setattr(noise, "_decided", lambda *given: found.append(honest(*given)) or found[-1])
    return found


@pytest.mark.parametrize("sign", [1, -1])
def test_a_boundary_within_the_word_is_decided_by_further_bits(sign, decided):
    tail = 2**41
    word = tail if sign > 0 else ~tail
    middle = as_fraction(tail_quantile(Fraction(2 * tail + 1, 2**65)))
    value = float(Fraction(1, 2) - sign * 256 * middle)  # (value + 256 Z) is half-way between 0 and 1, in mid-word
    for further, larger in ((5, True), (-5, False)):  # a smaller tail probability is a larger |Z|
        found = rounded_gaussian(np.array([value]), 256.0, 1.0, GivenWords([word, further]))
        assert set(found) == reference([word, further], value, 256.0, 1.0) == {int(larger == (sign > 0))}
    assert len(decided) == 2


@pytest.mark.parametrize("nudge", [-3, -1, 1, 3])
def test_close_to_a_boundary_the_exact_answer_is_taken(nudge, decided):
    """Some units of float64 beside a boundary, at a word of the middle."""
    for word in (2**62 + 12345, ~(2**61 + 999), 3 * 2**60):
        tail = word if word >= 0 else ~word
        z = as_fraction(tail_quantile(Fraction(2 * tail + 1, 2**65))) * (1 if word >= 0 else -1)
        k = math.floor(256 * z)
        value = float(Fraction(2 * k + 1, 2) - 256 * z) + nudge * 2.0**-46
        found = rounded_gaussian(np.array([value]), 256.0, 1.0, GivenWords([word]))
        assert set(found) == reference([word], value, 256.0, 1.0) == {k + 1 if nudge > 0 else k}
    assert len(decided) == 3


@pytest.mark.parametrize("words", [[0, 2**50, 1], [-1, 2**50, 1], [1, 3, 1], [~(2**20), 0, 5], [2**40 - 1, 8, 8]])
def test_far_tails_are_decided_exactly(words, decided):
    found = rounded_gaussian(np.array([0.125]), 300.0, 1.0, GivenWords(words))
    assert set(found) == reference(words[:2], 0.125, 300.0, 1.0)
    assert len(decided) == 1


def test_numbers_of_other_types_are_the_same_numbers():
    """Also where fractions are made of them, once in millions of draws."""
    found = rounded_gaussian(np.array([0.125]), np.float32(300), np.int64(1), GivenWords([5, 6]))
    assert set(found) == reference([5, 6], 0.125, 300.0, 1.0)


@pytest.mark.parametrize("spread", [0.01, 1.0, 256.0, 1e6])
def test_both_ways_give_the_same_numbers(spread, monkeypatch):
    value = mixed_values(400, 0.5)
    quick = rounded_gaussian(value, spread / 2, 0.5, RepeatableEntropy(1))
    monkeypatch.setattr(noise, "ERROR", 1e9)  # then float64 decides nothing
    assert np.array_equal(quick, rounded_gaussian(value, spread / 2, 0.5, RepeatableEntropy(1)))


def test_the_quantile_is_better_than_its_bound_by_far():
    """The bound is 2^-39 = 1.8e-12; an analysis of the formula gives 5.2e-15, and 2^-46 is 1.4e-14."""
    rng = np.random.default_rng(2)
    branch = math.exp(-2)
    beside = branch * (1 + np.arange(-50, 51) * 2.0**-52)
    p = np.concatenate([2.0 ** rng.uniform(-24, -1, 1500), rng.uniform(0, 0.5, 1500) + 2.0**-24, beside, [2**-24, 0.5]])
    p = np.minimum(p, 0.5)
    worst = max(
        abs(mpmath.mpf(-float(z)) - tail_quantile(Fraction(float(q)))) for q, z in zip(p, ndtri(p), strict=True)
    )
    assert worst < 2.0**-46


# --- words -------------------------------------------------------------------------------------------------------

FORKED = """
import os, sys
from silodp.noise import Entropy
assert "jax" not in sys.modules
entropy = Entropy()
entropy.words(3)

def told(depth):
    read, write = os.pipe()
    if not os.fork():
        deeper = told(depth - 1) if depth else []
        os.write(write, "\\n".join([",".join(map(str, entropy.words(4))), *deeper]).encode())
        os._exit(0)
    os.close(write)
    os.wait()
    return open(read).read().split("\\n")

print("\\n".join([*told(1), *told(0), ",".join(map(str, entropy.words(4)))]))
"""


def test_a_forked_process_repeats_no_word():
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, check=True)
    words = [word for line in done.stdout.split() for word in line.split(",")]
    assert len(words) == len(set(words)) == 16


def test_threads_share_no_key_and_no_words():
    entropy, found = RepeatableEntropy(7), []
    for _ in range(4):
        thread = threading.Thread(target=lambda: found.append(entropy.words(100)))
        thread.start()
        thread.join()
    assert entropy.keys == 4 and len(np.unique(np.concatenate(found))) == 400


def test_no_word_comes_twice():
    one, other = Entropy(), Entropy()
    words = np.concatenate([one.words(50_000), other.words(50_000), one.words(50_000)])
    assert len(np.unique(words)) == 150_000


def test_every_bit_of_a_word_is_fair():
    bits = np.unpackbits(RepeatableEntropy(4).words(100_000).view(np.uint8)).reshape(-1, 64)
    assert np.all(np.abs(bits.mean(axis=0) - 0.5) < 5 * 0.5 / math.sqrt(100_000))


def test_a_key_is_given_up_after_a_while(monkeypatch):
    monkeypatch.setattr(noise, "PER_KEY", 10)
    entropy = RepeatableEntropy(1)
    words = np.concatenate([entropy.words(4) for _ in range(5)])
    assert entropy.keys == 3 and len(np.unique(words)) == 20
    with pytest.raises(ValueError, match=r"count = 11.*ask for fewer"):
        entropy.words(11)


def test_keys_have_256_bits():
    """Each of its 32 bytes is drawn: one that is always the same would stand in fewer than 64 keys alike."""
    keys = np.array([list(noise.Entropy()._fresh_key()) for _ in range(64)])
    assert keys.shape == (64, 32) and all(len(set(column)) > 32 for column in keys.T)


def test_nobody_can_give_a_key_to_real_entropy():
    with pytest.raises(TypeError):
        Entropy(b"key")  # type: ignore[call-arg]


def test_keys_come_from_the_operating_system(monkeypatch):
    monkeypatch.setattr(noise.os, "urandom", lambda count: bytes(range(count)))
    first = [Entropy().words(2).tolist() for _ in range(2)]
    monkeypatch.setattr(noise.os, "urandom", lambda count: bytes(count))
    assert first[0] == first[1] != Entropy().words(2).tolist()


# --- the grid, shapes and refusals -------------------------------------------------------------------------------


def test_the_grid_is_a_power_of_two_near_the_noise():
    near = [1.0, 0.3, 3.0, 256.0, np.nextafter(np.float32(4), np.float32(0)), 1e30, SMALLEST_STD]
    for std in np.float32([*near, *np.exp(np.random.default_rng(0).uniform(-50, 50, 200))]):
        step = float(SystemRandomness().step_of(np.zeros(1), std))
        assert math.frexp(step)[0] == 0.5
        assert Fraction(float(std)) / (2 * GRID_STEPS) < Fraction(step) <= Fraction(float(std)) / GRID_STEPS


def test_blocks_and_shapes_do_not_matter(monkeypatch):
    value = mixed_values(60, 1.0).reshape(4, 15)
    words = RepeatableEntropy(2).words(60)
    whole = rounded_gaussian(value, 5.0, 1.0, GivenWords(words))
    monkeypatch.setattr(noise, "BLOCK", 7)
    assert np.array_equal(whole, rounded_gaussian(value, 5.0, 1.0, GivenWords(words)))
    turned = rounded_gaussian(value.T, 5.0, 1.0, GivenWords(words.reshape(4, 15).T.reshape(-1)))
    assert np.array_equal(whole, turned.T)
    assert rounded_gaussian(np.zeros((0, 3)), 1.0, 1.0, Entropy()).shape == (0, 3)
    assert rounded_gaussian(np.float64(2.0), 1.0, 1.0, Entropy()).shape == ()
    assert whole.dtype == np.int64


def test_the_farthest_values_are_exact():
    value = np.array([2.0**62, -(2.0**62), 2.0**52 + 1, 5e-324])
    word, z = 2**61, tail_quantile(Fraction(1, 8))
    found = rounded_gaussian(value, 4.0, 1.0, GivenWords([word] * 4)) - value.astype(np.int64)
    assert set(found.tolist()) == {round(4 * float(z))}


NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"std": 0.0}, "std = 0.0: must be a finite number above 0"),
        ({"std": -1.0}, "std = -1.0: must"),
        ({"std": NAN}, "std = nan: must"),
        ({"std": INFINITE}, "std = inf: must"),
        ({"step": 0.3}, r"step = 0.3: must be a power of two; take one near std / 256"),
        ({"step": 0.0}, "step = 0.0: must be a power of two"),
        ({"step": -1.0}, "step = -1.0: must be a power of two"),
        ({"step": NAN}, "step = nan: must be a power of two"),
        ({"step": 2.0**21}, "std / step = 4.77e-07 is not in"),
        ({"step": 2.0**-31}, "std / step = 2.15e[+]09 is not in"),
        ({"value": np.array([1.0, NAN, -INFINITE])}, "value holds 2 of 3 numbers that are NaN or infinite; clip"),
        ({"value": np.array([INFINITE])}, "value holds 1 of 1"),
        ({"value": np.array([1.0, 4.7e18])}, "value is more than 2.62 steps of step = 1.0 from 0; clip"),
        ({"value": np.array([-4.7e18])}, "value is more than"),
        ({"value": np.array([1e308]), "step": 2.0**-20}, "value is more than"),
        ({"value": np.zeros(3, np.float32)}, "value has dtype float32: must be float64; convert"),
        ({"value": np.zeros(3, np.int64)}, "value has dtype int64"),
    ],
)
def test_what_has_no_exact_answer_is_refused(changes, message):
    given = {"value": np.zeros(3), "std": 1.0, "step": 1.0} | changes
    with pytest.raises(ValueError, match=message) as refusal:
        rounded_gaussian(**given, entropy=Entropy())
    assert "4.7" not in str(refusal.value).replace("4.77e-07", ""), "a value is a record's secret"
