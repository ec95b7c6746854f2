"""What the papers' theorems choose: step size, restart interval, batch, rounds, clips, momentum.

    [algorithm] theory = true, smoothness = L, gradient_bound = G (diameter, heterogeneity, pl_constant where needed)

fills in what a config leaves out; what it gives is kept, and the rest is chosen to go with it. Only public numbers are
used: the constants, d, the silos' sizes, and the target (epsilon, delta). mu2 needs no `theory = true` for its step
size and clip. Constants that the theorems hide are chosen here, the same for all:

- O(.) and Theta(.) have constant 1; the ln(1/delta) that a tilde hides stands beside d, as in Lowy et al., Thm F.1.
- F(x0) - min F is taken to be 1 (GAP), as DIFF2 assumes up to a constant.
- `reach` is n*sqrt(N) under an untrusted server and n*N under any other, n the smallest silo, N the silos of a round:
  the noise of the mean falls with it, and it turns a theorem for one trust model into one for the other.
- The noise of differences is the one that the plan will really add, not the paper's bound on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from silodp.algorithms.choice import Choice, whole
from silodp.config import AlgorithmConfig, Config, ConfigError, parse_config
from silodp.privacy.plan import VALUE_SHARE

GAP = 1.0


def choose(config: Config, sizes: Sequence[int], parameters: int | None) -> dict[str, Any]:
    """The options that the theorem of the config's algorithm chooses: {} when nobody asks it."""
    options = config.algorithm
    if not (options.theory or asks_mu2(options, parameters)):
        return {}
    if options.name not in FAMILIES:
        raise ConfigError(f"algorithm.theory = true: no theorem is known for {options.name}; leave it out")
    choice = Choice(options, config.privacy, tuple(sizes), parameters)
    FAMILIES[options.name](choice)
    return choice.chosen


def asks_mu2(options: AlgorithmConfig, parameters: int | None) -> bool:
    constants = (options.gradient_bound, options.smoothness, options.diameter, parameters)
    return options.name == "mu2" and None not in constants


def with_options(config: Config, chosen: dict[str, Any]) -> Config:
    """The config with the theorem's choices in the place of what it leaves out."""
    if not chosen:
        return config
    tree = config.model_dump(exclude_unset=True)
    return parse_config(tree | {"algorithm": tree["algorithm"] | chosen})


def descent(c: Choice) -> None:
    """Without noise: the longest step for which the descent lemma promises progress; rounds stay the config's."""
    c.pick("step_size", lambda: 1 / c.L)


def horizon(c: Choice) -> float:
    """Rounds of length 1/L after which the noise has caught up with the descent (SoteriaFL, eq. 47)."""
    return math.sqrt(c.L * GAP / ((1 + c.omega) * c.noise)) / c.G


def gradient(c: Choice) -> None:
    """dp-gd, dp-sgd, ldp-sgd, cdp-sgd: SoteriaFL, Thm 1 and its proof; the papers give the others no theorem.

    The proof's second bound on the rounds is about sampling and compression: full, plain messages do not need it.
    """
    c.pick("clip", lambda: c.G)
    exact = c.options.batch is None and c.options.compressor is None
    least = lambda: 0.0 if exact else 1 / (c.silos * c.noise)
    rounds = c.pick("rounds", lambda: whole(max(horizon(c), least())))
    c.pick("step_size", lambda: min(1.0, horizon(c) / rounds) / c.L)


def local(c: Choice) -> None:
    """local-sgd: no theorem in the papers; as many local steps in all as `gradient` takes, K times shorter (ours)."""
    c.pick("clip", lambda: c.G)
    rounds = c.pick("rounds", lambda: whole(horizon(c) / c.steps))
    c.pick("step_size", lambda: min(1.0, horizon(c) / rounds) / (c.steps * c.L))


def shift_cost(c: Choice) -> float:
    """tau of SoteriaFL: what compression costs, spread over the silos."""
    return math.sqrt((1 + c.omega) ** 3 / c.silos)


