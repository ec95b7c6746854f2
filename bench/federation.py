"""`python -m bench.federation [NAME ...]`: real runs over NVFlare on this machine, beside what a prototype took.

Every party is a process of its own with a guard of its own, over mutual TLS on loopback. The table goes to standard
output; what was measured is kept under runs/federation, so that a stopped command goes on. Needs `silodp[deploy]`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from silodp.deploy.parade import Show, performed

FEATURES, RECORDS, ROUNDS = 20, 207, 20
KEPT = Path("runs/federation")
OPTIONS = {"name": "spider", "rounds": ROUNDS, "step_size": 0.5, "clip": 1.0, "clip_difference": 0.5, "restart": 10}
PRIVACY = {"epsilon": 4.0, "delta": 1e-5}


def network(hidden: int) -> dict[str, Any]:
    return {"kind": "mlp", "hidden": [hidden], "activation": "softplus", "loss": "cross-entropy"}


@dataclass(frozen=True)
class Case:
    """One run, and the seconds a round that the prototype took on a busy machine (the specification's table)."""

    label: str
    sites: int
    config: dict[str, Any]
    prototype: float | None
    shuffler: bool = False


SMALL = {"model": network(43)}
CASES = {
    "untrusted-3": Case("spider, untrusted", 3, {"privacy": PRIVACY, "algorithm": OPTIONS, **SMALL}, 0.078),
    "untrusted-10": Case("spider, untrusted", 10, {"privacy": PRIVACY, "algorithm": OPTIONS, **SMALL}, 0.21),
    "untrusted-3-large": Case(
        "spider, untrusted", 3, {"privacy": PRIVACY, "algorithm": OPTIONS, "model": network(2173)}, 0.20
    ),
    "pvec-3": Case(
        "P_vec under masks",
        3,
        {
            "privacy": PRIVACY | {"trust": "shuffled"},
            "algorithm": OPTIONS | {"name": "sdp-spider", "weights": "size"},
            **SMALL,
        },
        0.17,
    ),
    "aggregated-3": Case(
        "spider, aggregated", 3, {"privacy": PRIVACY | {"trust": "aggregated"}, "algorithm": OPTIONS, **SMALL}, None
    ),
    "missing-4": Case(
        "spider, aggregated, may miss 1",
        4,
        {
            "privacy": PRIVACY | {"trust": "aggregated", "missing": 1, "colluding": 1},
            "algorithm": OPTIONS,
            **SMALL,
        },
        None,
    ),
    "shuffler-3": Case(
        "privunit through a shuffler",
        3,
        {
            "privacy": PRIVACY | {"trust": "shuffled"},
            "algorithm": OPTIONS | {"randomizer": "privunit", "weights": "size"},
            "model": {"kind": "logistic"},
        },
        1.0,
        shuffler=True,
    ),
}


def made_show(case: Case) -> Show:
    """Records of a noisy linear rule, the same number at every site."""
    names = [f"f{i}" for i in range(FEATURES)]
    columns = "".join(f'[columns.{name}]\nkind = "number"\nrange = [-5, 5]\n' for name in names)
    schema = f'[target]\nname = "outcome"\nclasses = ["ill", "well"]\n{columns}'
    rng = np.random.default_rng(0)
    rule = rng.normal(size=FEATURES)

    def text() -> str:
        rows = np.clip(rng.normal(size=(RECORDS, FEATURES)), -5, 5)
        labels = np.where(rows @ rule + rng.normal(size=RECORDS) > 0, "ill", "well")
        lines = [",".join([*(f"{cell:.4f}" for cell in row), label]) for row, label in zip(rows, labels, strict=True)]
        return ",".join([*names, "outcome"]) + "\n" + "\n".join(lines) + "\n"

    return Show(schema, {f"site-{i + 1}": text() for i in range(case.sites)}, case.config, case.shuffler)


def measured(name: str) -> dict[str, Any]:
    """Of one case, run now or kept."""
    file = KEPT / f"{name}.json"
    if file.is_file():
        return json.loads(file.read_text())
    case, out = CASES[name], KEPT / f"{name}-{os.getpid()}"
    KEPT.mkdir(parents=True, exist_ok=True)
    began, load = time.monotonic(), os.getloadavg()[0]
    performed(out, made_show(case), lambda text: print(f"  {name}: {text}", flush=True))
    told = json.loads((out / "run" / "status.json").read_text())
    sites = [site for site in told["sites"] if site["records"] is not None]
    found = {
        "parameters": told["parameters"],
        "seconds_a_round": told["seconds_a_round"],
        "bytes_up": max(site["bytes_up"] for site in sites) / ROUNDS,
        "bytes_down": max(site["bytes_down"] for site in sites) / ROUNDS,
        "seconds": time.monotonic() - began,
        "load": (load + os.getloadavg()[0]) / 2,
    }
    file.write_text(json.dumps(found))
    return found


def table(found: dict[str, dict[str, Any]]) -> str:
    head = "run | sites | d | s/round | prototype | bytes up, down a site and round | all of it, s | load"
    lines = [f"| {head} |", "|---" * 8 + "|"]
    for name, row in found.items():
        case = CASES[name]
        sites = f"{case.sites}+1" if case.shuffler else f"{case.sites}"
        moved = f"{row['bytes_up']:,.0f}, {row['bytes_down']:,.0f}"
        before = "" if case.prototype is None else f"{case.prototype:g}"
        cells = [
            case.label, sites, f"{row['parameters']:,}", f"{row['seconds_a_round']:.2g}", before, moved,
            f"{row['seconds']:.0f}", f"{row['load']:.0f}",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    # argparse holds an empty list of names itself against the choices: [] allows it.
    parser.add_argument("names", nargs="*", choices=[[], *CASES], metavar="NAME", help="all when left out")
    print(table({name: measured(name) for name in parser.parse_args().names or CASES}))


if __name__ == "__main__":
    main()
