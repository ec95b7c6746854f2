"""The commands of a federation, from a new site's folder to a checked certificate; guards answer in this process."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from typer.testing import CliRunner

from silodp.cli import app
from silodp.deploy import doctor, kits, listen, status
from silodp.deploy.guard import Guard
from silodp.deploy.policy import read_policy
from silodp.errors import ConfigError
from silodp.parse import parse_config, to_toml
from tests.guards import SCHEMA, SIZES, TREE, make_site


def silodp(*words: object, code: int = 0, answer: str | None = None) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words], input=answer)
    assert done.exit_code == code, done.output
    return done.output


def config_file(folder: Path) -> Path:
    file = folder / "config.toml"
    file.write_text(to_toml(parse_config(TREE)))
    return file


def new_site(folder: Path) -> tuple[object, ...]:
    schema, data = folder / "schema.toml", folder / "north" / "records.csv"
    return ("silo", "init", folder / "new-guard", "--name", "new", "--schema", schema, "--data", data)


@pytest.fixture
def sites(tmp_path) -> dict[str, Path]:
    """Two sites made by `silo init`, which know each other."""
    (tmp_path / "schema.toml").write_text(SCHEMA)
    folders = {site: tmp_path / f"{site}-guard" for site in SIZES}
    for site, records in SIZES.items():
        make_site(tmp_path / site, site, records)
        data = tmp_path / site / "records.csv"
        silodp("silo", "init", folders[site], "--name", site, "--schema", tmp_path / "schema.toml", "--data", data)
        silodp("silo", "facts", folders[site], "-o", tmp_path / f"{site}.facts.json")
    for folder in folders.values():
        told = silodp("silo", "trust", folder, *tmp_path.glob("*.facts.json"), answer="y\n")
        assert told.count("noted") == 1
    return folders


def test_a_site_that_is_trusted_twice_stands_in_the_policy_once(sites, tmp_path):
    """In one command too. An operator's own way to write a heading is kept, or the file is left as it is."""
    policy, facts = sites["north"] / "guard.toml", tmp_path / "south.facts.json"
    without = "".join(line for line in policy.read_text().splitlines(True) if not line.startswith('"south"'))
    (tmp_path / "both.json").write_text(json.dumps([json.loads(facts.read_text())] * 2))
    for heading in ("[peers]", "[peers]  # by telephone", "# [peers]\n[peers]"):
        policy.write_text(without.replace("[peers]", heading))
        told = silodp("silo", "trust", sites["north"], facts, facts, tmp_path / "both.json", "--yes")
        assert told.count("noted") == 1 and read_policy(sites["north"]).peers.keys() == {"south"}
    policy.write_text(without.replace("[peers]", "[ peers ]"))
    before = policy.read_text()
    assert "by hand" in silodp("silo", "trust", sites["north"], facts, "--yes", code=2)
    assert policy.read_text() == before


def test_from_a_new_folder_to_a_checked_certificate(sites, tmp_path, monkeypatch):
    north, plan = sites["north"], tmp_path / "plan.json"
    told = silodp("plan", "propose", config_file(tmp_path), *tmp_path.glob("*.facts.json"), "-o", plan)
    assert "north: 20 records, epsilon 1" in told
    assert silodp("plan", "show", plan).splitlines()[-1] in told
    silodp("approve", plan, "--site", north, answer="n\n", code=1)
    for site, folder in sites.items():
        told = silodp("approve", plan, "--site", folder, "-o", tmp_path / f"{site}.approval.json", answer="y\n")
        assert "calculated here" in told
    guards = {site: Guard(folder) for site, folder in sites.items()}
    monkeypatch.setattr(listen, "sockets", lambda paths, patience: lambda site, data: guards[site].reply(data))
    run, approvals = tmp_path / "run", sorted(tmp_path.glob("*.approval.json"))
    silodp("server", "run", plan, *approvals, "--out", run, "--guards", tmp_path)
    certificates = run / "certificates.json"
    assert silodp("verify", certificates, "--plan", plan).endswith("good\n")
    changed = json.loads(certificates.read_text())
    changed[0]["body"]["epsilon"] = 0.1
    (tmp_path / "changed.json").write_text(json.dumps(changed))
    assert "refused: certificate" in silodp("verify", tmp_path / "changed.json", code=1)
    assert "epsilon 0.9541 of 4 at delta 2e-05; 3.045 left" in silodp("ledger", "show", north)
    assert silodp("ledger", "verify", north).startswith("0 problems")
    events = [entry["event"]["kind"] for entry in json.loads(silodp("ledger", "export", north))]
    assert events[0] == "approve" and events[-2:] == ["close", "certify"] and events.count("answer") == 5
    assert "round 4 of 4" in silodp("status", run)
    check_page(run)
    for guard in guards.values():
        guard.close()
    assert "PROBLEM no guard answers" in silodp("silo", "doctor", north, code=1)
    assert silodp("silo", "doctor", north, code=1).count("PROBLEM") == 1


