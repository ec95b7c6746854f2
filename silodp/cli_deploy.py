"""The command line of a real federation: plans, sites, approvals, ledgers. What needs JAX is imported in a command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from silodp.cli_sites import shuffler, silo
from silodp.cli_told import Out, Outside, SiteFolder, loaded, refuse_existing, told, written
from silodp.errors import ConfigError

Site = Annotated[Path, typer.Option("--site", help="the folder of this site's guard", metavar="DIR")]
PlanFile = Annotated[Path, typer.Argument(help="a plan that `silodp plan propose` wrote", metavar="PLAN.json")]

ledger = typer.Typer(no_args_is_help=True, help="For a hospital: what has been spent on its records, and what is left.")
federation = typer.Typer(no_args_is_help=True, help="A whole federation on this machine, to look at.")
server = typer.Typer(no_args_is_help=True, help="For the operator of the server, which never sees a record.")


class PlanGroup(TyperGroup):
    """`silodp plan CONFIG.toml` tells what would be run; `propose` and `show` are about plans that sites sign."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = ["tell", *args]
        return super().parse_args(ctx, args)


plan = typer.Typer(cls=PlanGroup, no_args_is_help=True, help="What would be run; and plans that all sites sign.")


@plan.command()
def propose(
    config: Annotated[Path, typer.Argument(help="TOML file that describes the run", metavar="CONFIG.toml")],
    facts: Annotated[list[Path], typer.Argument(help="signed facts, one file for each site", metavar="FACTS.json...")],
    out: Annotated[Path, typer.Option("--out", "-o", help="the plan")] = Path("plan.json"),
    on_missing: Annotated[
        str, typer.Option(help="a site that does not answer: wait for it, or skip it in this round")
    ] = "wait",
    shuffler: Annotated[
        Path | None, typer.Option(help="signed facts of the shuffler, where the trust model has one")
    ] = None,
) -> None:
    """Make the plan that all sites are asked to approve: choices made, noise calculated, nothing known of a record."""
    with told():
        from silodp.parse import load_config

        parsed = load_config(config)
        from silodp.deploy.approval import show as shown
        from silodp.deploy.document import Document, proposed
        from silodp.deploy.shuffling import new_box, public_of, write_box

        box, key = new_box(), out.with_suffix(".key")
        mixing = None if shuffler is None else {"facts": loaded([shuffler])[0], "server_key": public_of(box)}
        document = Document(proposed(parsed, loaded(facts), on_missing, mixing))
        text = shown(document)
        refuse_existing(out)
        if shuffler is not None:
            write_box(key, box)
            print(f"written to {key}: the server needs it to open messages, and nobody else may have it")
        written(document.tree, out)
        print(text)


@plan.command()
def show(file: PlanFile, outside: Outside = None) -> None:
    """Print what a plan says, after recalculating it, and its fingerprint in words."""
    with told():
        from silodp.deploy import approval

        print(approval.show(approval.load(file, outside or ())))


def approve(
    file: PlanFile,
    site: Site,
    out: Out = None,
    yes: Annotated[bool, typer.Option("--yes", help="do not ask; for scripts that have shown the screen")] = False,
) -> None:
    """Show on one screen what a plan would do with this site's records, ask, and sign."""
    with told():
        from silodp.deploy import approval

        document = approval.load(file, approval.outside_of(site))
        print(approval.screen(site, document))
        if not yes and not typer.confirm("\nApprove this plan for this site?"):
            print("not approved; nothing was written")
            raise typer.Exit(1)
        written(approval.approve(site, document), out)


def revoke(
    run: Annotated[str, typer.Argument(help="the run's number, or the plan's fingerprint", metavar="RUN")], site: Site
) -> None:
    """Take an approval back: no further question of this plan is answered. What was answered stays charged."""
    with told():
        from silodp.deploy import approval

        print(f"revoked: run {approval.revoke(site, run)}")


def verify(
    certificates: Annotated[list[Path], typer.Argument(help="certificates of guards", metavar="CERTIFICATE.json...")],
    plan_file: Annotated[Path | None, typer.Option("--plan", help="the plan that they belong to")] = None,
    outside: Outside = None,
) -> None:
    """Check certificates: signatures, and that what was counted gives the stated epsilon. No secret is needed."""
    with told():
        from silodp.deploy.certify import verified

        document = None
        if plan_file is not None:
            from silodp.deploy.approval import load

            document = load(plan_file, outside or ())
        for line in verified(loaded(certificates), document):
            print(line)
        print("good" if document is not None else "good, for what they say; with --plan the keys are checked too")


# --- a ledger ----------------------------------------------------------------------------------------------------


@contextmanager
def opened(folder: Path) -> Iterator[Any]:
    from silodp.deploy.office import open_ledger

    found = open_ledger(folder)
    try:
        yield found
    finally:
        found.close()


@ledger.command("show")
def ledger_show(folder: SiteFolder) -> None:
    """What has been spent on this site's records over all runs, what is left, and what was refused lately."""
    with told(), opened(folder) as book:
        from silodp.deploy.doctor import spent_lines

        book.check_unedited()
        for line in spent_lines(folder, book):
            print(line)


@ledger.command()
def close(run: Annotated[str, typer.Argument(help="the run's number", metavar="RUN")], folder: SiteFolder) -> None:
    """End a run here: no further answers, and what was reserved for it and not used is free again. Releases on batches
    that are drawn at random stay charged as planned, unless there was none."""
    with told(), opened(folder) as book:
        from silodp.deploy.doctor import closed_line

        book.check_unedited()
        book.finish(run)
        print(closed_line(book, run))


