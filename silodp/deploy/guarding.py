"""The guard as a process: `python -m silodp.deploy.guarding DIR`. It opens no network socket."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from silodp import registry
from silodp.deploy.guard import Guard
from silodp.deploy.listen import Listener
from silodp.errors import ConfigError

SOCKET = Path("run") / "guard.sock"


def serve(folder: Path) -> None:
    import jax

    # What is proven of sums holds for products in float32; accelerators round them to less unless they are told.
    jax.config.update("jax_default_matmul_precision", "highest")
    os.umask(0o077)
    guard = Guard(folder)
    registry.close(guard.policy.limits.outside)
    user = os.getuid() if guard.policy.relay_uid is None else guard.policy.relay_uid
    listener = Listener(folder / SOCKET, user, guard.reply, guard.policy.limits.message_bytes)
    signal.signal(signal.SIGTERM, lambda *_: listener.close())
    print(f"guard of {guard.policy.site} ready", flush=True)
    try:
        listener.serve()
    finally:
        guard.close()


def main() -> None:
    try:
        serve(Path(sys.argv[1]))
    except (ConfigError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