def check_page(run: Path) -> None:
    """Read only, on loopback, and no text in it is taken for HTML."""
    told = json.loads((run / "status.json").read_text())
    told["sites"][0]["site"] = "<script>alert(1)</script>\x1b"
    (run / "status.json").write_text(json.dumps(told))

    with status.page_server(run, "127.0.0.1:0") as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with urlopen(f"http://127.0.0.1:{server.server_address[1]}/") as page:
            text = page.read().decode()
        for host in ("evil.example:80", "", "127.0.0.1.evil.example"):  # a name that was made to point here
            with pytest.raises(HTTPError, match="404"):
                urlopen(Request(f"http://127.0.0.1:{server.server_address[1]}/", headers={"Host": host}))
        server.shutdown()
    assert "Round 4 of 4" in text and "1 spent of 1, delta 1e-05" in text and "0.9541 of 4 reserved, 3.045 left" in text
    assert "<script>" not in text and "\x1b" not in text
    for address in ("0.0.0.0:80", "::1:80", "example.org:80", "127.0.0.1:x", "127.0.0.1"):
        with pytest.raises(ConfigError, match=r"127\.0\.0\.1:PORT"):
            status.page_server(run, address)


def test_a_closed_or_revoked_run_is_said(sites, tmp_path):
    plan = tmp_path / "plan.json"
    silodp("plan", "propose", config_file(tmp_path), *tmp_path.glob("*.facts.json"), "-o", plan)
    silodp("approve", plan, "--site", sites["north"], "--yes", "-o", tmp_path / "a.json")
    run = json.loads(plan.read_text())["run"]
    assert silodp("revoke", run, "--site", sites["north"]) == f"revoked: run {run}\n"
    assert "no such approval" in silodp("revoke", run, "--site", sites["north"], code=2)
    assert "not open here" in silodp("ledger", "close", run, sites["north"], code=2)


def test_mistakes_are_one_line(sites, tmp_path):
    (tmp_path / "junk.json").write_text("[")
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "twice.json").write_text('{"body": {}, "body": {}}')
    for words, code in (
        (("plan", "show", tmp_path / "none.json"), 2),
        (("plan", "show", tmp_path / "junk.json"), 1),
        (("plan", "show", tmp_path / "other.json"), 1),
        (("verify", tmp_path / "junk.json"), 2),
        (("verify", tmp_path / "other.json"), 1),
        (("verify", tmp_path / "twice.json"), 2),
        (("ledger", "show", tmp_path), 2),
        (("silo", "facts", tmp_path), 2),
        (("silo", "init", sites["north"], "--name", "../x", "--schema", tmp_path / "schema.toml", "--data", "x"), 2),
        ((*new_site(tmp_path), "--epsilon", "-1"), 2),
        ((*new_site(tmp_path), "--delta", "0.5"), 2),
        (("plan", "propose", config_file(tmp_path), tmp_path / "other.json"), 1),
        (("status", tmp_path), 2),
        (("status", tmp_path / "none", "--web", "127.0.0.1:0"), 2),
    ):
        told = silodp(*words, code=code)
        assert told.count("\n") == 1 and told.startswith(("error: ", "refused: ")), told
    silodp(*new_site(tmp_path))  # what was refused has left nothing behind


