"""Whole runs over NVFlare, every party a process of its own. Skipped where the engine is not installed; slow."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from safetensors.numpy import load_file

from silodp.deploy import policy
from silodp.deploy.approval import load
from silodp.deploy.crew import VARIABLE, members
from silodp.deploy.parade import Show, performed
from silodp.deploy.pipes import message_federation
from silodp.deploy.policy import read_policy
from silodp.deploy.sites import read_records
from silodp.objective import penalised
from silodp.plan.parts import trained_model
from tests.guards import SCHEMA, TREE, make_site
from tests.seeded_guard import check_all_but_the_seed

SEED = 5
TRUSTS: dict[str, dict[str, Any]] = {
    "untrusted": {},
    "aggregated": {"privacy": {"trust": "aggregated"}},
    "pvec": {"privacy": {"trust": "shuffled"}, "algorithm": {"name": "sdp-spider", "weights": "size"}},
    "shuffler": {"privacy": {"trust": "shuffled"}, "algorithm": {"randomizer": "privunit", "weights": "size"}},
}


def show(folder: Path, trust: str) -> Show:
    sections = TRUSTS[trust] | {"run": {"test_seed": True, "seed": SEED}}
    config = {name: TREE.get(name, {}) | sections.get(name, {}) for name in TREE.keys() | sections.keys()}
    records = {}
    for site, size in {"north": 20, "south": 12, "east": 16}.items():
        make_site(folder / site, site, size)
        records[site] = (folder / site / "records.csv").read_text()
    return Show(SCHEMA, records, config, shuffler=trust == "shuffler")


@pytest.mark.slow
@pytest.mark.parametrize("trust", TRUSTS)
def test_a_run_over_the_engine_is_the_run_on_pipes(trust, tmp_path, monkeypatch):
    """To the last bit, when both have one seed; and nothing that was started is left."""
    pytest.importorskip("nvflare")
    monkeypatch.setattr(policy, "check_config", check_all_but_the_seed)
    command = lambda folder: [sys.executable, "-m", "tests.seeded_guard", str(SEED), str(folder.resolve())]
    out = tmp_path / "out"
    lines = performed(out, show(tmp_path / "made", trust), print, guard=command)
    assert len(lines) == (4 if trust == "shuffler" else 3)
    document = load(out / "run" / "plan.json")
    plan = document.plan
    folders = [out / "sites" / site for site in document.sites]
    records = [read_records(read_policy(folder), folder).named() for folder in folders]
    model = trained_model(plan.config, plan.facts)
    x0, unravel = ravel_pytree(model.init(jax.random.key(plan.config.run.seed)))
    algorithm = penalised(model, unravel, plan.training.algorithm)
    with message_federation(plan, records, SEED) as fed:
        *_, state = fed.rounds(algorithm, x0)
    last = ravel_pytree(jax.tree.map(np.asarray, unravel(algorithm.result(state))))[0]
    found = load_file(out / "run" / "model.safetensors")
    ours = np.concatenate([found[name].ravel() for name in sorted(found)])
    np.testing.assert_array_equal(np.sort(ours), np.sort(np.asarray(last)))
    assert marked(tmp_path) == []


def marked(folder: Path) -> list[int]:
    """Processes of a crew that work in a folder."""
    found = []
    for place in Path("/proc").iterdir():
        try:
            ours = place.name.isdigit() and str(folder).encode() in (place / "cmdline").read_bytes()
            if ours and VARIABLE.encode() in (place / "environ").read_bytes():
                found.append(int(place.name))
        except OSError:
            continue
    return found


@pytest.mark.slow
@pytest.mark.parametrize("word", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_demo_that_is_stopped_leaves_no_process_behind(word, tmp_path):
    """Also not what the engine started, and also when the demo is killed."""
    pytest.importorskip("nvflare")
    if signal.getsignal(word) is signal.SIG_IGN:
        pytest.skip("these tests were started in the background, where Ctrl-C is not heard")
    command = [sys.executable, "-m", "silodp.cli", "federation", "demo", "--silos", "2", "--out", str(tmp_path / "d")]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    for line in process.stdout:
        if "run submitted" in line:
            break
    children = marked(tmp_path)
    assert len(children) >= 6  # server, status, and two of each site
    process.send_signal(word)
    process.wait(timeout=60)
    process.stdout.close()
    until = time.monotonic() + 30
    while marked(tmp_path) and time.monotonic() < until:
        time.sleep(0.2)
    assert marked(tmp_path) == []
    assert word == signal.SIGKILL or process.returncode == 130


def test_a_crew_ends_together_with_what_it_started(tmp_path):
    from silodp.deploy.crew import Crew

    started = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], \
start_new_session=True); print('on', flush=True); time.sleep(60)"
    with Crew(tmp_path, os.environ) as crew:
        crew.start("one", [sys.executable, "-c", started])
        until = time.monotonic() + 30
        while "on" not in (tmp_path / "one.log").read_text() and time.monotonic() < until:
            time.sleep(0.02)
        assert len(members(crew.mark)) == 2 and crew.ended() is None
    assert members(crew.mark) == [] and crew.ended() == "one"


def test_the_status_of_a_run_is_json_without_records(tmp_path):
    """What the page shows of budgets has to be numbers, whatever a site says."""
    from silodp.deploy.board import NUMBERS, sound

    good = dict.fromkeys(NUMBERS, 1.0)
    assert sound(good) and json.dumps(good)
    for wrong in (None, [], {}, good | {"total": "<b>"}, good | {"total": float("nan")}, good | {"more": 1}):
        assert not sound(wrong)
    assert not any(sound(good | {"limit": wrong}) for wrong in (True, -1.0, 10**400))
