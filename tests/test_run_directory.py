"""A run's directory: what was damaged, cut or taken by another program is noticed before anything is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from silodp.algorithms.soteria import RAND_K
from silodp.errors import ConfigError
from silodp.parse import parse_config
from silodp.run.answers import load_arrays
from silodp.run.directory import CHECKPOINT, HISTORY, RunDirectory
from silodp.run.runner import resume, train
from tests.conftest import made_data

CARRY = {"x": np.arange(40, dtype=np.float32), "round": np.int32(2)}


def kept(path: Path) -> RunDirectory:
    """A run with two rows and a checkpoint, as another program left it."""
    config = parse_config({"algorithm": {"name": "dp-gd", "rounds": 4, "step_size": 1.0, "clip": 1.0}})
    run = RunDirectory.create(path, config, "run")
    run.append_history([{"round": 0.0}])
    run.append_history([{"round": 1.0}])
    run.save_checkpoint(CARRY, 2)
    return run


def resumed(path: Path) -> list[Any]:
    run = RunDirectory.open(path)
    found = run.load_checkpoint(CARRY)
    assert found is not None
    np.testing.assert_array_equal(found[0]["x"], CARRY["x"])
    run.cut_history(found[1])
    return run.history()


def test_rows_after_the_checkpoint_are_dropped_whole_or_torn(tmp_path):
    kept(tmp_path / "run")
    for more in ('{"round": 2.0}\n', '{"round": 2.0, "obj', "\x00\x00"):
        with (tmp_path / "run" / HISTORY).open("a") as file:
            file.write(more)
        assert resumed(tmp_path / "run") == [{"round": 0.0}, {"round": 1.0}]


def test_a_flipped_bit_of_a_checkpoint_is_noticed_at_once(tmp_path):
    file = kept(tmp_path / "run").path / CHECKPOINT
    good = file.read_bytes()
    for at in [*range(8, len(good), 7), len(good) - 1]:
        file.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        try:
            resumed(tmp_path / "run")
        except ConfigError as error:
            assert "\n" not in str(error).strip()
        else:  # a space of the header's padding
            assert good[at : at + 1] == b" "
    for cut in (0, 7, 100, len(good) - 1):
        file.write_bytes(good[:cut])
        with pytest.raises(ConfigError):
            resumed(tmp_path / "run")


@pytest.mark.parametrize("text", ["", '{"round": 0.0}\n', '{"round": 0.0}\n{"rou', '{"round": 0.0}\n{"round": 1.5}\n'])
def test_a_history_that_was_cut_or_changed_is_noticed(tmp_path, text):
    kept(tmp_path / "run")
    (tmp_path / "run" / HISTORY).write_text(text)
    with pytest.raises(ConfigError, match="cut short or changed"):
        resumed(tmp_path / "run")
    (tmp_path / "run" / HISTORY).unlink()
    with pytest.raises(ConfigError, match="cut short or changed"):
        resumed(tmp_path / "run")


def test_one_program_at_a_time_and_nobody_else_reads(tmp_path):
    run = kept(tmp_path / "run")
    with run.held():
        with pytest.raises(ConfigError, match="another program works in it"), RunDirectory.open(run.path).held():
            pass
        run.save_checkpoint(CARRY, 2)
    with RunDirectory.open(run.path).held():
        pass
    assert run.path.stat().st_mode & 0o077 == 0
    assert (run.path / CHECKPOINT).stat().st_mode & 0o077 == 0


class Stopped(Exception):
    pass


GRADIENT = {"name": "dp-gd", "rounds": 5, "step_size": 0.3, "clip": 1.0, "weights": "size"}
LASTING = {
    "untrusted": ({}, {"name": "soteria-saga", "batch": 8, "weights": "equal"} | RAND_K),
    "shuffled": ({}, {"randomizer": "privunit"}),
    "aggregated": ({"missing": 1, "colluding": 0}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("trust", LASTING)
def test_a_message_run_that_was_stopped_twice_ends_where_an_unbroken_one_does(tmp_path, trust):
    """Seeded for the test: all parties go on from their own files, to the same bits and the same costs."""
    privacy, options = LASTING[trust]
    tree = {
        "privacy": {"trust": trust, "epsilon": 2.0, "delta": 1e-4} | privacy,
        "algorithm": GRADIENT | options,
        "run": {"mode": "messages", "test_seed": True, "answers": True},
    }
    data = made_data((20, 12, 16))
    whole = train(tree, data=data, out=tmp_path / "whole")

    def stop(round: float) -> Any:
        def on_round(x: Any, row: dict[str, float]) -> None:
            if row["round"] == round:
                raise Stopped

        return on_round

    with pytest.raises(Stopped):
        train(tree, data=data, out=tmp_path / "run", on_round=stop(2.0))
    with pytest.raises(Stopped):
        resume(tmp_path / "run", data=data, on_round=stop(3.0))
    again = resume(tmp_path / "run", data=data)
    assert again.history == whole.history
    for name, array in load_arrays(RunDirectory(tmp_path / "whole")).items():
        np.testing.assert_array_equal(load_arrays(RunDirectory(tmp_path / "run"))[name], array)
