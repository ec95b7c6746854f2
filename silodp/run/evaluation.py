"""The stage after training: what held-out records say about the model, privately."""

from __future__ import annotations

from silodp.releases import Account, Vector
from silodp.run.prepare import Prepared, asked_stage


def evaluated(prepared: Prepared, x: Vector, account: Account) -> tuple[Vector | None, Account]:
    """In a simulation: what the stage released, and the account with it; as it was where there is no such stage."""
    stage = prepared.plan.evaluation
    if stage is None:
        return None, account
    table, spent = asked_stage(prepared.ground, stage, prepared.ground.held_out, x)
    return table, account.joined(spent)
