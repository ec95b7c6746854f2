"""How the two processes of a site are started: systemd units, and a compose file.

The guard reads records and has no network. The relay has a network and cannot read the guard's folder: it belongs to
another user, and shares with the guard only the folder of the socket.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from silodp.deploy.policy import Policy, operators_file, socket_of

GUARD_FILE, RELAY_FILE, COMPOSE_FILE = "silodp-guard.service", "silodp-relay.service", "compose.yml"
SILO, SHUFFLER_COMMAND = ("silo", "guard"), ("shuffler", "guard")
SECRETS = ("key", "box", "ledger.db", "ledger.db-wal", "ledger.db-shm", "blobs")  # in an operator's folder
NOT_ROOT = "${SILODP_UID:?a user number that is not root's}"  # compose asks for it
NO_NETWORK = ("PrivateNetwork=yes", "RestrictAddressFamilies=AF_UNIX", "IPAddressDeny=any")
GUARD_UNIT = """[Unit]
Description=silodp guard in {folder}: no network

[Service]
ExecStart={silodp} {command} {folder}
User=silodp-guard
Group=silodp-relay
RuntimeDirectory=silodp
RuntimeDirectoryMode=0750
{no_network}
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes
ReadWritePaths={places}
UMask=0077
MemoryMax=80%
Restart=on-failure

[Install]
WantedBy=multi-user.target
"""
RELAY_UNIT = """[Unit]
Description=silodp relay in {kit}: carries bytes, reads no records
Wants=network-online.target
After=network-online.target {guard}

[Service]
ExecStart={silodp} silo relay {kit}
User=silodp-relay
Group=silodp-relay
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes
ReadWritePaths={kit}
InaccessiblePaths={hidden}
UMask=0077
Restart=on-failure

[Install]
WantedBy=multi-user.target
"""
COMPOSE = """# An image with silodp in it: FROM python:3.11-slim, RUN pip install 'silodp[deploy]'
# The relay shares nothing with the guard but the folder of the socket.
services:
  guard:
    image: silodp
    command: silodp {command} {folder}
    network_mode: none
    user: "{uid}:{uid}"
    volumes: [{volumes}]
"""
COMPOSE_RELAY = """  relay:
    image: silodp
    command: silodp silo relay {kit}
    user: "{uid}:{uid}"
    volumes: ["{kit}:{kit}", "{socket}:{socket}"]
"""


def program() -> Path:
    """The command of this very installation."""
    return Path(sys.executable).parent / "silodp"


def guard_unit(folder: Path, command: Sequence[str]) -> str:
    places = " ".join(["", *map(str, elsewhere(folder))]).replace(" ", " -")  # "-": it may not be there yet
    told = {"silodp": program(), "command": " ".join(command), "no_network": "\n".join(NO_NETWORK)}
    return GUARD_UNIT.format(folder=folder.resolve(), places=f"{folder.resolve()}{places}", **told)


def elsewhere(folder: Path) -> list[Path]:
    """Folders outside its own that a guard writes to, where its operator has put the socket or the counter."""
    policy, place = operators_file(folder), folder.resolve()
    parents = {(place / file).resolve().parent for file in (policy.socket, policy.counter)}
    return sorted(each for each in parents if not each.is_relative_to(place))


def relay_unit(folder: Path, kit: Path) -> str:
    """Records and secrets are out of its reach twice: by the folder's rights, and by name."""
    hidden = " ".join(f"-{file}" for file in secrets_of(folder))
    return RELAY_UNIT.format(kit=kit.resolve(), silodp=program(), guard=GUARD_FILE, hidden=hidden)


def secrets_of(folder: Path) -> list[Path]:
    """What a relay must never read."""
    policy, place = operators_file(folder), folder.resolve()
    records = [place / file for file in policy.data.files] if isinstance(policy, Policy) else []
    return [*(place / name for name in SECRETS), *records]


def compose(folder: Path, command: Sequence[str], data: Sequence[Path] = (), kit: Path | None = None) -> str:
    """With the relay once there is a kit."""
    place = folder.resolve()
    volumes = [f'"{each}:{each}"' for each in (place, *elsewhere(folder))]
    volumes += [f'"{file.resolve()}:{file.resolve()}:ro"' for file in data]
    text = COMPOSE.format(folder=place, command=" ".join(command), uid=user(), volumes=", ".join(volumes))
    return text if kit is None else text + relay_service(folder, kit)


def relay_service(folder: Path, kit: Path) -> str:
    socket = socket_of(folder, operators_file(folder)).parent.resolve()
    return COMPOSE_RELAY.format(kit=kit.resolve(), uid=user(), socket=socket)


def user() -> int | str:
    """Whose files the folder's are; a container that has root's number would have root's rights."""
    return os.getuid() or NOT_ROOT
