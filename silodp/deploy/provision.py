"""For the project's admin: a CA, the kits of server and submitter, and an invitation for every other party. No JAX.

A hospital makes its own private key, from its invitation, and the admin signs what comes back: the key never leaves the
hospital. docs/deployment.md has the commands. The CA's key passes every check of the engine, so the admin is not the
server's operator.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from silodp.config import Section
from silodp.deploy.kits import ADMIN, PROJECT, SERVER_ORG, harden_server, org_of
from silodp.deploy.policy import read_toml
from silodp.errors import ConfigError

SECONDS = 120.0  # that one step of the engine may take


class FederationFile(Section):
    """Who takes part, written by the project's admin."""

    host: str = Field(min_length=1, description="the server's DNS name; it stands in its certificate")
    port: int = Field(default=8002, ge=1, le=65535, description="the one port that sites connect to")
    sites: list[str] = Field(min_length=2, description="names of the hospitals")
    shuffler: str | None = Field(default=None, description="name of the shuffler, if there is one")

    @property
    def parties(self) -> list[str]:
        return [*self.sites, *([] if self.shuffler is None else [self.shuffler])]


def read_federation(file: Path) -> FederationFile:
    return read_toml(file, FederationFile, "an admin; docs/deployment.md has an example; nothing")


def invitation(name: str, kind: str, org: str, role: str | None = None) -> str:
    """A participant as the engine describes one."""
    more = "" if role is None else f", role: {role}"
    return f"name: {PROJECT}\nparticipants:\n  - {{name: {name}, type: {kind}, org: {org}{more}}}\n"


def engine(out: Path, *words: str) -> None:
    """A step of the engine's own program."""
    command = [sys.executable, "-m", "nvflare.cli", *words]
    done = subprocess.run(
        command, cwd=out, capture_output=True, text=True, timeout=SECONDS, check=False, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        told = " ".join((done.stderr + done.stdout).split())[-300:]
        raise ConfigError(f"{out}: nvflare {' '.join(words[:2])} failed: {told}")


def provisioned(out: Path, federation: FederationFile) -> list[str]:
    """What the admin has afterwards, a line each."""
    if out.exists():
        raise ConfigError(f"--out {out}: exists; give a new directory")
    out.mkdir(parents=True, mode=0o700)
    server = f"server: {{host: {federation.host}, fed_learn_port: {federation.port}, admin_port: {federation.port}}}\n"
    head = f"name: {PROJECT}\nscheme: grpc\nconnection_security: mtls\n"
    (out / "profile.yml").write_text(head + server, encoding="utf-8")
    engine(out, "cert", "init", "--profile", "profile.yml", "-o", "ca")
    mark = json.loads((out / "ca" / "ca.json").read_text(encoding="utf-8"))["rootCA_fingerprint"]
    own = {federation.host: ("server", SERVER_ORG, None), ADMIN: ("admin", SERVER_ORG, "lead")}
    for name, (kind, org, role) in own.items():
        packaged(out, name, invitation(name, kind, org, role), mark)
    made = out / "workspace" / PROJECT / "prod_00"
    harden_server(made / federation.host)
    return [
        f"the server's kit: {made / federation.host}",
        f"the submitter's kit, for silodp server run: {made / ADMIN}",
        *invited(out, federation.parties),
        f"the CA's fingerprint, for everybody, by telephone: {mark}",
        f"keep {out / 'ca'} on a machine without network; it is not the server's",
    ]


def packaged(out: Path, name: str, text: str, mark: str) -> None:
    """A kit whose key is made here: of the server, and of whoever submits runs."""
    (out / f"{name}.yml").write_text(text, encoding="utf-8")
    request = f"requests/{name}"
    engine(out, "cert", "request", "-p", f"{name}.yml", "--out", request)
    engine(out, "cert", "approve", f"{request}/{name}.request.zip", "--ca-dir", "ca", "--profile", "profile.yml")
    engine(out, "package", f"{request}/{name}.signed.zip", "--request-dir", request, "--fingerprint", mark)


def invited(out: Path, parties: Sequence[str]) -> list[str]:
    folder = out / "invitations"
    folder.mkdir()
    for party in parties:
        (folder / f"{party}.yml").write_text(invitation(party, "client", org_of(party)), encoding="utf-8")
    return [f"an invitation for {party}: {folder / f'{party}.yml'}" for party in parties]
