"""The shapes of data on its way to a run: `Table` as read, `FederatedData` ready to train on.

Setting: N silos, silo i holds n_i records (features, target); sizes are public and may differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from jaxtyping import Float32, Int, Shaped

Task = Literal["classification", "regression"]


@dataclass(frozen=True)
class Table:
    """Records as read from one place.

    `targets` are raw labels or numbers until encoding has set `classes` (classification)
    or turned them to float32 (regression). A column named in `categories` holds indices into its
    list of values. `groups` is the silo of each record, an index into `silo_names`, if it is known.
    """

    source: str
    features: Float32[np.ndarray, "n ..."]
    targets: Shaped[np.ndarray, " n"]
    names: tuple[str, ...] = ()  # of the columns; empty when they have none (images, bare arrays)
    categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    classes: tuple[str, ...] = ()
    groups: Int[np.ndarray, " n"] | None = None
    silo_names: tuple[str, ...] = ()
    open_width: bool = False  # LIBSVM leaves out zeros, so a file may seem narrower than it is

    def __len__(self) -> int:
        return len(self.features)

    def take(self, rows: Int[np.ndarray, " k"]) -> Table:
        groups = None if self.groups is None else self.groups[rows]
        return replace(self, features=self.features[rows], targets=self.targets[rows], groups=groups)


@dataclass(frozen=True)
class SiloData:
    """The records of one silo (or of the test set): float32 features, float32 or int32 targets."""

    name: str
    features: Float32[np.ndarray, "n ..."]
    targets: Shaped[np.ndarray, " n"]

    def __len__(self) -> int:
        return len(self.features)


@dataclass(frozen=True)
class FederatedData:
    """The silos of one run.

    Args:
        source: where the records came from. silos: each one's records. test: records held out, if any.
        task: classification or regression. classes: the label of class 0, 1, ...; empty for regression.
        notes: how the records were prepared; each starts with `public` or `not private`.

    Example:
        >>> import silodp
        >>> data = silodp.load_data("wbcd", silos=4, test=0.2)
        >>> data.sizes, data.classes, data.input_shape
        ((114, 114, 114, 113), ('benign', 'malignant'), (30,))
    """

    source: str
    silos: tuple[SiloData, ...]
    test: SiloData | None
    task: Task
    classes: tuple[str, ...]  # label of class index 0, 1, ...; empty for regression
    notes: tuple[str, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(len(silo) for silo in self.silos)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return self.silos[0].features.shape[1:]

    def stack(
        self,
    ) -> tuple[
        Float32[np.ndarray, "N n_max *shape"],
        Shaped[np.ndarray, "N n_max"],
        Int[np.ndarray, " N"],
    ]:
        """Features, targets and sizes of all silos; records first, zeros behind them."""
        sizes = np.array(self.sizes, dtype=np.int32)
        shape = (len(self.silos), int(sizes.max()))
        features = np.zeros((*shape, *self.input_shape), np.float32)
        targets = np.zeros(shape, self.silos[0].targets.dtype)
        for row, silo in enumerate(self.silos):
            features[row, : len(silo)] = silo.features
            targets[row, : len(silo)] = silo.targets
        return features, targets, sizes
