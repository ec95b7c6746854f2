"""What a silo answers and what it refuses, byte by byte, in this process; its noise is from the operating system."""

from __future__ import annotations

import io
import json
import os
import re
import struct
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

import silodp
from silodp import registry
from silodp.channels.channel import SMALLEST_BOUND
from silodp.channels.masks import Masks
from silodp.config import Config
from silodp.data import SiloData
from silodp.deploy.coordinator import MessageFederation
from silodp.deploy.links import SiloProcess
from silodp.deploy.pipes import set_up
from silodp.deploy.shuffling import agreed_terms
from silodp.deploy.silo import SiloServer, digest
from silodp.deploy.silo_process import reply, serve
from silodp.deploy.wire import LARGEST, decode, encode, read_frame, write_frame
from silodp.errors import ConfigError, Refused
from silodp.parse import parse_config
from silodp.plan.certificate import SIMULATED, settle
from silodp.plan.plan import Plan
from silodp.randomness import GRID_STEPS, SeededRandomness, SystemRandomness
from silodp.run.directory import RunDirectory
from silodp.run.prepare import prepare
from silodp.run.runner import context_of, resume, train
from silodp.sampling import MOVES, FixedSize
from tests.cases import case
from tests.conftest import made_data

DATA = made_data((20, 12))
X0 = np.zeros(6, np.float32)
Message = tuple[dict[str, Any], dict[str, np.ndarray]]


# --- the wire ------------------------------------------------------------------------------------------


def test_a_message_comes_back_as_it_was():
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3).T, "empty": np.zeros((0, 4)), "one": np.int32(7)}
    header, back = decode(encode({"kind": "ask", "round": 3}, arrays))
    assert header == {"kind": "ask", "round": 3}
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array)
        assert back[name].dtype == np.asarray(array).dtype


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01\x00",
        struct.pack("<I", 1000) + b"{}",
        struct.pack("<I", 2) + b"{}" + b"not safetensors",
        struct.pack("<I", 3) + b"\xff\xfe\xfd",
        encode({}, {})[:-1],
        struct.pack("<I", 2) + b"[]" + encode({}, {})[6:],
    ],
)
def test_bytes_that_are_no_message_are_refused(data):
    with pytest.raises(Refused):
        decode(data)


def test_frames():
    stream = io.BytesIO()
    write_frame(stream, b"first")
    write_frame(stream, b"")
    whole = stream.getvalue()
    stream.seek(0)
    assert [read_frame(stream), read_frame(stream), read_frame(stream)] == [b"first", b"", b""]
    for cut in (3, 8, len(b"first") + 7):
        with pytest.raises(Refused):
            read_frame(io.BytesIO(whole[:cut]))
    with pytest.raises(Refused, match="longer than allowed"):
        read_frame(io.BytesIO(struct.pack("<Q", LARGEST + 1) + b"x"))


# --- a silo --------------------------------------------------------------------------------------------


def agreed(trust: str = "untrusted", **algorithm: Any) -> Config:
    options = {"name": "spider", "rounds": 4, "step_size": 0.3, "clip": 1.0, "clip_difference": 0.7, "restart": 2}
    privacy = {"trust": trust, "epsilon": 2.0, "delta": 1e-4}
    return parse_config({"privacy": privacy, "algorithm": options | algorithm, "run": {"mode": "messages"}})


class Neighbour:
    """Stands for a silo's process: the same bytes, answered in this one."""

    def __init__(self) -> None:
        self.server: SiloServer | None = None
        self.sent: list[bytes] = []

    def send(self, header: dict[str, Any], arrays: dict[str, np.ndarray]) -> int:
        self.sent.append(encode(header, arrays))
        self.server, self.answer = reply(self.server, self.sent[-1])
        return len(self.sent[-1])

    def receive(self) -> Message:
        header, arrays = decode(self.answer)
        assert header["kind"] != "refused", header
        return header, arrays


def records_of(silo: SiloData) -> dict[str, np.ndarray]:
    return {"features": silo.features, "targets": silo.targets}


def setup_of(plan: Plan, index: int = 0, **changes: Any) -> dict[str, Any]:
    """What the server sends first; no seed: noise is the operating system's."""
    tree = {"kind": "setup", "plan": plan.to_json(), "index": index, "seed": None, "shuffler": None}
    return json.loads(json.dumps(tree | changes))


def set_up_silos(config: Config) -> list[Neighbour]:
    """All silos with the plan and their records."""
    silos = [Neighbour() for _ in DATA.silos]
    set_up(silos, prepare(config, DATA).plan, [records_of(own) for own in DATA.silos], None)  # type: ignore[arg-type]
    return silos


def started(config: Config, index: int = 0) -> SiloServer:
    silo = set_up_silos(config)[index]
    silo.send({"kind": "start"}, {"x0": X0})
    assert silo.receive()[0]["kind"] == "ready"
    assert silo.server is not None
    return silo.server


def ask(
    server: SiloServer | None, query: str, round: int, *public: np.ndarray
) -> tuple[dict[str, Any], dict[str, Any]]:
    header = {"kind": "ask", "query": query, "round": round}
    return decode(reply(server, encode(header, {str(i): p for i, p in enumerate(public)}))[1])


