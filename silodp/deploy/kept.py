"""A silo on pipes that forgets nothing when its process ends: a ledger in a folder of the run's directory.

The same question gets the same bytes, whoever asks again. What a release costs is not kept here: this ledger is of one
run, whose plan says it; what may be spent over many runs is a guard's business.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from silodp.deploy.desk import Desk
from silodp.deploy.files import held
from silodp.deploy.ledger import COUNTER, LEDGER, Ledger
from silodp.deploy.silo import SiloServer, agreed_bytes
from silodp.errors import Refused
from silodp.facts import Stream


class KeptSilo(Desk):
    """Answers of one silo of one message run. The folder is its own until the process ends."""

    def __init__(self, folder: Path, setup: Mapping[str, Any], silo: SiloServer):
        os.umask(0o077)
        self.holding = held(folder, "silo")
        self.holding.__enter__()
        ledger, run = Ledger(folder / LEDGER, folder / COUNTER), str(setup.get("run"))
        fingerprint = hashlib.sha256(agreed_bytes(setup)).hexdigest()
        for each in ledger.runs():
            if (each.run, each.fingerprint) != (run, fingerprint):
                raise Refused("setup: this silo has begun another run, or this one with another plan")
        super().__init__(ledger, run, fingerprint, silo)

    def _lines(self, streams: Sequence[Stream]) -> list[dict[str, Any]]:
        return [{"stream": stream.name, "count": stream.count} for stream in streams]
