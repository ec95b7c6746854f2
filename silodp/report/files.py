"""Reports of directories: of a run, or of a saved model (a bundle). JSON and text are read; the rest is hashed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from silodp.errors import ConfigError
from silodp.report.found import baseline_rows, found_in
from silodp.report.story import Pairs, Story, told
from silodp.report.swept import swept_page

NAME = "report.html"
HASHED = ("model.safetensors", "certificate.json", "config.toml", "history.jsonl")
ID_DIGITS = 16
REMEDY = "take the original, or save the model again"  # of a bundle


def story_of(directory: Path) -> Story:
    """Of a run that is complete, or of a bundle."""
    bundle = (directory / "bundle.json").is_file()
    if not bundle and not (directory / "summary.json").is_file():
        raise ConfigError(f"{str(directory)!r}: neither a finished run (summary.json) nor a saved model (bundle.json)")
    try:
        return story_of_bundle(bundle_index(directory)) if bundle else story_of_run(directory)
    except (LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{str(directory)!r}: what silodp writes is missing in its files ({error!r}); the run or model is damaged"
        ) from None


def story_of_run(directory: Path) -> Story:
    summary = read_json(directory / "summary.json")
    certificate = directory / "certificate.json"
    history, hashes = read_history(directory), hashes_of(directory)
    tests, baselines = summary.get("test_records"), summary.get("baselines") or {}
    promised = read_json(certificate) if certificate.is_file() else None
    held_out = (summary.get("held_out") or {"records": 0})["records"]
    return Story(
        title=title_of(summary["algorithm"], summary["silos"], held_out),
        certificate=promised,
        made=made(summary, held_out, run_id(promised, hashes)),
        versions=summary["versions"],
        hashes=hashes,
        found=[*found_in(summary["final"], tests), *baseline_rows(baselines, tests)],
        history=history,
        baselines=baselines,
        notes=["The noise was drawn once: another draw gives other results."] if summary["private"] else [],
        held_out=summary.get("held_out"),
    )


def made(summary: Mapping[str, Any], held_out: int, run: str) -> Pairs:
    final, besides = summary["final"], f" and {held_out:,} held out" if held_out else ""
    return [
        ("date (UTC)", day_and_time(summary.get("finished"))),
        ("run", run),
        ("algorithm", summary["algorithm"]),
        ("trust model", summary["trust"]),
        ("records", f"{sum(silo['records'] for silo in summary['silos']):,}{besides}"),
        ("parameters of the model", f"{summary['parameters']:,}"),
        ("rounds", f"{final['round']:.0f}"),
        ("sent to the server", f"{final['bits_up'] / 8e6:.3g} MB"),
        ("sent to the silos", f"{final['bits_down'] / 8e6:.3g} MB"),
        ("theorem", summary.get("theorem")),
    ]


def bundle_index(directory: Path) -> dict[str, Any]:
    told = read_json(directory / "bundle.json")
    try:
        check_digest(told)
    except ConfigError as error:
        raise ConfigError(f"{directory / 'bundle.json'}: {error}") from None
    return told


def check_digest(told: Mapping[str, Any]) -> None:
    if told["digest"] != digest_of(told):
        raise ConfigError(f"changed since it was saved (its digest differs); {REMEDY}")


def digest_of(told: Mapping[str, Any]) -> str:
    """SHA-256 of all that a bundle.json says, its certificate included, whatever the order of its keys."""
    rest = {key: part for key, part in told.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def story_of_bundle(index: Mapping[str, Any]) -> Story:
    certificate = index["certificate"]
    silos = [] if certificate is None else certificate["silos"]
    hashes = [(name, digest) for name, digest in index["files"].items() if name != NAME]
    return Story(
        title=title_of(index["estimator"], silos),
        certificate=certificate,
        made=[
            ("date (UTC)", day_and_time(index["saved"])),
            ("run", run_id(certificate, hashes)),
            ("estimator", index["estimator"]),
            ("model", index["model"].get("kind")),
            ("trust model", index["options"].get("trust")),
            ("schema's columns", ", ".join((index["schema"] or {}).get("columns", {}))),
            ("fingerprint of the plan", index["plan"]),
        ],
        versions=index["versions"],
        hashes=hashes,
        held_out=index.get("held_out"),
    )


def day_and_time(stamp: str | None) -> str | None:
    return None if stamp is None else stamp.replace("T", " ").removesuffix("+00:00").removesuffix("Z")


def title_of(what: str, silos: Iterable[Mapping[str, Any]], besides: int = 0) -> str:
    """`besides`: records that the silos' numbers leave out."""
    sizes = [silo["records"] for silo in silos]
    held = f", silos: {len(sizes)}, records: {sum(sizes) + besides:,}" if sizes else ""
    return f"Privacy report: {what}{held}"


def run_id(certificate: Mapping[str, Any] | None, hashes: Pairs) -> str:
    """As the certificate names it, or made of what the run left: other noise, settings or records give another."""
    if certificate is not None and certificate.get("made"):
        return certificate["made"]["run"]
    return hashlib.sha256("".join(f"{name} {digest}\n" for name, digest in hashes).encode()).hexdigest()[:ID_DIGITS]


def hashes_of(directory: Path, names: Iterable[str] = HASHED) -> Pairs:
    files = [directory / name for name in names]
    return [(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files if file.is_file()]


def read_history(directory: Path) -> list[dict[str, float]]:
    file = directory / "history.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return [as_json(line, file) for line in lines]


def read_json(file: Path) -> dict[str, Any]:
    return as_json(file.read_bytes(), file)


def as_json(text: str | bytes, file: Path) -> dict[str, Any]:
    try:
        return json.loads(text)
    except ValueError:
        raise ConfigError(f"{file}: not valid JSON; the run or model is damaged") from None


def write_report(directory: Path, read: Callable[[Path], Story] = story_of) -> Path:
    """report.html of what lies in the directory."""
    swept = (directory / "sweep.json").is_file() and not (directory / "summary.json").is_file()
    text = swept_page(read_json(directory / "sweep.json")) if swept else told(read(directory))
    (directory / NAME).write_text(text, encoding="utf-8")
    return directory / NAME
