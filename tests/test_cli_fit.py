"""`silodp fit` and `silodp predict`: raw files in, a bundle, predictions, and mistakes told without JAX."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import silodp
from silodp.cli import app
from tests.patients import SCHEMA, SIZES, fitted, raw
from tests.test_startup import last_line, typed

ROWS = raw()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Three hospitals' files, all of them in one, and a model of the three."""
    base = tmp_path_factory.mktemp("files")
    (base / "schema.toml").write_text(silodp.Schema.read(SCHEMA).to_toml())
    for name, rows in ROWS.groupby("hospital"):
        rows.drop(columns="hospital").to_csv(base / f"{name}.csv", index=False)
    ROWS.to_csv(base / "all.csv", index=False)
    return base


def called(*arguments: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return done.exit_code, done.stdout, done.stderr


def fit(folder: Path, *files: str, out: str | None = "model", **options: object) -> tuple[int, str, str]:
    chosen = {"schema": folder / "schema.toml", "out": out and folder / out, "epsilon": 3} | options
    flags = [
        part for name, value in chosen.items() if value is not None for part in (f"--{name.replace('_', '-')}", value)
    ]
    return called("fit", *(folder / file for file in files), *flags)


def test_files_are_silos_and_the_model_predicts(folder):
    code, told, progress = fit(folder, "north.csv", "south.csv", "lake.csv", target="outcome")
    assert code == 0, progress
    assert "600 records read" in progress and "20/20" in progress
    for name, size in SIZES.items():
        assert any(line.split()[:3] == [name, str(size), "3"] for line in told.splitlines())
    assert "This was a simulation on one machine." in told and f"silodp predict {folder / 'model'}" in told
    code, table, _ = called("predict", folder / "model", folder / "all.csv", "--proba")
    found = pd.read_csv(io.StringIO(table))
    assert code == 0 and list(found.columns) == ["prediction", "probability ill", "probability well"]
    model = silodp.load(folder / "model")
    assert found["prediction"].tolist() == model.predict(ROWS).tolist()
    np.testing.assert_array_equal(found.iloc[:, 1:], model.predict_proba(ROWS))  # pandas writes what it reads
    code, told, _ = called("predict", folder / "model", folder / "lake.csv", "--out", folder / "told.csv")
    assert code == 0 and len(pd.read_csv(folder / "told.csv")) == SIZES["lake"]
    code, _, told = called("predict", folder / "model", folder / "lake.csv", "--out", folder / "told.csv")
    assert code == 2 and "exists; give another path" in told


def test_a_column_names_the_silos_and_warnings_are_lines(folder):
    code, told, more = fit(
        folder, "all.csv", out="second", silo="hospital", epsilon=11, trust="trusted", delta=0.01, held_out=0.2
    )  # fmt: skip
    assert code == 0, more
    assert "warning: epsilon = 11: a 1 % suspicion" in more and "warning: delta = 0.01: above 1/n" in more
    assert "trust trusted, silos: 3, records: 600" in told and "chosen as" not in told
    assert "Measured on 120 records that were held out" in told


def test_a_model_of_plain_columns_predicts_files_of_numbers(folder):
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(600, 3)), columns=["p", "q", "r"])
    silodp.SiloClassifier(epsilon=5.0).fit(frame, frame["p"] > 0).save(folder / "plain")
    frame[["r", "q", "p"]].to_csv(folder / "numbers.csv", index=False)
    code, told, _ = called("predict", folder / "plain", folder / "numbers.csv")
    assert code == 0 and told.splitlines()[1] in ("True", "False") and len(told.splitlines()) == 601
    frame.assign(q="Qx7Zebra").to_csv(folder / "texts.csv", index=False)
    code, _, told = called("predict", folder / "plain", folder / "texts.csv")
    assert code == 2 and "column q: some rows are no numbers; correct them" in told and "Zebra" not in told
    frame.assign(q="inf").to_csv(folder / "infinite.csv", index=False)
    code, _, told = called("predict", folder / "plain", folder / "infinite.csv")
    assert code == 2 and "column q: some rows are no numbers; correct them" in told
    (folder / "twice.csv").write_text("p,q,r,q\n1,2,3,4\n")
    code, _, told = called("predict", folder / "plain", folder / "twice.csv")
    assert code == 2 and "twice.csv: column 'q' occurs twice; give every column its own name" in told


