"""A paper's own calibration: its noise, and what it says the epsilon is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from silodp.algorithms import find
from silodp.algorithms.entry import Case, Entry, Printed
from silodp.config import Config
from silodp.facts import Facts
from silodp.privacy import gaussian


@dataclass(frozen=True)
class Claim:
    """A paper's own calibration: what it says the epsilon is."""

    epsilon: float
    formula: str

    def verdict(self, true: float) -> dict[str, Any]:
        """The claim beside the epsilon that the noise really gives."""
        return {
            "formula": self.formula,
            "claimed_epsilon": self.epsilon,
            "true_epsilon": true,
            "violated": bool(true > self.epsilon * (1 + 1e-6)),
        }


def claim_of(config: Config) -> Claim | None:
    """What the paper says the epsilon is; None when it prints no calibration for this algorithm and target."""
    printed = find(config.algorithm.name).printed_for(config.privacy.trust)
    claimed = claimed_epsilon(config, printed) if printed is not None else None
    return None if printed is None or claimed is None else Claim(claimed, printed.formula)


def claimed_epsilon(config: Config, printed: Printed) -> float | None:
    privacy = config.privacy
    if privacy.epsilon is None and privacy.gdp is not None and printed.claims_gdp:
        return gaussian.epsilon_of(privacy.delta, privacy.gdp)
    return privacy.epsilon


def printed_noise(config: Config, facts: Facts, entry: Entry) -> list[dict[str, float]]:
    """The paper's multipliers for each silo."""
    privacy, name = config.privacy, config.algorithm.name
    printed, claim = entry.printed_for(privacy.trust), claim_of(config)
    if claim is None or printed is None:
        reason = "no paper prints one" if printed is None else "it needs privacy.epsilon"
        raise ValueError(f"calibration = 'paper': not available for {name}: {reason}")
    case = lambda records: Case(config.algorithm, claim.epsilon, privacy.delta, records, facts.silos, privacy.gdp)
    return [printed.noise(case(records)) for records in facts.sizes]
