"""No value of a record in any error or repr: canaries are planted in files and arrays, and every message is searched.

An error is searched with its whole traceback as Python prints it, so that what a parser said does not show behind ours.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import silodp
from silodp.cli import app
from silodp.data import FederatedData, SiloData, load_data, read_data
from silodp.data.cells import read_cells
from silodp.data.schema import Schema
from silodp.data.tables import Columns, from_frame
from silodp.front.records import Rows
from silodp.parse import parse_config
from silodp.records import as_arrays

WORD, NUMBER = "Qx" + "7Zebra", 900_000.5 + 87_654
PLANTED = (WORD.casefold(), "987654", "9.8765")
WORDS = [f"{WORD}{i}" for i in range(8)]
X = np.full((8, 2), NUMBER) + np.arange(16).reshape(8, 2) / 8
Y = np.arange(8) % 2


def frame(**columns: Any) -> pd.DataFrame:
    return pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "label": Y}).assign(**columns)


def written(folder: Path, table: pd.DataFrame | str | bytes, name: str = "t.csv") -> Path:
    path = folder / name
    if isinstance(table, pd.DataFrame):
        table.to_csv(path, index=False)
    else:
        path.write_bytes(table if isinstance(table, bytes) else table.encode())
    return path


def loaded(table: pd.DataFrame | str | bytes, name: str = "t.csv", **options: Any) -> Callable[[Path], Any]:
    options = {"target": "label", "silos": None if "silo_column" in options else 2} | options
    return lambda folder: load_data(written(folder, table, name), **options)


def given(*sources: Any, **options: Any) -> Callable[[Path], Any]:
    return lambda folder: load_data(sources[0] if len(sources) == 1 else list(sources), **options)


def predicted(features: Any) -> Callable[[Path], Any]:
    model = silodp.build_model("linear", inputs=2)
    return lambda folder: model.predict(model.init(jax.random.key(0)), features)


def configured(**data: Any) -> Callable[[Path], Any]:
    return lambda folder: read_data(parse_config({"data": data}).data)


def on_arrays() -> silodp.SiloClassifier:
    """As if fitted on arrays."""
    model = silodp.SiloClassifier()
    model.schema_, model.n_features_in_, model._predictor = None, 2, None
    return model


TWO = frame(label=np.repeat(WORDS[:2], 4))
LINE = f"{NUMBER},{WORD},1\n"
HEADLESS = f"{NUMBER},{WORD},x\n" * 4
SCHEMA = Schema.read({
    "silo": "site",
    "target": {"name": "label", "classes": [0, 1]},
    "columns": {
        "a": {"kind": "number", "range": [0, 1]},
        "b": {"kind": "ordered", "values": ["x", "y"]},
        "c": {"kind": "date", "reference": "2020-01-01", "unit": "days", "range": [0, 1]},
        "d": {"kind": "flag"},
    },
})  # fmt: skip
RAW = pd.DataFrame({"site": WORDS, "label": Y, "a": X[:, 0], "b": "x", "c": "2020-01-01", "d": "yes"})

ERRORS: dict[str, Callable[[Path], Any]] = {
    "text in a number": loaded(frame(a=WORDS)),
    "an identifier": loaded(frame(patient_id=WORDS)),
    "text among numbers": loaded(frame(a=[1, 2, 3, WORD, 4, 5, 6, 7])),
    "text in a frame": given(frame(a=WORDS), silos=2, target="label"),
    "objects in a frame": given(frame(a=[{WORD: NUMBER}] * 8), silos=2, target="label"),
    "a missing cell": loaded(frame(a=[None, *X[1:, 0]])),
    "an infinite cell": loaded(frame(a=[np.inf, *X[1:, 0]])),
    "a number too large": loaded(frame(a=[NUMBER * 1e50, *X[1:, 0]])),
    "a missing target": loaded(frame(label=[None, *WORDS[1:]])),
    "an infinite target": loaded(frame(label=[np.inf, *X[1:, 0]])),
    "a target that is no class": loaded(frame(label=X[:, 0]), task="classification"),
    "a target that is no number": loaded(frame(label=WORDS), task="regression"),
    "an unknown label": loaded(frame(label=WORDS), classes=["x", "y"]),
    "an unknown number": loaded(frame(label=np.round(X[:, 0])), classes=[0, 1], task="classification"),
    "one label": loaded(frame(label=WORD)),
    "labels given twice": given((X, Y), silos=2, classes=[WORD, WORD]),
    "classes from the records": given((X, Y), silos=2, classes=[*np.round(X[:, 0]), *np.round(X[:, 0])]),
    "classes of a regression": loaded(frame(label=WORDS), classes=WORDS, task="regression"),
    "no target": loaded(f"{WORD}1,{NUMBER},x\n" + LINE * 4, target=None),
    "a wrong target": loaded(HEADLESS, target="label"),
    "a wrong silo column": loaded(f"{NUMBER},{WORD},label\n" + LINE * 4, silo_column="site"),
    "a first line of numbers": loaded(f"{NUMBER},{NUMBER + 1}\n" * 4),
    "a header twice": loaded(f"{WORD},{NUMBER},{WORD},label\n" + LINE * 4),
    "a record that looks like a header twice": loaded(f"{NUMBER},{WORD},{WORD}\n" * 4),
    "a line too long": loaded(f"a,b,label\n{LINE}{NUMBER},{WORD},1,{WORD}\n"),
    "all lines too long": loaded(f"a,label\n{LINE}{LINE}"),
    "bad quotes": loaded(f'a,b,label\n{LINE}"{WORD},{NUMBER}'),
    "text that is not UTF-8": loaded(f"a,b,label\n{WORD}\xe9,{NUMBER},1\n".encode("latin-1")),
    "LIBSVM text": loaded(f"1 1:{WORD}\n", "t.svm"),
    "LIBSVM label": loaded(f"{WORD} 1:{NUMBER}\n", "t.svm"),
    "LIBSVM columns": loaded(f"1 {NUMBER}:1\n", "t.svm"),
    "an npz that is none": loaded(f"{WORD}{NUMBER}", "t.npz"),
    "a Parquet that is none": loaded(f"{WORD}{NUMBER}", "t.parquet"),
    "a silo without name": loaded(frame(site=[None, *WORDS[1:]]), silo_column="site"),
    "a silo for each record": loaded(frame(site=WORDS), silo_column="site"),
    "a silo for each number": loaded(frame(site=X[:, 0]), silo_column="site"),
    "too many silos": loaded(frame(site=np.repeat(WORDS[:4], 2)), silo_column="site", silos=3),
    "text that is not one-hot": loaded(frame(c=WORDS), preprocess=["one-hot:b"]),
    "one-hot of no column": loaded(frame(c=WORDS), preprocess=["one-hot:c", "one-hot:e"]),
    "one-hot beyond float32": loaded(frame(c=WORDS), preprocess=["one-hot:a,b,c", "divide:1e-44"]),
    "one-hot of a missing cell": loaded(frame(c=[None, *WORDS[1:]]), preprocess=["one-hot:c"]),
    "a step for numbers": loaded(frame(c=WORDS), preprocess=["divide:2", "one-hot:c"]),
    "pairs of labels": loaded(frame(label=np.repeat(WORDS[:2], 4)), partition="label-pairs"),
    "parity of labels": loaded(frame(label=np.repeat(WORDS[:2], 4)), preprocess=["target-parity"]),
    "records beyond a dirichlet": loaded(frame(), partition="dirichlet", alpha=1e-9, silos=4),
    "other columns": given(frame(), frame().rename(columns={"a": WORD, "b": "1"}), target="label"),
    "no header in one silo": given(frame(), frame().set_axis([f"{WORD}a", "1", "label"], axis=1), target="label"),
    "a label of test records": given(TWO, silos=2, target="label", test=frame(label=WORDS)),
    "other shapes": given((X, Y), (X[:, :1], Y)),
    "text in arrays": given((np.array([WORDS, WORDS]), np.array([0, 1])), silos=2),
    "arrays of other lengths": given((X, Y[:-1]), silos=2),
    "missing in arrays": given((np.where(X.min() < X, X, np.nan), Y), silos=2),
    "a list of rows": given([X.tolist(), Y.tolist()], silos=2),
    "a dict of values": given({WORD: WORDS}.values(), silos=2),
    "trees of text": lambda folder: FederatedData.of({"a": ({"x": np.array(WORDS)}, Y)}),
    "trees of objects": lambda folder: FederatedData.of({"a": (np.array([WORD, NUMBER] * 4, object), Y)}),
    "trees of ragged lists": lambda folder: as_arrays([[NUMBER], [NUMBER, NUMBER]], "features"),
    "trees with large numbers": lambda folder: as_arrays(np.full(3, int(NUMBER) << 30), "features"),
    "a tree that is a frame": lambda folder: SiloData("a", frame(a=WORDS), Y),
    "trees with holes": lambda folder: FederatedData.of({"a": (np.where(X.min() < X, X, np.inf), Y)}),
    "a silo that is no pair": lambda folder: FederatedData.of({"a": X}),  # pyright: ignore[reportArgumentType]
    "classes that contradict": lambda folder: FederatedData.of({"a": (X, Y)}, task="regression", classes=WORDS),
    "predict of text": predicted(frame(a=WORDS)),
    "predict of a frame": predicted(frame()),
    "predict of lists": predicted([[NUMBER, NUMBER]]),
    "predict of objects": predicted(np.array([[WORD, NUMBER]], object)),
    "predict of a row": predicted(np.array(WORDS)),
    "a frame as source": configured(source=frame(a=WORDS)),
    "a list of frames as source": configured(source=[frame(a=WORDS)]),
    "a column as target": configured(target=pd.Series(WORDS)),
    "a long list as limit": configured(limit=WORDS * 2),
    "an array as sizes": configured(sizes=X),
    "a frame as data section": lambda folder: parse_config({"data": frame(a=WORDS)}),
    "a frame as config": lambda folder: silodp.train(frame(a=WORDS)),  # pyright: ignore[reportArgumentType]
    "a frame in a config object": lambda folder: silodp.Config(data={"source": 3, "target": frame(a=WORDS)}),
    "a frame in a schema object": lambda folder: Schema(target=frame(a=WORDS), columns={"a": WORDS}),  # type: ignore
    "a frame as schema": lambda folder: Schema.read(frame(a=WORDS)),  # pyright: ignore[reportArgumentType]
    "a frame in a schema": lambda folder: Schema.read({"target": frame(), "columns": {"a": frame(a=WORDS)}}),
    "a column in a schema": lambda folder: Schema.read({"target": {"name": pd.Series(WORDS)}, "columns": {}}),
    "a schema's numbers": lambda folder: SCHEMA.encode(RAW.assign(a=WORDS)),
    "a schema's steps": lambda folder: SCHEMA.encode(RAW.assign(b=WORDS)),
    "a schema's days": lambda folder: SCHEMA.encode(RAW.assign(c=WORDS)),
    "a schema's flags": lambda folder: SCHEMA.encode(RAW.assign(d=X[:, 0])),
    "a schema's classes": lambda folder: SCHEMA.encode(RAW.assign(label=WORDS)),
    "a schema's silos": lambda folder: SCHEMA.encode(RAW.assign(site=[None, *WORDS[1:]])),
    "a schema without header": lambda folder: SCHEMA.encode(RAW.set_axis(WORDS[:6], axis=1)),
    "a row in the place of rows": lambda folder: silodp.SiloClassifier().fit(X[:, 0], Y),
    "a record to predict as a row": lambda folder: on_arrays().predict(X[0]),
    "a record to predict as a dict": lambda folder: on_arrays().predict({"a": NUMBER, "b": WORD}),
    "a text to predict": lambda folder: on_arrays().predict(WORD),
    "complex features": lambda folder: silodp.SiloClassifier().fit(X * 1j, Y),
    "complex targets": lambda folder: silodp.SiloClassifier().fit(X, X[:, 0] * 1j),
    "labels of which one is pandas' NA": lambda folder: silodp.SiloClassifier().fit(
        X, pd.Series([None, *WORDS[1:]], dtype="string")
    ),
    "rows that are an array": lambda folder: SCHEMA.features(RAW.to_numpy()),  # pyright: ignore[reportArgumentType]
}  # fmt: skip


def told(error: BaseException) -> str:
    """With what it remembers of errors before it, hidden by `from None` or not."""
    earlier = "" if error.__context__ is None else told(error.__context__)
    return "\n".join([earlier, str(error), repr(error), *traceback.format_exception(error)]).casefold()


@pytest.mark.parametrize("case", ERRORS)
def test_no_error_shows_a_value(case, tmp_path):
    with pytest.raises((ValueError, TypeError)) as caught:
        ERRORS[case](tmp_path)
    text = told(caught.value)
    assert not [canary for canary in PLANTED if canary in text], text


def test_the_search_finds_what_is_chained():
    try:
        try:
            float(WORD)
        except ValueError as fault:
            raise ValueError("ours") from fault
    except ValueError as error:
        assert PLANTED[0] in told(error)


def test_reprs_and_notes_show_shapes_and_numbers():
    data = load_data(frame(c=WORDS, label=np.repeat(WORDS[:2], 4), site=np.repeat(["n", "s"], 4)[::-1]), target="label",
                     silo_column="site", preprocess=["one-hot:c"], test=0.25)  # fmt: skip
    assert repr(data) == (
        "FederatedData('DataFrame', classification, 2 classes, 2 silos, 6 records, 2 test records of "
        "('float32[10]', 'int32[]'))"
    )
    assert repr(data.silos[0]) == "SiloData('n', 3 records of ('float32[10]', 'int32[]'))"
    scaled = load_data((X, X[:, 0]), 2, preprocess=["target-max", "standardise"])
    everything = "\n".join(
        [repr(data), repr(data.silos), repr(data.test), str(data.notes), repr(scaled), str(scaled.notes)]
    )
    assert not [canary for canary in PLANTED if canary in everything.casefold()]
    assert data.classes == tuple(WORDS[:2])  # what was asked for by name is given


def parts_of(thing: Any) -> list[Any]:
    """The thing and all that it holds, of the library's own classes."""
    if isinstance(thing, list | tuple | dict):
        inner = list(thing.values()) if isinstance(thing, dict) else list(thing)
    else:
        inner = list(vars(thing).values()) if type(thing).__module__.startswith("silodp") else []
    own = [thing] if type(thing).__module__.startswith("silodp") else []
    return own + [part for each in inner for part in parts_of(each)]


