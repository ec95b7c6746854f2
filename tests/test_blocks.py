"""Features whitened block by block: the bound of products, the map, which features belong together, messages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import silodp
from silodp.errors import ConfigError
from silodp.facts import Facts
from silodp.parse import parse_config
from silodp.plan.make import make_plan
from silodp.plan.plan import Plan
from silodp.releases import Statistic, packed
from silodp.run.prepare import prepare
from silodp.sampling import MOVES
from silodp.stages.blocks import SHORTER, Blocks
from silodp.stages.whiten import CONSTANT, Moment, rescaling_of
from tests.conftest import made_data
from tests.patients import SCHEMA

DATA = made_data((60, 35, 45))
NUMBERS = [3, 0, 3, 0, 7]  # of the blocks that five features belong to


def case(**changes):
    tree = {
        "whiten": {"moment": "blocks", "blocks": NUMBERS},
        "privacy": {"epsilon": 4.0, "trust": "untrusted"},
        "algorithm": {"name": "dp-gd", "rounds": 3, "step_size": 2.0, "clip": 0.5},
    }
    return parse_config(tree | changes)


def test_products_within_blocks_move_by_at_most_their_bound():
    """The worst neighbours are as long as allowed, in one block each."""
    asked, n = Blocks.of(1.2, NUMBERS, 1.0), 60
    assert asked.blocks == ((0, 2), (1, 3), (4,)) and asked.init(jnp.zeros(0)).x.size == 3 + 3 + 1
    rows = np.random.default_rng(0).normal(size=(n, 5)).astype(np.float32)
    of = Statistic(asked.products, 7)
    total = lambda x: np.asarray(
        of.clipped_sum((jnp.asarray(x), jnp.zeros(n)), jnp.ones(n), asked.unit).high, np.float64
    )
    parts = [rows[:, list(block)] for block in asked.blocks]
    each = [np.einsum("na,nb->nab", part, part) for part in parts]
    length = np.sqrt(sum((matrix**2).sum(axis=(1, 2)) for matrix in each))
    kept = np.minimum(1, asked.unit / length)
    wanted = [packed(jnp.asarray(np.tensordot(kept, matrix, 1), jnp.float32)) for matrix in each]
    np.testing.assert_allclose(total(rows), np.concatenate(wanted), rtol=1e-4, atol=1e-3)
    moved = []
    for one, other in (([9, 0, 0, 0, 0], [0, 9, 0, 0, 0]), ([9, 0, 9, 0, 0], [9, 0, -9, 0, 0]), ([1e9] * 5, [0] * 5)):
        first, second = rows.copy(), rows.copy()
        first[0], second[0] = one, other
        moved.append(np.linalg.norm(total(first) - total(second)) / asked.unit)
    assert max(moved) == pytest.approx(np.sqrt(2), rel=1e-4) and max(moved) <= MOVES


def test_blocks_are_whitened_each_by_itself():
    rng = np.random.default_rng(1)
    features = rng.normal(size=(4000, 5)).astype(np.float32) @ rng.normal(size=(5, 5)).astype(np.float32)
    asked = Blocks.of(1e3, NUMBERS, 0.5)
    mean = np.mean(np.asarray(jax.vmap(asked.products)((jnp.asarray(features), jnp.zeros(4000)))), axis=0)
    made = asked.whitening(jnp.asarray(mean), 1e-9)
    mapped = np.asarray(made.features(jnp.asarray(features)))
    for block in asked.blocks:
        own = mapped[:, list(block)]
        np.testing.assert_allclose(6 * own.T @ own / 4000, np.eye(len(block)), atol=0.01)
        assert not made.matrix[np.ix_(block, [i for i in range(6) if i not in block])].any()
    assert 6 * mapped[0, -1] ** 2 == pytest.approx(CONSTANT**2, abs=0.01) and made.directions == pytest.approx(
        6 * SHORTER, abs=0.01
    )


def test_blocks_of_one_feature_and_one_of_all_are_nearly_the_other_moments():
    """Beside the ridge."""
    rng = np.random.default_rng(2)
    features = rng.normal(size=(4000, 4)) * [3, 1, 0.3, 0.1]
    moment = features.T @ features / 4000
    apart = Blocks.of(1e3, [0, 1, 2, 3], 1.0).whitening(jnp.asarray(np.diag(moment), jnp.float32), 1e-9)
    np.testing.assert_allclose(
        np.diag(apart.matrix), rescaling_of(jnp.asarray(np.diag(moment), jnp.float32), 1e-9, 1.0).matrix, rtol=1e-3
    )
    whole = Blocks.of(1e3, [5] * 4, 1.0).whitening(packed(jnp.asarray(moment, jnp.float32)), 1e-9)
    full = Moment.of(1e3, 4, 1.0).whitening(packed(jnp.asarray(moment, jnp.float32)), 1e-9)
    np.testing.assert_allclose(whole.matrix, full.matrix, rtol=1e-3, atol=1e-4)


def test_blocks_have_less_noise_than_pairs_and_are_counted():
    prepared = prepare(case(), DATA)
    stage = prepared.plan.at("whiten")
    assert stage.releases(0)[0].dimension == 7 and prepared.before is not None
    assert prepared.before.tallies["moment"].count.tolist() == [1, 1, 1]
    assert max(prepared.plan.epsilon(i) for i in range(3)) == pytest.approx(4.0, rel=1e-6)
    assert prepared.bounds["moment"] == "computed by the library"
    assert stage.algorithm.unit == pytest.approx(min(1.5**2, 3 / np.sqrt(3)))
    told = prepared.plan.to_json()
    assert told["config"]["whiten"]["blocks"] == NUMBERS and Plan.from_json(told).to_json() == told
    assert "blocks" not in prepare(case(whiten={}), DATA).plan.to_json()["config"]["whiten"]


def test_pieces_of_a_feature_are_a_block_and_a_schemas_column_is_one():
    facts = Facts((60, 35), ("a", "b"), ("float32[12]", "int32[]"))
    config = case(whiten={"moment": "blocks"}, data={"preprocess": ["standardise", "pieces:5"]})
    asked = make_plan(config, facts).at("whiten").algorithm
    assert isinstance(asked, Blocks) and asked.blocks == ((0, 3, 6, 9), (1, 4, 7, 10), (2, 5, 8, 11))
    schema = silodp.Schema.read(SCHEMA)
    assert len(schema.blocks) == len(schema.feature_names)
    columns = [name.split("=")[0].split(" ")[0] for name in schema.feature_names]
    assert [list(schema.used)[i] for i in schema.blocks] == columns
    assert make_plan(config, Facts((60, 35), ("a", "b"))).epsilon(0) <= 4.0 * (1 + 1e-6)  # before there is data


@pytest.mark.parametrize(
    ("section", "match"),
    [
        (
            {"moment": "blocks"},
            "whiten.moment = 'blocks': nothing says which features belong together; give",
        ),
        ({"moment": "blocks", "blocks": [0, 1]}, "whiten.blocks: 2 numbers for 5 features; give one for each"),
        ({"blocks": NUMBERS}, "whiten.blocks: without effect with moment = 'full'; leave it out"),
    ],
)
def test_blocks_that_are_not_known_are_refused(section, match):
    with pytest.raises(ConfigError, match=match):
        prepare(case(whiten=section), DATA)


@pytest.mark.slow
def test_messages_are_the_simulation(tmp_path):
    one = silodp.train(case(), data=DATA, out=tmp_path / "one")
    tree = case().model_dump(exclude_unset=True) | {"run": {"mode": "messages", "test_seed": True}}
    other = silodp.train(parse_config(tree), data=DATA, out=tmp_path / "other")
    for left, right in zip(jax.tree.leaves(one.params), jax.tree.leaves(other.params), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-4)
    assert "1 x moment" in (tmp_path / "other" / "certificate.txt").read_text()
