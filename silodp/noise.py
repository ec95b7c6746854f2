"""Gaussian noise whose guarantee is true of the numbers that leave: a real Gaussian, rounded to a public grid.

`rounded_gaussian` returns k = round((value + std Z) / step) for a standard Gaussian Z in the mathematicians' sense, and
the chance of every k is exactly that formula's. Rounding comes after the noise and needs no secret, so k is a
post-processing of value + std Z: whatever holds for the real Gaussian mechanism at this `value` and `std` (its mu of
GDP, every (epsilon, delta)) holds for k as it stands. The grid costs nothing, and there are no low bits to read.

Two assumptions remain. The words are uniform: ChaCha20 under a key of the operating system. And time is not observed:
one draw in about eight million takes a millisecond longer, as a rule because of its word, seldom because of `value`.

How (Ziv's way). A 64-bit word gives the sign of Z and the first 63 bits of |Z|'s tail probability p, so that tails have
their own precision. One quantile in float64 and a tolerance decide nearly every k. What they cannot decide (p below
2^-24, or too near to the boundary of two k) is decided exactly: by comparing p, of which more bits are drawn as they
are needed, with the tail probabilities of the boundaries. It is the same p in both ways, so their mixture is exact.
"""

import math
import os
import threading
from fractions import Fraction
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from silodp.later import Later

many_digits = Later("mpmath.libmp")  # one word in 2^23 needs it
special = Later("scipy.special")

BLOCK = 16384  # numbers whose arrays fit into a core's cache
WORD = 64
PER_KEY = 2**27  # words, one GiB: far below the 2^32 blocks that a key of ChaCha20 can give
SMALLEST_TAIL = 2**40  # in units of 2^-64: smaller tail probabilities, one in 2^23, are decided exactly

# The float64 quantile is within 2^-38 of Z, in standard deviations: the sum of two bounds.
#   2^-39 for what the word leaves open. p lies in [m, m + 1] 2^-64, float64 rounds m by 2^-53 of it, m >= 2^40: so p is
#   known to 2^-39.99 of itself, and Z moves by at most p / density(Z) <= sqrt(pi / 2) times as much.
#   2^-39 = 1.8e-12 for ndtri on [2^-24, 1/2]. Its formula (Cephes) is off by at most 2e-16 and a running error analysis
#   of its operations gives 5e-15 for their roundings; the tests measure 1.3e-15. Other formulas have room to be worse.
# ERROR is twice the sum, which leaves room for roundings that grow with std / step: two of 2^-53 of |Z| <= 5.42. BEYOND
# is for those that do not: of the fraction of value / step, and of the tolerance itself.
ERROR = 2.0**-37
BEYOND = 2.0**-50

LARGEST = 2**63 - 1
TILTED_STEPS, TILTED_ERROR = 4, 2.0**-34  # of a local randomizer's message, whose numbers have a std of about 1

LEAST_SPREAD, MOST_SPREAD = 2.0**-20, 2.0**30  # std / step: beyond, nearly every draw would be decided exactly
FARTHEST = 2.0**62  # |value| / step. That the noise adds as much again has a chance below exp(-2^62).


def rounded_gaussian(value: np.ndarray, std: float, step: float, entropy: "Entropy") -> np.ndarray:
    """round((value + std Z) / step) with independent real Gaussians Z: int64, in exactly that distribution.

    Args:
        value: float64, finite; taken as exact. At most 2^62 steps from 0.
        std: the noise's standard deviation.
        step: the grid's step, a power of two near std / 256 (silodp.randomness knows which).
        entropy: where the words come from.

    Example:
        >>> import numpy as np
        >>> from silodp.noise import Entropy, rounded_gaussian
        >>> sent = rounded_gaussian(np.zeros(1000), 0.3, 2.0**-10, Entropy())
        >>> received = sent * 2.0**-10
    """
    value, std, step = np.asarray(value), float(std), float(step)
    _check_grid(value, std, step)
    flat, drawn = value.reshape(-1), np.empty(value.size, np.int64)
    work = np.empty((3, min(BLOCK, value.size)))  # kept over the blocks: fresh memory costs as much as the quantiles
    for begin in range(0, value.size, BLOCK):
        block = slice(begin, begin + BLOCK)
        _draw(flat[block], std, step, entropy, drawn[block], work[:, : flat[block].size])
    return drawn.reshape(value.shape)