def test_the_plan_command_still_tells_what_would_be_run(tmp_path):
    tree = {"data": {"sizes": [400, 250]}} | TREE
    (tmp_path / "c.toml").write_text(to_toml(parse_config(tree)))
    assert silodp("plan", tmp_path / "c.toml")
    assert json.loads(silodp("plan", "--json", tmp_path / "c.toml"))


# --- kits, units and the shuffler --------------------------------------------------------------------------------


def made_kit(folder: Path) -> Path:
    """What a site gets from the engine, as far as it is hardened here."""
    (folder / "local").mkdir(parents=True)
    tree = {"components": [{"id": "site_log_streamer"}, {"id": "resource_manager"}], "allow_log_streaming": True}
    (folder / "local" / "resources.json.default").write_text(json.dumps(tree))
    return folder


def test_a_site_joins_with_a_kit_that_may_only_carry_bytes(sites, tmp_path):
    north, kit = sites["north"], made_kit(tmp_path / "kits" / "north")
    with pytest.raises(ConfigError, match="allows more"):
        kits.kit_of(kit)
    assert "lies in the guard's folder" in silodp("silo", "join", north, "--kit", made_kit(north / "inside"), code=2)
    policy = north / "guard.toml"
    policy.write_text(policy.read_text().replace("# counter =", "counter =").replace("/other/disk", str(tmp_path)))
    assert "PROBLEM silodp-guard.service: the guard can write" in silodp("silo", "doctor", north, code=1)
    silodp("silo", "join", north, "--kit", kit)
    assert "joined already" in silodp("silo", "join", north, "--kit", kit, code=2)
    assert kits.kit_of(north) == kit.resolve() == kits.kit_of(kit)
    allowed = json.loads((kit / "local" / "resources.json").read_text())
    assert [each["id"] for each in allowed["components"]] == ["resource_manager"]
    told = silodp("silo", "doctor", north, code=1)
    assert told.count("PROBLEM") == 1 and "allows the relay and nothing else" in told
    relay, containers = (north / "silodp-relay.service").read_text(), (north / "compose.yml").read_text()
    for secret in ("key", "ledger.db", "ledger.db-wal", "blobs"):
        assert f"-{north.resolve() / secret}" in relay.replace("=", " ").split()
    assert 'user: "0:' not in containers
    services = containers.partition("  relay:")
    assert "network_mode: none" in services[0] and "records.csv" in services[0] and "records.csv" not in services[2]
    assert f"{tmp_path}:{tmp_path}" in services[0] and f" -{tmp_path}\n" in (north / "silodp-guard.service").read_text()
    assert all((north / name).stat().st_mode & 0o077 == 0 for name in ("guard.toml", "compose.yml"))
    check_units(north, tmp_path)
    rights = kit / "local" / "authorization.json"
    rights.write_text(rights.read_text().replace('"byoc": "none"', '"byoc": "any"'))
    (north / "silodp-guard.service").write_text("[Service]\n")
    assert silodp("silo", "doctor", north, code=1).count("PROBLEM") == 4


def test_a_relay_that_would_not_be_heard_is_a_problem(sites, tmp_path, monkeypatch):
    """Of another user: the operator has to name it, and to put the socket where it can go."""
    north, kit = sites["north"], made_kit(tmp_path / "kits" / "north")
    silodp("silo", "join", north, "--kit", kit)
    assert "ok      relay_uid" in silodp("silo", "doctor", north, code=1)
    others = {str(kit.resolve())}
    monkeypatch.setattr(
        doctor, "owner_of", lambda place: 4711 if str(place.resolve()) in others else place.stat().st_uid
    )
    policy = north / "guard.toml"
    for line, heard in (("", False), ("relay_uid = 4711\n", False), (f'socket = "{tmp_path}/g.sock"\n', True)):
        policy.write_text(line + policy.read_text())
        assert ("ok      relay_uid" in silodp("silo", "doctor", north, code=1)) is heard, line


