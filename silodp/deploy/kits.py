"""Kits of NVFlare 2.9: made, hardened and started. A kit holds a party's certificate and what it allows the engine.

The engine's own defaults give a project's admin shipped code, a shell and log streaming at every site. Here a site runs
one class, ours, from jobs that are JSON only.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from silodp.deploy.crew import Crew
from silodp.deploy.files import held, is_free, write_whole
from silodp.deploy.policy import is_shuffler, operators_file, read_policy, socket_of
from silodp.deploy.signing import SERVER_KEY, canonical
from silodp.errors import ConfigError, Refused

if TYPE_CHECKING:
    from silodp.deploy.document import Document

PROJECT, ADMIN, SERVER_ORG = "silodp", "admin@silodp.org", "coordinator"
COORDINATOR, RELAY = "silodp.deploy.flare.Coordinator", "silodp.deploy.flare.Relay"
NOTHING = {
    "submit_job": "any", "clone_job": "none", "manage_job": "any", "download_job": "none", "view": "any",
    "operate": "none", "shell_commands": "none", "byoc": "none", "server-predeployed-flwr": "none",
}  # fmt: skip
AT_SERVER = {"download_job": "any", "operate": "any"}
SUBMITTERS = ("project_admin", "lead")  # roles that may submit a run; nobody else may do anything
CERTIFICATES = "certificates.json"
START = 300.0  # seconds until server and sites have found each other
LOOK, UNATTENDED = 5.0, 120.0  # seconds: between looks at whether the run is worked on, and until it is given up
ATTEMPTS = 3  # to go on with a run that makes no progress
BUILDERS = """builders:
  - path: nvflare.lighter.impl.workspace.WorkspaceBuilder
  - path: nvflare.lighter.impl.static_file.StaticFileBuilder
    args: {config_folder: config, scheme: grpc}
  - path: nvflare.lighter.impl.cert.CertBuilder
  - path: nvflare.lighter.impl.signature.SignatureBuilder
"""


def org_of(site: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in site)


def project_file(host: str, port: int, sites: Sequence[str]) -> str:
    """NVFlare's description of the federation."""
    server = f"  - {{name: {host}, type: server, org: {SERVER_ORG}, fed_learn_port: {port}, admin_port: {port}}}\n"
    clients = "".join(f"  - {{name: {site}, type: client, org: {org_of(site)}}}\n" for site in sites)
    admin = f"  - {{name: {ADMIN}, type: admin, org: {SERVER_ORG}, role: project_admin}}\n"
    head = f"api_version: 3\nname: {PROJECT}\ndescription: a silodp federation\nparticipants:\n"
    return head + server + clients + admin + BUILDERS


def begin_provision(folder: Path, host: str, port: int, parties: Sequence[str]) -> subprocess.Popen[str]:
    """Let the engine make a CA and kits; it takes some seconds, in which others can work."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "project.yml").write_text(project_file(host, port, parties), encoding="utf-8")
    command = [sys.executable, "-m", "nvflare.cli", "provision", "-p", "project.yml", "-w", "made"]
    return subprocess.Popen(
        command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def end_provision(making: subprocess.Popen[str], folder: Path, host: str) -> dict[str, Path]:
    """A hardened kit for every party, by its name."""
    told, _ = making.communicate(timeout=300)
    made = folder / "made" / PROJECT / "prod_00"
    if making.returncode or not made.is_dir():
        raise ConfigError(f"{folder}: nvflare could not make the kits: {told.strip()[-300:]}")
    kits = {kit.name: kit for kit in made.iterdir() if kit.is_dir()}
    for name, kit in kits.items():
        if name == host:
            harden_server(kit)
        elif name != ADMIN:
            harden_site(kit)
    return kits


def harden_site(kit: Path) -> None:
    """What the engine may do at a site: run our relay. The guard's socket is told by `connect`."""
    tree = defaults(kit)
    tree |= {"class_allow_list": [RELAY], "class_list_enforcement_mode": "enforce", "allow_log_streaming": False}
    tree["components"] = [each for each in tree["components"] if each["id"] != "site_log_streamer"]
    put(kit / "local" / "resources.json", tree)
    put_rights(kit, NOTHING)