def refusal(server: SiloServer | None, query: str, round: int, *public: np.ndarray) -> str:
    header, arrays = ask(server, query, round, *public)
    assert header["kind"] == "refused"
    assert arrays == {}
    return header["reason"]


def test_an_error_of_the_compiled_program_is_not_passed_on():
    """Its text may quote numbers of the records."""
    silo = started(agreed())

    def broken(*_: Any) -> Any:
        raise jax.errors.JaxRuntimeError("cannot round 31.4159")

    silo.compiled["ask", "value"] = broken
    told = refusal(silo, "value", 0, X0)
    assert "no noise could be drawn" in told and "31.4159" not in told
    assert silo.round == -1 and not silo.answered


@pytest.fixture(scope="module")
def answered() -> SiloServer:
    """A silo that has answered rounds 0 to 3 of its plan, with all the refusals in between."""
    server = started(agreed())
    assert ask(server, "value", 0, X0)[0]["kind"] == "answer"
    assert "answered already" in refusal(server, "value", 0, X0)  # a replay would average the noise away
    assert "answered already" in refusal(server, "value", 0, X0 + 1)  # also at another point
    assert ask(server, "difference", 1, X0 + 0.1, X0)[0]["kind"] == "answer"
    assert "in the past" in refusal(server, "difference", 0, X0 + 0.2, X0)
    assert ask(server, "value", 2, X0)[0]["kind"] == "answer"
    return server


def test_a_silo_answers_no_more_than_planned(answered):
    """The plan has two values and two differences: a server that asks for a third value gets none."""
    before = int(answered.account.tallies["value"].count)
    assert before == 2
    assert "the plan allows 2 releases" in refusal(answered, "value", 3, X0)
    assert int(answered.account.tallies["value"].count) == before  # what was refused is not counted
    assert ask(answered, "difference", 3, X0 + 0.1, X0)[0]["kind"] == "answer"
    assert "the plan has 4 rounds" in refusal(answered, "difference", 4, X0, X0)


def test_a_silo_refuses_what_it_does_not_know(answered):
    for name in ("round", "init", "__class__", "releases", "nothing"):
        assert "the agreed algorithm asks only ('value', 'difference')" in refusal(answered, name, 9, X0)
    assert "send setup first" in refusal(None, "value", 0, X0)
    for broken in (encode({"kind": "ask"}, {}), encode({"kind": "ask", "query": "value", "round": "x"}, {}), b"junk"):
        assert decode(reply(answered, broken)[1])[0]["kind"] == "refused"


@pytest.mark.parametrize("trust", ["untrusted", "trusted"])
def test_a_query_is_not_answered_as_a_local_task(trust):
    """What a silo returns from a local task is sent as it is: a clipped mean asked for that way would go unnoised."""
    server = started(agreed(trust))
    header, arrays = decode(reply(server, encode({"kind": "local", "query": "value", "round": 0}, {"0": X0}))[1])
    assert (header["kind"], arrays) == ("refused", {})
    assert int(server.account.tallies["value"].count) == 0


def test_a_silo_computes_with_the_numbers_that_its_bounds_are_proved_for(answered):
    """Half-precision points would be gradients, clips and sums in half precision."""
    assert "types ['float16']; send float32" in refusal(answered, "value", 3, X0.astype(np.float16))
    # The same bytes are another point as whole numbers: masks cancelled while others added less noise.
    assert "types ['int32']; send float32" in refusal(answered, "value", 3, X0.view(np.int32))
    assert digest([jnp.float32(1)]) != digest([jnp.float32(1).view(jnp.int32)])


@pytest.mark.parametrize("x0", [np.zeros((3, 3), np.float32), X0.astype(np.float16), np.full_like(X0, np.nan)])
def test_a_silo_starts_at_a_point_only(x0):
    server = set_up_silos(agreed())[0].server
    assert decode(reply(server, encode({"kind": "start"}, {"x0": x0}))[1])[0]["reason"].startswith("start: ")
    assert decode(reply(server, encode({"kind": "start"}, {"x0": X0}))[1])[0]["kind"] == "ready"


def test_no_error_ends_a_silo(answered, monkeypatch):
    """Texts of errors that nobody has looked at stay in the silo."""

    def broken(*_: Any) -> Any:
        raise RuntimeError("record 17.25")

    monkeypatch.setattr(answered, "answer", broken)
    assert refusal(answered, "value", 3, X0) == "a RuntimeError in this silo"


def test_a_refusal_shows_nothing_of_the_records(answered):
    """Reasons are made of names and counts; a wrong shape is told by its shape."""
    told = refusal(answered, "difference", 9, np.zeros(99, np.float32), X0)
    assert not re.search(r"\d\.\d{3,}", told)


def test_two_silos_given_the_same_request_draw_different_noise():
    config = agreed()
    answers = [ask(started(config), "value", 0, X0)[1]["value"] for _ in range(2)]  # same records, same point
    # Integers: one coordinate in a thousand may well be the same in both.
    assert np.count_nonzero(answers[0] != answers[1]) > len(X0) / 2


