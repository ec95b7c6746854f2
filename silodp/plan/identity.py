"""Which run a certificate is of: when it ended, by which plan, and the model that it left."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from typing import Any

from silodp.plan.plan import Plan

ID_DIGITS = 16
# Raised when the same words of a plan come to mean other releases: an approval of the old ones is none of the new ones.
MECHANISM = 3  # broken lines are made of coarse and fine bends


def fingerprint(plan: Plan) -> str:
    """SHA-256 of the plan's JSON without its seed: from that, all noise could be found by trying."""
    tree: dict[str, Any] = plan.to_json() | {"mechanism": MECHANISM}
    tree["config"]["run"].pop("seed", None)
    tree["facts"].pop("seed", None)
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def identity(plan: Plan, model: bytes) -> dict[str, str]:
    """Of a run that ends now. `model`: its model.safetensors, which holds what was released and nothing else."""
    digest, of_plan = hashlib.sha256(model).hexdigest(), fingerprint(plan)
    now = datetime.now(UTC)
    run = hashlib.sha256(f"{now.isoformat()} {of_plan} {digest}".encode()).hexdigest()[:ID_DIGITS]
    return {"run": run, "date": now.isoformat(timespec="seconds"), "plan": of_plan, "model": digest}