MISTAKES = {
    "no schema": ({"schema": None}, "--schema is missing: it describes the columns; silodp schema draft"),
    "no place": ({"out": None}, "--out is missing: give a new directory for the model"),
    "a place that is taken": ({"out": "taken"}, "exists and is not an empty directory; give a new one"),
    "a place below a file": ({"out": "schema.toml/model"}, "schema.toml is no directory that you may write to"),
    "another target": ({"target": "age"}, "--target age: the target of"),
    "no such silo": ({"silo": "ward"}, "column 'ward' is not there; add it"),
    "a column too many": ({"files": ["all.csv"]}, "not in the schema: 'hospital'; add each"),
    "no such file": ({"files": ["east.csv"]}, "east.csv: no such file"),
    "a file twice": ({"files": ["lake.csv", "lake.csv"]}, "one is given twice: give every file once"),
    "a file of another kind": ({"files": ["schema.toml"]}, "unknown kind of file"),
    "an unknown trust": ({"trust": "blind"}, "privacy.trust = 'blind': unknown"),
    "a negative epsilon": ({"epsilon": -1}, "privacy.epsilon = -1.0: must be"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_told_and_nothing_is_written(folder, case):
    options, message = MISTAKES[case]
    (folder / "taken").mkdir(exist_ok=True)
    (folder / "taken" / "file").touch()
    given = {"out": "never"} | options
    code, told, error = fit(folder, *given.pop("files", ["lake.csv"]), **given)
    assert (code, told) == (2, "") and message in error, error
    assert not (folder / "never").exists()


def test_problems_of_all_files_are_told_at_once_without_a_cell(folder):
    lines = (folder / "lake.csv").read_text().splitlines()
    (folder / "bad1.csv").write_text("\n".join([lines[0], lines[1].replace(",", ",Qx7Zebra", 1)]))
    (folder / "bad2.csv").write_text("\n".join([lines[0].replace("sex", "gender"), *lines[1:]]))
    code, _, error = fit(folder, "bad1.csv", "bad2.csv", out="never")
    assert code == 2 and "bad1.csv: column 'age'" in error and "bad2.csv: column 'sex' is not there" in error
    assert "Zebra" not in error


def test_wrong_rows_to_predict_are_told_with_their_file(folder, tmp_path):
    saved = fitted().save(tmp_path / "model")
    ROWS.drop(columns="age").to_csv(tmp_path / "rows.csv", index=False)
    code, _, error = called("predict", saved, tmp_path / "rows.csv")
    assert code == 2 and "rows.csv: column 'age' is not there; add it" in error
    code, _, error = called("predict", tmp_path / "none", tmp_path / "rows.csv")
    assert code == 2 and "no model is saved here" in error


def test_mistakes_and_predictions_need_no_jax(folder, tmp_path):
    saved = fitted().save(tmp_path / "model")
    told = typed(folder, "predict", str(saved), "lake.csv")
    assert (told.returncode, last_line(told)) == (0, "no JAX"), told.stderr
    told = typed(folder, "fit", "east.csv", "--schema", "schema.toml", "--out", "never")
    assert (told.returncode, last_line(told)) == (2, "no JAX"), told.stderr


def test_silos_get_intercepts_and_rows_are_predicted_with_them(folder):
    flags = ("--schema", folder / "schema.toml", "--silo", "hospital", "--silo-intercepts", "--out", folder / "own")
    code, _, more = called("fit", folder / "all.csv", *flags)
    assert code == 0, more
    model = silodp.load(folder / "own")
    assert isinstance(model, silodp.SiloClassifier)
    for silo in ("hospital", "lake"):
        code, table, more = called("predict", folder / "own", folder / "all.csv", "--proba", "--silo", silo)
        assert code == 0, more
        found = pd.read_csv(io.StringIO(table)).iloc[:, 1:]
        np.testing.assert_array_equal(found, model.predict_proba(ROWS, silo=silo))
    code, _, told = called("predict", folder / "own", folder / "all.csv", "--silo", "age")
    assert code == 2 and "600 of 600 rows are of no silo of the fit, which had lake, north, south" in told