def soteria_sgd(c: Choice) -> None:
    """soteria-sgd: SoteriaFL, Cor. 1. Its batch's sqrt((1+omega) L d ln) / (n eps G) is read off `noise`."""
    spread = lambda: shift_cost(c) / (2 * (1 + c.omega))
    local_noise = lambda: math.sqrt((1 + c.omega) * c.L * c.noise * c.silos) / c.G
    c.pick("batch", lambda: whole(math.sqrt(spread()) / local_noise(), c.n))
    soteria_gd(c)


def soteria_gd(c: Choice) -> None:
    """soteria-gd: SoteriaFL, Cor. 1 with all records."""
    c.pick("clip", lambda: c.G)
    c.pick("rounds", lambda: whole(horizon(c) * (1 + math.sqrt(shift_cost(c)))))
    c.pick("step_size", lambda: 1 / ((1 + 2 * shift_cost(c)) * c.L))


def soteria_svrg(c: Choice) -> None:
    """soteria-svrg, ldp-svrg: SoteriaFL, Cor. 2 (omega = 0 without compression)."""
    c.pick("clip", lambda: c.G)
    batch = c.pick("batch", lambda: whole(c.n ** (2 / 3) / 4))
    p = c.pick("snapshot_probability", lambda: batch / c.n)
    c.pick("rounds", lambda: whole(horizon(c) * max(1.0, shift_cost(c))))
    pace = p ** (2 / 3) * batch ** (1 / 3)
    c.pick("step_size", lambda: min(pace, 0.25) * min(1.0, 1 / shift_cost(c)) / (2 * c.L))


def soteria_saga(c: Choice) -> None:
    """soteria-saga: SoteriaFL, Cor. 3."""
    c.pick("clip", lambda: c.G)
    c.pick("batch", lambda: whole(3 * c.n ** (2 / 3), c.n))
    c.pick("rounds", lambda: whole(horizon(c) * max(1.0, shift_cost(c))))
    c.pick("step_size", lambda: min(1.0, 1 / shift_cost(c)) / (3 * c.L))


def difference_clips(c: Choice) -> None:
    c.pick("clip", lambda: c.G)
    c.pick("clip_difference", lambda: c.L)


def difference_noise(c: Choice, rounds: int, restart: int) -> float:
    """Std of the mean difference's noise per unit of |x - y|, over L: the plan's, for full batches."""
    values = c.privacy.split if isinstance(c.privacy.split, float) else VALUE_SHARE
    share = (1 - values) / (2 if c.steps > 1 else 1)  # local steps are a stream of their own
    count = rounds - math.ceil(rounds / restart)
    return 2 * math.sqrt(count / share) / (c.rho * c.reach)


def difference_step(c: Choice, rounds: int, restart: int) -> float:
    """The longest step at which noise gathered between restarts stays below the descent.

    DIFF2, Thm 4.3, min(1/L, 1/(sqrt(T d) L sigma2)), with the constants of Lowy et al.'s proof of Thm F.1.
    """
    return stable_step(c, difference_noise(c, rounds, restart), restart)


def stable_step(c: Choice, noise: float, span: float) -> float:
    return min(0.5, 1 / math.sqrt(8 * span * c.d * noise**2) if noise else 0.5) / c.L


def optimum(c: Choice) -> float:
    """The best squared gradient norm that privacy allows to private differences, (L G d)^(2/3) / (reach eps)^(4/3)."""
    return (GAP * c.L * c.G * c.noise) ** (2 / 3)


def diff2(c: Choice) -> None:
    """diff2-gd: DIFF2, Thm 4.3."""
    difference_clips(c)
    rounds = c.pick("rounds", lambda: whole(1 + c.L / optimum(c) + c.L**2 * c.noise / optimum(c) ** 2))
    restart = c.pick("restart", lambda: diff2_restart(c, rounds))
    c.pick("step_size", lambda: difference_step(c, rounds, restart))


def diff2_restart(c: Choice, rounds: int) -> int:
    share = (c.G**2 * math.sqrt(c.noise) / c.L) ** (2 / 3)
    return whole(share * rounds, rounds)


