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
    assert (options.name, options.batch, options.clip, options.weights) == ("dp-sgd", 400, 0.5, "size")
    assert (made.model.activation, made.model.norm, made.whiten) == ("tanh", "group", None)
    assert options.average == {"kind": "exponential", "decay": 0.9}
    told = reasons(auto(3.0), known)
    assert "batches of 400 records a silo" in told[0] and "tanh and group norm" in told[1]


def test_more_noise_makes_a_shorter_path_in_fewer_rounds():
    known = facts((6000,) * 10)
    quiet, loud = (resolved(auto(*each), known).algorithm for each in ((8.0, "trusted"), (1.0, "untrusted")))
    path = lambda chosen: chosen.rounds * chosen.step_size * chosen.clip
    assert (quiet.rounds, path(quiet)) == (300, pytest.approx(600.0))
    assert loud.rounds == 100 and 0 < path(loud) < 500
    assert "300 rounds with steps of 2, a path of 600" in reasons(auto(8.0), known)[2]
    assert "of that of large tasks" in reasons(auto(1.0, "untrusted"), known)[2]


def test_given_rounds_share_the_path():
    known = facts((6000,) * 10)
    few = resolved(auto(8.0, rounds=50), known).algorithm
    assert few.step_size is not None and 50 * few.step_size * 0.5 == pytest.approx(600.0)
    assert "as many rounds as are given" in reasons(auto(8.0, rounds=50), known)[3]


def test_what_is_given_stays():
    model = {"kind": "mlp", "hidden": [7], "activation": "relu"}
    made = resolved(auto(3.0, model=model, rounds=9, batch=50, step_size=0.5), facts((900, 800)))
    assert (made.algorithm.rounds, made.algorithm.batch, made.algorithm.step_size) == (9, 50, 0.5)
    assert (made.model.hidden, made.model.activation, made.model.norm) == ([7], "relu", "group")
    assert resolved(auto(3.0, model={"kind": "mlp"}), facts((900,))).model.hidden == [32]
    plain = resolved(auto(None), facts((900, 800))).algorithm
    assert (plain.name, plain.clip) == ("mb-sgd", None)


NUMBERS = Facts((900, 800), ("a", "b"), ("float32[4]", "float32[]"), outputs=1, task="regression")


def test_a_squared_loss_gets_short_steps_and_nothing_clipped_gets_fixed_ones():
    """With the path of cross-entropy an mlp for numbers was worse than their mean, and diverged without an epsilon."""
    mlp = {"kind": "mlp"}
    chosen = lambda epsilon, **options: resolved(auto(epsilon, model=mlp, **options), NUMBERS).algorithm
    for options in (chosen(8.0), chosen(1.0), chosen(8.0, rounds=3)):
        assert options.step_size is not None and options.clip == 0.5 and options.step_size * 0.5 <= 0.5
    assert chosen(None).step_size == 0.1
    classes = resolved(auto(None, model=mlp), facts((900, 800), ("float32[4]", "int32[]"))).algorithm
    assert classes.step_size == 0.3
    assert "0.1 of the gradient a step" in reasons(auto(None, model=mlp), NUMBERS)[2]
    clipped, told = chosen(8.0, clip=2.0), reasons(auto(8.0, model=mlp, step_size=3.0), NUMBERS)[2]
    assert clipped.clip == 2.0 and clipped.step_size * 2.0 == pytest.approx(chosen(8.0).step_size * 0.5)
    assert "the step size that is given" in told
