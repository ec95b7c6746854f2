"""Public features of images before an estimator: the preprocessing steps `hog`, `scattering` and the like."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from jaxtyping import Float32
from sklearn.base import BaseEstimator, TransformerMixin

from silodp.data.image_steps import STEPS
from silodp.data.preprocess import apply_steps, parse_steps
from silodp.data.types import Table
from silodp.errors import ConfigError
from silodp.parse import shown


class ImageFeatures(TransformerMixin, BaseEstimator):
    """Makes public features of images, each image by itself: nothing is learned from records.

    They are what `data.preprocess` makes in a config, times the root of their number: estimators want numbers that are
    about 1 in size.

    Args:
        step: "hog", "hog-colour", "scattering", or "encoder:MODULE:FUNCTION" or "encoder:FILE.npz" for one of your own,
            which must not be made from the silos' records.
        shape: of an image, where X has a flat row for each: (height, width), or with channels first or last.

    Example:
        >>> import numpy as np, silodp
        >>> from sklearn.pipeline import make_pipeline
        >>> rng = np.random.default_rng(0)
        >>> labels, images = rng.integers(2, size=400), rng.normal(size=(400, 8, 8))
        >>> images[labels == 1] += 3 * np.arange(8)
        >>> clf = make_pipeline(silodp.ImageFeatures("hog"), silodp.SiloClassifier(epsilon=3.0, random_state=0))
        >>> clf = clf.fit(images, labels, siloclassifier__silo=rng.choice(["a", "b"], 400))
        >>> clf.score(images, labels) > 0.9
        True
    """

    def __init__(self, step: str = "hog", shape: tuple[int, ...] | None = None):
        self.step = step
        self.shape = shape

    def fit(self, X: Any, y: Any = None) -> Self:
        """Checks the step against one image; nothing is kept."""
        self.transform(X[:1])
        return self

    def transform(self, X: Any) -> Float32[np.ndarray, "n d"]:
        """A row of features for each image."""
        step, images = self._steps(), self._images(X)
        table = Table("images", images, np.zeros(len(images), np.float32))
        try:
            features = apply_steps(step, table, None)[0].features
        except ValueError as error:
            raise ConfigError(f"ImageFeatures: {error}") from None
        return features * np.float32(np.sqrt(features.shape[1]))

    def _steps(self) -> Any:
        name = self.step.partition(":")[0] if isinstance(self.step, str) else ""
        if name not in STEPS:
            raise ConfigError(f"ImageFeatures: step{shown(self.step)}: give one of {', '.join(STEPS)}")
        return parse_steps([self.step])

    def _images(self, X: Any) -> Float32[np.ndarray, "n ..."]:
        images = np.asarray(X)
        if images.dtype.kind not in "buif" or not np.isfinite(images).all():
            raise ConfigError("ImageFeatures: X holds what is no finite number; give images as arrays of numbers")
        if self.shape is not None:
            if images.ndim != 2 or images.shape[1] != np.prod(self.shape):
                told = f"rows of shape {images.shape[1:]} are no images of shape {tuple(self.shape)}"
                raise ConfigError(f"ImageFeatures: {told}; give flat rows, or leave shape out")
            images = images.reshape(len(images), *self.shape)
        return images.astype(np.float32)

    def __sklearn_is_fitted__(self) -> bool:
        return True