def test_the_noise_of_a_silo_is_what_the_plan_says():
    """One value per round at one point, many rounds: mean and deviation over all coordinates."""
    rounds = 200
    config = agreed(name="dp-gd", rounds=rounds, clip_difference=None, restart=None)
    server = started(config, index=1)
    answers = [ask(server, "value", r, X0) for r in range(rounds)]
    assert {arrays["value"].dtype for _, arrays in answers} == {np.dtype(np.int32)}
    drawn = np.stack([header["facts"]["step"] * arrays["value"] for header, arrays in answers])
    multiplier = float(server.plan.noised.multipliers["value"][1])
    expected = multiplier * MOVES * 1.0 / 12
    plan = prepare(config, DATA).plan
    assert plan.std_over_clip("value")[1] == pytest.approx(expected)
    measured = (drawn - drawn.mean(axis=0)).std()
    assert measured == pytest.approx(expected, rel=0.1)  # 1200 draws: 2 percent is one deviation


POISSON: dict[str, tuple[str, dict[str, Any], tuple[str, list[np.ndarray]]]] = {
    "untrusted": ("untrusted", {"name": "ldp-sgd"}, ("value", [X0])),
    "trusted": ("trusted", {"name": "mb-psgm", "clip_difference": 0.7, "momentum": 0.3}, ("value", [X0])),
    "difference": ("untrusted", {"name": "prox-svrg", "restart": 9}, ("difference", [X0 + 1, X0])),
    "svrg": (
        "untrusted",
        {"name": "ldp-svrg", "snapshot_probability": 0.5},
        ("estimate", [X0 + 1, X0, np.asarray(True)]),
    ),
    "saga": ("untrusted", {"name": "soteria-saga", "compressor": "rand-k", "keep": 2}, ("estimate", [X0])),
}


@pytest.mark.parametrize("case_", POISSON)
def test_a_header_tells_the_planned_size_of_a_batch_and_not_the_drawn_one(case_):
    """How many records joined a Poisson batch depends on who they are: a header must not say it."""
    trust, options, (query, points) = POISSON[case_]
    unused = dict.fromkeys(("clip_difference", "restart"))
    server = started(agreed(trust, **unused | {"rounds": 9, "batch": 4, **options}))
    told = [ask(server, query, r, *points)[0]["facts"] for r in range(8)][1:]  # an anchor's full mean may come first
    for facts in told:
        facts.pop("step", None)  # of the grid, public where noise is real
        facts.pop("round", None)  # of a schedule of shifts
    assert told == told[:1] * 7, told
    assert told[0]["gradients"] == 4 * min(len(points), 2)
    assert set(told[0]) <= {"gradients", "stream", "parameters"}


def test_a_header_of_a_sum_tells_the_planned_number_of_records():
    federated = Federated()
    federated.agree()
    header, _ = ask(federated.silos[2], "value", 2, X0)
    assert header["facts"] == {"stream": "value", "records": 16.0, "gradients": 16.0}


def test_a_server_hears_what_each_silo_counted():
    plan = prepare(agreed(), DATA).plan
    silos = set_up_silos(agreed())
    fed = MessageFederation(plan, silos, None)  # type: ignore[arg-type]
    fed.start(jnp.asarray(X0))
    fed.begin_round(0)
    fed.mean(plan.algorithm.value, jnp.asarray(X0))  # type: ignore[attr-defined]
    tallies = fed.final_accounts().tallies
    np.testing.assert_array_equal(tallies["value"].count, [1, 1])
    np.testing.assert_allclose(tallies["value"].multiplier, plan.multipliers["value"], rtol=1e-6)
    np.testing.assert_array_equal(tallies["difference"].count, [0, 0])


def trusted_means(rounds: int) -> np.ndarray:
    """What a trusted server publishes of the same silos asked at the same point."""
    config = agreed("trusted", name="dp-gd", rounds=rounds, clip_difference=None, restart=None)
    plan, silos = prepare(config, DATA).plan, set_up_silos(config)
    fed = MessageFederation(plan, silos, None)  # type: ignore[arg-type]
    fed.start(jnp.asarray(X0))
    means = []
    for r in range(rounds):
        fed.begin_round(r)
        means.append(np.asarray(fed.mean(plan.algorithm.value, jnp.asarray(X0))))  # type: ignore[attr-defined]
    settle(plan, fed.final_accounts())
    return np.stack(means)


def test_a_trusted_servers_noise_is_fresh_and_nobody_can_repeat_it():
    """Full batches at one point: all that differs between rounds, and between runs of one public seed, is noise."""
    one, other = trusted_means(3), trusted_means(3)
    drawn = np.concatenate([one, other])
    assert len(np.unique(drawn)) > 0.8 * drawn.size  # on a grid, two may be alike by chance
    assert np.mean(np.abs(one - other) > 1e-6) > 0.8


@pytest.mark.parametrize(
    ("run", "stamp"),
    [
        ({"mode": "messages"}, None),
        ({"mode": "messages", "test_seed": True}, SIMULATED),
        ({"mode": "simulation"}, SIMULATED),
    ],
)
def test_a_run_with_a_known_seed_is_stamped(run, stamp):
    """Only noise that nobody can repeat is certified without reserve."""
    config = agreed()
    changed = config.model_copy(update={"run": config.run.model_copy(update=run)})
    assert context_of(prepare(changed, DATA)).stamp == stamp


