"""The commands of a federation, from a new site's folder to a checked certificate; guards answer in this process."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from urllib.request import urlopen

import pytest
from typer.testing import CliRunner

from silodp.cli import app
from silodp.deploy import listen, status
from silodp.deploy.guard import Guard
from silodp.errors import ConfigError
from tests.guards import SCHEMA, SIZES, TREE, make_site


def silodp(*words: object, code: int = 0, answer: str | None = None) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words], input=answer)
    assert done.exit_code == code, done.output
    return done.output


def config_file(folder: Path) -> Path:
    from silodp.parse import parse_config, to_toml

    file = folder / "config.toml"
    file.write_text(to_toml(parse_config(TREE)))
    return file


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
    assert "epsilon 1 of 4 at delta 1e-05; 3 left" in silodp("ledger", "show", north)
    assert silodp("ledger", "verify", north).startswith("0 problems")
    events = [entry["event"]["kind"] for entry in json.loads(silodp("ledger", "export", north))]
    assert events[0] == "approve" and events[-1] == "close" and events.count("answer") == 5
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
        server.shutdown()
    assert "Round 4 of 4" in text and "1 spent of 1, delta 1e-05" in text and "1 of 4 reserved, 3 left" in text
    assert "<script>" not in text and "\x1b" not in text
    for address in ("0.0.0.0:80", "example.org:80", "127.0.0.1:x", "127.0.0.1"):
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
    for words, code in (
        (("plan", "show", tmp_path / "none.json"), 2),
        (("plan", "show", tmp_path / "junk.json"), 1),
        (("plan", "show", tmp_path / "other.json"), 1),
        (("verify", tmp_path / "junk.json"), 2),
        (("verify", tmp_path / "other.json"), 1),
        (("ledger", "show", tmp_path), 2),
        (("silo", "facts", tmp_path), 2),
        (("silo", "init", sites["north"], "--name", "../x", "--schema", tmp_path / "schema.toml", "--data", "x"), 2),
        (("plan", "propose", config_file(tmp_path), tmp_path / "other.json"), 1),
        (("status", tmp_path), 2),
        (("status", tmp_path / "none", "--web", "127.0.0.1:0"), 2),
    ):
        told = silodp(*words, code=code)
        assert told.count("\n") == 1 and told.startswith(("error: ", "refused: ")), told


def test_the_plan_command_still_tells_what_would_be_run(tmp_path):
    tree = {"data": {"sizes": [400, 250]}} | TREE
    from silodp.parse import parse_config, to_toml

    (tmp_path / "c.toml").write_text(to_toml(parse_config(tree)))
    assert silodp("plan", tmp_path / "c.toml")
    assert json.loads(silodp("plan", "--json", tmp_path / "c.toml"))
