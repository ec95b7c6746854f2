"""A silo that ends and starts again: it forgets nothing that it has spent, and goes on with the same numbers."""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from silodp.data import FederatedData
from silodp.deploy.coordinator import MessageFederation, checked
from silodp.deploy.kept import KeptSilo
from silodp.deploy.links import SiloProcess, heard
from silodp.deploy.nursery import Nursery
from silodp.deploy.pipes import set_up
from silodp.deploy.silo import SiloServer
from silodp.deploy.silo_process import reply
from silodp.deploy.wire import Late, decode, encode, plain
from silodp.errors import Gone, Refused
from silodp.plan.plan import Plan
from silodp.run.runner import prepare
from tests.cases import case
from tests.conftest import made_data
from tests.test_deploy_messages import DATA, X0, Neighbour, agreed, ask, records_of, setup_of, started


def again(silo: SiloServer, plan: Plan, data: FederatedData, index: int = 0, seed: int | None = None) -> SiloServer:
    """The silo as a new process would know it: plan, records, and the state as bytes."""
    fresh = SiloServer(setup_of(plan, index, seed=seed), records_of(data.silos[index]))
    fresh.restore(*decode(encode(*silo.state())))
    return fresh


def test_a_restarted_silo_answers_nothing_again():
    silo = started(agreed())
    assert ask(silo, "value", 0, X0)[0]["kind"] == "answer"
    back = again(silo, prepare(agreed(), DATA).plan, DATA)
    assert "answered already" in ask(back, "value", 0, X0)[0]["reason"]
    assert "has begun already" in decode(reply(back, encode({"kind": "start"}, {"x0": X0}))[1])[0]["reason"]
    assert ask(back, "difference", 1, X0 + 0.1, X0)[0]["kind"] == "answer"
    assert ask(back, "value", 2, X0)[0]["kind"] == "answer"
    assert "the plan allows 2 releases" in ask(back, "value", 3, X0)[0]["reason"]
    with pytest.raises(Refused, match="begun already"):
        back.restore(*silo.state())


def test_a_kept_silo_gives_the_same_bytes_and_takes_no_other_plan(tmp_path):
    """Its process ended; the next one finds question and answer in its folder."""
    plan, other = (prepare(agreed(clip=clip), DATA).plan for clip in (1.0, 2.0))
    setup = setup_of(plan) | {"run": "00"}
    question = encode({"kind": "ask", "query": "value", "round": 0, "run": "00"}, {"0": X0})
    answers = []
    for _ in range(2):
        keep = lambda header, silo: KeptSilo(tmp_path, header, silo)
        kept, told = reply(None, encode(setup, records_of(DATA.silos[0])), keep)
        assert isinstance(kept, KeptSilo) and decode(told)[0]["kind"] == "ready"
        reply(kept, encode({"kind": "start"}, {"x0": X0}), keep)
        answers.append(reply(kept, question, keep)[1])
        assert "has a plan" in decode(reply(kept, encode(setup, records_of(DATA.silos[0])), keep)[1])[0]["reason"]
        kept.ledger.close()
        kept.holding.__exit__(None, None, None)
    assert answers[0] == answers[1] and decode(answers[0])[0]["kind"] == "answer"
    for changed in (setup_of(other) | {"run": "00"}, setup | {"run": "11"}):
        keep = lambda header, silo: KeptSilo(tmp_path / "copy", header, silo)
        shutil.copytree(tmp_path, tmp_path / "copy", ignore=shutil.ignore_patterns("copy"), dirs_exist_ok=True)
        refused = decode(reply(None, encode(changed, records_of(DATA.silos[0])), keep)[1])[0]
        assert "another run" in refused["reason"], refused
        shutil.rmtree(tmp_path / "copy")


SEEDED = {
    "spider": ("spider", "untrusted", {}),
    "saga": ("soteria-saga", "untrusted", {}),  # a memory of the silo, and a shift of the channel
    "pvec": ("sdp-spider", "shuffled", {}),
}