def test_the_server_draws_from_the_operating_system_unless_a_test_gives_a_seed():
    plan = prepare(agreed("trusted"), DATA).plan
    for seed, kind in ((None, SystemRandomness), (7, SeededRandomness)):
        fed = MessageFederation(plan, [], seed)
        fed.begin_round(0)
        assert type(fed.randomness) is kind


def test_a_shuffled_batch_is_drawn_afresh_in_every_round(monkeypatch):
    """Amplification by sampling counts on it; within a round all messages come from one batch."""
    drawn: list[tuple[int, ...]] = []
    honest = FixedSize.draw

    def spied(self: FixedSize, silo: Any, purpose: str, step: Any = 0) -> Any:
        batch = honest(self, silo, purpose, step)
        jax.debug.callback(lambda rows: drawn.append(tuple(np.sort(rows).tolist())), batch.rows)
        return batch

    data = made_data()
    options = {"batch": 5, "sampling": "fixed", "weights": "equal"}
    plan = prepare(case("mb-psgm", "shuffled", **options), data).plan
    monkeypatch.setattr("silodp.deploy.silo.LocalOutbox", Box)
    silo = SiloServer(setup_of(plan, shuffler={}), records_of(data.silos[0]))
    silo.start(jnp.asarray(X0))
    monkeypatch.setattr(FixedSize, "draw", spied)
    for r in range(3):
        for query, points in (("value", [X0]), ("difference", [X0 + 1, X0])):
            silo.answer("ask", query, r, [jnp.asarray(p) for p in points])
            jax.effects_barrier()
    assert len(drawn) == 6
    assert drawn[0::2] == drawn[1::2], "two messages of a round from two batches"
    assert len(set(drawn)) == 3


def test_a_silo_serves_frames_until_its_input_ends():
    requests, answers = io.BytesIO(), io.BytesIO()
    write_frame(requests, set_up_silos(agreed())[0].sent[0])
    write_frame(requests, encode({"kind": "account"}, {}))
    requests.seek(0)
    serve(requests, answers)
    answers.seek(0)
    assert decode(read_frame(answers))[0] == {"kind": "ready", "key": None}
    header, arrays = decode(read_frame(answers))
    assert header == {"kind": "account"}
    assert {"count/value", "count/difference", "gradients"} <= arrays.keys()
    assert read_frame(answers) == b""


def test_a_trusting_silo_says_which_stream_it_answers():
    header, arrays = ask(started(agreed("trusted")), "value", 0, X0)
    assert header["facts"]["stream"] == "value"
    assert arrays["bound"] == pytest.approx(MOVES * 1.0 / 20)


def test_the_package_never_unpickles():
    root = Path(silodp.__file__).parent
    forbidden = re.compile(
        r"^\s*(import|from)\s+(pickle|dill|cloudpickle|marshal|shelve|joblib)\b|allow_pickle\s*=\s*True", re.M
    )
    sources = list(root.rglob("*.py"))
    assert len(sources) > 20
    assert [str(file) for file in sources if forbidden.search(file.read_text(encoding="utf-8"))] == []


def test_the_plan_that_travels_is_json():
    header, _ = decode(set_up_silos(agreed())[0].sent[0])
    assert json.loads(json.dumps(header)) == header


# --- a hostile server --------------------------------------------------------------------------------


def hostile(name: str, **changes):
    """A silo of one of the conformance cases, set up for real noise, and a way to ask it."""
    data = made_data()
    prepared = prepare(case(name, "untrusted", **changes), data)
    server, _ = reply(None, encode(setup_of(prepared.plan), records_of(data.silos[0])))
    d = prepared.ground.objective.parameters

    def ask(header, *arrays):
        nonlocal server
        server, answer = reply(server, encode(header, {str(i): np.asarray(a) for i, a in enumerate(arrays)}))
        return decode(answer)

    server, _ = reply(server, encode({"kind": "start"}, {"x0": np.zeros(d, np.float32)}))
    return ask, d


@pytest.mark.parametrize("round", [-1, 6, 2**29, 5_000_000_000])
def test_a_round_outside_the_plan_is_refused(round):
    ask, d = hostile("prox-sgd")
    header, arrays = ask({"kind": "ask", "query": "value", "round": round}, np.zeros(d, np.float32))
    assert header["kind"] == "refused"
    assert not arrays


def test_arguments_of_another_shape_are_refused():
    ask, d = hostile("mb-psgm", fused=True)
    x = np.zeros(d, np.float32)
    for wrong in ((x, x, x), (x[:-1], x), (x,), (np.float32(0), x)):
        header, _ = ask({"kind": "ask", "query": "fused_value", "round": 0}, *wrong)
        assert header["kind"] == "refused", wrong
        assert "the agreed algorithm sends" in header["reason"]  # before anything is computed with them


