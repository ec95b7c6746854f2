"""The commands of those who run a site: a hospital, or a shuffler. What needs JAX is imported in a command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from silodp.cli_told import Out, SiteFolder, loaded, told, written

ShufflerFolder = Annotated[Path, typer.Argument(help="the folder of the shuffler's guard", metavar="DIR")]
silo = typer.Typer(no_args_is_help=True, help="For a hospital: set up this site, tell its facts, run its guard.")
shuffler = typer.Typer(no_args_is_help=True, help="For whoever runs the shuffler: it has no records, and hides them.")


@silo.command()
def init(
    folder: SiteFolder,
    name: Annotated[str, typer.Option(help="this site's name in the federation")],
    schema: Annotated[Path, typer.Option(help="the federation's schema", metavar="SCHEMA.toml")],
    data: Annotated[list[Path], typer.Option(help="this site's records; may be repeated", metavar="FILE")],
    epsilon: Annotated[float, typer.Option(help="largest epsilon of one run")] = 1.0,
    total_epsilon: Annotated[float, typer.Option(help="largest epsilon of all runs together")] = 4.0,
    delta: Annotated[float, typer.Option(help="largest delta of one run; all runs together have twice as much")] = 1e-5,
    trust: Annotated[
        list[str] | None, typer.Option(help="a trust model that plans may use; may be repeated (default: untrusted)")
    ] = None,
) -> None:
    """Make this site's folder: its key, guard.toml with its limits, systemd units and a compose file."""
    with told():
        from silodp.deploy.setup import init_site

        trusts = trust or ["untrusted"]
        for line in init_site(folder, name, schema, data, epsilon, total_epsilon, delta, trusts):
            print(line)


@silo.command()
def facts(folder: SiteFolder, out: Out = None) -> None:
    """Sign what the others have to know: how many records there are, and what a record is. Nothing else is computed."""
    with told():
        from silodp.deploy.guard import signed_site_facts

        written(signed_site_facts(folder), out)


@silo.command()
def trust(
    folder: SiteFolder,
    facts: Annotated[list[Path], typer.Argument(help="signed facts of the other sites", metavar="FACTS.json...")],
    yes: Annotated[bool, typer.Option("--yes", help="do not ask")] = False,
) -> None:
    """Note the other sites' keys, after comparing them with these sites by telephone."""
    with told():
        from silodp.deploy.setup import trust_sites

        for line in trust_sites(folder, loaded(facts), ask=None if yes else typer.confirm):
            print(line)


@silo.command()
def doctor(folder: SiteFolder) -> None:
    """Check this site: files and their rights, key, limits, records, ledger, and whether its guard answers."""
    with told():
        from silodp.deploy.doctor import checkup

        findings = checkup(folder)
        for good, text in findings:
            print(f"{'ok     ' if good else 'PROBLEM'} {text}")
        if not all(good for good, _ in findings):
            raise typer.Exit(1)


@silo.command()
def guard(folder: SiteFolder) -> None:
    """Run this site's guard: the process that reads records. It opens no network connection."""
    with told():
        from silodp.deploy.guarding import serve

        serve(folder)


@silo.command()
def join(
    folder: SiteFolder,
    kit: Annotated[Path, typer.Option(help="the unpacked kit that the project's admin approved", metavar="KIT")],
) -> None:
    """Take this site's kit of the network engine, and forbid it everything but carrying bytes to the guard."""
    with told():
        from silodp.deploy.kits import join_site

        print(f"joined: {join_site(folder, kit)}; next: silodp silo relay {folder}")


@silo.command()
def relay(
    place: Annotated[Path, typer.Argument(help="the kit, or the folder that has joined with it", metavar="KIT")],
) -> None:
    """Run this site's relay: it carries bytes between the server and the guard, and reads no records."""
    with told():
        from silodp.deploy.kits import relay_process

        relay_process(place)


@silo.command("run")
def silo_run(folder: SiteFolder) -> None:
    """Run guard and relay together, for a trial. In earnest start them as two users, by the units of `silo init`."""
    with told():
        from silodp.deploy.kits import run_site

        run_site(folder, lambda text: print(text, flush=True))


# --- a shuffler --------------------------------------------------------------------------------------------------


@shuffler.command("init")
def shuffler_init(
    folder: ShufflerFolder,
    name: Annotated[str, typer.Option(help="the shuffler's name in the federation")] = "shuffler",
) -> None:
    """Make the shuffler's folder: its keys, shuffler.toml with its limits, a systemd unit and a compose file."""
    with told():
        from silodp.deploy.setup import init_shuffler

        for line in init_shuffler(folder, name):
            print(line)


@shuffler.command("facts")
def tell_shuffler(folder: ShufflerFolder, out: Out = None) -> None:
    """Sign what the others have to know: the shuffler's name and its keys."""
    with told():
        from silodp.deploy.mixer import shuffler_facts

        written(shuffler_facts(folder), out)


@shuffler.command("guard")
def shuffler_guard(folder: ShufflerFolder) -> None:
    """Run the shuffler's guard: the process that permutes messages. It opens no network connection."""
    with told():
        from silodp.deploy.guarding import serve

        serve(folder)


@shuffler.command("run")
def shuffler_run(
    folder: Annotated[Path, typer.Option("--kit", help="the shuffler's folder, which has joined", metavar="DIR")],
) -> None:
    """Run the shuffler's guard and relay together. `silodp silo join` gives it its kit, `silo doctor` checks it."""
    with told():
        from silodp.deploy.kits import run_site

        run_site(folder, lambda text: print(text, flush=True))
