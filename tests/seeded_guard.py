"""A guard for one test: `python -m tests.seeded_guard SEED DIR` answers plans with a known seed, which no guard does.

Everything else of it is a guard's: socket, signatures, ledger, checks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from silodp.deploy import guarding, policy, silo

honest = policy.check_config
Server = silo.SiloServer


def check_all_but_the_seed(limits: policy.Limits, config: Any) -> None:
    unseeded = config.run.model_copy(update={"test_seed": False})
    honest(limits, config.model_copy(update={"run": unseeded}))


def main() -> None:
    seed = int(sys.argv[1])
    policy.check_config = check_all_but_the_seed
    silo.SiloServer = lambda setup, *given: Server({**setup, "seed": seed}, *given)  # type: ignore[assignment]
    guarding.serve(Path(sys.argv[2]))


if __name__ == "__main__":
    main()
