"""A site's folder: made, checked, and shown to its operator. Files that the two processes of a site are started by."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from silodp.deploy.files import private_files
from silodp.deploy.guarding import SOCKET
from silodp.deploy.ledger import Ledger
from silodp.deploy.policy import NAME, read_policy
from silodp.deploy.signing import Key, words
from silodp.digits import rounded_up
from silodp.errors import ConfigError
from silodp.parse import toml_literal

POLICY = """# What this site allows. The guard reads it when it starts; nothing in it ever comes from the network.
site = {site}
# relay_uid = 1001      the user number of the relay, if it is not the guard's own user
# counter = "/other/disk/counter"   the ledger's second file, best on another disk

[data]
files = {files}
schema = "schema.toml"

[limits]
trusts = ["untrusted"]
epsilon = {epsilon}           # of one run, for every record
delta = {delta}
total_epsilon = {total}     # of all runs on these records together
total_delta = {delta}

[peers]
"""
GUARD_UNIT = """[Unit]
Description=silodp guard of {site}: reads records, has no network

[Service]
ExecStart=silodp silo guard {folder}
User=silodp-guard
Group=silodp-relay
PrivateNetwork=yes
RestrictAddressFamilies=AF_UNIX
IPAddressDeny=any
NoNewPrivileges=yes
ProtectSystem=strict
ReadWritePaths={folder}
UMask=0077
Restart=on-failure

[Install]
WantedBy=multi-user.target
"""
RELAY_UNIT = """[Unit]
Description=silodp relay of {site}: carries bytes, reads no records
After=network-online.target silodp-guard.service

[Service]
ExecStart=silodp silo relay {folder}
User=silodp-relay
Group=silodp-relay
NoNewPrivileges=yes
ProtectSystem=strict
ReadWritePaths={folder}/kit
InaccessiblePaths={hidden}
UMask=0077
Restart=on-failure

[Install]
WantedBy=multi-user.target
"""
COMPOSE = """services:
  guard:
    image: silodp
    command: silodp silo guard /site
    network_mode: none
    user: "{uid}:{uid}"
    volumes: ["{folder}:/site", {data}]
  relay:
    image: silodp
    command: silodp silo relay /site
    user: "{uid}:{uid}"
    volumes: ["{folder}/kit:/site/kit", "{folder}/run:/site/run"]