def test_points_too_close_for_float32_reveal_nothing():
    """A distance of zero clips to nothing; what is sent is noise of the smallest bound that there is."""
    ask, d = hostile("diff2-gd")
    for r, gap in enumerate((1e-37, 1e-30, 1e-20)):
        x = np.zeros(d, np.float32)
        x[0] = gap
        told, arrays = ask({"kind": "ask", "query": "difference", "round": r}, x, np.zeros(d, np.float32))
        assert 0 < told["facts"]["step"] < 1e3 * SMALLEST_BOUND / GRID_STEPS
        assert np.abs(arrays["value"]).max() < 8 * 2 * GRID_STEPS  # eight standard deviations of it


@pytest.mark.parametrize("number", [np.nan, np.inf, 3e38])
def test_points_without_a_bound_are_refused(number):
    """Neither is finite, or their distance is not: then no noise is enough."""
    ask, d = hostile("diff2-gd")
    x = np.full(d, number, np.float32)
    header, arrays = ask({"kind": "ask", "query": "difference", "round": 0}, x, -x)
    assert (header["kind"], arrays) == ("refused", {})
    assert int(ask({"kind": "account"})[1]["count/difference"]) == 0
    assert ask({"kind": "ask", "query": "difference", "round": 0}, np.ones(d, np.float32), X0)[0]["kind"] == "answer"


def test_a_run_does_not_start_at_a_point_that_is_none():
    silo = set_up_silos(agreed())[0]
    for wrong in (X0 + np.nan, X0 - np.inf, X0[:-1], np.float32(0)):
        silo.server, answer = reply(silo.server, encode({"kind": "start"}, {"x0": np.asarray(wrong)}))
        assert decode(answer)[0]["kind"] == "refused", wrong
    silo.send({"kind": "start"}, {"x0": X0})
    assert silo.receive()[0]["kind"] == "ready"


def test_svrg_does_not_take_the_servers_word_for_its_snapshot():
    """The bound needs the full mean at the anchor that is asked about, whatever the server claims the silo knows."""
    from silodp.core import Silo

    seen = []
    original = Silo.cond
    try:
        Silo.cond = lambda self, fresh, yes, no: seen.append(fresh) or original(self, fresh, yes, no)
        ask, d = hostile("ldp-svrg")
        x = np.full(d, 0.5, np.float32)
        told, arrays = ask({"kind": "ask", "query": "estimate", "round": 0}, x, x, np.asarray(False))
    finally:
        Silo.cond = original
    assert told["kind"] == "answer"
    assert arrays["value"].shape == (d,)
    assert seen and not isinstance(seen[0], bool)
    # The flag is not even part of the predicate: with fresh = False the mean at x is computed all the same.
    assert told["facts"]["gradients"] > 2 * 8


def test_the_shuffler_waits_for_as_many_messages_as_are_accounted():
    for name, options in (
        ("ce-psgm-fg", {"fused": True}),
        ("mb-psgm", {"batch": 4, "sampling": "fixed", "weights": "equal", "batch_first": 12}),
        ("spider", {}),
    ):
        plan = prepare(case(name, "shuffled", **options), made_data()).plan
        terms = agreed_terms(plan)
        assert terms is not None
        (accounted,) = [s.releases.sampling for s in plan.spent(0) if s.releases.stream == "message"]
        asked = {"fused_value"} if "fused" in options else {"value", "difference"}
        assert {terms[query].messages for query in asked} == {accounted.round.messages}, name
        if accounted.first is not None:
            assert terms["first_value"].messages == accounted.first.messages
        assert "refine" not in terms


def test_a_second_plan_or_start_is_refused():
    ask, _ = hostile("dp-gd")
    for header in ({"kind": "setup", "plan": {}}, {"kind": "start"}):
        told, _ = ask(header)
        assert told["kind"] == "refused"


def test_a_good_second_plan_is_refused_too():
    """It would begin with an account in which nothing is spent."""
    silo = set_up_silos(agreed())[0]
    server, answer = reply(silo.server, silo.sent[0])
    assert server is silo.server
    assert "would forget what it has spent" in decode(answer)[0]["reason"]


class Box:
    """Stands for the way to the shuffler: keeps what a silo would have sent."""

    server_key = X25519PrivateKey.generate().public_key().public_bytes_raw()

    def __init__(self, invitation: dict[str, Any], index: int) -> None:
        self.sent: list[str] = []

    def submit(self, name: str, sealed: list[bytes]) -> dict[str, np.ndarray]:
        assert sealed
        self.sent.append(name)
        return {}