@ledger.command("export")
def ledger_export(folder: SiteFolder, out: Out = None) -> None:
    """All entries as JSON, for an auditor; no record, answer or secret is in them."""
    with told(), opened(folder) as book:
        book.check_unedited()
        rows = book.db.execute("select seq, at, event, head from chain order by seq")
        written([{"seq": s, "at": at, "event": json.loads(e), "head": h} for s, at, e, h in rows], out)


@ledger.command("verify")
def ledger_verify(folder: SiteFolder) -> None:
    """Check that every entry is the one that was written, and that entries and answers belong together."""
    with told(), opened(folder) as book:
        problems, head = book.verify(), book.head
        for line in problems:
            print(line)
        print(f"{len(problems)} problems; entry {head.seq}, {head.hash[:16]}")
        if problems:
            raise typer.Exit(1)


# --- the server --------------------------------------------------------------------------------------------------


@server.command()
def run(
    file: PlanFile,
    approvals: Annotated[list[Path], typer.Argument(help="the sites' approvals", metavar="APPROVAL.json...")],
    out: Annotated[Path, typer.Option(help="the run's folder")],
    kit: Annotated[Path | None, typer.Option(help="the project admin's kit: run it over the network engine")] = None,
    guards: Annotated[
        Path | None, typer.Option(help="a folder with SITE.sock for every site: guards' sockets on this machine")
    ] = None,
    key: Annotated[
        Path | None, typer.Option(help="the key beside a plan with a shuffler, which opens its messages")
    ] = None,
    patience: Annotated[float, typer.Option(help="seconds that a site may take for an answer")] = 600.0,
    start: Annotated[
        Path | None, typer.Option(help="the folder of an earlier run: begin with the model that it had come to")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on with the run in --out; without it a folder with a run is refused")
    ] = False,
    outside: Outside = None,
) -> None:
    """Run a plan to its certificates. With --resume the same command goes on with a run that was stopped."""
    with told():
        if (kit is None) == (guards is None):
            raise ConfigError("give --kit for a run over the network, or --guards for guards on this machine")
        from silodp.deploy.approval import load

        if (out / "plan.json").exists() and not resume:
            raise ConfigError(f"--out {out}: holds a run; --resume goes on with it")
        if kit is not None and outside:
            raise ConfigError("--outside: over the network engine plans have the library's own parts only")
        from silodp.deploy.checkpoints import model_of, put_first
        from silodp.deploy.kits import put_run, run_over

        document, say = load(file, outside or ()), lambda text: print(text, flush=True)
        signed = loaded(approvals)
        model = None if start is None or resume else model_of(start, document)
        put_run(out, document, signed, key)
        if model is not None:
            put_first(out, model)
        if kit is not None:
            run_over(kit, document, out, patience, say)
        else:
            from silodp.deploy.listen import sockets
            from silodp.deploy.server import drive

            paths = {site: Path(str(guards)) / f"{site}.sock" for site in document.parties}
            drive(document, signed, sockets(paths, patience), out, say)
        print(f"model and certificates in {out}")


@server.command()
def start(kit: Annotated[Path, typer.Argument(help="the server's kit", metavar="KIT")]) -> None:
    """Run the network engine's server, which sites connect to. It never sees a record."""
    with told():
        from silodp.deploy.kits import server_process

        server_process(kit)


@federation.command("demo")
def federation_demo(
    silos: Annotated[int, typer.Option(help="how many sites")] = 3,
    shuffler: Annotated[bool, typer.Option("--shuffler", help="with a shuffler as one more site")] = False,
    out: Annotated[Path, typer.Option(help="a new directory for everything")] = Path("runs/federation"),
) -> None:
    """A whole federation on this machine: CA, server, guards and relays as processes of their own, over mutual TLS."""
    with told():
        from silodp.deploy.kits import check_engine
        from silodp.deploy.parade import demo

        check_engine()
        for line in demo(out, silos, shuffler, lambda text: print(text, flush=True)):
            print(line)
        print(f"model and signed certificates in {out / 'run'}; everything that was started has been stopped")


def provision(
    file: Annotated[Path, typer.Argument(help="host, port, sites and shuffler of the federation", metavar="FED.toml")],
    out: Annotated[Path, typer.Option(help="a new directory for the CA, the kits and the invitations")],
    trial: Annotated[
        bool, typer.Option("--trial", help="make everybody's kit here, private keys too: for a trial on one machine")
    ] = False,
) -> None:
    """For the project's admin: the CA, the server's kit, and an invitation from which each site makes its own key."""
    with told():
        from silodp.deploy.kits import begin_provision, check_engine, end_provision
        from silodp.deploy.provision import provisioned, read_federation

        check_engine()
        federation = read_federation(file)
        if not trial:
            print("\n".join(provisioned(out, federation)))
            return
        making = begin_provision(out, federation.host, federation.port, federation.parties)
        for name, kit in end_provision(making, out, federation.host).items():
            print(f"{name}: {kit}")


def status(
    folder: Annotated[Path, typer.Argument(help="the folder of a server's run", metavar="RUN")],
    web: Annotated[str | None, typer.Option(help="show a page there instead", metavar="127.0.0.1:PORT")] = None,
) -> None:
    """How far a run is, what each site spends, and when it was last heard of. Read only."""
    with told():
        from silodp.deploy.status import lines, serve_page

        if web is None:
            print("\n".join(lines(folder)))
            return
        serve_page(folder, web, lambda address: print(f"{address} (Ctrl-C ends it)", flush=True))


def attach(app: typer.Typer) -> None:
    """These commands beside the others."""
    app.add_typer(plan, name="plan")
    app.add_typer(silo, name="silo")
    app.add_typer(shuffler, name="shuffler")
    app.add_typer(ledger, name="ledger")
    app.add_typer(server, name="server")
    app.add_typer(federation, name="federation")
    for command in (approve, revoke, verify, status, provision):
        app.command()(command)
