"""How far a server's run is: a few lines, or a page on loopback. Read only, and nothing of it comes from records."""

from __future__ import annotations

import html
import json
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from silodp.deploy.wire import plain
from silodp.digits import rounded_down, rounded_up
from silodp.errors import ConfigError

STATUS = "status.json"  # silodp.deploy.board writes it
LOOPBACK = ("127.0.0.1", "localhost")
STYLE = """
:root { color-scheme: light dark; --line: #8884; --bar: #2b6cb0; --held: #90b4d8; --bad: #b7410e; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; }
h1 { font-size: 1.3rem; margin-bottom: .2rem; } .dim { opacity: .7; font-size: .9rem; }
table { border-collapse: collapse; width: 100%; margin-top: 1rem; }
th, td { text-align: left; padding: .45rem .6rem; vertical-align: top; } tr + tr { border-top: 1px solid var(--line); }
.state { border: 1px solid var(--line); border-radius: 1rem; padding: .1rem .7rem; font-size: .85rem; }
.stopped { color: var(--bad); border-color: var(--bad); }
.bar { background: var(--line); border-radius: .3rem; height: .7rem; margin: .35rem 0 .15rem; overflow: hidden; }
.bar { display: flex; min-width: 9rem; } .bar b { background: var(--bar); } .bar i { background: var(--held); }
.wide { overflow-x: auto; } h1, li { overflow-wrap: anywhere; }
.num { font-variant-numeric: tabular-nums; } ul { padding-left: 1.2rem; } li { color: var(--bad); }
"""
PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8">{refresh}
<meta name="viewport" content="width=device-width"><title>silodp run {run}</title><style>{style}</style></head><body>
<h1>Run {run} <span class="state {state}">{state}</span></h1>
<div>{algorithm}, trust {trust}, {parameters} parameters. <b>Round {round} of {rounds}</b>{pace}.</div>
<div class="bar" style="max-width: 30rem"><b style="width: {percent:.1f}%"></b></div>
<div class="dim">plan {plan}; written {ago} s ago</div>
<div class="wide"><table><tr><th>site</th><th>last heard</th><th>up, down</th><th>epsilon of this run</th>
<th>epsilon of all runs here</th></tr>
{rows}</table></div>{refusals}
<p class="dim">Budgets are what each site's own ledger says; they follow from plans and counts, never from a record.
Dark: spent. Light: reserved for the rest of the run.</p></body></html>"""
WAITING = """<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="1">
<title>silodp</title><style>{style}</style></head><body><h1>No run yet <span class="state">waiting</span></h1>
<div>The server has not begun. This page looks again every second.</div></body></html>"""


def read_status(folder: Path) -> dict[str, Any]:
    file = folder / STATUS
    if not file.is_file():
        raise ConfigError(f"{folder}: no run of a server; it has no {STATUS}")
    return json.loads(file.read_text(encoding="utf-8"))


def lines(folder: Path) -> list[str]:
    told = read_status(folder)
    pace = told["seconds_a_round"]
    first = f"run {told['run']}: {told['state']}, round {told['round']} of {told['rounds']}"
    return [
        first + ("" if pace is None else f", {pace:.2f} s a round"),
        *(f"  {plain(site['site'])}: {spent_text(site)}; {heard_text(site)}" for site in told["sites"]),
        *(f"  refused: {plain(each['text'])}" for each in told["refusals"]),
    ]


def spent_text(site: Mapping[str, Any]) -> str:
    budget = site["budget"]
    if budget is None:
        return "no budget told" if site["epsilon"] is None else f"epsilon {rounded_up(site['epsilon'])} planned"
    own = f"epsilon {rounded_up(budget['run_spent'])} of {rounded_up(budget['run_reserved'])} in this run"
    over = f"{rounded_up(budget['total'])} of {budget['limit']:g} in all runs at delta {rounded_up(budget['delta'])}"
    return f"{own}, {over}"


def heard_text(site: Mapping[str, Any]) -> str:
    at = site["heard_at"]
    moved = f"{size(site['bytes_up'])} up, {size(site['bytes_down'])} down"
    return f"not heard yet; {moved}" if at is None else f"heard {max(0, time.time() - at):.0f} s ago; {moved}"


def size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


def bar(spent: float, held: float, whole: float, text: str) -> str:
    """Spent, reserved beyond it, and what is left, of a whole."""
    share = lambda part: 100 * min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0
    dark = share(spent)
    light = min(100.0 - dark, max(0.0, share(held) - dark))
    parts = f'<b style="width: {dark:.1f}%"></b><i style="width: {light:.1f}%"></i>'
    return f'<div class="bar">{parts}</div><span class="dim num">{text}</span>'


def row(site: Mapping[str, Any], delta: float) -> str:
    budget, at = site["budget"], site["heard_at"]
    records = "shuffler" if site["records"] is None else f"{int(site['records'])} records"
    ago = "not yet" if at is None else f"{max(0, time.time() - at):.0f} s ago"
    if budget is None:
        shuffles = site["records"] is None
        told = "no records" if shuffles else f"{rounded_up(site['epsilon'])} planned"
        bars = f'<td class="dim">{told}</td><td class="dim">{"no budget" if shuffles else "not told"}</td>'
    else:
        spent, reserved = budget["run_spent"], budget["run_reserved"]
        told = f"{rounded_up(spent)} spent of {rounded_up(reserved)}, delta {rounded_up(delta)}"
        run = bar(spent, reserved, reserved, told)
        left = max(0.0, budget["limit"] - budget["total"])
        total, limit = budget["total"], budget["limit"]
        known = f"{rounded_up(total)} of {limit:g} reserved, {rounded_down(left)} left"
        text = f"{known}, delta {rounded_up(budget['delta'])}"
        bars = f"<td>{run}</td><td>{bar(0.0, total, limit, text)}</td>"
    moved = f"{size(site['bytes_up'])}, {size(site['bytes_down'])}"
    name = f'{html.escape(plain(site["site"]))}<br><span class="dim">{records}</span>'
    return f'<tr><td>{name}</td><td class="num">{ago}</td><td class="num">{moved}</td>{bars}</tr>'


def page(folder: Path) -> str:
    if not (folder / STATUS).is_file():
        return WAITING.format(style=STYLE)
    told = read_status(folder)
    clean = lambda text: html.escape(plain(text))
    names = ("run", "algorithm", "trust", "plan", "round", "rounds", "state", "parameters")
    refused = "".join(f"<li>{clean(each['text'])}</li>" for each in told["refusals"])
    pace = "" if told["seconds_a_round"] is None else f", {told['seconds_a_round']:.2f} s a round"
    return PAGE.format(
        **{name: clean(told[name]) for name in names},
        style=STYLE,
        refresh="" if told["state"] == "finished" else '<meta http-equiv="refresh" content="2">',
        percent=100 * told["round"] / max(1, told["rounds"]),
        pace=pace,
        ago=round(time.time() - told["at"]),
        rows="".join(row(site, told["delta"]) for site in told["sites"]),
        refusals=f"<h2>Refusals</h2><ul>{refused}</ul>" if refused else "",
    )


def asked_here(host: str) -> bool:
    """Whether a browser has asked for this machine by its own name. A stranger's page whose name was made to point here
    would read ours otherwise."""
    return host.partition(":")[0] in LOOPBACK


def page_server(folder: Path, address: str) -> HTTPServer:
    """On loopback only; it takes no input but the path /."""
    host, _, port = address.rpartition(":")
    if host not in LOOPBACK or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"--web {address}: give 127.0.0.1:PORT; for others use a tunnel or a proxy with a login")
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder")

    class Handler(BaseHTTPRequestHandler):
        timeout = 10  # seconds: nobody holds the page up

        def do_GET(self) -> None:
            found = self.path == "/" and asked_here(self.headers.get("Host", ""))
            body = page(folder).encode() if found else b"not found: ask for / of 127.0.0.1 or localhost"
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: a terminal is no place for what others ask."""

    return HTTPServer((host, int(port)), Handler)


def serve_page(folder: Path, address: str, ready: Callable[[str], None]) -> None:
    with page_server(folder, address) as server:
        ready(f"http://{address.rpartition(':')[0]}:{server.server_address[1]}/")
        server.serve_forever()
