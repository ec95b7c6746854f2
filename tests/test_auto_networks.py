"""What `auto` chooses for networks: from public facts alone, told in words, and what is given stays."""

from __future__ import annotations

from typing import Any

import pytest

from silodp.facts import Facts
from silodp.parse import parse_config
from silodp.plan.make import make_plan, reasons, resolved

IMAGES = ("float32[28,28,1]", "int32[]")


def facts(sizes: tuple[int, ...], record: tuple[str, str] = IMAGES) -> Facts:
    return Facts(sizes, tuple(map(str, range(len(sizes)))), record, outputs=10, task="classification")


def auto(epsilon: float | None, trust: str = "trusted", model: dict[str, Any] | None = None, **options: Any) -> Any:
    privacy = {"trust": trust} | ({} if epsilon is None else {"epsilon": epsilon})
    tree = {"privacy": privacy, "algorithm": {"name": "auto", **options}, "model": model or {"kind": "cnn"}}
    return parse_config(tree)


def test_a_network_gets_large_batches_a_low_clip_and_normalised_layers():
    known = facts((6000, 4000))
    made = make_plan(auto(3.0), known).config
    options = made.algorithm
    assert (options.name, options.batch, options.clip, options.weights) == ("dp-sgd", 400, 0.1, "size")
    assert (made.model.activation, made.model.norm, made.whiten) == ("tanh", "group", None)
    assert options.average == {"kind": "exponential", "decay": 0.9}
    told = reasons(auto(3.0), known)
    assert "batches of 400 records a silo" in told[0] and "tanh and group norm" in told[1]


def test_more_noise_makes_shorter_steps():
    known = facts((6000,) * 10)
    long, short = (resolved(auto(*each), known).algorithm.step_size for each in ((8.0, "trusted"), (1.0, "untrusted")))
    assert long == pytest.approx(20.0)
    assert short is not None and 0 < short < 18
    assert "as for large tasks" in reasons(auto(8.0), known)[2]
    assert "of those of large tasks" in reasons(auto(1.0, "untrusted"), known)[2]


def test_what_is_given_stays():
    model = {"kind": "mlp", "hidden": [7], "activation": "relu"}
    made = resolved(auto(3.0, model=model, rounds=9, batch=50, step_size=0.5), facts((900, 800)))
    assert (made.algorithm.rounds, made.algorithm.batch, made.algorithm.step_size) == (9, 50, 0.5)
    assert (made.model.hidden, made.model.activation, made.model.norm) == ([7], "relu", "group")
    assert resolved(auto(3.0, model={"kind": "mlp"}), facts((900,))).model.hidden == [32]
    plain = resolved(auto(None), facts((900, 800))).algorithm
    assert (plain.name, plain.clip) == ("mb-sgd", None)