def test_no_result_shows_the_records_it_holds():
    """Nor does any part of it: a debugger or a log prints those too."""
    data = load_data((X, Y), 2, test=0.25)
    found = silodp.sweep(
        algorithm={"name": "dp-gd", "rounds": 1, "clip": 1.0, "step_size": 1.0}, epsilon=1.0, delta=1e-5,
        model="logistic", data=data, grid={"algorithm.step_size": [0.5, 2.0]},
    )  # fmt: skip
    rows = Rows(X, Y, np.array(WORDS))
    table = from_frame(frame(c=WORDS), "t", Columns("label", categorical=("c",)))
    shown = parts_of([found, found[0], rows, table, SCHEMA.encode(RAW), read_cells(RAW["a"], float)])
    kinds = {type(each).__name__ for each in shown}
    assert kinds > {"Sweep", "Outcome", "Prepared", "Ground", "Problem", "Silos", "SiloData", "Table", "Encoded"}
    for each in shown:
        text = (repr(each) + str(each)).casefold()
        assert not [canary for canary in PLANTED if canary in text], type(each)


def test_the_command_line_shows_no_value(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "schema.toml").write_text(SCHEMA.to_toml())
    written(tmp_path, frame(a=WORDS))
    (tmp_path / "run.toml").write_text('[data]\nsource = "t.csv"\ntarget = "label"\nsilos = 2\n')
    for command, code in ((["run", "run.toml"], 2), (["schema", "check", "schema.toml", "t.csv"], 1)):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == code and "t.csv" in done.output
        assert not [canary for canary in PLANTED if canary in done.output.casefold()]