def check_units(folder: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        return
    for name in ("silodp-guard.service", "silodp-relay.service"):
        text = (folder / name).read_text().replace("/bin/silodp", "/bin/python")  # a test may run where it is not
        (tmp_path / name).write_text(text)
        done = subprocess.run(["systemd-analyze", "verify", str(tmp_path / name)], capture_output=True, text=True)
        ours = [line for line in done.stderr.splitlines() if "silodp" in line and "Unknown" in line]
        assert ours == [], done.stderr


def test_a_shuffler_is_made_trusted_and_planned_with(sites, tmp_path):
    mixer = tmp_path / "mixer"
    assert f"facts {mixer} -o mixer.json\n" in silodp("shuffler", "init", mixer, "--name", "mixer")
    silodp("shuffler", "facts", mixer, "-o", tmp_path / "mixer.json")
    assert "holds a site already" in silodp("shuffler", "init", mixer, code=2)
    for folder in sites.values():
        policy = folder / "guard.toml"
        policy.write_text(policy.read_text().replace('["untrusted"]', '["untrusted", "shuffled"]'))
        assert "mixer: noted" in silodp("silo", "trust", folder, tmp_path / "mixer.json", answer="y\n")
        assert read_policy(folder).shufflers.keys() == {"mixer"} and len(read_policy(folder).peers) == 1
    options = {"randomizer": "privunit", "weights": "size"}
    tree = TREE | {"privacy": TREE["privacy"] | {"trust": "shuffled"}, "algorithm": TREE["algorithm"] | options}
    config, plan = tmp_path / "config.toml", tmp_path / "plan.json"
    config.write_text(to_toml(parse_config(tree)))
    facts = sorted(tmp_path.glob("*.facts.json"))
    assert "needs a shuffler" in silodp("plan", "propose", config, *facts, "-o", plan, code=2)
    everybody = [*facts, tmp_path / "mixer.json"]
    silodp("plan", "propose", config, *everybody, "-o", plan, "--shuffler", tmp_path / "mixer.json", code=1)
    assert not (tmp_path / "plan.key").exists()  # nothing is written for a plan that is none
    told = silodp("plan", "propose", config, *facts, "-o", plan, "--shuffler", tmp_path / "mixer.json")
    assert "mixer: shuffles" in told and (tmp_path / "plan.key").stat().st_mode & 0o077 == 0
    told = silodp("approve", plan, "--site", mixer, "-o", tmp_path / "a.json", answer="y\n")
    assert "32 messages" in told and "north, south" in told
    assert "shuffled by  mixer" in silodp("approve", plan, "--site", sites["north"], "--yes")
    told = silodp("silo", "doctor", mixer, code=1)
    assert told.count("PROBLEM") == 1 and "silodp shuffler guard" in told
    assert "no budget" in silodp("ledger", "show", mixer)


def test_a_run_that_is_there_is_gone_on_with_only_when_asked(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "plan.json").write_text("{}")
    words = ("server", "run", tmp_path / "p.json", tmp_path / "a.json", "--out", tmp_path / "run", "--guards", tmp_path)
    assert "--resume goes on with it" in silodp(*words, code=2)
    assert "no such file" in silodp(*words, "--resume", code=2)


def test_a_federations_file_is_checked(tmp_path):
    from silodp.deploy.provision import invitation, read_federation

    file = tmp_path / "fed.toml"
    file.write_text('host = "server.example.org"\nsites = ["north", "south"]\nshuffler = "mixer"\n')
    assert read_federation(file).parties == ["north", "south", "mixer"]
    assert "type: client, org: north}" in invitation("north", "client", "north")
    for wrong in ('sites = ["a", "b"]\n', 'host = "h"\nsites = ["a"]\n', 'host = "h"\nsites = ["a", "b"]\nport = 0\n'):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match=r"fed\.toml"):
            read_federation(file)