def bvr(c: Choice) -> None:
    """diff2-bvr-l-sgd: DIFF2, Thm F.4; local_steps and batch_local are the config's."""
    difference_clips(c)
    K, b = c.steps, c.options.batch_local or c.n
    if K > 1:
        c.pick("clip_local", lambda: c.L)
    rounds = c.pick("rounds", lambda: bvr_rounds(c, K, b))
    restart = c.pick("restart", lambda: diff2_restart(c, rounds))
    c.pick("step_size", lambda: min(difference_step(c, rounds, restart) / K, *local_limits(c, K, b, rounds)))


def bvr_rounds(c: Choice, K: int, b: int) -> int:
    descent = c.L / K + heterogeneity(c) + c.L / math.sqrt(K * b)
    private = c.d * math.log(1 / c.privacy.delta) / c.epsilon
    noisy, lasting = c.L * math.sqrt(private / K) / b, c.L**2 * private / (c.n**2 * c.silos * c.epsilon)
    return whole(1 + (descent + noisy) / optimum(c) + lasting / optimum(c) ** 2)


def heterogeneity(c: Choice) -> float:
    """Hessians bounded by L are never further than 2 L from their mean."""
    return c.options.heterogeneity or 2 * c.L


def local_limits(c: Choice, K: int, b: int, rounds: int) -> tuple[float, ...]:
    """Steps at which a silo's own steps stay close to descent on F (DIFF2, Prop. F.2; PSGM, Thm 4.2)."""
    if K == 1:
        return (1 / c.L,)
    log = math.log(1 / c.privacy.delta)
    variance = log * (K * rounds / (c.silos * (c.n * c.epsilon) ** 2) + 1 / (b**2 * c.epsilon))
    return 1 / (K * heterogeneity(c)), math.sqrt(b / K) / c.L, 1 / (math.sqrt(K * c.d * variance) * c.L)


def spider(c: Choice) -> None:
    """spider: Lowy et al., Thm F.1 (F.2 with a shuffler): R = sqrt(q L / noise) / G, and the largest q for which
    q <= 1/(tau2 eta)^2. That condition is q R <= cap for the noise that is really added; solving it for q gives the
    theorem's q with its constant."""
    difference_clips(c)
    cap = lambda: 1 / (2 * c.d * difference_noise(c, 2, 2) ** 2)
    longest = lambda: math.floor(max(1.0, min((cap() / horizon(c)) ** (2 / 3), sampled_silos(c))))
    rounds = c.pick("rounds", lambda: whole(math.sqrt(longest()) * horizon(c)))
    restart = c.pick("restart", lambda: math.floor(max(1.0, min(cap() / rounds, sampled_silos(c), rounds))))
    c.pick("step_size", lambda: difference_step(c, rounds, restart))


def sampled_silos(c: Choice) -> float:
    return math.inf if c.silos == len(c.sizes) else float(c.n * c.silos)


def spider_alt(c: Choice) -> None:
    """spider-alt: no theorem; spider's with q = 2."""
    difference_clips(c)
    rounds = c.pick("rounds", lambda: whole(math.sqrt(2) * horizon(c)))
    c.pick("step_size", lambda: difference_step(c, rounds, 2))


def condition(c: Choice) -> float:
    """kappa."""
    return c.L / c.constant("pl_constant")


def prox_sgd(c: Choice) -> None:
    """prox-sgd: Lowy et al., Thm E.1."""
    c.pick("clip", lambda: c.G)
    accuracy = lambda: c.L * GAP / (condition(c) * c.G**2) * min(c.silos * c.n, 1 / c.noise)
    c.pick("rounds", lambda: whole(2 * condition(c) * math.log(max(math.e, accuracy())), c.n))
    c.pick("step_size", lambda: 1 / (2 * c.L))


