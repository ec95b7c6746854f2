"""Whole runs of sums under masks: silos that go away in the middle of a round, and servers that cheat."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

from silodp.audit.real import SiloHere, mean_of
from silodp.channels.summing import AggregatedSilo
from silodp.data import FederatedData
from silodp.deploy.coordinator import MessageFederation
from silodp.deploy.links import SiloProcess
from silodp.deploy.pipes import joined
from silodp.errors import Gone, Refused
from silodp.parse import parse_config
from silodp.plan.certificate import settle
from silodp.run.runner import Prepared, prepare
from tests.conftest import made_data

ROUNDS = 3


def prepared_for(data: FederatedData, **privacy: Any) -> Prepared:
    tree = {
        "privacy": {"trust": "aggregated", "epsilon": 500.0, "delta": 1e-5} | privacy,
        "algorithm": {"name": "dp-gd", "rounds": ROUNDS, "step_size": 0.3, "clip": 1.0, "weights": "size"},
        "model": {"kind": "logistic", "bias": False},
        "run": {"mode": "messages"},
    }
    return prepare(parse_config(tree), data)


class Mortal(SiloHere):
    """A silo's program without a process of its own that dies when it is told: asked, and without an answer."""

    dies: tuple[int, str] | None = None
    dead = False

    def send(self, header: dict[str, Any], arrays: Any) -> None:
        if self.dead:
            raise Gone("a silo's process ended")
        super().send(header, arrays)
        self.dead = (header.get("round"), header["kind"]) == self.dies

    def receive(self) -> Any:
        if self.dead:
            raise Gone("a silo's process ended")
        return super().receive()


def rounds(fed: MessageFederation, prepared: Prepared) -> list[np.ndarray]:
    """The means of all rounds."""
    means: list[np.ndarray] = []
    fed.heard = lambda round, query, silos, packed, value: means.append(np.asarray(value))
    fed.start(prepared.setting.x0)
    state = prepared.plan.algorithm.init(prepared.setting.x0)
    for r in range(ROUNDS):
        fed.begin_round(r)
        state = prepared.plan.algorithm.round(state, fed)
    return means


def check_first(prepared: Prepared, mean: np.ndarray, present: list[int]) -> None:
    """The first mean is that of these silos, as their programs compute it, and noise."""
    weights = np.asarray(prepared.plan.facts.weights)[present]
    own = np.stack([mean_of(prepared, i)[0] for i in present])
    std = prepared.plan.std_of_average("value") / weights.sum()
    np.testing.assert_allclose(mean, weights @ own / weights.sum(), atol=6 * std)
    assert std < 0.02  # against means of up to 1


def records_of(prepared: Prepared) -> list[Any]:
    return [silo.named() for silo in prepared.data.silos]


def test_a_round_does_without_a_silo_that_dies_in_it_and_so_do_the_others():
    prepared = prepared_for(made_data((40, 25, 31)), missing=1, colluding=0)
    silos = [Mortal() for _ in range(3)]
    silos[2].dies = (0, "ask")
    with joined(prepared.plan, silos, records_of(prepared), None) as fed:
        means = rounds(fed, prepared)
        assert len(means) == ROUNDS and fed.gone == {2}
        check_first(prepared, means[0], [0, 1])
        counted = fed.final_accounts()
    assert settle(prepared.plan, counted)
    assert counted.tallies["value"].count.tolist() == [ROUNDS] * 3  # the dead one is charged with the whole plan


def test_a_second_silo_that_dies_ends_the_run():
    prepared = prepared_for(made_data((40, 25, 31)), missing=1, colluding=0)
    silos = [Mortal() for _ in range(3)]
    silos[2].dies, silos[1].dies = (0, "ask"), (1, "sum")
    with (
        joined(prepared.plan, silos, records_of(prepared), None) as fed,
        pytest.raises(Refused, match="1 of 3 silos left, the plan misses 1"),
    ):
        rounds(fed, prepared)


def test_a_silo_is_asked_once_even_if_its_sum_was_never_opened():
    """A server that plays dead after the answers gets no second sum of the round."""
    with before_a_sum() as (fed, ask, x0):
        fed.end.open = lambda *_: None  # type: ignore[method-assign]
        fed.end.mean = lambda *given: (x0, given[2])  # type: ignore[method-assign]
        ask()
        with pytest.raises(Refused, match="prepared already"):
            ask()
        fed.end.prepare = lambda talk, present: list(present)  # type: ignore[method-assign]
        with pytest.raises(Refused, match="answered already"):
            ask()