def _along(count: int, threshold: float, above: float, entropy: "Entropy") -> np.ndarray:
    """Gaussians that lie above the threshold (0 or more) with probability `above`, each within 2^-48 of a real one.

    Tail probabilities have relative precision on either side of the threshold, however far out it lies: a uniform
    number of 52 bits would leave only some values to what is as rare as 2^-50, and these would name the side.
    """
    side, more = uniforms(entropy.words(2 * count)).reshape(2, -1)
    tails = ((entropy.words(count) & LARGEST) + more) * 2.0 ** (1 - WORD)
    upper, lower = -special.ndtri(tails * float(special.ndtr(-threshold))), near_gaussian((count,), entropy)
    while (over := np.flatnonzero(lower >= threshold)).size:
        lower[over] = near_gaussian((over.size,), entropy)
    return np.where(side < above, upper, lower)


def near_gaussian(shape: tuple[int, ...], entropy: "Entropy") -> np.ndarray:
    """Gaussians in float64, each within 2^-48 of a real one (up to 38 standard deviations)."""
    words, more = entropy.words(2 * math.prod(shape)).reshape(2, *shape)
    tail = (words ^ (words >> 63)) + uniforms(more)  # relative precision, however small it is
    return np.copysign(special.ndtri(tail * 2.0**-WORD), words.view(np.float64))


def uniforms(words: np.ndarray) -> np.ndarray:
    """Words as numbers in (0, 1), in float64."""
    return ((words.view(np.uint64) >> np.uint64(12)) + 0.5) * 2.0**-52


def tilted(unit: np.ndarray, threshold: float, above: float, entropy: "Entropy") -> np.ndarray:
    """For each unit row u the vector n + (g - <n, u>) u, rounded to multiples of 1 / TILTED_STEPS.

    n is a Gaussian vector and g a Gaussian that lies above `threshold` with probability `above`: PrivUnitG's message.
    Rounding hides how u entered. A row whose float64 numbers are too near to a boundary to say where the real ones lie
    is drawn again, whatever u: so what leaves is the real message, rounded, but for d 2^-31 of the level eps0.
    """
    unit = unit.astype(np.float64)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    drawn, left = np.empty(unit.shape), np.arange(len(unit))
    while left.size:
        rows, sure = _tilted(unit[left], threshold, above, entropy)
        drawn[left[sure]] = rows[sure]
        left = left[~sure]
    return drawn / TILTED_STEPS


def _tilted(unit: np.ndarray, threshold: float, above: float, entropy: "Entropy") -> tuple[np.ndarray, np.ndarray]:
    """In steps, and which rows are sure."""
    along, across = _along(len(unit), threshold, above, entropy), near_gaussian(unit.shape, entropy)
    rows = TILTED_STEPS * (across + (along - np.sum(across * unit, axis=1))[:, None] * unit)
    nearest = np.rint(rows)
    return nearest, (np.abs(rows - nearest) < 0.5 - TILTED_ERROR).all(axis=1)


class Entropy:
    """Uniform 64-bit words for whatever leaves for real: ChaCha20 under keys of the operating system.

    No two threads, processes or objects share a key, and a key is never kept for long. A process that was forked takes
    a key of its own before it gives a word.
    """

    def __init__(self) -> None:
        self._own = threading.local()  # a stream for each thread: nobody waits, and no fork can inherit a held lock

    def words(self, count: int) -> np.ndarray:
        """So many words, as int64; read only."""
        if count > PER_KEY:
            raise ValueError(f"count = {count}: a key gives at most {PER_KEY} words; ask for fewer at a time")
        stream = getattr(self._own, "stream", None)
        if stream is None or stream.process != _process() or stream.left < count:
            stream = self._own.stream = _Stream(self._fresh_key())
        return stream.words(count)

    def _fresh_key(self) -> bytes:
        return os.urandom(32)


class _Stream:
    """The key stream of one key, in the process that took it."""

    def __init__(self, key: bytes):
        self.process, self.left = _process(), PER_KEY
        # The nonce may be constant: no key is used twice.
        self.cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()

    def words(self, count: int) -> np.ndarray:
        self.left -= count
        return np.frombuffer(self.cipher.update(bytes(8 * count)), np.int64)


_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):  # not on Windows, which knows no forks
    os.register_at_fork(after_in_child=_count_fork)


def _process() -> tuple[int, int]:
    """Differs in every forked process: the system's numbers come back, and forks outside Python are not counted."""
    return os.getpid(), _forks