def harden_server(kit: Path) -> None:
    """Jobs and snapshots stay in the kit: the default is one folder for all servers of a machine."""
    tree = defaults(kit) | {"class_allow_list": [COORDINATOR], "class_list_enforcement_mode": "enforce"}
    for each in tree["components"]:
        if each["id"] == "job_manager":
            each["args"]["uri_root"] = str((kit / "jobs").resolve())
    tree["components"] = [each for each in tree["components"] if each["id"] != "log_receiver"]
    tree["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str((kit / "snapshots").resolve())
    put(kit / "local" / "resources.json", tree)
    put_rights(kit, NOTHING | AT_SERVER)


def connect(kit: Path, socket: Path) -> None:
    """Tell a site's relay where its guard listens."""
    put(kit / "local" / "silodp.json", {"guard": str(socket.resolve())})


def defaults(kit: Path) -> dict[str, Any]:
    file = kit / "local" / "resources.json.default"
    if not file.is_file():
        raise ConfigError(f"{kit}: no kit of NVFlare 2.9; it has no local/resources.json.default")
    return json.loads(file.read_text(encoding="utf-8"))


def put_rights(kit: Path, rights: Mapping[str, str]) -> None:
    permissions = {role: dict(rights) for role in SUBMITTERS}
    put(kit / "local" / "authorization.json", {"format_version": "1.0", "permissions": permissions})


def put(file: Path, tree: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(tree, indent=1), encoding="utf-8")


def hardened(kit: Path) -> bool:
    """Whether a site's kit allows our relay and nothing else."""
    try:
        tree = json.loads((kit / "local" / "resources.json").read_text(encoding="utf-8"))
        rights = json.loads((kit / "local" / "authorization.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    alone = tree.get("class_allow_list") == [RELAY] and tree.get("class_list_enforcement_mode") == "enforce"
    few = rights.get("permissions") == dict.fromkeys(SUBMITTERS, NOTHING)
    return alone and not tree.get("allow_log_streaming", True) and few


def make_job(folder: Path, run: Path, sites: Sequence[str], patience: float) -> None:
    """A job of JSON files only: no code is in it."""
    deploy = {"app_server": ["server"], "app_client": list(sites)}
    meta = {"name": run.name, "resource_spec": {}, "min_clients": len(sites), "mandatory_clients": list(sites)}
    put(folder / "meta.json", meta | {"deploy_map": deploy})
    empty = {"format_version": 2, "components": [], "task_data_filters": [], "task_result_filters": []}
    arguments = {"folder": str(run.resolve()), "patience": patience}
    server = empty | {"workflows": [{"id": "silodp", "path": COORDINATOR, "args": arguments}]}
    client = empty | {"executors": [{"tasks": ["silodp"], "executor": {"path": RELAY, "args": {}}}]}
    put(folder / "app_server" / "config" / "config_fed_server.json", server)
    put(folder / "app_client" / "config" / "config_fed_client.json", client)


def relay_command(kit: Path) -> list[str]:
    """A site's relay, without the kit's shell scripts."""
    module = "nvflare.private.fed.app.client.client_train"
    options = ["secure_train=true", f"uid={kit.name}", f"org={org_of(kit.name)}", "config_folder=config"]
    return [sys.executable, "-u", "-m", module, "-m", str(kit), "-s", "fed_client.json", "--set", *options]


def server_command(kit: Path) -> list[str]:
    module = "nvflare.private.fed.app.server.server_train"
    options = ["secure_train=true", f"org={SERVER_ORG}", "config_folder=config"]
    return [sys.executable, "-u", "-m", module, "-m", str(kit), "-s", "fed_server.json", "--set", *options]


def environment() -> dict[str, str]:
    """Of a process of the engine: few threads, no accelerator."""
    quiet = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "4", "JAX_PLATFORMS": "cpu"}
    return os.environ | quiet


def check_engine() -> None:
    """The engine is an extra of its own."""
    if importlib.util.find_spec("nvflare") is None:
        raise ConfigError("NVFlare is not installed; pip install 'silodp[deploy]' brings it")


def join_site(folder: Path, kit: Path) -> Path:
    """The kit in the operator's folder, hardened, with the way to its guard; and how the relay is started."""
    from silodp.deploy import units

    place, shuffles = folder / "kit", is_shuffler(folder)
    if place.exists():
        raise ConfigError(f"{place}: this site has joined already")
    if kit.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"--kit {kit}: lies in the guard's folder, which the relay must not see; move it out")
    harden_site(kit)
    connect(kit, socket_of(folder, operators_file(folder)))
    place.symlink_to(kit.resolve())
    data = [] if shuffles else [folder / file for file in read_policy(folder).data.files]
    command = units.SHUFFLER_COMMAND if shuffles else units.SILO
    written = {
        units.GUARD_FILE: units.guard_unit(folder, command),  # once more: the operator has set counter and socket since
        units.RELAY_FILE: units.relay_unit(folder, kit),
        units.COMPOSE_FILE: units.compose(folder, command, data, kit),
    }
    for name, text in written.items():
        write_whole(folder / name, text.encode(), 0o600)
    return place


def kit_of(place: Path) -> Path:
    """A kit, or the kit of an operator's folder; one that allows more than it needs is not started."""
    kit = (place / "kit" if (place / "kit").exists() else place).resolve()
    if not hardened(kit):
        raise ConfigError(f"{kit}: no kit, or one that allows more than carrying bytes; silodp silo join sets it right")
    return kit


def relay_process(place: Path) -> None:
    """Become the relay."""
    check_engine()
    os.execve(sys.executable, relay_command(kit_of(place)), environment())


def silodp_command() -> list[str]:
    return [sys.executable, "-c", "from silodp.cli import main; main()"]


def guard_command(folder: Path) -> list[str]:
    return [sys.executable, "-m", "silodp.deploy.guarding", str(folder.resolve())]


def run_site(folder: Path, say: Callable[[str], None]) -> None:
    """Guard and relay together, until one of them ends: for a trial. In earnest they are units of two users."""
    check_engine()
    operators_file(folder)
    with Crew(folder / "logs", environment()) as crew:
        crew.start("guard", guard_command(folder))
        crew.start("relay", relay_command(kit_of(folder)))
        say(f"guard and relay of {folder} run; logs in {folder / 'logs'}; Ctrl-C ends both")
        while (ended := crew.ended()) is None:
            time.sleep(0.5)
    raise Refused(f"the {ended} has ended; see {folder / 'logs' / ended}.log")


def server_process(kit: Path) -> None:
    check_engine()
    os.execve(sys.executable, server_command(kit.resolve()), environment())


def put_run(run: Path, document: Document, approvals: Sequence[Any], key: Path | None = None) -> None:
    """What the coordinator reads; the same again when a run is resumed. `key`: what messages are sealed to.

    Everything is checked before anything is written: a run that is there stays whole.
    """
    from silodp.deploy.document import check_approvals

    check_approvals(document, list(approvals))
    plan, text = run / "plan.json", canonical(document.tree)
    with held(run, "server"):
        if plan.is_file() and plan.read_bytes() != text:
            raise ConfigError(f"{run}: holds the run of another plan")
        if document.shuffler is not None:
            document.shuffler.check_key(run / SERVER_KEY if key is None else key)
        write_whole(plan, text)
        write_whole(run / "approvals.json", json.dumps(list(approvals)).encode())
        if key is not None:
            write_whole(run / SERVER_KEY, key.read_bytes())


def run_over(admin: Path, document: Document, run: Path, patience: float, say: Callable[[str], None]) -> None:
    """A plan over the engine, from the machine that holds the server's run folder (`put_run`)."""
    check_engine()
    submit(admin, run, list(document.parties), patience, say)


def submit(admin: Path, run: Path, sites: Sequence[str], patience: float, say: Callable[[str], None]) -> None:
    """Submit the run to the engine, and again when the engine loses it: guards and checkpoint know where it was."""
    fruitless, again = 0, ""
    while fruitless < ATTEMPTS:
        before = progress(run)
        one_job(admin, run, sites, patience, say, again)
        if (run / CERTIFICATES).is_file():
            return
        fruitless, again = 0 if progress(run) != before else fruitless + 1, " again"
    stopped = run / "stopped.txt"
    raise Refused(stopped.read_text().strip() if stopped.is_file() else "the engine did not finish the run; see logs")


def progress(run: Path) -> int:
    """Changes with every round."""
    file = run / "checkpoint.safetensors"
    return file.stat().st_mtime_ns if file.is_file() else 0


def one_job(
    admin: Path, run: Path, sites: Sequence[str], patience: float, say: Callable[[str], None], again: str
) -> None:
    """From one submission to its end, whatever end that is. A server of the engine that dies is one, too."""
    from nvflare.fuel.flare_api.flare_api import new_secure_session  # pyright: ignore[reportMissingImports]

    until = time.monotonic() + START
    session = retried(lambda: new_secure_session(ADMIN, str(admin), timeout=30), until)
    try:
        while len(session.get_system_info().client_info) < len(sites) and time.monotonic() < until:
            time.sleep(0.3)
        with tempfile.TemporaryDirectory() as folder:  # submitting signs the job in its place
            make_job(Path(folder) / run.name, run, sites, patience)
            name = session.submit_job(str(Path(folder) / run.name))
        say(f"run submitted{again}")
        await_job(session, name, run, say)
    except Exception as error:  # of many classes of the engine's own
        say(f"the engine's server went away ({type(error).__name__}); run to be submitted{again}")
    finally:
        session.close()


def await_job(session: Any, name: str, run: Path, say: Callable[[str], None]) -> None:
    """Until the engine says that the job is over. A server that was killed says for ever that its job is running, so it
    is over too when nobody has worked on the run for long."""
    worked = looked = time.monotonic()
    reached = ""
    while not str(session.get_job_meta(name).get("status")).startswith("FINISHED"):
        time.sleep(0.3)
        now = time.monotonic()
        if now - looked > LOOK:
            looked, worked = now, worked if is_free(run) else now
            if (now_at := reached_round(run)) != reached:
                reached = now_at
                say(reached)
        if now - worked > UNATTENDED:
            session.abort_job(name)
            return


def reached_round(run: Path) -> str:
    from silodp.deploy.status import STATUS

    try:
        told = json.loads((run / STATUS).read_text(encoding="utf-8"))
        return f"round {told['round']} of {told['rounds']}"
    except (OSError, ValueError, LookupError):  # none yet
        return ""


def retried(open_session: Callable[[], Any], until: float) -> Any:
    """The server takes some seconds to listen."""
    while True:
        try:
            return open_session()
        except Exception:
            if time.monotonic() > until:
                raise Refused("the server cannot be reached; see logs") from None
            time.sleep(0.5)