@contextmanager
def before_a_sum() -> Iterator[tuple[MessageFederation, Callable[[], Any], Any]]:
    """A federation before its first sum, the question, and the point that it is asked at."""
    prepared = prepared_for(made_data((40, 25, 31)), missing=1, colluding=0)
    query, x0 = prepared.plan.algorithm.value, prepared.setting.x0  # type: ignore[attr-defined]
    with joined(prepared.plan, [SiloHere() for _ in range(3)], records_of(prepared), None) as fed:
        fed.start(x0)
        fed.begin_round(0)
        yield fed, lambda: fed.mean(query, x0), x0


LIES: dict[str, Any] = {"nothing": {}, "lists": [], "numbers": 7, "texts": "zz", "none": None}
HONEST = {"public": ["11" * 32, "22" * 32], "sealed": {str(i): "00" for i in range(3)}}


@pytest.fixture(scope="module")
def summed():
    with before_a_sum() as (fed, ask, _):
        yield fed, ask


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("step", ["prepare", "shares", "close", "open"])
def test_words_around_a_sum_that_are_none_end_the_run_in_a_line(summed, monkeypatch, step, lie):
    fed, ask = summed
    told = dict.fromkeys(("public", "sealed", "words", "seeds", "keys"), LIES[lie])
    words = {"words": {str(i): "00" for i in range(3)}}

    def talk(said: Any) -> dict[int, Any]:
        asked = said[0]["step"]
        return dict.fromkeys(said, told if asked == step else HONEST | words)

    monkeypatch.setattr(fed, "_talk", talk)
    if step in ("close", "open"):
        ask = lambda: fed.end.open(talk, [0, 1, 2])
    with pytest.raises(Refused, match="do not fit together"), fed._fitting():
        ask()


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("aside", [(-(2.0**-14), 0.0, 2.0**-14), (2.0**-14, 2.0**-11, 0.0)])
def test_silos_whose_processors_round_differently_come_to_one_grid(missing, aside, monkeypatch):
    """On the border, all of them or but one."""
    honest = AggregatedSilo.settled

    def settled(end: AggregatedSilo, message: Any, exponent: int | None) -> Any:
        border = 2.0 ** math.floor(math.log2(float(message.step)))
        return honest(end, replace(message, step=jnp.float32(border * (1 + aside[end.index]))), exponent)

    monkeypatch.setattr(AggregatedSilo, "settled", settled)
    prepared = prepared_for(made_data((40, 25, 31)), missing=missing, colluding=0)
    silos = [Mortal() for _ in range(3)]
    with joined(prepared.plan, silos, records_of(prepared), None) as fed:
        means = rounds(fed, prepared)
        check_first(prepared, means[0], [0, 1, 2])
        assert settle(prepared.plan, fed.final_accounts())  # asking again costs nothing


class Doomed(SiloProcess):
    """A real process that is killed before it can answer a question of round 1."""

    doomed = False

    def send(self, header: dict[str, Any], arrays: Any) -> None:
        if self.doomed and header.get("round") == 1 and header["kind"] == "ask":
            self.process.kill()
            self.process.wait()
        super().send(header, arrays)


@pytest.mark.slow
def test_three_of_twelve_silos_are_killed_in_a_round_and_the_run_ends_with_the_right_sums():
    prepared = prepared_for(made_data((20,) * 12), missing=3)
    with ExitStack() as stack:
        silos = [stack.enter_context(Doomed()) for _ in range(12)]
        for i in (1, 4, 9):
            silos[i].doomed = True
        fed = stack.enter_context(joined(prepared.plan, silos, records_of(prepared), None))
        means = rounds(fed, prepared)
        assert fed.gone == {1, 4, 9}
        assert settle(prepared.plan, fed.final_accounts())
    check_first(prepared, means[0], list(range(12)))
    alive = [i for i in range(12) if i not in (1, 4, 9)]
    x = np.asarray(prepared.setting.x0) - 0.3 * means[0]
    setting = eqx.tree_at(lambda setting: setting.x0, prepared.setting, jnp.asarray(x, jnp.float32))
    check_first(replace(prepared, setting=setting), means[1], alive)
