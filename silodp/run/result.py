"""What a finished run hands over."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from silodp.config import Config
from silodp.models import Model
from silodp.records import as_arrays
from silodp.run.directory import RunDirectory

if TYPE_CHECKING:
    import pandas as pd


@dataclass
class Run:
    """A finished run: its files, its history, and the trained parameters.

    Args:
        directory: where its files are. config: what was run. history: rows of what was measured.
        params: of the last iterate. drawn: of the iterate of a uniformly drawn round.
        summary: last row, guarantee, timing, versions. model: what `params` belong to.

    Example:
        >>> import silodp, tempfile
        >>> data = silodp.load_data("wbcd", silos=3, test=0.2, preprocess=["standardise"])
        >>> options = silodp.algorithms.GD(rounds=2, step_size=0.5)
        >>> run = silodp.train(algorithm=options, data=data, out=tempfile.mkdtemp())
        >>> isinstance(run, silodp.Run), run.predict(data.test.features[:5]).shape, run.history[-1]["round"]
        (True, (5,), 2.0)
    """

    directory: Path
    config: Config
    history: list[dict[str, float]]
    params: PyTree
    drawn: PyTree
    summary: dict[str, Any]
    model: Model

    def predict(self, features: Any) -> Any:
        """Predictions for features as the silos have them: one array, or the same dict or tuple of arrays."""
        return self.model.predict(self.params, jax.tree.map(jnp.asarray, as_arrays(features, "features")))

    def to_pandas(self) -> pd.DataFrame:
        """The history as a table, one row for each of its rows."""
        import pandas as pd

        return pd.DataFrame(self.history)

    @property
    def trajectory(self) -> np.ndarray:
        """The flat parameters of every history row, rows x d; `run.trajectory = true` keeps them."""
        return RunDirectory(self.directory).trajectory()
