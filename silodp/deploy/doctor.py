"""What is right and wrong with an operator's folder, and what its ledger says: for people, a line each."""

from __future__ import annotations

import stat
from pathlib import Path

from silodp.deploy.kits import hardened
from silodp.deploy.ledger import Ledger, Run
from silodp.deploy.office import HELLO, KEY, open_ledger
from silodp.deploy.policy import is_shuffler, operators_file, read_policy, socket_of
from silodp.deploy.units import COMPOSE_FILE, GUARD_FILE, NO_NETWORK, RELAY_FILE, elsewhere, secrets_of
from silodp.digits import rounded_down, rounded_up, several
from silodp.errors import ConfigError

Finding = tuple[bool, str]


def checkup(folder: Path) -> list[Finding]:
    """Of a site, or of a shuffler."""
    operators_file(folder)
    found = [_rights(folder), _owners(folder)]
    found += [_secret(folder / name) for name in (KEY, "box") if (folder / name).exists()]
    if not is_shuffler(folder):
        found += _site(folder)
    found += _book(folder)
    found += _units(folder)
    found.append(_answers(folder))
    return found


def _rights(folder: Path) -> Finding:
    mode = stat.S_IMODE(folder.stat().st_mode)
    return mode & 0o007 == 0, f"{folder}: rights {mode:o}; nobody else may look into it"


def _owners(folder: Path) -> Finding:
    """A command that was run as another user leaves files that the guard cannot write."""
    owner = owner_of(folder)
    others = [file for file in folder.iterdir() if file.lstat().st_uid != owner]
    told = f": not {', '.join(sorted(file.name for file in others))}; chown them" if others else ""
    return not others, f"{folder}: its files belong to its owner{told}"


def _secret(file: Path) -> Finding:
    mode = stat.S_IMODE(file.stat().st_mode)
    return mode == 0o600, f"{file}: rights {mode:o}; only the guard may read it"


def _site(folder: Path) -> list[Finding]:
    policy = read_policy(folder)
    return [
        (not policy.limits.outside, "no code from outside the library is allowed"),
        (bool(policy.peers), f"{several(len(policy.peers), 'other site')} known by key"),
        _records(folder),
    ]


def _records(folder: Path) -> Finding:
    from silodp.deploy.sites import own_facts

    try:
        facts, _ = own_facts(read_policy(folder), folder)
    except (ConfigError, OSError) as error:
        return False, f"records: {' '.join(str(error).split())}"
    return True, f"records: {facts.sizes[0]} fit the schema"


def _book(folder: Path) -> list[Finding]:
    try:
        ledger = open_ledger(folder)
    except ConfigError as error:
        return [(False, str(error))]
    try:
        problems = ledger.verify()
        found = [(not problems, f"ledger: {ledger.head.seq} entries, {len(problems)} problems")]
        return (
            found if problems else found + [_goes_on(folder, ledger, each) for each in ledger.runs() if not each.closed]
        )
    finally:
        ledger.close()


def _goes_on(folder: Path, ledger: Ledger, run: Run) -> Finding:
    """A run that is open must end before the software changes: no program answers the plan of another version."""
    from silodp.deploy.document import versions
    from silodp.deploy.signing import read_document

    kept, close = ledger.document(run.run), f"silodp ledger close {run.run} {folder}"
    if kept is None or read_document(kept)["versions"] == versions():
        return True, f"run {run.run}: open; before an upgrade let it end, or {close}"
    return False, f"run {run.run}: planned with other versions than are installed, so it cannot go on; {close}"


def _units(folder: Path) -> list[Finding]:
    """What starts the guard gives it no network; what starts the relay hides the guard's folder from it."""
    guard, containers, kit = _text(folder / GUARD_FILE), _text(folder / COMPOSE_FILE), folder / "kit"
    found = [
        (all(line in guard.splitlines() for line in NO_NETWORK), f"{GUARD_FILE}: the guard has no network"),
        (_reaches(folder, guard), f"{GUARD_FILE}: the guard can write to all places that its operator has set"),
        ("network_mode: none" in containers, f"{COMPOSE_FILE}: the guard has no network"),
    ]
    if kit.is_dir():
        line = next((line for line in _text(folder / RELAY_FILE).splitlines() if "InaccessiblePaths=" in line), "")
        hidden = all(f"-{file}" in line.partition("=")[2].split() for file in secrets_of(folder))
        found.append((hidden, f"{RELAY_FILE}: the relay cannot read records and secrets"))
        found.append((hardened(kit), f"{kit}: allows the relay and nothing else"))
        found.append(_heard(folder, kit))
    return found


def _heard(folder: Path, kit: Path) -> Finding:
    """Another user's relay is answered only if the operator has named it, and cannot look into the guard's folder."""
    policy, own, user = operators_file(folder), owner_of(folder), owner_of(kit)
    outside = not socket_of(folder, policy).resolve().is_relative_to(folder.resolve())
    return user == own or (user == policy.relay_uid and outside), (
        f"relay_uid and socket: the relay of user {user}, whose the kit is, reaches the guard"
    )


def owner_of(place: Path) -> int:
    return place.stat().st_uid


def _reaches(folder: Path, unit: str) -> bool:
    line = next((line for line in unit.splitlines() if line.startswith("ReadWritePaths=")), "")
    places = {place.removeprefix("-") for place in line.partition("=")[2].split()}
    return {str(place) for place in (folder.resolve(), *elsewhere(folder))} <= places


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def _answers(folder: Path) -> Finding:
    from silodp.deploy.listen import GuardSocket
    from silodp.deploy.wire import decode, encode

    path = socket_of(folder, operators_file(folder))
    link = GuardSocket(path, 10.0)
    try:
        header, _ = decode(link.ask(encode({"kind": HELLO}, {})))
        return header.get("kind") == HELLO, "the guard answers on its socket"
    except (ConfigError, OSError, ValueError):
        kind = "shuffler" if is_shuffler(folder) else "silo"
        return False, f"no guard answers on {path}; silodp {kind} guard {folder} starts it"
    finally:
        link.close()


def closed_line(ledger: Ledger, run: str) -> str:
    from silodp.deploy.spending import charged, read

    found = ledger.run(run)
    assert found is not None  # it was just closed
    whole = (
        "" if charged(found) == read(found.counted) else ", and batches that are drawn at random as they were planned"
    )
    return f"closed: run {run}; what it released stays charged{whole}"


def spent_lines(folder: Path, ledger: Ledger) -> list[str]:
    """For the operator: spent and left, every run, and the last refusals."""
    from silodp.deploy.spending import epsilon_over
    from silodp.deploy.wire import plain

    refused = [f"  refused: {code}: {plain(detail)}" for _, code, detail in ledger.refusals(10)]
    runs = ledger.runs()
    if is_shuffler(folder):
        released = [f"  run {each.run}: {ledger.count_answers(each.run)} batches" for each in runs]
        return [f"{len(runs)} runs shuffled; a shuffler has no records and no budget", *released, *refused]
    limits = read_policy(folder).limits
    total = epsilon_over(runs, limits.total_delta)
    left = max(0.0, limits.total_epsilon - total)
    at = f"at delta {limits.total_delta:g}"
    spent = rounded_up(total) if total else 0
    lines = [f"spent and reserved: epsilon {spent} of {limits.total_epsilon:g} {at}; {rounded_down(left)} left"]
    for each in runs:
        counted = sum(line["count"] for line in each.counted)
        planned = sum(line["count"] for line in each.reserved)
        kind = "closed" if each.closed else f"open, {planned} releases reserved"
        lines.append(f"  run {each.run}: {counted} releases, {kind}")
    return lines + refused
