"""The cost of what was released, and the noise that a target asks for.

Composition takes the first route that fits:
1. all releases Gaussian: the exact closed form (gaussian.py);
2. privacy loss distributions of all releases, convolved (mixture.py), pessimistic throughout;
3. Renyi DP, added up and converted (Canonne, Kamath and Steinke 2020, Prop. 12): for masked
   releases, and for deltas too small for the floating-point convolution.
Route 1 is exact, route 2 exceeds the truth by about 3e-5 relative, route 3 by 5-15% in epsilon.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib import metadata
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from silodp import __version__, cache
from silodp.digits import rounded_up
from silodp.later import Later
from silodp.privacy import gaussian
from silodp.privacy.coins import beyond
from silodp.privacy.kinds import Releases, Sampling, Spent
from silodp.privacy.roots import root
from silodp.privacy.sums import apart, within

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

losses = Later("dp_accounting.pld.privacy_loss_distribution")
renyi_dp = Later("dp_accounting.rdp.rdp_privacy_accountant")

ORDERS = 1 + np.geomspace(0.011, 1e5, 300)
_CELLS_PER_SCALE = 60  # grid cells per root mean square loss of one release: error about 3e-5
_MOST_CELLS = 1 << 21
_ROUNDING = 1e-16  # of the convolution's FFT, per release
NO_NOISE = 1e-3  # a smaller multiplier (mu above 1000) counts as none: pessimistic, and no grid could hold it
_LEAST_RENYI = 1e-15  # below, e^-cost is 1 in float64: dp_accounting takes the logarithm of nothing, or says epsilon 0
_TINY = 1e-320
_GROUP_STEP, _LEAST_EPSILON = 1.1, 1e-9  # of the search for a group's epsilon
_HARDLY = 1e-4  # in the logarithm of the noise
_VERSIONS = lru_cache(lambda: tuple(metadata.version(name) for name in ("dp-accounting", "numpy", "scipy")))
_FIRST_STEP = 0.05  # of the search for the noise, in its logarithm: the first guess is that near


def epsilon(spent: Sequence[Spent], delta: float) -> float:
    """Smallest epsilon (never below the truth) for which the releases are (epsilon, delta)-DP."""
    check_delta(delta)
    loss, lost = apart(spent)
    if not (loss or lost):
        return _ideal_epsilon(spent, delta)
    most = _ideal_epsilon(spent, delta / 2)
    for _ in range(3):  # each time from above, and nearer
        rest = within(delta, most, loss, lost)
        if rest < delta / 2:
            return math.inf
        most = _ideal_epsilon(spent, rest)
    return most + loss


def _ideal_epsilon(spent: Sequence[Spent], delta: float) -> float:
    exposed, parts = _split(spent)
    exposed += left_out(spent)
    if not parts:
        return 0.0 if exposed <= delta else math.inf
    if exposed >= delta:
        return math.inf
    rest = (delta - exposed) / (1 - exposed)
    mu = _mu(parts)
    return gaussian.epsilon_of(rest, mu) if mu is not None else _epsilon_of_mixed(parts, rest)


def delta(spent: Sequence[Spent], epsilon: float) -> float:
    """Smallest delta (never below the truth) for which the releases are (epsilon, delta)-DP."""
    if not epsilon >= 0:
        raise ValueError(f"epsilon = {epsilon}: must be a number >= 0")
    loss, lost = apart(spent)
    if epsilon < loss:
        return 1.0
    return min(1.0, math.exp(loss) * (_ideal_delta(spent, epsilon - loss) + math.exp(min(epsilon, 700.0)) * lost))


def _ideal_delta(spent: Sequence[Spent], epsilon: float) -> float:
    exposed, parts = _split(spent)
    exposed = min(1.0, exposed + left_out(spent))
    return exposed + (1 - exposed) * _delta_of_noisy(parts, epsilon)


def curve(spent: Sequence[Spent], epsilons: Sequence[float]) -> Float[np.ndarray, " n"]:
    """delta(epsilon) at each of the epsilons: the whole guarantee."""
    return np.array([delta(spent, value) for value in epsilons])


def gdp(spent: Sequence[Spent]) -> float | None:
    """mu if every release is plainly Gaussian (then it says everything), else None."""
    return None if any(apart(spent)) else nearest_gdp(spent)


def nearest_gdp(spent: Sequence[Spent]) -> float | None:
    """The same of the releases that these are within e^loss and `lost` of."""
    exposed, parts = _split(spent)
    return math.inf if exposed == 1 else None if exposed > 0 else _mu(parts)


def rdp(spent: Sequence[Spent], orders: Float[np.ndarray, " a"]) -> Float[np.ndarray, " a"]:
    """Renyi DP of all releases together at each order."""
    total = np.zeros(orders.size)
    for part in _merged(spent):
        cost = part.releases.sampling.rdp(part.multiplier, part.releases.count, orders)
        if cost is None:
            kind = type(part.releases.sampling).__name__
            raise ValueError(f"{kind} releases have no Renyi bound: cannot be composed this way")
        total += cost
    return total


def pld(spent: Sequence[Spent], interval: float) -> PrivacyLossDistribution:
    """Composed privacy loss distribution of noisy releases, to be composed with others further."""
    total = losses.identity(interval)
    for part in _merged(spent):
        kind = part.releases
        total = total.compose(kind.sampling.pld(part.multiplier, kind.count, interval))
    return total


# Solvers end within 1e-12 of a target, on either side: what is promised must lie on the safe one.
SAFE = 1 + 1e-10


def calibrate(
    releases: Sequence[Releases],
    epsilon: float,
    delta: float,
    shares: Mapping[str, float] | None = None,
    already: Sequence[Spent] = (),
) -> dict[str, float]:
    """Multiplier per stream so that all releases and what is already spent are (epsilon, delta)-DP.

    Multipliers are t * sqrt(count * rate^2 / share), the smallest t that meets the target: for
    Gaussian streams `share` is exactly the stream's part of mu^2. Default: equal shares. All zeros
    means that the target holds without noise (see `needs_no_noise`).
    """
    check_epsilon(epsilon)
    check_delta(delta)
    base = _family(releases, shares)
    _check_overflow(releases, delta, already)
    if needs_no_noise(releases, epsilon, delta, already):
        return {release.stream: 0.0 for release in releases}
    loss, lost = apart(_noised(releases, base, 1.0, already))
    if loss or lost:
        epsilon, delta = epsilon - loss, within(delta, epsilon, loss, lost)
        if not (epsilon > 0 and delta > 0):
            told = f"{rounded_up(loss, 3)} of it and {rounded_up(lost, 3)} of delta"
            raise ValueError(f"epsilon: out of reach, {told} are what sums lose")
    excess = lambda log_t: math.log(
        max(_ideal_delta(_noised(releases, base, math.exp(log_t), already), epsilon), _TINY) / delta
    )
    scale = _exact_scale(releases, base, gaussian.mu_of(epsilon, delta), already)
    if scale is not None and (far := left_out(_noised(releases, base, scale, already))):
        # More noise leaves less beyond. Where much lies there, the search below finds how much more is best.
        rest = delta - far
        scale = _exact_scale(releases, base, gaussian.mu_of(epsilon, rest), already) if rest > delta / 2 else None
    if scale is None:
        _check_reachable(already, epsilon, delta)
        asked = tuple(releases), epsilon, delta, tuple(base.items()), tuple(already)
        scale = math.exp(_searched(asked, excess, -math.log(gaussian.mu_of(epsilon, delta))))
    return {stream: SAFE * scale * value for stream, value in base.items()}


def calibrate_gdp(
    releases: Sequence[Releases],
    mu: float,
    shares: Mapping[str, float] | None = None,
    already: Sequence[Spent] = (),
) -> dict[str, float]:
    """Multiplier per stream so that all (Gaussian) releases and what is already spent are mu-GDP."""
    if not 0 < mu < math.inf:
        raise ValueError(f"mu = {mu}: must be a positive number")
    base = _family(releases, shares)
    sums = any(apart(_noised(releases, base, 1.0, already)))
    scale = None if sums else _exact_scale(releases, base, mu, already)
    if scale is None:
        raise ValueError("a GDP target needs plainly Gaussian streams: give epsilon and delta instead")
    return {stream: SAFE * scale * value for stream, value in base.items()}


def needs_no_noise(releases: Sequence[Releases], epsilon: float, delta: float, already: Sequence[Spent] = ()) -> bool:
    """Whether the target holds without noise: the record is hardly ever used, or never."""
    bare = [Spent(release, 0.0) for release in releases]
    return _delta([*already, *bare], epsilon) <= delta


def optimal_share(count1: int, count2: int, a: float, b: float) -> float:
    """Share of mu^2 for the first of two streams that minimises the total noise variance a/b weigh:
    a = C1^2, b = C2^2 * mean over restarts of sum |dx|^2."""
    first, second = math.sqrt(count1 * a), math.sqrt(count2 * b)
    return first / (first + second)


def group_epsilon(spent: Sequence[Spent], delta: float, records: int) -> float:
    """Epsilon when `records` records of a silo change at once (user level: all of one person's).

    Gaussian: exactly that of records * mu. Otherwise (k eps, k e^{(k-1) eps} delta) from any valid
    (eps, delta) (paper 001, Appendix B), at the smallest eps that will do.
    """
    check_delta(delta)
    if records < 1:
        raise ValueError(f"records = {records}: must be at least 1")
    if records == 1:
        return epsilon(spent, delta)
    mu, (loss, lost) = nearest_gdp(spent), apart(spent)
    if mu is not None:
        delta -= left_out(spent, records)
        if delta <= 0:
            return math.inf
        most = gaussian.epsilon_of(delta / 2, records * mu)
        rest = within(delta, most, loss, lost)
        return gaussian.epsilon_of(rest, records * mu) + loss if rest >= delta / 2 else math.inf
    excess = lambda each: math.log(max(_delta(spent, each), _TINY) * records / delta) + (records - 1) * each
    # It falls until delta is at its floor, and grows from there: what will do is looked for from below.
    low = high = max(epsilon(spent, delta / records), _LEAST_EPSILON)
    last = (math.log(delta / records) - math.log(_TINY)) / (records - 1)  # beyond, no delta is small enough
    while high <= last and excess(high) > 0:
        low, high = high, high * _GROUP_STEP
    if high > last:
        return math.inf
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return records * high


def group_delta(spent: Sequence[Spent], epsilon: float, records: int) -> float:
    """delta(epsilon) when `records` records of a silo change at once: what `group_epsilon` inverts."""
    if records == 1:
        return delta(spent, epsilon)
    mu, (loss, lost) = nearest_gdp(spent), apart(spent)
    if mu is None:
        each = epsilon / records
        return min(1.0, records * math.exp(min((records - 1) * each, 700.0)) * delta(spent, each))
    if epsilon < loss:
        return 1.0
    ideal = left_out(spent, records) + gaussian.delta_of(epsilon - loss, records * mu)
    return min(1.0, math.exp(loss) * (ideal + math.exp(min(epsilon, 700.0)) * lost))


def check_epsilon(value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"epsilon = {value}: must be a positive number")


def check_delta(value: float) -> None:
    if not 0 < value < 1:
        raise ValueError(f"delta = {value}: must be strictly between 0 and 1")


_delta = delta  # the public names are also natural argument names


def _merged(spent: Sequence[Spent]) -> tuple[Spent, ...]:
    """Equal releases added up. A one-pass stream counts once, at its least noisy release."""
    least: dict[str, float] = {}
    for part in spent:
        if part.releases.sampling.one_pass and part.releases.count:
            stream = part.releases.stream
            least[stream] = min(least.get(stream, math.inf), part.multiplier)
    counts: dict[tuple[str, Sampling, float], int] = {}
    for part in spent:
        kind = part.releases
        multiplier = least[kind.stream] if kind.sampling.one_pass and kind.count else part.multiplier
        if kind.count and multiplier < math.inf:
            key = (kind.stream, kind.sampling, multiplier)
            counts[key] = counts.get(key, 0) + kind.count
    return tuple(
        Spent(Releases(stream, count, sampling), multiplier) for (stream, sampling, multiplier), count in counts.items()
    )


def _split(spent: Sequence[Spent]) -> tuple[float, tuple[Spent, ...]]:
    """Probability that a noiseless release touches the record, and the noisy releases."""
    merged = _merged(spent)
    log_unseen = 0.0
    for part in merged:
        if part.multiplier < NO_NOISE:
            exposure = part.releases.sampling.exposure
            log_unseen += part.releases.uses * math.log1p(-exposure) if exposure < 1 else -math.inf
    return -math.expm1(log_unseen), tuple(part for part in merged if part.multiplier >= NO_NOISE)


def left_out(spent: Sequence[Spent], records: int = 1) -> float:
    """Probability of what the costs of noisy releases leave out: coins that count as shown when so many records move
    them, and batches that are too large for their slots."""

    def of_one(part: Spent) -> float:
        coins = part.releases.coins
        return part.releases.sampling.overflow + (coins * beyond(records / part.multiplier) if coins else 0.0)

    noisy = [part for part in spent if NO_NOISE <= part.multiplier < math.inf]
    return sum(part.releases.uses * of_one(part) for part in noisy)


def _mu(parts: tuple[Spent, ...]) -> float | None:
    each = [part.releases.sampling.gdp(part.multiplier, part.releases.count) for part in parts]
    known = [mu for mu in each if mu is not None]
    return math.hypot(*known) if len(known) == len(each) else None


def _slack(parts: tuple[Spent, ...]) -> float:
    """Bound on the rounding of the convolution, inf when there is no convolution to be had."""
    if not all(part.releases.sampling.has_pld for part in parts):
        return math.inf
    return _ROUNDING * (10 + sum(part.releases.count for part in parts))


@lru_cache(maxsize=256)
def _epsilon_of_mixed(parts: tuple[Spent, ...], delta: float) -> float:
    slack, best = _slack(parts), math.inf
    if delta > slack:
        best = float(_composed(parts).get_epsilon_for_delta(delta - slack))
    if delta < 100 * slack and _has_rdp(parts):
        renyi = renyi_dp.compute_epsilon(ORDERS, _costs(parts), delta)[0]
        best = min(best, float(renyi))
    return best


def _delta_of_noisy(parts: tuple[Spent, ...], epsilon: float) -> float:
    if not parts:
        return 0.0
    mu = _mu(parts)
    if mu is not None:
        return gaussian.delta_of(epsilon, mu)
    slack, best = _slack(parts), 1.0
    if slack < math.inf:
        best = min(best, float(_composed(parts).get_delta_for_epsilon(epsilon)) + slack)
    if best < 100 * slack and _has_rdp(parts):
        renyi = renyi_dp.compute_delta(ORDERS, _costs(parts), epsilon)[0]
        best = min(best, float(renyi))
    return best


def _costs(parts: tuple[Spent, ...]) -> Float[np.ndarray, " a"]:
    return np.maximum(rdp(parts, ORDERS), _LEAST_RENYI)


def _has_rdp(parts: tuple[Spent, ...]) -> bool:
    probe = np.array([2.0])
    return all(part.releases.sampling.rdp(part.multiplier, 1, probe) is not None for part in parts)


@lru_cache(maxsize=16)
def _composed(parts: tuple[Spent, ...]) -> PrivacyLossDistribution:
    return pld(parts, _interval(parts))


def _interval(parts: tuple[Spent, ...]) -> float:
    """Grid step: fine against one release's loss, unless the composed range would not fit."""
    scales = [part.releases.sampling.loss_scale(part.multiplier) for part in parts]
    uses = [part.releases.uses for part in parts]
    variance = sum(n * scale**2 for n, scale in zip(uses, scales, strict=True))
    reach = 20 * math.sqrt(variance) + variance
    return max(min(scales) / _CELLS_PER_SCALE, reach / _MOST_CELLS)


def _family(releases: Sequence[Releases], shares: Mapping[str, float] | None) -> dict[str, float]:
    """The multipliers at t = 1."""
    streams = [release.stream for release in releases]
    if len(set(streams)) < len(streams):
        raise ValueError(f"releases name a stream twice: {streams}")
    used = [release.stream for release in releases if release.count]
    given = dict.fromkeys(used, 1.0) if shares is None else {s: shares.get(s, 0.0) for s in used}
    for stream, share in given.items():
        if not 0 < share < math.inf:
            raise ValueError(f"shares[{stream!r}] = {share}: every stream needs a positive share")
    total = sum(given.values())
    return {
        release.stream: math.sqrt(release.uses) * release.sampling.rate / math.sqrt(given[release.stream] / total)
        if release.count
        else 0.0
        for release in releases
    }


def _noised(
    releases: Sequence[Releases], base: Mapping[str, float], scale: float, already: Sequence[Spent]
) -> list[Spent]:
    return [*already, *(Spent(release, scale * base[release.stream]) for release in releases)]


def _exact_scale(
    releases: Sequence[Releases], base: Mapping[str, float], mu: float, already: Sequence[Spent]
) -> float | None:
    """t in closed form when everything is Gaussian."""
    at_one, before = nearest_gdp(_noised(releases, base, 1.0, ())), nearest_gdp(already)
    if at_one is None or before is None:
        return None
    if before >= mu:
        raise ValueError(f"target out of reach: what is already spent is {before:.6g}-GDP, over {mu:.6g}")
    return at_one / math.sqrt(mu**2 - before**2)


def _check_overflow(releases: Sequence[Releases], delta: float, already: Sequence[Spent]) -> None:
    asked = [*releases, *(part.releases for part in already if part.multiplier < math.inf)]
    overflow = sum(release.uses * release.sampling.overflow for release in asked)
    if overflow > delta / 2:
        raise ValueError(
            f"delta = {delta}: {rounded_up(overflow, 3)} of it is the chance that a Poisson batch overflows; give at "
            f"least {rounded_up(2 * overflow, 3)}, or batches of fixed size"
        )


def _check_reachable(already: Sequence[Spent], target: float, delta: float) -> None:
    smallest = _ideal_epsilon(already, delta)
    if smallest >= target:
        raise ValueError(
            f"epsilon = {target}: out of reach, already spent is {rounded_up(smallest, 6)} at delta = {delta}"
        )


def _searched(asked: tuple[Any, ...], excess: Callable[[float], float], guess: float) -> float:
    """The result of the search, or of an earlier one: believed only if it meets the target, and hardly less would."""
    key = hashlib.sha256(repr((asked, __version__, _VERSIONS())).encode()).hexdigest()
    kept = cache.number("calibrations", key)
    if kept is not None and abs(kept) < 700 and excess(kept) <= 0 < excess(kept - _HARDLY):
        return kept
    found = _smallest(excess, guess)
    cache.keep_number("calibrations", key, found)
    return found


def _smallest(excess: Callable[[float], float], guess: float) -> float:
    """Smallest argument with excess <= 0, to 1e-6, for a decreasing function."""
    excess = functools.cache(excess)  # a value costs a composition
    step = _FIRST_STEP if excess(guess) > 0 else -_FIRST_STEP
    near, far = guess, guess + step
    while (excess(far) > 0) == (step > 0):
        step *= 2
        near, far = far, far + step
        if far > guess + 40:
            raise ValueError("target out of reach: more noise no longer helps at this delta")
    found = root(excess, min(near, far), max(near, far), xtol=2e-6)
    return next(x for x in found + 2e-6 * 2.0 ** np.arange(-1, 24) if excess(x) <= 0)
