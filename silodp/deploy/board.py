"""What a server writes about its run, for the status page: how far it is, who was heard, what each site has spent.

Nothing in it was computed on records. Budgets are what the sites' own ledgers say, where their operators let them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from silodp.deploy.document import Document
from silodp.deploy.files import write_whole
from silodp.deploy.remote import Remote
from silodp.deploy.wire import is_number, plain
from silodp.errors import Refused

STATUS = "status.json"
EVERY = 5.0  # seconds between two questions for budgets
NUMBERS = ("run_spent", "run_reserved", "total", "limit", "delta")
MOST_REFUSALS = 20


class Board:
    """One run's status, written whole after every round."""

    def __init__(self, folder: Path, document: Document, links: Sequence[Remote]):
        self.folder, self.document, self.links = folder, document, links
        self.seconds: list[float] = []
        self.refusals: list[dict[str, Any]] = []
        self.budgets: dict[str, dict[str, float]] = {}
        self.asked_at = 0.0
        self.done = 0

    def ask(self) -> None:
        """Every site for its budget; one that does not tell has none on the page."""
        sites = [link for link in self.links if link.site in self.document.keys]
        self.asked_at = time.monotonic()
        try:
            for link in sites:
                link.send({"kind": "budget"}, {})
            answers: dict[str, Any] = {link.site: link.receive()[0].get("budget") for link in sites}
        except Refused as error:
            self.refused(error)
            return
        self.budgets = {site: told for site, told in answers.items() if sound(told)}

    def refused(self, error: Exception) -> None:
        self.refusals = [*self.refusals, {"at": time.time(), "text": plain(error)}][-MOST_REFUSALS:]

    def write(self, state: str, done: int | None = None) -> None:
        self.done = self.done if done is None else done
        if state == "running" and time.monotonic() - self.asked_at > EVERY:
            self.ask()
        recent, tree, plan = self.seconds[-20:], self.document.tree, self.document.plan
        rows = [
            {
                "site": link.site,
                "records": plan.facts.sizes[i] if i < plan.facts.silos else None,
                "epsilon": tree["epsilon"][i] if tree["epsilon"] and i < plan.facts.silos else None,
                "heard_at": link.heard_at,
                "bytes_up": link.bytes[0],
                "bytes_down": link.bytes[1],
                "budget": self.budgets.get(link.site),
            }
            for i, link in enumerate(self.links)
        ]
        status = {
            "run": self.document.run,
            "plan": self.document.words,
            "state": state,
            "algorithm": plan.config.algorithm.name,
            "trust": plan.config.privacy.trust,
            "parameters": plan.facts.parameters,
            "round": self.done,
            "rounds": plan.training.facts.rounds,
            "seconds_a_round": float(np.median(recent)) if recent else None,
            "delta": tree["delta"],
            "at": time.time(),
            "sites": rows,
            "refusals": self.refusals,
        }
        write_whole(self.folder / STATUS, json.dumps(status).encode())


def sound(told: Any) -> bool:
    """Whether a site's budget is numbers and nothing else."""
    numbers = isinstance(told, dict) and told.keys() == set(NUMBERS)
    return numbers and all(is_number(each) for each in told.values())