@pytest.mark.parametrize(
    ("name", "options", "questions", "refused"),
    [
        ("spider", {}, ["value", "difference"], True),
        ("mb-psgm", {}, ["value", "difference"], False),
        ("mb-psgm", {"batch_first": 20}, ["value", "difference"], False),
        ("mb-psgm", {"batch_first": 20}, ["first_value", "value"], True),
        ("mb-psgm", {"batch_first": 20}, ["difference", "first_value"], True),
        ("ce-psgm", {}, ["value", "refine", "difference"], False),
    ],
)
def test_a_shuffled_round_has_no_more_messages_than_were_accounted_together(
    name, options, questions, refused, monkeypatch
):
    """Spider asks a value or a difference; both in a round would be a pair on one batch, which is not in its plan. The
    batch of a first round is accounted alone, and nested in that of a pair."""
    sampled = {"batch": 4, "sampling": "fixed", "weights": "equal"} if "batch_first" in options else {}
    shuffled_data = made_data()
    plan = prepare(case(name, "shuffled", **options, **sampled), shuffled_data).plan
    monkeypatch.setattr("silodp.deploy.silo.LocalOutbox", Box)
    silo = SiloServer(setup_of(plan, shuffler={}), records_of(shuffled_data.silos[0]))
    box = silo.end.shuffler  # type: ignore[attr-defined]
    silo.start(jnp.asarray(X0))
    points = {"value": [X0], "first_value": [X0], "difference": [X0 + 1, X0], "refine": [X0, X0, X0, np.float32(1)]}
    for query in questions[:-1]:
        silo.answer("local" if query == "refine" else "ask", query, 0, [jnp.asarray(p) for p in points[query]])
    passing = [f"0/{query}" for query in questions if query != "refine"]
    assert box.sent == passing[:-1]
    last = [jnp.asarray(p) for p in points[questions[-1]]]
    if refused:
        with pytest.raises(Refused, match="no further message in this round"):
            silo.answer("ask", questions[-1], 0, last)
        assert box.sent == passing[:-1]
    else:
        silo.answer("ask", questions[-1], 0, last)
        assert box.sent == passing


# --- P_vec's masked parts ------------------------------------------------------------------------------


SUMS: dict[str, Any] = {"name": "sdp-spider", "weights": "size"}


class Federated:
    """Three silos with P_vec's plan, keys exchanged, and what they answer."""

    def __init__(self, told: Callable[[int, dict[str, Any]], dict[str, Any]] = lambda i, plan: plan, **options: Any):
        self.data = made_data((20, 12, 16))
        self.plan = prepare(agreed("shuffled", **SUMS, **options), self.data).plan
        self.silos = [
            SiloServer(setup_of(self.plan, i) | {"plan": told(i, self.plan.to_json())}, records_of(own))
            for i, own in enumerate(self.data.silos)
        ]
        self.keys = [silo.end.key.hex() for silo in self.silos if silo.end.key is not None]

    def agree(self) -> set[str]:
        headers = [decode(reply(silo, encode({"kind": "keys", "keys": self.keys}, {}))[1])[0] for silo in self.silos]
        for silo in self.silos:
            silo.start(jnp.asarray(X0))
        return {header["fingerprint"] for header in headers}

    def parts(self, query: str, round: int, *points: np.ndarray) -> np.ndarray:
        """The integers that each silo sends."""
        return np.stack([ask(silo, query, round, *points)[1]["total"] for silo in self.silos])


def readable(words: np.ndarray) -> bool:
    """Whether all words are as small as parts and sums of them really are."""
    return bool((np.abs(words.view(np.int32).astype(np.int64)) < 2**24).all())


@pytest.fixture(scope="module")
def federated() -> Federated:
    federated = Federated()
    assert len(federated.agree()) == 1
    return federated


def test_a_server_reads_the_sum_of_the_parts_and_no_part(federated):
    for round, query, points in ((0, "value", [X0]), (1, "difference", [X0 + 0.1, X0])):
        parts = federated.parts(query, round, *points)
        assert (parts.dtype, parts.shape) == (np.uint32, (3, 6))
        assert readable(parts.sum(axis=0, dtype=np.uint32))
        for some in ([0], [1], [2], [0, 1], [0, 2], [1, 2]):
            assert not readable(parts[some].sum(axis=0, dtype=np.uint32)), some
    assert "answered already" in refusal(federated.silos[0], "difference", 1, X0 + 0.1, X0)
    assert "answered already" in refusal(federated.silos[0], "difference", 1, X0 + 0.2, X0)
    assert "agreed already" in refused_keys(federated.silos[0], federated.keys)


def refused_keys(silo: SiloServer, keys: list[str]) -> str:
    header, _ = decode(reply(silo, encode({"kind": "keys", "keys": keys}, {}))[1])
    assert header["kind"] == "refused"
    return header["reason"]


def test_parts_without_masks_would_be_noticed(monkeypatch):
    monkeypatch.setattr(Masks, "hide", lambda self, values, present, message, context=b"": values)
    bare = Federated()
    bare.agree()
    parts = bare.parts("value", 0, X0)
    assert readable(parts) and readable(parts.sum(axis=0, dtype=np.uint32))


def test_nothing_is_sent_before_keys_are_agreed():
    silo = Federated().silos[0]
    silo.start(jnp.asarray(X0))
    assert "not agreed" in refusal(silo, "value", 0, X0)
    assert int(silo.account.tallies["value"].count) == 0
    for keys in ([], ["zz"], ["00" * 32] * 3, None):
        refused_keys(silo, keys)  # type: ignore[arg-type]


def noised(plan: dict[str, Any], change: Callable[[float], float]) -> dict[str, Any]:
    """The plan as it travels, every multiplier changed."""
    told = deepcopy(plan)
    for stage in told["stages"]:
        stage["multipliers"] = {line: [change(m) for m in noise] for line, noise in stage["multipliers"].items()}
    return told


