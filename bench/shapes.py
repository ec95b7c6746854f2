"""The promise that a clipped mean costs hardly more than one plain gradient, shape by shape: the headline table."""

from __future__ import annotations

from typing import Any, NamedTuple

from bench.targets import OURS, PLAIN

HEAD = [
    "clipped mean", "target", "CPU over ONE plain JAX gradient", "wall", "quickest private peer over silodp, CPU",
    "wall", "met",
]  # fmt: skip
PRIVATE = ("JAX vmap", "jax-privacy", "Opacus", "torch.func")
OTHERS = {("values", "784-64-LayerNorm-10"): 1.3, ("values", "embedding"): 1.6}  # of shapes that are not dense
DENSE = {"values": 1.15, "differences": 2.1}
PARTS = {
    "values": "values", "differences": "differences", "networks": "values", "network-differences": "differences",
}  # fmt: skip


class Best(NamedTuple):
    name: str
    ratio: float


def limit(part: str, work: str) -> float | None:
    what = PARTS[part]
    if part == what:
        return DENSE[what]
    return next((most for (of, start), most in OTHERS.items() if of == what and work.startswith(start)), None)


def quickest(rows: Any, time: str) -> Best:
    """The private peer whose time is the smallest multiple of silodp's."""
    peers = {name: own["over"][OURS][time][1] for name, own in rows.items() if name.startswith(PRIVATE)}
    name = min(peers, key=lambda each: peers[each])
    return Best(name, peers[name])


def row(part: str, work: str, rows: Any) -> list[str]:
    most, over = limit(part, work), rows[OURS]["over"][PLAIN]
    best = {time: quickest(rows, time) for time in ("cpu", "wall")}
    missed = [
        f"{words}" for time, words in (("cpu", "CPU"), ("wall", "wall"))
        if (most is not None and over[time][1] > most) or best[time].ratio < 1
    ]  # fmt: skip
    figure = lambda time: "{1:.2f} ({0:.2f}-{2:.2f})".format(*over[time])
    peer = lambda time: f"{best[time].ratio:.3g} ({best[time].name})"
    target = "" if most is None else f"<= {most:g}x"
    met = "yes" if not missed else "NO: " + ", ".join(missed)
    return [f"{PARTS[part]}, {work}", target, figure("cpu"), figure("wall"), peer("cpu"), peer("wall"), met]


def table(found: dict[str, Any]) -> list[list[str]]:
    return [row(part, work, rows) for part in PARTS if part in found for work, rows in found[part]["found"].items()]