@pytest.mark.parametrize(
    "which", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("spider", "saga")), "pvec"]
)
def test_a_restart_between_rounds_changes_no_bit(which):
    """Seeded: the model is that of an unbroken run."""
    name, trust, options = SEEDED[which]
    config = case(name, trust, **options)
    run = config.run.model_copy(update={"mode": "messages", "test_seed": True})
    data = made_data()
    prepared = prepare(config.model_copy(update={"run": run}), data)
    plan, x0 = prepared.plan, prepared.setting.x0

    def trained(restarts: bool) -> np.ndarray:
        silos: Any = [Neighbour() for _ in data.silos]
        set_up(silos, plan, [records_of(own) for own in data.silos], run.seed)
        fed = MessageFederation(plan, silos, run.seed)
        fed.start(x0)
        state = plan.algorithm.init(x0)
        for r in range(3):
            fed.begin_round(r)
            state = plan.algorithm.round(state, fed)
            if restarts and r == 1:
                silos[1].server = again(silos[1].server, plan, data, 1, run.seed)
        return np.asarray(state.x)

    np.testing.assert_array_equal(trained(True), trained(False))


def test_a_refused_question_leaves_the_round_as_it_was():
    """A later round that is refused must neither free the questions of this one nor draw its batch anew."""
    silo = started(agreed())
    assert ask(silo, "value", 0, X0)[0]["kind"] == "answer"
    seed = silo.batch_seed.copy()
    silo.streams["value"] = silo.streams["value"].__class__("value", 1, silo.streams["value"].batch)
    assert "the plan allows 1 releases" in ask(silo, "value", 1, X0)[0]["reason"]
    assert "answered already" in ask(silo, "value", 0, X0)[0]["reason"]
    np.testing.assert_array_equal(silo.batch_seed, seed)


# --- what a server makes of answers ------------------------------------------------------------------------------

GOOD = {"kind": "answer", "facts": {"gradients": 3.0, "step": 0.5, "stream": "value"}}
NUMBERS = np.arange(6, dtype=np.int32)
MALFORMED: dict[str, tuple[dict[str, Any], dict[str, np.ndarray]]] = {
    "no facts": ({"kind": "answer"}, {"value": NUMBERS}),
    "facts that are a list": ({"kind": "answer", "facts": []}, {"value": NUMBERS}),
    "another kind": ({"kind": "ready"}, {}),
    "too short": (GOOD, {"value": NUMBERS[:5]}),
    "too long": (GOOD, {"value": np.zeros(7, np.float32)}),
    "a matrix": (GOOD, {"value": NUMBERS.reshape(2, 3)}),
    "NaN": (GOOD, {"value": np.full(6, np.nan, np.float32)}),
    "infinite": (GOOD, {"value": np.full(6, np.inf, np.float32)}),
    "3e38": (GOOD, {"value": np.full(6, 3e38, np.float32)}),
    "truth values": (GOOD, {"value": NUMBERS > 2}),
    "another stream": ({"kind": "answer", "facts": {"stream": "difference"}}, {"value": NUMBERS}),
    "records beyond all numbers": ({"kind": "answer", "facts": {"records": 10**400}}, {}),
    "other records": ({"kind": "answer", "facts": {"records": 1e6}}, {"total": NUMBERS.view(np.uint32)}),
    "other parameters": ({"kind": "answer", "facts": {"parameters": 10**12}}, {}),
    "a text for a number": ({"kind": "answer", "facts": {"gradients": "many"}}, {"value": NUMBERS}),
    "work without end": ({"kind": "answer", "facts": {"gradients": float("inf")}}, {"value": NUMBERS}),
    "a negative step": ({"kind": "answer", "facts": {"step": -1.0}}, {"value": NUMBERS}),
}


@pytest.mark.parametrize("which", MALFORMED)
def test_an_answer_that_no_honest_silo_sends_is_refused(which):
    expected = {"stream": "value", "parameters": 6, "records": 20.0}
    assert checked((GOOD, {"value": NUMBERS}), expected).facts["gradients"] == 3.0
    with pytest.raises(Refused):
        checked(decode(encode(*MALFORMED[which])), expected)


class Lying:
    """A silo of a run whose answers somebody has changed."""

    def __init__(self, honest: Neighbour, change: Any):
        self.honest, self.change, self.send = honest, change, honest.send

    def receive(self) -> Any:
        header, arrays = self.honest.receive()
        return self.change(header, arrays) if header["kind"] == "answer" else (header, arrays)