def prox_svrg(c: Choice) -> None:
    """prox-svrg, prox-pl-svrg: Lowy et al., Thm E.2. Epochs of Q = floor(n/K) rounds, 12 kappa rounds a stage, as many
    stages as halve the gap down to the noise. prox-svrg is one stage."""
    c.pick("clip", lambda: c.G)
    batch = c.pick("batch", lambda: whole((c.n**2 / c.silos) ** (1 / 3), c.n))
    restart = c.pick("restart", lambda: c.n // batch)
    stage = lambda: whole(12 * condition(c) / restart) * restart
    if c.options.name.endswith("prox-pl-svrg"):
        epochs = c.pick("epochs", lambda: stage() // restart)
        halvings = lambda: math.log2(GAP * c.L / (condition(c) ** 2 * c.noise * c.G**2))
        c.pick("rounds", lambda: whole(halvings()) * epochs * restart)
    else:
        c.pick("rounds", stage)
    c.pick("step_size", lambda: min(1.0, batch**1.5 * math.sqrt(c.silos) / c.n) / (8 * c.L))


def mu2(c: Choice) -> None:
    """mu2: Reshef and Levy, Thm 5.2 (untrusted) and 6.2 (trusted). For chunks of b records S is S/b (ours)."""
    options, chunk = c.options, c.options.batch or 1
    D = c.constant("diameter")
    rounds = c.pick("rounds", lambda: c.n // chunk) if options.theory else options.rounds
    clip = c.pick("clip", lambda: c.G + 2 * c.L * D)
    silos = math.sqrt(c.silos) if c.privacy.trust == "untrusted" else c.silos
    noisy = lambda: c.rho * D * silos * chunk / (2 * clip * math.sqrt(c.d)) if c.privacy.private else math.inf
    c.pick("step_size", lambda: min(noisy(), 1 / (4 * c.L)) / rounds)


def psgm(c: Choice) -> None:
    """mb-psgm, ce-psgm: PSGM, Thm A.3, A.4, 4.2, A.2, proved there for the shuffle model. The theorems fix no rounds:
    those are chosen at which descent is as small as the cost of privacy (ours). Their bound on the step by the noise,
    sqrt(momentum) reach eps / (sqrt(d R) K L), is that of differences with 1/momentum for the restart interval, and
    is taken with the same constants: with constant 1 runs diverge."""
    difference_clips(c)
    K, b = c.steps, c.options.batch_local or c.n
    if K > 1:
        c.pick("clip_local", lambda: c.L)
    rounds = c.pick("rounds", lambda: whole(GAP * c.L / optimum(c)))
    momentum = c.pick("momentum", lambda: psgm_momentum(c, rounds))
    c.pick("step_size", lambda: min(psgm_limit(c, K, momentum, rounds), *local_limits(c, K, b, rounds)))


def psgm_momentum(c: Choice, rounds: int) -> float:
    scale = (GAP * c.L) ** (2 / 3) / c.G ** (4 / 3)
    private = scale / (c.noise ** (1 / 3) * rounds)
    sampled = scale * (c.silos * c.options.batch) ** (1 / 3) / rounds ** (2 / 3) if c.options.batch else math.inf
    return min(1.0, max(1 / rounds, min(private, sampled)))


def psgm_limit(c: Choice, K: int, momentum: float, rounds: int) -> float:
    private = stable_step(c, difference_noise(c, rounds, rounds), 1 / momentum) / K
    sampled = math.sqrt(momentum * c.silos * c.options.batch) / (K * c.L) if c.options.batch else math.inf
    return min(private, sampled)


FAMILIES: dict[str, Callable[[Choice], None]] = {
    "gd": descent, "mb-sgd": descent,
    "dp-gd": gradient, "dp-sgd": gradient, "ldp-sgd": gradient, "cdp-sgd": gradient, "local-sgd": local,
    "diff2-gd": diff2, "diff2-bvr-l-sgd": bvr, "spider": spider, "spider-alt": spider_alt,
    "prox-sgd": prox_sgd, "prox-svrg": prox_svrg, "prox-pl-svrg": prox_svrg,
    "soteria-gd": soteria_gd, "soteria-sgd": soteria_sgd, "soteria-svrg": soteria_svrg, "ldp-svrg": soteria_svrg,
    "sdp-spider": spider, "sdp-prox-sgd": prox_sgd, "sdp-prox-svrg": prox_svrg, "sdp-prox-pl-svrg": prox_svrg,
    "soteria-saga": soteria_saga, "mu2": mu2, "mb-psgm": psgm, "ce-psgm": psgm,
    "mb-psgm-fg": psgm, "ce-psgm-fg": psgm,
}  # fmt: skip
