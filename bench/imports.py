"""Where the CPU time of `silodp account` goes: `python -m bench.imports`, import by import, in milliseconds."""

from __future__ import annotations

import importlib
import time

ORDER = (
    "silodp.cli", "silodp.parse", "numpy", "jaxtyping", "jax", "equinox", "silodp.randomness", "silodp.gradients",
    "silodp.facts", "silodp.plan.account", "silodp.algorithms.gradient", "silodp.channels.compressed",
)  # fmt: skip


def main() -> None:
    print(f"{'Python itself':30}{1e3 * time.process_time():7.0f}")
    for name in ORDER:
        began = time.process_time()
        importlib.import_module(name)
        print(f"{name:30}{1e3 * (time.process_time() - began):7.0f}")
    from silodp.parse import parse_config
    from silodp.plan.account import account

    algorithm = {"name": "dp-gd", "rounds": 12}
    config = parse_config({"data": {"sizes": [100, 130]}, "privacy": {"epsilon": 2.0}, "algorithm": algorithm})
    began = time.process_time()
    account(config)
    print(f"{'the account itself':30}{1e3 * (time.process_time() - began):7.0f}")


if __name__ == "__main__":
    main()
