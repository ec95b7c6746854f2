"""What a finished run hands over."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from silodp.config import Config
from silodp.models import Model
from silodp.objective import example_record, methods_of
from silodp.plan.certificate import unit_of
from silodp.plan.parts import trained_on
from silodp.records import as_arrays
from silodp.report.files import story_of
from silodp.report.notebook import Certificate, of_story
from silodp.run.baselines import baselines
from silodp.run.directory import RunDirectory, versions
from silodp.run.simulate import chosen_round

if TYPE_CHECKING:
    import pandas as pd

    from silodp.run.prepare import Prepared


@dataclass
class Run:
    """A finished run: its files, its history, and the trained parameters.

    Args:
        directory: where its files are. config: what was run. history: rows of what was measured.
        params: of the last iterate. drawn: of the iterate that the theorem speaks of, mostly one drawn at random.
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
    def certificate(self) -> Certificate | None:
        """What was promised and counted, as data; None of a run without privacy."""
        return (
            Certificate(RunDirectory(self.directory).read_json("certificate.json")) if self.summary["private"] else None
        )

    def _repr_html_(self) -> str | None:
        """Its report, for a notebook; nothing where its files are gone."""
        return of_story(story_of(self.directory)) if (self.directory / "summary.json").is_file() else None

    @property
    def trajectory(self) -> np.ndarray:
        """The flat parameters of every history row, rows x d; `run.trajectory = true` keeps them."""
        return RunDirectory(self.directory).trajectory()


def summary_of(
    prepared: Prepared,
    statement: dict[str, Any] | None,
    final: dict[str, float],
    drawn: dict[str, float],
    timing: dict[str, float],
    held_out: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """`drawn`: what was measured at the iterate that the theorem speaks of."""
    plan, objective = prepared.plan, prepared.ground.objective
    return {
        "algorithm": plan.config.algorithm.name,
        "trust": plan.config.privacy.trust,
        "private": plan.private,
        "protects": f"{unit_of(plan)} every silo",
        "stamp": None if statement is None else statement["stamp"],
        "epsilon": None if statement is None else max(s["epsilon"] for s in statement["silos"]),
        "delta": plan.config.privacy.delta if statement else None,
        "final": final,
        "held_out": held_out,
        "drawn_round": round_of_drawn(prepared),
        "drawn": drawn,
        "silos": [{"silo": n, "records": s} for n, s in zip(plan.facts.names, plan.facts.sizes, strict=True)],
        "parameters": objective.parameters,
        "theorem": plan.theorem.label,
        "no_theorem_because": plan.theorem.fails,
        "chosen_by_theory": plan.chosen,
        "engine": objective.engine,
        "engine_reason": objective.engine_reason,
        "engine_methods": methods_of(objective, example_record(trained_on(plan.config, plan.facts))),
        "classes": list(prepared.data.classes),
        "preprocessing": [str(note) for note in prepared.data.notes],
        "timing": timing,
        "versions": versions(),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "test_records": None if prepared.data.test is None else len(prepared.data.test),
        "baselines": baselines(
            prepared.data, objective.model.metric, without_privacy=statement is None or statement["stamp"] is not None
        ),
    }


def round_of_drawn(prepared: Prepared) -> int:
    """After how many rounds (or, of local steps, in which round) the iterate was reached that the theorem speaks of."""
    rounds, output = prepared.problem.rounds, prepared.setting.algorithm.output
    if output == "last":
        return rounds
    return int(chosen_round(prepared.setting.key, rounds)) + (output != "before")