"""


def init_site(
    folder: Path, site: str, schema: Path, data: Sequence[Path], epsilon: float, total: float, delta: float
) -> list[str]:
    from silodp.data.schema import Schema
    from silodp.deploy.document import SITE

    if not SITE.fullmatch(site):
        raise ConfigError(f"--name {site!r}: use letters, digits, '.', '-' and '_', at most 63")
    if (folder / NAME).exists():
        raise ConfigError(f"{folder}: holds a site already; give a new folder")
    for file in (schema, *data):
        if not file.is_file():
            raise ConfigError(f"{file}: no such file")
    text = Schema.read(schema).to_toml()
    with private_files():
        key = made_folder(
            folder,
            site,
            text,
            data,
            POLICY.format(
                site=toml_literal(site),
                files=toml_literal([str(file.resolve()) for file in data]),
                epsilon=epsilon,
                total=total,
                delta=delta,
            ),
        )
    return [
        f"{folder} is the site {site}; read {folder / NAME} and set its limits",
        f"its key, for the other sites: {words(key.public)}",
        f"next: silodp silo facts {folder} -o {site}.facts.json",
    ]


def made_folder(folder: Path, site: str, schema: str, data: Sequence[Path], policy: str) -> Key:
    """Key, policy, schema, and how the two processes of a site are started."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    place = {
        "site": site,
        "folder": folder.resolve(),
        "hidden": " ".join(str(file.resolve()) for file in data),
        "uid": os.getuid(),
        "data": ", ".join(f'"{file.resolve()}:{file.resolve()}:ro"' for file in data),
    }
    texts = {
        NAME: policy,
        "schema.toml": schema,
        "silodp-guard.service": GUARD_UNIT.format(**place),
        "silodp-relay.service": RELAY_UNIT.format(**place),
        "compose.yml": COMPOSE.format(**place),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return Key.create(folder / "key")


def trust_sites(folder: Path, statements: Sequence[Any], ask: Callable[[str], bool] | None) -> list[str]:
    """Other sites' keys into guard.toml, one question each."""
    from silodp.deploy.document import told_facts

    policy, lines = read_policy(folder), []
    for statement in statements:
        site, key = told_facts(statement)["site"], statement["key"]
        known = policy.peers.get(site)
        if site == policy.site or known == key:
            continue
        if known is not None:
            raise ConfigError(f"{site}: known with another key; ask this site, then change [peers] in {NAME} by hand")
        if ask is not None and not ask(f"{site} has the key\n  {words(key)}\nDid {site} tell you the same?"):
            lines.append(f"{site}: not noted")
            continue
        with (folder / NAME).open("a", encoding="utf-8") as file:
            file.write(f'"{site}" = "{key}"\n')
        lines.append(f"{site}: noted")
    return lines


def checkup(folder: Path) -> list[tuple[bool, str]]:
    """What is right and wrong with a site, a line each."""
    policy = read_policy(folder)
    mode = stat.S_IMODE(folder.stat().st_mode)
    found = [(mode & 0o007 == 0, f"{folder}: rights {mode:o}; nobody else may look into it")]
    secret = stat.S_IMODE((folder / "key").stat().st_mode)
    found.append((secret == 0o600, f"{folder / 'key'}: rights {secret:o}; only the guard may read it"))
    found.append((not policy.limits.outside, "no code from outside the library is allowed"))
    found.append((bool(policy.peers), f"{len(policy.peers)} other sites are known by their keys"))
    found.append(_records(folder))
    found += _book(folder)
    kit = folder / "kit"
    if kit.is_dir():
        from silodp.deploy.kits import hardened

        found.append((hardened(kit), f"{kit}: allows the relay and nothing else"))
    unit = folder / "silodp-guard.service"
    found.append((unit.is_file() and "PrivateNetwork=yes" in unit.read_text(), "the guard's unit has no network"))
    found.append(_answers(folder))
    return found


def _records(folder: Path) -> tuple[bool, str]:
    from silodp.deploy.sites import own_facts

    try:
        facts, _ = own_facts(read_policy(folder), folder)
    except (ConfigError, OSError) as error:
        return False, f"records: {' '.join(str(error).split())}"
    return True, f"records: {facts.sizes[0]} fit the schema"


def _book(folder: Path) -> list[tuple[bool, str]]:
    try:
        ledger = Ledger(folder / "ledger.db", folder / read_policy(folder).counter)
    except ConfigError as error:
        return [(False, str(error))]
    try:
        problems = ledger.verify()
        return [(not problems, f"ledger: {ledger.head.seq} entries, {len(problems)} problems")]
    finally:
        ledger.close()


def _answers(folder: Path) -> tuple[bool, str]:
    from silodp.deploy.listen import GuardSocket
    from silodp.deploy.wire import decode, encode

    link = GuardSocket(folder / SOCKET, 10.0)
    try:
        header, _ = decode(link.ask(encode({"kind": "hello"}, {})))
        return header.get("code") == "kind", "the guard answers on its socket"
    except (ConfigError, OSError, ValueError):
        return False, f"no guard answers on {folder / SOCKET}; silodp silo guard {folder} starts it"
    finally:
        link.close()


def spent_lines(folder: Path, ledger: Ledger) -> list[str]:
    """For the operator: spent and left, every run, and the last refusals."""
    from silodp.deploy.spending import epsilon_over, read
    from silodp.deploy.wire import plain

    limits, runs = read_policy(folder).limits, ledger.runs()
    total = epsilon_over({each.run: read(each.reserved) for each in runs}, limits.total_delta)
    left = max(0.0, limits.total_epsilon - total)
    at = f"at delta {limits.total_delta:g}"
    spent = rounded_up(total) if total else 0
    lines = [f"spent and reserved: epsilon {spent} of {limits.total_epsilon:g} {at}; {left:.3g} left"]
    for each in runs:
        counted = sum(line["count"] for line in each.counted)
        planned = sum(line["count"] for line in each.reserved)
        kind = "closed" if each.closed else f"open, {planned} releases reserved"
        lines.append(f"  run {each.run}: {counted} releases, {kind}")
    lines += [f"  refused: {code}: {plain(detail)}" for _, code, detail in ledger.refusals(10)]
    return lines
