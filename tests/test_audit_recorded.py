"""`silodp audit --real`: what the answers that a message run kept show, and what they convict."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from silodp import train
from silodp.audit.recorded import audit_recorded
from silodp.cli import app
from silodp.data import FederatedData, SiloData
from silodp.deploy.coordinator import MessageFederation
from silodp.errors import ConfigError
from silodp.run.answers import FOLDER, load_answers, load_arrays
from silodp.run.directory import RunDirectory


def data() -> FederatedData:
    rng = np.random.default_rng(0)
    make = lambda i, n: SiloData(
        f"silo {i}", rng.normal(size=(n, 60)).astype(np.float32), rng.integers(0, 2, n).astype(np.int32)
    )
    return FederatedData("made", (make(0, 50), make(1, 40)), None, "classification", ("0", "1"), ())


def recorded(path, trust: str, **changes) -> RunDirectory:
    algorithm = {"name": "dp-gd", "rounds": 8, "step_size": 0.01, "clip": 1.0}
    tree = {"privacy": {"trust": trust, "epsilon": 2.0, "delta": 1e-5}, "algorithm": algorithm,
            "run": {"mode": "messages"} | changes}  # fmt: skip
    directory = RunDirectory(train(tree, data=data(), out=path).directory)
    if changes.get("answers") and "noise" in failed(directory):  # by chance once in 15,000 runs; not twice
        return RunDirectory(train(tree, data=data(), out=path.with_name("again")).directory)
    return directory


@pytest.fixture(scope="module")
def untrusted(tmp_path_factory) -> RunDirectory:
    return recorded(tmp_path_factory.mktemp("real") / "run", "untrusted", answers=True)


def failed(directory: RunDirectory) -> set[str]:
    return {finding.check.split(":")[0] for finding in audit_recorded(directory) if not finding.passed}


def changed(untrusted: RunDirectory, path, change) -> RunDirectory:
    """A copy of the run whose answers went through `change(name, array)`."""
    (path / FOLDER).mkdir(parents=True)
    for name in ("config.toml", "plan.json"):
        (path / name).write_text((untrusted.path / name).read_text())
    arrays = load_arrays(untrusted)
    save_file({name: change(name, array, arrays) for name, array in arrays.items()}, path / FOLDER / "0.safetensors")
    return RunDirectory(path)


def test_honest_answers_pass_and_the_output_says_what_it_cannot_see(untrusted):
    assert failed(untrusted) == set()
    checks = {finding.check.split(":")[0] for finding in audit_recorded(untrusted)}
    assert checks == {"count", "fresh", "grid", "noise"}
    result = CliRunner().invoke(app, ["audit", "--real", str(untrusted.path)])
    assert result.exit_code == 0 and "cannot tell" in result.stdout


def test_smaller_noise_is_convicted(untrusted, tmp_path):
    halve = lambda name, array, _: array // 2 if name.endswith("value") and array.dtype.kind == "i" else array
    assert failed(changed(untrusted, tmp_path / "run", halve)) == {"noise"}
    assert CliRunner().invoke(app, ["audit", "--real", str(tmp_path / "run")]).exit_code == 1


def test_floats_and_repeated_answers_are_convicted(untrusted, tmp_path):
    floats = lambda name, array, _: array.astype(np.float32) if array.dtype.kind == "i" else array
    assert failed(changed(untrusted, tmp_path / "floats", floats)) == {"grid"}
    repeat = lambda name, array, arrays: arrays["2/value/1/value"] if name == "6/value/1/value" else array
    assert failed(changed(untrusted, tmp_path / "repeated", repeat)) == {"fresh"}


def test_more_answers_than_planned_are_convicted(untrusted, tmp_path):
    directory = changed(untrusted, tmp_path / "run", lambda name, array, _: array)
    more = {"8/value/mean/value": load_arrays(directory)["7/value/mean/value"] + 1}
    save_file(more, directory.path / FOLDER / "1.safetensors")
    assert failed(directory) == {"count"}


def test_nothing_that_is_not_public_is_kept(tmp_path):
    """Under a trusted server the silos' means come in the clear: only the noised one is written."""
    directory = recorded(tmp_path / "run", "trusted", answers=True)
    assert {name.split("/")[2] for name in load_arrays(directory)} == {"mean"}
    assert failed(directory) == set()
    assert json.loads((directory.path / "plan.json").read_text())["facts"]["sizes"] == [50, 40]


def test_a_run_without_answers_says_how_to_keep_them(tmp_path):
    directory = recorded(tmp_path / "run", "untrusted")
    with pytest.raises(ConfigError, match=r"set run\.answers = true"):
        audit_recorded(directory)


def test_an_interrupted_run_keeps_what_was_heard(tmp_path, monkeypatch):
    """Rows of the history come every fourth round, and the run breaks in the seventh: six were heard. The first stage
    is kept too: there all silos answer, and later one of two in each round."""
    honest = MessageFederation.begin_round

    def begin_round(self, round):
        if round == 6:
            raise KeyboardInterrupt
        honest(self, round)

    monkeypatch.setattr(MessageFederation, "begin_round", begin_round)
    algorithm = {"name": "dp-gd", "rounds": 8, "step_size": 0.01, "clip": 1.0, "participation": 1}
    tree = {"privacy": {"trust": "untrusted", "epsilon": 2.0}, "algorithm": algorithm, "whiten": {},
            "model": {"kind": "logistic", "bias": False},
            "run": {"mode": "messages", "answers": True, "every": 4}}  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        train(tree, data=data(), out=tmp_path / "run")
    answers = load_answers(RunDirectory(tmp_path / "run"))
    assert [answer.sender for answer in answers if answer.query == "moment"] == ["0", "1", "mean"]
    assert [answer.round for answer in answers if answer.query == "value" and answer.sender == "mean"] == list(range(6))
    assert failed(RunDirectory(tmp_path / "run")) <= {"noise"}  # of few numbers, so that chance may fail it
