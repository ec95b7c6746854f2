"""A silo in its own process: `python -m silodp.deploy.silo_process`, bytes in on stdin, bytes out on stdout.

Parts from outside the library that a plan names are refused, unless its operator lists them when the process is
started: `python -m silodp.deploy.silo_process MODULE:CLASS ...`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol, overload

import jax
import numpy as np

from silodp import registry
from silodp.cache import keep_programs
from silodp.deploy.silo import SiloServer
from silodp.deploy.wire import decode, encode, read_frame, write_frame
from silodp.errors import Refused, Undecided
from silodp.releases import Account

# Errors about what was sent: their text goes back.
TOLD = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, OSError)


def account_arrays(account: Account) -> dict[str, np.ndarray]:
    arrays = {"gradients": np.asarray(account.gradients)}
    for stream, tally in account.tallies.items():
        arrays[f"count/{stream}"] = np.asarray(tally.count)
        arrays[f"multiplier/{stream}"] = np.asarray(tally.multiplier)
    return arrays


def respond(
    server: SiloServer, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The answer of a silo that has its plan."""
    kind = header.get("kind")
    if kind == "keys":
        fingerprint = server.agree(header["keys"], header.get("signatures"))
        # For the silo's operator, who may compare it with the other silos'; the server's word would be worthless.
        print(f"silo {server.index}: keys and plan agreed, fingerprint {fingerprint}", file=sys.stderr, flush=True)
        return {"kind": "ready", "fingerprint": fingerprint}, {}
    if kind == "sum":
        return {"kind": "sum"} | server.end.step(header), {}
    if kind == "start":
        server.start(jax.device_put(arrays["x0"]))
        return {"kind": "ready", "gradients": float(server.account.gradients)}, {}
    if kind == "leave":
        server.leave(str(header.get("stage")), jax.device_put(arrays["released"]) if "released" in arrays else None)
        return {"kind": "ready"}, {}
    if kind == "account":
        return {"kind": "account"}, account_arrays(server.account)
    public = [jax.device_put(arrays[str(i)]) for i in range(len(arrays))]
    exponent = None if header.get("exponent") is None else int(header["exponent"])
    facts, message = server.answer(str(kind), header["query"], int(header["round"]), public, exponent)
    return {"kind": "answer", "facts": facts}, message


class Kept(Protocol):
    """A silo whose answers are on the disk before they leave (silodp.deploy.kept)."""

    silo: SiloServer
    ahead: bool

    def ask(self, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes: ...


Served = SiloServer | Kept
Keep = Callable[[Mapping[str, Any], SiloServer], Kept]


@overload
def reply(served: SiloServer | None, data: bytes) -> tuple[SiloServer | None, bytes]: ...


@overload
def reply(served: Served | None, data: bytes, keep: Keep | None) -> tuple[Served | None, bytes]: ...


def reply(served: Served | None, data: bytes, keep: Keep | None = None) -> tuple[Served | None, bytes]:
    """One request and its answer. A refusal is an answer too: the reason goes back, nothing else does."""
    try:
        header, arrays = decode(data)
        if header.get("kind") == "setup":
            served = set_up(served, header, arrays, keep)
            silo = served if isinstance(served, SiloServer) else served.silo
            return served, encode(silo.ready(), {})
        if served is None:
            raise Refused("no plan yet: send setup first")
        if isinstance(served, SiloServer):
            return served, encode(*respond(served, header, arrays))
        return served, served.ask(header, arrays)
    except Undecided as error:
        return served, encode({"kind": "grid", "exponents": list(error.either)}, {})
    except TOLD as error:
        return served, encode({"kind": "refused", "reason": f"{error}"}, {})
    except Exception as error:  # nothing that a server sends ends the process; a text of JAX's may quote numbers
        return served, encode({"kind": "refused", "reason": f"a {type(error).__name__} in this silo"}, {})


def set_up(
    served: Served | None, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray], keep: Keep | None
) -> Served:
    if served is not None and (not isinstance(served, SiloServer) or served.seed is None):
        raise Refused("setup: this silo has a plan; a new one would forget what it has spent")
    fresh = SiloServer(header, arrays)
    return fresh if keep is None else keep(header, fresh)


def serve(requests: BinaryIO, answers: BinaryIO, keep: Keep | None = None) -> None:
    served: Served | None = None
    while data := read_frame(requests):
        served, answer = reply(served, data, keep)
        write_frame(answers, answer)
        if served is not None and not isinstance(served, SiloServer) and served.ahead:
            return  # memory is ahead of the disk: a silo that starts again reads what is there


def main() -> None:
    """`--keep DIR` before other arguments: what must not be forgotten goes there."""
    names, keep = sys.argv[1:], None
    if names[:1] == ["--keep"]:
        from silodp.deploy.kept import KeptSilo

        folder, names = Path(names[1]), names[2:]
        keep = lambda setup, silo: KeptSilo(folder, setup, silo)
    registry.close(names)
    if not names:  # what is the library's own takes records as arguments
        keep_programs()
    # What is proven of sums holds for products in float32; accelerators round them to less unless they are told.
    jax.config.update("jax_default_matmul_precision", "highest")
    # Whatever prints must not end up between the frames: keep the pipe, point stdout at stderr.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, answers, keep)


if __name__ == "__main__":
    main()
