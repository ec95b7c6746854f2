"""Parts from outside (tests/outside) run everywhere, get a right certificate, and mistakes get none."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import silodp
from silodp import cache, registry, vouched
from silodp.algorithms import find
from silodp.audit.check import check
from silodp.config import Config
from silodp.errors import ConfigError
from silodp.facts import Facts
from silodp.parse import parse_config
from silodp.plan.account import account
from silodp.plan.certificate import AccountingError
from silodp.plan.make import make_plan
from silodp.run.prepare import prepare
from silodp.run.runner import train
from silodp.run.sweep import sweep
from tests.conftest import made_data
from tests.outside.adam import ServerAdam
from tests.outside.moment import Whitened
from tests.outside.relay import Relay
from tests.outside.scaffold import Scaffold
from tests.outside.topk import TopK

DATA = made_data()
ALGORITHMS = ["scaffold:Scaffold", "adam:ServerAdam", "moment:Whitened"]


@pytest.fixture(autouse=True)
def nothing_is_vouched_for(monkeypatch, tmp_path):
    monkeypatch.setenv("SILODP_CACHE", str(tmp_path / "cache"))


def outside(part: str, **changes: Any) -> Config:
    """A private run of a part of tests/outside, by module:Class."""
    path = f"tests.outside.{part}"
    options = {"name": path, "rounds": 4, "step_size": 0.3} | dict(find(path).example) | changes
    privacy = {"epsilon": 4.0, "delta": 1e-4}
    return parse_config({"privacy": privacy, "algorithm": options, "run": {"every": 2}})


def topk(**changes: Any) -> Config:
    options = {"name": "dp-gd", "rounds": 4, "step_size": 0.3, "clip": 1.0}
    compressed = {"compressor": "tests.outside.topk:TopK", "largest": 3}
    return parse_config({"privacy": {"epsilon": 4.0, "delta": 1e-4}, "algorithm": options | compressed | changes})


def relayed(**privacy: Any) -> Config:
    options = {"name": "dp-gd", "rounds": 4, "step_size": 0.3, "clip": 1.0}
    target = {"trust": "tests.outside.relay:Relay", "epsilon": 4.0, "delta": 1e-4}
    return parse_config({"privacy": target | privacy, "algorithm": options})


CONFIGS = {name: lambda name=name: outside(name) for name in ALGORITHMS} | {"topk": topk, "relay": relayed}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_part_from_outside_runs_and_is_certified(name, tmp_path):
    finished = train(CONFIGS[name](), data=DATA, out=tmp_path / "run")
    assert np.isfinite(finished.history[-1]["objective"])
    statement = json.loads((tmp_path / "run" / "certificate.json").read_text())
    assert max(silo["epsilon"] for silo in statement["silos"]) <= 4.0 + 1e-6
    assert set(statement["bounds"].values()) == {"computed by the library"}, "nobody has stated anything"
    assert finished.summary["theorem"] is None


@pytest.mark.parametrize("name", ["adam", "moment", "scaffold", "topk"])
def test_a_method_of_another_paper_is_a_short_file(name):
    assert len((Path(__file__).parent / "outside" / f"{name}.py").read_text().splitlines()) <= 60


def test_a_second_moment_is_a_stream_of_its_own_shape():
    plan = prepare(outside("moment:Whitened"), DATA).plan
    assert plan.sizes == {"value": 6, "moment": 25}
    assert {s.releases.stream: s.releases.count for s in plan.spent(0)} == {"value": 3, "moment": 1}


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "name", [pytest.param("scaffold:Scaffold", marks=SLOW), pytest.param("topk", marks=SLOW), "relay"]
)
def test_it_runs_message_by_message(name, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[1]))
    simulated = train(CONFIGS[name](), data=DATA, out=tmp_path / "simulated")
    tree = CONFIGS[name]().model_dump(exclude_unset=True)
    tree["run"] = tree.get("run", {}) | {"mode": "messages", "test_seed": True}
    sent = train(tree, data=DATA, out=tmp_path / "messages")
    for one, other in zip(simulated.params.values(), sent.params.values(), strict=True):
        for key in one:
            np.testing.assert_allclose(one[key], other[key], rtol=1e-5, atol=1e-5)


def test_it_is_swept_and_accounted():
    config = outside("scaffold:Scaffold")
    tree = config.model_dump(exclude_unset=True) | {"sweep": {"grid": {"algorithm.server_step": [0.5, 1.0]}}}
    outcomes = sweep(tree, data=DATA)
    assert [outcome.values["algorithm.server_step"] for outcome in outcomes] == [0.5, 1.0]
    assert outcomes[0].history[-1]["objective"] != outcomes[1].history[-1]["objective"]
    counted = account(parse_config(tree | {"data": {"silos": 3, "records": 30}}))
    assert counted["silos"][0]["releases"][0]["count"] == 4 * 3


def test_options_of_its_own_are_checked_by_name():
    with pytest.raises(ConfigError, match=r"algorithm\.server_stp: unknown key \(did you mean server_step\?\)"):
        prepare(outside("scaffold:Scaffold", server_stp=1.0), DATA)
    with pytest.raises(ConfigError, match=r"algorithm\.server_step = 'big': must be a number"):
        prepare(outside("scaffold:Scaffold", server_step="big"), DATA)
    with pytest.raises(ConfigError, match=r"algorithm\.local_steps is missing"):
        prepare(outside("scaffold:Scaffold", local_steps=None), DATA)
    with pytest.raises(ConfigError, match=r"algorithm\.largest is missing: compressor"):
        prepare(topk(largest=None), DATA)
    with pytest.raises(ConfigError, match=r"algorithm\.largest = 99 must be between"):
        prepare(topk(largest=99), DATA)
    with pytest.raises(ConfigError, match=r"privacy\.margn = 1\.0: unknown key"):
        prepare(relayed(margn=1.0), DATA)


def test_options_of_its_own_are_checked_by_type():
    with pytest.raises(ConfigError, match=r"algorithm\.features = 'many': must be a whole number"):
        prepare(outside("moment:Whitened", features="many"), DATA)
    with pytest.raises(ConfigError, match=r"algorithm\.largest = 2\.5: must be a whole number"):
        prepare(topk(largest=2.5), DATA)
    with pytest.raises(ConfigError, match=r"privacy\.margin = 'wide': must be a number"):
        prepare(relayed(margin="wide"), DATA)
    assert prepare(relayed(margin=2), DATA).plan.private, "a whole number is a number"


@pytest.mark.parametrize(
    ("annotation", "right", "wrong"),
    [(bool, True, 1), (int, np.int64(3), True), ("int | None", 3, 2.5), (float | None, 2, "2"), (str, "a", 3),
     (Any, "a", None), ("tuple[int, ...]", [3], None)],
)  # fmt: skip
def test_plain_annotations_say_what_a_value_may_be(annotation, right, wrong):
    registry.check_option("algorithm.key", right, annotation)
    registry.check_option("algorithm.key", None, annotation)  # not given
    if wrong is not None:
        with pytest.raises(ConfigError, match=r"algorithm\.key = .*: must be "):
            registry.check_option("algorithm.key", wrong, annotation)


def test_a_trust_model_of_its_own_sets_noise_and_words(tmp_path):
    plain, wide = (prepare(relayed(margin=margin), DATA).plan for margin in (1.0, 1.5))
    assert wide.multipliers["value"][0] == pytest.approx(1.5 * plain.multipliers["value"][0])
    train(relayed(), data=DATA, out=tmp_path / "run")
    text = (tmp_path / "run" / "certificate.txt").read_text()
    assert Relay.sees in text
    assert "the channel Relay is not the library's own: not verified" in text


def test_names_can_be_registered_and_own_ones_not_taken():
    for name, part in (("scaffold-here", Scaffold), ("adam-here", ServerAdam), ("topk-here", TopK)):
        assert silodp.register(name, part) is part
    assert prepare(outside("adam:ServerAdam", name="adam-here"), DATA).plan.algorithm.decay == np.float32(0.9)
    assert registry.path_of("algorithm", "scaffold-here") == "tests.outside.scaffold:Scaffold"
    with pytest.raises(ConfigError, match="a name of the library's own"):
        silodp.register("spider", Whitened)
    with pytest.raises(ConfigError, match="cannot tell what it is"):
        silodp.register("nothing", 3)


def test_a_closed_process_imports_nothing_that_is_not_listed(monkeypatch):
    monkeypatch.setattr(registry, "_allowed", {"tests.outside.adam:ServerAdam"})
    monkeypatch.delitem(sys.modules, "antigravity", raising=False)
    for kind, name in (("model", "antigravity:main"), ("algorithm", "antigravity:A"), ("channel", "antigravity:C")):
        with pytest.raises(ConfigError, match="not listed by this silo's operator"):
            registry.find(kind, name)
    assert "antigravity" not in sys.modules
    assert registry.find("algorithm", "tests.outside.adam:ServerAdam") is ServerAdam


# --- mistakes ------------------------------------------------------------------------------------------------


def wrong(name: str) -> Config:
    return outside(f"wrong:{name}", clip=1.0)


@pytest.mark.parametrize(("name", "words"), [("RawPublic", "Public answer depends"), ("Silent", "declares no release")])
def test_what_lets_records_out_or_declares_nothing_is_refused(name, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        train(wrong(name), data=DATA, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_bound_that_is_too_small_is_not_vouched_for(tmp_path):
    train(wrong("SmallBound"), data=DATA, out=tmp_path / "run")
    statement = json.loads((tmp_path / "run" / "certificate.json").read_text())
    assert statement["bounds"] == {"value": "stated by the author, not verified"}
    assert "Bound of value: stated by the author, not verified." in (tmp_path / "run" / "certificate.txt").read_text()


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [("Unlisted", ValueError, "query 'other': silos answer value; add it to `queries`"),
     ("Reader", AttributeError, "no attribute 'data'")],
)  # fmt: skip
def test_a_simulation_answers_no_more_than_silos_do(name, error, words, tmp_path):
    with pytest.raises(error, match=words):
        train(wrong(name), data=DATA, out=tmp_path / "run")
    assert not (tmp_path / "run" / "certificate.json").exists()


def test_releases_that_the_account_cannot_mean_are_refused():
    twice = lambda trust, **options: make_plan(
        parse_config(
            {
                "algorithm": {"name": "tests.outside.wrong:Twice", "clip": 1.0, "step_size": 0.3, "rounds": 4}
                | options,
                "privacy": {"trust": trust, "epsilon": 4.0, "delta": 1e-4},
            }
        ),
        Facts((40, 25, 31), ("a", "b", "c"), parameters=6),
    )
    assert twice("untrusted").streams == ("value",)
    with pytest.raises(ConfigError, match=r"one pass .* in one release a round, but 8 are declared for 4 rounds"):
        twice("untrusted", sampling="one-pass")
    with pytest.raises(ConfigError, match="more than 1 message a round; the algorithm's property `together`"):
        twice("shuffled", batch=4, sampling="fixed")
    with pytest.raises(ConfigError, match="give each once, and the same for every silo"):
        prepare(wrong("Uneven"), DATA)


@pytest.mark.parametrize("name", ["Bare", "Late"])
def test_a_trust_model_that_sends_records_unnoised_is_refused(name):
    with pytest.raises(ConfigError, match=rf"wrong:{name}': a message of {name} depends on records that were not"):
        prepare(relayed(trust=f"tests.outside.wrong:{name}"), DATA)


@pytest.mark.parametrize(
    ("name", "words"),
    [("Thin", r"Thin protects 'value' with noise multiplier 0\.19\d*, and the target needs 1\.9"),
     ("Unaccounted", "Unaccounted does not account value")],
)  # fmt: skip
def test_a_trust_model_that_keeps_less_than_the_target_is_refused(name, words):
    with pytest.raises(ConfigError, match=words):
        prepare(relayed(trust=f"tests.outside.wrong:{name}"), DATA)


@pytest.mark.parametrize("trust", ["untrusted", "trusted", "aggregated"])
def test_a_clip_below_zero_is_an_error(trust, tmp_path):
    config = wrong("Shrinking")
    config = config.model_copy(update={"privacy": config.privacy.model_copy(update={"trust": trust})})
    with pytest.raises(AccountingError, match="silo 0, stream 'value': a release had a bound below 0"):
        train(config, data=DATA, out=tmp_path / "run")


@pytest.mark.slow
def test_check_convicts_it_and_keeps_nothing():
    findings = check("tests.outside.wrong:SmallBound", {"clip": 1.0})
    failed = {(finding.trust, finding.check) for finding in findings if not finding.passed}
    assert {("untrusted", "bounds hold on neighbours"), ("untrusted", "audit")} <= failed
    assert not kept()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [(name, {}) for name in ALGORITHMS] + [("topk:TopK", {"largest": 3}), ("relay:Relay", {"margin": 1.1})],
)
def test_check_passes_what_is_right(name, options, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[1]))
    findings = check(f"tests.outside.{name}", options)
    assert [finding for finding in findings if not finding.passed] == []
    assert len(kept()) == 1


def kept() -> list[Path]:
    place = cache.folder("checked")
    assert place is not None
    return list(place.glob("*.json"))


def test_what_was_checked_is_known_by_its_source(tmp_path, monkeypatch):
    source = tmp_path / "mine.py"
    source.write_text("from tests.outside.wrong import SmallBound\nclass Mine(SmallBound):\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    part = registry.find("algorithm", "mine:Mine")
    assert vouched.passed(part) is None
    for clip in (1.0, 2.0, 1.0):
        vouched.record(part, {"name": "mine:Mine"}, {"clip": clip})
    words = vouched.passed(part)
    assert words is not None and str(vouched.source_hash(part))[:16] in words
    assert words.endswith("tried with clip = 2.0 or clip = 1.0"), "a check vouches for what it has tried"
    beside = type("Beside", (part,), {})
    assert vouched.passed(beside) is None, "another class of the same file"
    source.write_text(source.read_text() + "# changed\n")
    assert vouched.passed(part) is None


def test_a_check_covers_what_the_source_uses_and_a_class_without_source_has_none(tmp_path, monkeypatch):
    helper = tmp_path / "bounds_of_mine.py"
    helper.write_text("def bound(b):\n    return b\n")
    (tmp_path / "mine_with.py").write_text(
        "from bounds_of_mine import bound\nfrom silodp import Algorithm\nclass Mine(Algorithm):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    part = registry.find("algorithm", "mine_with:Mine")
    vouched.record(part, {"name": "mine_with:Mine"}, {})
    assert vouched.passed(part) is not None
    helper.write_text("def bound(b):\n    return b / 100\n")
    assert vouched.passed(part) is None
    monkeypatch.setattr(sys.modules["mine_with"], "__file__", "<stdin>")
    assert vouched.source_hash(part) is None