def _draw(value: np.ndarray, std: float, step: float, entropy: Entropy, drawn: np.ndarray, work: np.ndarray) -> None:
    """Writes a block into `drawn`; `work` is three arrays of its length."""
    part, place, nearest = work
    _on_grid(value, step, drawn, part)
    spread = std / step
    words = entropy.words(value.size)
    tail = words ^ (words >> 63)  # the lower 63 bits, turned over where the sign is negative: uniform too
    np.multiply(np.maximum(tail, SMALLEST_TAIL), 2.0**-WORD, out=place)
    np.copysign(special.ndtri(place, out=place), words.view(np.float64), out=place)
    place *= spread
    place += part
    drawn += np.rint(place, out=nearest).astype(np.int64)
    place -= nearest
    unsure = np.abs(place, out=place) > 0.5 - (ERROR * spread + BEYOND)
    unsure |= tail < SMALLEST_TAIL
    for i in np.flatnonzero(unsure):
        drawn[i] = _decided(_Gaussian(int(words[i]), entropy), float(value[i]), std, step, int(drawn[i]))


def _on_grid(value: np.ndarray, step: float, whole: np.ndarray, part: np.ndarray) -> None:
    """value / step as an integer and a part in [-1/2, 1/2], exactly: the step is a power of two."""
    with np.errstate(over="ignore"):  # refused below
        np.divide(value, step, out=part)
    if not (part.min() >= -FARTHEST and part.max() <= FARTHEST):
        _refuse_values(value, step)
    nearest = np.rint(part)
    whole[:] = nearest
    part -= nearest


class _Gaussian:
    """A real Gaussian Z of which as many bits are drawn as questions about it need."""

    def __init__(self, word: int, entropy: Entropy):
        self.negative, self.entropy = word < 0, entropy
        self.tail, self.bits = word ^ (word >> 63), WORD  # |Z|'s tail probability is in [tail, tail + 1] 2^-bits

    def exceeds(self, bound: Fraction) -> bool:
        """Whether Z > bound."""
        size = -bound if self.negative else bound
        return (size < 0 or self._larger(size)) != self.negative

    def _larger(self, size: Fraction) -> bool:
        """Whether |Z| > size, that is, whether its tail probability is below that of `size`."""
        while True:
            there = _scaled_tail(size, self.bits)
            if self.tail + 1 < there:
                return True
            if self.tail > there + 1:
                return False
            self.tail = self.tail << WORD | int(self.entropy.words(1)[0]) % 2**WORD
            self.bits += WORD


def _scaled_tail(size: Fraction, bits: int) -> Any:
    """2^bits P(Z > size) = 2^bits erfc(size / sqrt 2) / 2 as an integer, off by less than one.

    The 64 further bits leave 2^60 units for mpmath's last digits. Its global precision is shared by threads: not used.
    """
    half_square, precision = size * size / 2, bits + WORD
    square = many_digits.from_rational(half_square.numerator, half_square.denominator, precision)
    tail = many_digits.mpf_erfc(many_digits.mpf_sqrt(square, precision), precision)
    return many_digits.to_int(many_digits.mpf_shift(tail, bits - 1))


def _decided(gaussian: _Gaussian, value: float, std: float, step: float, guess: int) -> int:
    """round((value + std Z) / step), in exact arithmetic: the least k with Z <= (step (k + 1/2) - value) / std."""
    exact_value, exact_std, exact_step = Fraction(value), Fraction(std), Fraction(step)
    above = lambda k: gaussian.exceeds((exact_step * Fraction(2 * k + 1, 2) - exact_value) / exact_std)
    low, high, reach = guess - 1, guess, 1
    while above(high):
        low, high, reach = high, high + reach, 2 * reach
    while not above(low):
        low, high, reach = low - reach, low, 2 * reach
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if above(middle) else (low, middle)
    return high


def _check_std(std: float) -> None:
    if not (math.isfinite(std) and std > 0):
        raise ValueError(f"std = {std!r}: must be a finite number above 0; without noise nothing is private")


def _check_grid(value: np.ndarray, std: float, step: float) -> None:
    _check_std(std)
    if not (math.isfinite(step) and step > 0 and math.frexp(step)[0] == 0.5):
        raise ValueError(f"step = {step!r}: must be a power of two; take one near std / 256")
    if not LEAST_SPREAD <= std / step <= MOST_SPREAD:
        raise ValueError(
            f"step = {step!r}: std / step = {std / step:.3g} is not in 2^-20 to 2^30; take one near std / 256"
        )
    if value.dtype != np.float64:
        raise ValueError(f"value has dtype {value.dtype}: must be float64; convert it where it is still exact")


def _refuse_values(value: np.ndarray, step: float) -> None:
    """Says how many numbers are wrong, never which: they are records' secrets."""
    if bad := int(np.count_nonzero(~np.isfinite(value))):
        raise ValueError(f"value holds {bad} of {value.size} numbers that are NaN or infinite; clip before noise")
    raise ValueError(f"value is more than 2^62 steps of step = {step!r} from 0; clip it, or take a larger step")
