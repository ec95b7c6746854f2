"""What a site's guard and a shuffler's have in common: a folder of their own, a key, a ledger, and refusals.

Nothing that is sent ends such a process, and no text of an error leaves it: a refusal is a code and a fixed sentence.
"""

from __future__ import annotations

import os
import sqlite3
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from silodp.deploy import signing
from silodp.deploy.book import PutBack
from silodp.deploy.document import Document, check_approvals
from silodp.deploy.files import locked
from silodp.deploy.ledger import Closed, Dropped, Edited, Ledger, Repeated
from silodp.deploy.policy import SENTENCES, Denied, operators_file
from silodp.deploy.wire import decode, encode
from silodp.errors import ConfigError, Refused, Undecided

KEY = "key"  # the file of the private key
HELLO = "hello"  # asks whether anybody is there, and is answered by the same


def open_ledger(folder: Path) -> Ledger:
    return Ledger(folder / "ledger.db", folder / operators_file(folder).counter, approved=True)


class Office:
    """One process that answers, in a folder that is its own.

    `policy`: its operator's file, with `site`, `counter` and `limits.message_bytes`.
    """

    def __init__(self, folder: Path, policy: Any):
        self.folder, self.policy, self.lock = folder, policy, threading.Lock()
        self.held = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        if not locked(self.held):
            os.close(self.held)
            raise ConfigError(f"{folder}: another guard works here; two would answer twice")
        self.key = signing.Key.read(folder / KEY)
        self.ledger = open_ledger(folder)
        try:
            self.ledger.check_unedited()
        except Edited:
            self.close()
            raise

    def close(self) -> None:
        self.ledger.close()
        os.close(self.held)

    def reply(self, data: bytes) -> bytes:
        """One request and its answer."""
        with self.lock:
            try:
                return self._reply(data)
            except Undecided as error:  # nothing was spent, and the two grids are public
                return encode({"kind": "grid", "exponents": list(error.either)}, {})
            except Denied as error:
                return self._refused(error.code, str(error), error.about)
            except (Repeated, Dropped) as error:
                return self._refused("repeated", str(error))
            except PutBack as error:
                return self._refused("put-back", str(error))
            except Edited as error:
                return self._refused("edited", str(error))
            except Closed as error:
                return self._refused("run", str(error))
            except (sqlite3.Error, OSError) as error:
                return self._refused("disk", f"{type(error).__name__}: {error}")
            except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
                return self._refused("question", f"{type(error).__name__}: {error}")
            except Exception as error:
                return self._refused("fault", type(error).__name__)

    def _reply(self, data: bytes) -> bytes:
        raise NotImplementedError

    def _forget(self) -> None:
        """What is in memory and not on the disk."""

    def _refused(self, code: str, detail: str, about: str = "") -> bytes:
        self._forget()
        try:
            self.ledger.refused(code, detail)
        except sqlite3.Error as error:  # a full disk refuses this line too
            print(f"guard: a refusal could not be noted ({error})", file=sys.stderr, flush=True)
        told = {"kind": "refused", "code": code, "reason": SENTENCES[code]}
        return encode(told | ({"about": about} if about else {}), {})

    def _message(self, data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        if len(data) > self.policy.limits.message_bytes:
            raise Denied("message")
        try:
            return decode(data)
        except Refused:
            raise Denied("message") from None

    def _agreed(self, header: Mapping[str, Any]) -> Document:
        """The plan of a message, if this operator and all parties of the plan have signed it."""
        document = self._document(header.get("document"))
        if not self.ledger.approved(document.fingerprint):
            raise Denied("not-approved")
        try:
            check_approvals(document, header.get("approvals"))
        except Refused:
            raise Denied("not-signed") from None
        return document

    def _document(self, text: Any) -> Document:
        try:
            return Document(signing.read_document(str(text).encode()))
        except (Refused, ConfigError, UnicodeError, LookupError, TypeError):
            raise Denied("document") from None