def without_noise(plan: dict[str, Any]) -> dict[str, Any]:
    return plan | {"stages": [stage | {"multipliers": {}} for stage in plan["stages"]]}


def test_less_noise_than_the_config_needs_and_a_seed_are_refused():
    """Told to all silos alike, a weaker plan would give masks that cancel: every silo calibrates for itself."""
    with pytest.raises(Refused, match=r"this noise gives epsilon .* the config says 2"):
        Federated(lambda i, plan: noised(plan, lambda m: 0.99 * m))
    with pytest.raises(ConfigError, match=r"multipliers of \[\]; this run releases \['difference', 'value'\]"):
        Federated(lambda i, plan: without_noise(plan))
    honest = Federated()
    with pytest.raises(Refused, match="must not be repeatable"):
        SiloServer(setup_of(honest.plan, seed=7), records_of(honest.data.silos[0]))


def test_a_key_shown_twice_gives_no_equal_pads():
    """X25519 ignores a key's last bit, and a colluding silo may repeat another one's key."""
    masks = [Masks(i, 3, b"plan") for i in range(3)]
    keys = [m.public_key for m in masks]
    again = keys[0][:-1] + bytes([keys[0][-1] | 0x80])
    with pytest.raises(Refused, match="one way"):
        masks[1].agree([keys[0], keys[1], again])
    same = [masks[1]._secret(other, keys[0], b"agreed") for other in (0, 2)]
    assert same[0] != same[1]


def test_a_silo_that_was_told_to_draw_fewer_coins_spoils_the_sum(monkeypatch):
    """Even if it believed it: the guarantee of the others needs its coins, so the masks must not cancel."""
    monkeypatch.setattr(SiloServer, "_check_plan", lambda self: None)
    split = Federated(lambda i, plan: noised(plan, lambda m: m / 2) if i == 2 else plan)
    assert len(split.agree()) > 1
    parts = split.parts("value", 0, X0)
    assert not readable(parts.sum(axis=0, dtype=np.uint32))


def test_masks_are_those_of_the_silos_that_the_plan_has_in_the_round():
    partial = Federated(participation=2)
    partial.agree()
    seen = set()
    for round in range(4):
        query, points = ("value", [X0]) if round % 2 == 0 else ("difference", [X0 + 0.1, X0])
        answers = [ask(silo, query, round, *points) for silo in partial.silos]
        absent = [i for i, (header, _) in enumerate(answers) if header["kind"] == "refused"]
        assert len(absent) == 1
        assert "not this one" in answers[absent[0]][0]["reason"]
        parts = np.stack([arrays["total"] for header, arrays in answers if header["kind"] == "answer"])
        assert readable(parts.sum(axis=0, dtype=np.uint32))
        assert not readable(parts)
        seen |= set(absent)
    assert len(seen) > 1


def test_a_killed_silo_ends_the_run_without_a_model_and_resume_goes_on(tmp_path, monkeypatch):
    """Masked sums: the silo that comes back has its key, its pads and its account, and no round is asked of others."""
    honest, out, silos = MessageFederation.begin_round, tmp_path / "run", []

    class Known(SiloProcess):
        def __init__(self, *given: Any, **named: Any):
            super().__init__(*given, **named)
            silos.append(self.process)

    def begin_round(self: MessageFederation, round: int) -> None:
        honest(self, round)
        if round == 1 and len(silos) == 2:
            silos[1].kill()

    monkeypatch.setattr("silodp.deploy.pipes.SiloProcess", Known)
    monkeypatch.setattr(MessageFederation, "begin_round", begin_round)
    with pytest.raises(Refused, match=r"silo 'silo 1' in round 1: a silo's process ended .*without this round"):
        train(agreed("shuffled", **SUMS), data=DATA, out=out)
    assert all(silo.poll() is not None for silo in silos)
    rounds = [json.loads(line)["round"] for line in (out / "history.jsonl").read_text().splitlines()]
    assert max(rounds) <= 1
    assert not (out / "model.safetensors").exists() and not (out / "certificate.json").exists()
    for file in (out, out / "silos", *(out / "silos").glob("*/*"), out / "checkpoint.safetensors"):
        assert file.stat().st_mode & 0o077 == 0, file
    with RunDirectory(out).held(), pytest.raises(ConfigError, match="another program works in it"):
        resume(out, data=DATA)
    finished = resume(out, data=DATA)
    assert (out / "certificate.json").is_file() and finished.history[-1]["round"] == 4.0
    assert not (out / "silos").exists() and not (out / "checkpoint.safetensors").exists()


def test_a_plan_for_other_records_is_refused(federated):
    """Every silo checks its own size, and the masks check that all were told the same sizes."""
    answer = answer_to(setup_of(federated.plan), records_of(federated.data.silos[1]))
    assert answer["kind"] == "refused"
    assert "12 records, the plan says 20" in answer["reason"]


# --- parts from outside -----------------------------------------------------------------------------------


