"""How far a server's run is: a few lines, or a page on loopback. Read only, and nothing of it comes from records."""

from __future__ import annotations

import html
import json
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from silodp.deploy.wire import plain
from silodp.errors import ConfigError

STATUS = "status.json"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="2">
<title>silodp run {run}</title><style>
body {{ font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 52rem; padding: 0 1rem; }}
table {{ border-collapse: collapse; width: 100%; }} th, td {{ text-align: left; padding: .3rem .6rem; }}
tr + tr {{ border-top: 1px solid #8884; }} meter {{ width: 12rem; }} .dim {{ opacity: .7; }}
</style><h1>Run {run}</h1><p>{algorithm}, trust {trust}. <b>Round {round} of {rounds}</b>{pace}.
<br><span class="dim">last heard {ago} s ago; plan: {plan}</span></p>
<p><meter max="{rounds}" value="{round}"></meter></p>
<table><tr><th>site</th><th>records</th><th>epsilon planned</th><th>rounds answered</th><th>heard, MB</th></tr>
{rows}</table></html>"""
ROW = (
    "<tr><td>{site}</td><td>{records}</td><td>{epsilon:.3g} at delta {delta:g}</td>"
    '<td><meter max="1" value="{share}"></meter></td><td>{sent:.1f}</td></tr>'
)


def read_status(folder: Path) -> dict[str, Any]:
    file = folder / STATUS
    if not file.is_file():
        raise ConfigError(f"{folder}: no run of a server; it has no {STATUS}")
    return json.loads(file.read_text(encoding="utf-8"))


def lines(folder: Path) -> list[str]:
    told = read_status(folder)
    pace = told["seconds_a_round"]
    first = f"run {told['run']}: round {told['round']} of {told['rounds']}"
    return [
        first + ("" if pace is None else f", {pace:.2f} s a round"),
        *(
            f"  {plain(site['site'])}: {site['records']} records, epsilon {site['epsilon']:.3g} planned, "
            f"{site['bytes_up'] / 1e6:.1f} MB heard"
            for site in told["sites"]
        ),
    ]


def page(folder: Path) -> str:
    told = read_status(folder)
    share = told["round"] / max(1, told["rounds"])
    clean = lambda text: html.escape(plain(text))
    rows = "".join(
        ROW.format(**{**site, "site": clean(site["site"])}, share=share, sent=site["bytes_up"] / 1e6)
        for site in told["sites"]
    )
    pace = "" if told["seconds_a_round"] is None else f", {told['seconds_a_round']:.2f} s a round"
    texts = {name: clean(told[name]) for name in ("run", "algorithm", "trust", "plan", "round", "rounds")}
    return PAGE.format(**texts, pace=pace, ago=round(time.time() - told["at"]), rows=rows)


def page_server(folder: Path, address: str) -> HTTPServer:
    """On loopback only; it takes no input but the path /."""
    host, _, port = address.rpartition(":")
    if host not in LOOPBACK or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"--web {address}: give 127.0.0.1:PORT; for others use a tunnel or a proxy with a login")
    read_status(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = page(folder).encode() if self.path == "/" else b"not found"
            self.send_response(200 if self.path == "/" else 404)
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
