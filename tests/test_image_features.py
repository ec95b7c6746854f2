"""Public features of images before an estimator: the config's own, each image by itself, and nothing is learned."""

from __future__ import annotations

import numpy as np
import pytest

import silodp
from silodp.errors import ConfigError


def images() -> np.ndarray:
    return np.random.default_rng(3).uniform(size=(20, 8, 8, 3)).astype(np.float32)


@pytest.mark.parametrize("step", ["hog", "hog-colour", "scattering:1"])
def test_features_are_those_of_a_config_about_1_in_size(step):
    given = images()
    made = silodp.ImageFeatures(step).fit_transform(given)
    loaded = silodp.load_data((given, np.zeros(20) + np.arange(20) % 2), silos=1, preprocess=[step]).silos[0].features
    # a partition draws an order
    order = lambda rows: rows[np.argsort(rows[:, 0])]
    np.testing.assert_allclose(order(made), order(loaded) * np.sqrt(made.shape[1]), rtol=1e-5, atol=1e-5)
    assert np.mean(np.square(made)) == pytest.approx(1, abs=1e-4)


def test_nothing_is_learned_from_records_and_flat_rows_are_images_too():
    given = images()
    fitted = silodp.ImageFeatures("hog-colour").fit(given)
    assert set(vars(fitted)) == {"step", "shape"}
    np.testing.assert_allclose(fitted.transform(given[3:4])[0], fitted.transform(given)[3], atol=1e-6)
    flat = silodp.ImageFeatures("hog-colour", shape=(8, 8, 3)).transform(given.reshape(20, -1))
    np.testing.assert_array_equal(flat, fitted.transform(given))


@pytest.mark.parametrize(
    ("options", "shape", "told"),
    [
        ({"step": "standardise"}, (2, 8, 8), "give one of hog, hog-colour, scattering, encoder"),
        ({"step": None}, (2, 8, 8), "give one of hog"),
        ({}, (2, 8), "needs images"),
        ({}, (2, 8, 8, 5), "at most 4 channels"),
        ({"step": "scattering"}, (2, 7, 7), "odd sides"),
        ({"step": "encoder:gone.npz"}, (2, 8, 8), "no such file"),
        ({"shape": (8, 8)}, (2, 60), "no images of shape"),
        ({"shape": (8, 8)}, (2, 8, 8), "no images of shape"),
    ],
)
def test_what_cannot_be_used_is_told(options, shape, told):
    with pytest.raises(ConfigError, match=told):
        silodp.ImageFeatures(**options).fit(np.ones(shape))


def test_no_value_of_a_record_is_told():
    for cell in ("AA77", np.nan):
        given = np.full((2, 8, 8), cell, dtype=object if isinstance(cell, str) else float)
        with pytest.raises(ConfigError, match="no finite number") as caught:
            silodp.ImageFeatures().fit(given)
        assert "AA77" not in str(caught.value)
