"""A guard, of a site or a shuffler, as a process: `python -m silodp.deploy.guarding DIR`. It opens no network port."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from silodp import registry
from silodp.cache import keep_programs
from silodp.deploy.approval import outside_of
from silodp.deploy.guard import Guard
from silodp.deploy.listen import Listener
from silodp.deploy.mixer import Mixer
from silodp.deploy.policy import is_shuffler, socket_of
from silodp.errors import ConfigError


def serve(folder: Path) -> None:
    import jax

    # What is proven of sums holds for products in float32; accelerators round them to less unless they are told.
    jax.config.update("jax_default_matmul_precision", "highest")
    os.umask(0o077)
    guard = Mixer(folder) if is_shuffler(folder) else Guard(folder)
    outside = outside_of(folder)
    registry.close(outside)
    if not outside:  # what is the library's own takes records as arguments
        keep_programs()
    user = os.getuid() if guard.policy.relay_uid is None else guard.policy.relay_uid
    largest = guard.policy.limits.message_bytes
    listener = Listener(socket_of(folder, guard.policy), user, guard.reply, largest)
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
