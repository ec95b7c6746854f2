"""All that leaves a silo is made of its noised releases: given these, neighbouring silos send the same bytes.

Every draw of a silo is replaced by a list that is the same in both worlds, and noised vectors by numbers of a grid that
no record has a say in. What a silo remembers by itself (tables, running sums, anchors) still differs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from silodp import randomness
from silodp.audit import real
from silodp.data import SiloData
from silodp.deploy import silo
from tests.cases import OPTIONS

RECORDS, FEATURES, ROUNDS = 12, 6, 4


class Told:
    """Draws that follow from their number alone."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def noised(self, high: Any, low: Any, std: Any, grid: Any) -> np.ndarray:
        assert 128 < float(std) / float(grid) <= 512
        return (self.rng.integers(-500, 500, np.shape(high)) * float(grid)).astype(np.float32)

    def bits(self, shape: tuple[int, ...]) -> np.ndarray:
        return self.rng.integers(0, 2**32, shape, np.uint32)


def sent(monkeypatch: pytest.MonkeyPatch, algorithm: dict[str, Any], first: float) -> list[bytes]:
    """The bytes of all answers of a silo whose first record is `first` times another."""
    told, answers = Told(), []
    for name in ("noised", "bits"):
        monkeypatch.setattr(randomness, f"_system_{name}", getattr(told, name))
    monkeypatch.setattr(silo, "fresh_seed", lambda: told.bits((2,)))
    honest = real.SiloHere.send

    def send(self: Any, header: Any, arrays: Any) -> None:
        honest(self, header, arrays)
        answers.append(self.answer)

    monkeypatch.setattr(real.SiloHere, "send", send)
    features = np.random.default_rng(1).normal(size=(RECORDS, FEATURES)).astype(np.float32)
    features[0] *= first
    records = SiloData("silo", features, (np.arange(RECORDS) % 2).astype(np.int32))
    options = {"rounds": ROUNDS, "step_size": 0.3} | algorithm
    real.answers(real.prepared_for(options, "untrusted", [records], 4.0))
    monkeypatch.undo()
    return answers


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dp-gd", {"compressor": "tests.outside.topk:TopK", "largest": 2}),
        pytest.param("soteria-saga", {"keep": 3}, marks=SLOW),
        pytest.param("soteria-sgd", {"compressor": "qsgd", "keep": None, "levels": 4}, marks=SLOW),
        pytest.param("local-sgd", {}, marks=SLOW),
        pytest.param("ce-psgm", {}, marks=SLOW),
        pytest.param("diff2-bvr-l-sgd", {}, marks=SLOW),
        pytest.param("mu2", {}, marks=SLOW),
    ],
)
def test_neighbours_send_the_same_bytes_when_their_noised_releases_are_the_same(monkeypatch, name, options):
    algorithm = {key: value for key, value in (OPTIONS[name] | options).items() if value is not None}
    one, other = (sent(monkeypatch, {"name": name} | algorithm, first) for first in (1.0, -1e3))
    assert len(one) > ROUNDS
    assert one == other