@pytest.mark.parametrize(
    "change",
    [
        lambda header, arrays: (header | {"facts": header["facts"] | {"step": 1e36}}, arrays),
        lambda header, arrays: (header, {}),
        lambda header, arrays: (header, {"total": arrays["value"]}),
        lambda header, arrays: (header | {"facts": {}}, arrays),
    ],
)
def test_no_answer_of_one_silo_ends_the_server_in_a_traceback(change):
    plan = prepare(agreed(), DATA).plan
    silos: Any = [Neighbour(), Lying(Neighbour(), change)]
    set_up(silos, plan, [records_of(own) for own in DATA.silos], None)
    fed = MessageFederation(plan, silos, None)
    fed.start(jnp.asarray(X0))
    fed.begin_round(0)
    with pytest.raises(Refused):
        fed.mean(plan.algorithm.value, jnp.asarray(X0))  # type: ignore[attr-defined]


def test_a_silos_words_cannot_reach_a_terminal():
    told = encode({"kind": "refused", "reason": "\x1b]0;owned\x07\r\nerror", "code": "\x1b[2J"}, {})
    with pytest.raises(Refused) as caught:
        heard(told)
    assert str(caught.value).isprintable() and "owned" in str(caught.value)
    assert len(plain("x" * 10**6)) == 400


def test_a_stopped_silo_does_not_hang_the_server():
    with SiloProcess(patience=0.2) as silo:
        os.kill(silo.process.pid, signal.SIGSTOP)
        try:
            with pytest.raises(Late):
                silo.send({"kind": "account"}, {"much": np.zeros(10**6)})  # more than a pipe holds
                silo.receive()
        finally:
            os.kill(silo.process.pid, signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_silos_of_one_nursery_are_processes_of_their_own():
    with Nursery() as nursery:
        with SiloProcess(nursery=nursery) as one, SiloProcess(nursery=nursery) as other:
            with pytest.raises(Refused, match="no plan yet"):
                heard(one.ask(encode({"kind": "account"}, {})))
            one.process.kill()
            assert one.process.wait(timeout=10) == -signal.SIGKILL
            with pytest.raises(Refused, match="no plan yet"):  # the other one lives on
                heard(other.ask(encode({"kind": "account"}, {})))
            assert other.process.poll() is None
        assert other.process.poll() == 0
        unheard = nursery.start([])
        for each in (unheard.told, unheard.stdout, unheard.stdin):  # it ends, and nobody asks how
            each.close()
        with SiloProcess(nursery=nursery) as last:
            with pytest.raises(Refused, match="no plan yet"):  # by now it has let go of what only the nursery may hold
                heard(last.ask(encode({"kind": "account"}, {})))
            nursery.process.kill()
            nursery.process.wait()
            life = os.pidfd_open(last.process.pid)
            assert last.process.poll() == -signal.SIGKILL
            assert select.select([life], [], [], 10)[0], "the silo outlives what was said of it"
            os.close(life)
        with pytest.raises(Gone, match="the process that starts silos ended"):
            SiloProcess(nursery=nursery)


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_nobody_waits_for_a_nursery_that_is_stopped(monkeypatch):
    monkeypatch.setattr("silodp.deploy.nursery.TELLING", 0.1)
    with Nursery() as nursery:
        with SiloProcess(nursery=nursery) as silo:
            nursery.process.send_signal(signal.SIGSTOP)
            silo.process.kill()
            assert silo.process.wait(timeout=10) == -signal.SIGKILL
        nursery.control.settimeout(0.1)
        with pytest.raises(Gone, match="did not answer"):
            nursery.start([])
        assert nursery.process.wait(timeout=10) == -signal.SIGKILL


def test_keys_are_agreed_on_with_everybodys_signature():
    """Where sites are known, a server that passes its own key on is noticed."""

    class Vouched:
        def sign(self, key: bytes) -> bytes:
            return b"signed " + key

        def check(self, index: int, key: bytes, signature: bytes) -> None:
            if signature != b"signed " + key:
                raise Refused("keys: not signed")

    data = made_data((20, 12, 16))
    plan = prepare(agreed("shuffled", name="sdp-spider", weights="size"), data).plan
    silos = [SiloServer(setup_of(plan, i), records_of(own), Vouched()) for i, own in enumerate(data.silos)]
    ready = [silo.ready() for silo in silos]
    keys, signatures = ([each[name] for each in ready] for name in ("key", "signature"))
    other = SiloServer(setup_of(plan, 2), records_of(data.silos[2])).ready()["key"]
    for wrong in ([*keys[:2], other], keys[:2]):
        with pytest.raises(ValueError):
            silos[0].agree(wrong, signatures)
    for missing in (None, signatures[:2]):
        with pytest.raises(ValueError):
            silos[0].agree(keys, missing)
    assert len({silo.agree(keys, signatures) for silo in silos}) == 1
