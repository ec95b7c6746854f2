"""A config's plan: the exact calibration, or a paper's printed one with what it really gives beside the claim."""

from __future__ import annotations

from collections.abc import Sequence

from silodp.build import checked_algorithm, schedule_of, silo_weights
from silodp.channels.options import compression_of, shuffle_of
from silodp.compressors import RandK
from silodp.config import Config, ConfigError
from silodp.privacy import gaussian
from silodp.privacy.certificate import Claim
from silodp.privacy.plan import Federates, Plan, Target, make_plan
from silodp.privacy.printed import Case, formula_of


def plan_of(
    config: Config, sizes: Sequence[int], names: Sequence[str], parameters: int | None, calibration: str | None = None
) -> Plan | None:
    """The plan of a private run; None for a run without privacy. Nothing is computed on records."""
    algorithm = checked_algorithm(config, sizes, names)
    privacy = config.privacy
    if not privacy.private:
        return None
    federates = Federates(
        tuple(sizes),
        tuple(silo_weights(sizes, config.algorithm.weights).tolist()),
        privacy.trust,
        config.algorithm.performed,
        config.algorithm.participation,
        schedule_of(config, len(sizes)),
        mask_of(config, parameters),
        shuffle_of(config, parameters),
        algorithm.together,
    )
    target = Target(privacy.delta, privacy.epsilon, privacy.gdp, privacy.multipliers, privacy.split)
    try:
        paper = (calibration or privacy.calibration) == "paper"
        return make_plan(algorithm, federates, target, printed_multipliers(config, sizes) if paper else None)
    except ConfigError:
        raise
    except ValueError as error:
        text = str(error)
        raise ConfigError(text if text.startswith("privacy") else f"privacy.{text}") from None


def within_budget(config: Config, sizes: Sequence[int], names: Sequence[str], parameters: int | None) -> Config:
    """With given noise and a budget: the filter. The run ends after the last round that the budget admits."""
    budget = config.privacy.budget
    if budget is None:
        return config

    def ending(rounds: int) -> Config:
        return config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"stop_after": rounds})})

    def admits(rounds: int) -> bool:
        plan = plan_of(ending(rounds), sizes, names, parameters)
        assert plan is not None
        return all(plan.epsilon(i) <= budget for i in range(len(sizes)))

    low, high = 0, config.algorithm.performed + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if admits(middle) else (low, middle)
    if low == 0:
        raise ConfigError(
            f"privacy.budget = {budget}: the first round already exceeds it with these multipliers; give more noise"
        )
    return ending(low)


def mask_of(config: Config, parameters: int | None) -> tuple[int, int] | None:
    """(keep, parameters) when rand-k's mask is to be accounted."""
    if not config.privacy.mask_amplification:
        return None
    if parameters is None:
        raise ConfigError("model.parameters is missing: privacy.mask_amplification depends on it")
    compression = compression_of(config.algorithm, config.privacy.trust, parameters)
    if compression is None or not isinstance(compression[0], RandK):
        raise ConfigError("privacy.mask_amplification = true: needs algorithm.compressor = 'rand-k'")
    return compression[0].keep, parameters


def claim_of(config: Config) -> Claim | None:
    """What the paper says the epsilon is; None when it prints no calibration for this algorithm and target."""
    privacy, name = config.privacy, config.algorithm.name
    formula = formula_of(name, privacy.trust)
    if formula is None or (privacy.epsilon is None and (privacy.gdp is None or name != "mu2")):
        return None
    claimed = privacy.epsilon
    if claimed is None:
        assert privacy.gdp is not None
        claimed = gaussian.epsilon_of(privacy.delta, privacy.gdp)
    return Claim(claimed, formula[0])


def printed_multipliers(config: Config, sizes: Sequence[int]) -> list[dict[str, float]]:
    """The paper's multipliers for each silo."""
    privacy, name = config.privacy, config.algorithm.name
    claim, formula = claim_of(config), formula_of(name, privacy.trust)
    if claim is None or formula is None:
        reason = "no paper prints one" if formula is None else "it needs privacy.epsilon"
        raise ValueError(f"calibration = 'paper': not available for {name}: {reason}")
    cases = [
        Case(config.algorithm, claim.epsilon, privacy.delta, records, len(sizes), privacy.gdp) for records in sizes
    ]
    return [formula[1](case) for case in cases]