def answer_to(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    return decode(reply(None, encode(header, arrays))[1])[0]


def setup_naming(section: str, key: str, name: str, trust: str = "untrusted") -> dict[str, Any]:
    """A good setup, but for one name that a hostile server has put there."""
    setup = setup_of(prepare(agreed(trust, **({"weights": "size"} if trust == "shuffled" else {})), DATA).plan)
    setup["plan"]["config"][section][key] = name
    return setup


@pytest.fixture
def closed(monkeypatch) -> Iterator[list[str]]:
    """This process as a silo's is; the paths of all that is imported by name (from outside nothing really is)."""
    imported, honest = [], registry._imported

    def spy(kind: str, path: str) -> Any:
        imported.append(path)
        if not path.startswith("silodp."):
            raise ConfigError("not in a test")
        return honest(kind, path)

    monkeypatch.setattr(registry, "_imported", spy)
    monkeypatch.setattr(registry, "_allowed", None)  # restored afterwards
    registry.close()
    yield imported


@pytest.mark.parametrize(
    ("section", "key", "name", "trust"),
    [
        ("model", "kind", "code:interact", "untrusted"),
        ("algorithm", "name", "os:system", "untrusted"),
        ("algorithm", "compressor", "os:system", "untrusted"),
        ("algorithm", "randomizer", "os:system", "shuffled"),
    ],
)
def test_a_server_cannot_make_a_silo_import_what_it_names(section, key, name, trust, closed):
    setup = setup_naming(section, key, name, trust)
    answer = answer_to(setup, records_of(DATA.silos[0]))
    assert answer["kind"] == "refused"
    assert (
        f"{section}.{key} = {name!r}: not the library's own, and not listed by this silo's operator" in answer["reason"]
    )
    assert closed  # the library's own parts were looked up
    assert [path for path in closed if not path.startswith("silodp.")] == []
    registry._allowed = None
    answer_to(setup, records_of(DATA.silos[0]))
    assert name in closed  # an open process would have imported it


def test_a_trust_model_that_a_server_names_is_not_imported_either(closed):
    answer = answer_to(setup_naming("privacy", "trust", "os:system"), records_of(DATA.silos[0]))
    assert answer["kind"] == "refused"
    assert [path for path in closed if not path.startswith("silodp.")] == []


OUTSIDE = """
from pathlib import Path
from silodp.models import build_model

Path(__file__).with_suffix(".imported").touch()

def listed(facts):
    return build_model("logistic", inputs=facts.input_shape[0], outputs=facts.outputs, task=facts.task)

def other(facts):
    return listed(facts)
"""


def test_a_silos_operator_allows_exactly_what_the_command_line_lists(tmp_path, monkeypatch):
    (tmp_path / "outside_part.py").write_text(OUTSIDE, encoding="utf-8")
    imported = tmp_path / "outside_part.imported"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    told = lambda name: (setup_naming("model", "kind", name), records_of(DATA.silos[0]))

    def refused(silo: SiloProcess, name: str) -> None:
        silo.send(*told(name))
        with pytest.raises(Refused, match="not listed by this silo's operator"):
            silo.receive()
        assert not imported.exists()

    with SiloProcess() as silo:
        refused(silo, "outside_part:listed")
    with SiloProcess(["outside_part:listed"]) as silo:
        for name in ("outside_part:other", "outside_part:listed.__globals__", "code:interact"):
            refused(silo, name)
        silo.send(*told("outside_part:listed"))
        assert silo.receive()[0] == {"kind": "ready", "key": None}
        assert imported.exists()


# --- plans that are none ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda setup: setup.update(index=2), "index"),
        (lambda setup: setup.update(index=-1), "index"),
        (lambda setup: setup.update(index="0"), "index"),
        (lambda setup: setup.pop("shuffler"), "shuffler"),
        (lambda setup: setup.update(plan="spider"), ""),
        (lambda setup: setup["plan"].pop("stages"), "stages"),
        (lambda setup: setup["plan"].update(stages=[None]), ""),
        (lambda setup: setup["plan"]["stages"][0].update(multipliers=[1.0]), ""),
        (lambda setup: setup["plan"]["facts"].update(more=1), "more"),
        (lambda setup: setup["plan"]["facts"].update(sizes=[]), ""),
        (lambda setup: setup["plan"]["facts"].update(weights=[0.9, 0.1]), "facts are not those that its config gives"),
        (lambda setup: setup["plan"]["facts"].update(parameters=7), "7 parameters, the model has 6"),
        (lambda setup: setup["plan"]["config"]["algorithm"].update(rounds=5), "facts are not"),
    ],
)
def test_a_setup_that_is_none_is_refused_and_does_not_end_the_silo(change, reason):
    setup = setup_of(prepare(agreed(), DATA).plan)
    assert answer_to(setup, records_of(DATA.silos[0]))["kind"] == "ready"
    change(setup)
    answer = answer_to(setup, records_of(DATA.silos[0]))
    assert answer["kind"] == "refused"
    assert reason in answer["reason"]


def test_a_plan_with_a_shuffler_needs_the_way_to_it():
    plan = prepare(agreed("shuffled", weights="size"), DATA).plan
    answer = answer_to(setup_of(plan), records_of(DATA.silos[0]))
    assert answer["kind"] == "refused"
    assert "shuffler" in answer["reason"]
