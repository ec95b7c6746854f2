"""An operator's folder: made, and told whom to trust."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from silodp.deploy.files import folder_alone, private_files, write_whole
from silodp.deploy.office import KEY
from silodp.deploy.policy import NAME, SHUFFLER_NAME, Policy, parsed_toml, read_policy
from silodp.deploy.signing import SITE, Key, opened, words
from silodp.deploy.units import COMPOSE_FILE, GUARD_FILE, SHUFFLER_COMMAND, SILO, compose, guard_unit
from silodp.errors import ConfigError, Refused
from silodp.parse import toml_literal

PEERS, SHUFFLERS = "peers", "shufflers"  # tables of guard.toml
POLICY = """# What this site allows. The guard reads it when it starts; nothing in it ever comes from the network.
site = {site}
# relay_uid = 1001      # the user number of the relay, if it is not the guard's own user
# socket = "/run/silodp/guard.sock"   # where the guard listens, if the relay is another user; a folder of its own
# counter = "/other/disk/counter"   # the ledger's second file, best on another disk

[data]
files = {files}
schema = "schema.toml"

[limits]
trusts = {trusts}
epsilon = {epsilon}           # of one run, for every record
delta = {delta}
total_epsilon = {total}     # of all runs on these records together, whoever chooses them
total_delta = {total_delta}     # twice delta: one run with all of total_epsilon needs more, with few drawn batches much
# colluding = 1         # so many other sites may work for the server (trust aggregated)
# epsilon_alone = 2.0   # of one run, if all others and the shuffler work for the server (trust shuffled)

[shufflers]

[peers]
"""
SHUFFLER_POLICY = """# What this shuffler allows. Its guard reads it when it starts; nothing comes from the network.
site = {site}
# relay_uid = 1001      # the user number of the relay, if it is not the guard's own user
# socket = "/run/silodp/guard.sock"   # where the guard listens, if the relay is another user; a folder of its own
# counter = "/other/disk/counter"   # the ledger's second file, best on another disk

[limits]
silos = 100
messages = 1_000_000      # of one batch
"""


def init_site(
    folder: Path,
    site: str,
    schema: Path,
    data: Sequence[Path],
    epsilon: float,
    total: float,
    delta: float,
    trusts: Sequence[str] = ("untrusted",),
) -> list[str]:
    from silodp.data.schema import Schema

    check_new(folder, site)
    for file in (schema, *data):
        if not file.is_file():
            raise ConfigError(f"{file}: no such file")
    text = Schema.read(schema).to_toml()
    policy = POLICY.format(
        site=toml_literal(site),
        trusts=toml_literal(list(trusts)),
        files=toml_literal([str(file.resolve()) for file in data]),
        epsilon=epsilon,
        total=total,
        delta=delta,
        total_delta=2 * delta,
    )
    parsed_toml(folder / NAME, policy, Policy)  # limits that are none are told of before anything is there
    with private_files():
        key = made_folder(folder, {NAME: policy, "schema.toml": text}, SILO, data)
    return [
        f"{folder} is the site {site}; read {folder / NAME} and set its limits",
        f"its key, for the other sites: {words(key.public)}",
        f"next: silodp silo facts {folder} -o {site}.facts.json",
    ]


def made_folder(folder: Path, files: Mapping[str, str], guard: Sequence[str], data: Sequence[Path]) -> Key:
    """Files of an operator's folder, the unit of its guard, and its key."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    for name, text in {GUARD_FILE: guard_unit(folder, guard), COMPOSE_FILE: compose(folder, guard, data)}.items():
        (folder / name).write_text(text, encoding="utf-8")
    return Key.create(folder / KEY)


def check_new(folder: Path, site: str) -> None:
    if not SITE.fullmatch(site):
        raise ConfigError(f"--name {site!r}: use letters, digits, '.', '-' and '_', at most 63")
    if (folder / NAME).exists() or (folder / SHUFFLER_NAME).exists():
        raise ConfigError(f"{folder}: holds a site already; give a new folder")


def init_shuffler(folder: Path, site: str) -> list[str]:
    """A shuffler's folder: two keys, its limits, and how its two processes are started."""
    from silodp.deploy.mixer import BOX
    from silodp.deploy.shuffling import create_box

    check_new(folder, site)
    with private_files():
        policy = SHUFFLER_POLICY.format(site=toml_literal(site))
        key = made_folder(folder, {SHUFFLER_NAME: policy}, SHUFFLER_COMMAND, [])
        create_box(folder / BOX)
    return [
        f"{folder} is the shuffler {site}; read {folder / SHUFFLER_NAME} and set its limits",
        f"its key, for the sites: {words(key.public)}",
        f"next: silodp shuffler facts {folder} -o {site}.json",
    ]


def trust_sites(folder: Path, statements: Sequence[Any], ask: Callable[[str], bool] | None) -> list[str]:
    """Other parties' keys into guard.toml, one question each."""
    lines = []
    for statement in statements:
        policy, (table, site, key) = read_policy(folder), party_of(statement)
        known = (policy.peers if table == PEERS else policy.shufflers).get(site)
        if site == policy.site or known == key:
            continue
        if known is not None:
            raise ConfigError(f"{site}: known with another key; ask there, then change [{table}] in {NAME} by hand")
        what = "the shuffler " if table == SHUFFLERS else ""
        if ask is not None and not ask(f"{what}{site} has the key\n  {words(key)}\nDid {site} tell you the same?"):
            lines.append(f"{site}: not noted")
            continue
        note_key(folder / NAME, table, site, key)
        lines.append(f"{site}: noted")
    return lines


def party_of(statement: Any) -> tuple[str, str, str]:
    """Table in guard.toml, name and key of whoever has signed these facts."""
    from silodp.deploy.document import told_facts
    from silodp.deploy.shuffling import SHUFFLER

    if isinstance(statement, dict) and isinstance(statement.get("body"), dict) and "box" in statement["body"]:
        body, key = opened(SHUFFLER, statement)
        if not SITE.fullmatch(str(body.get("site"))):
            raise Refused("facts: not those of a shuffler")
        return SHUFFLERS, body["site"], key
    return PEERS, told_facts(statement)["site"], statement["key"]


def note_key(file: Path, table: str, site: str, key: str) -> None:
    """A line more in the file as it is now: other programs that add to it wait."""
    with folder_alone(file.parent):
        text = file.read_text(encoding="utf-8")
        if tomllib.loads(text).get(table, {}).get(site) != key:  # else another program was quicker
            write_key(file, text, table, site, key)


def write_key(file: Path, text: str, table: str, site: str, key: str) -> None:
    """Below the table's heading; an operator may have written the file in another way."""
    line = f'"{site}" = "{key}"\n'
    heading = re.search(rf"^\[{table}\][ \t]*(#.*)?\n", text, re.MULTILINE)
    if heading is None:
        text += f"\n[{table}]\n{line}"
    else:
        text = text[: heading.end()] + line + text[heading.end() :]
    with suppress(tomllib.TOMLDecodeError):
        if tomllib.loads(text).get(table, {}).get(site) == key:
            write_whole(file, text.encode(), 0o600)
            return
    raise ConfigError(f"{file}: {site} could not be added; write {line.strip()} below [{table}] by hand")
