"""Schemas: what they may say, raw rows to features and back, and every mistake in one line that shows no cell."""

from __future__ import annotations

import copy
import gzip
import json
import re
import subprocess
import sys
import tomllib
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from silodp.cli import app
from silodp.data.cells import number, read_cells
from silodp.data.draft import column_draft
from silodp.data.frames import read_checked, read_frame
from silodp.data.identifiers import identifies
from silodp.data.inspection import others, rows
from silodp.data.kinds import KINDS
from silodp.data.numbers import bends
from silodp.data.schema import Schema, Target
from silodp.errors import ConfigError, Problems

TREE: dict[str, Any] = {
    "silo": "hospital",
    "target": {"name": "outcome", "classes": ["well", "ill"]},
    "columns": {
        "age": {"kind": "number", "range": [0, 120], "missing": 60, "unit": "years"},
        "weight": {"kind": "number", "centre": 70.0, "scale": 10.0},
        "sex": {"kind": "category", "values": ["female", "male"]},
        "ward": {"kind": "category", "values": [1, 2], "missing": "other"},
        "pain": {"kind": "ordered", "values": ["none", "mild", "severe"], "missing": "mild"},
        "born": {
            "kind": "date",
            "reference": "2020-01-01",
            "unit": "years",
            "range": [0, 100],
            "missing": "1970-01-01",
        },
        "smoker": {"kind": "flag", "missing": False},
        "notes": {"kind": "ignore"},
    },
}
NAMES = (
    "age", "age missing", "weight", "sex=female", "sex=male", "sex=other", "ward=1", "ward=2", "ward=other",
    "ward missing", "pain", "pain missing", "born", "born missing", "smoker", "smoker missing",
)  # fmt: skip
ROWS = pd.DataFrame(
    {
        "hospital": ["north", "north", "south", "south"],
        "outcome": ["well", "ILL ", "ill", "Well"],
        "age": ["90", "", "-5", "1e3"],
        "weight": ["70", "75.5", "500", "-500"],
        "sex": ["Female", " male", "f", ""],
        "ward": ["1", "2.0", "7", "NA"],
        "pain": ["none", "Severe", "mild", "n/a"],
        "born": ["1970-01-01", "2020-01-01 08:00:00", "1700-05-05", ""],
        "smoker": ["Yes", "0", "FALSE", "?"],
        "notes": ["a", "b", "c", "d"],
    }
)
HALF = (date(2020, 1, 1) - date(1970, 1, 1)).days / 365.2425 / 50 - 1
ENCODED = np.array(
    [
        [0.5, 0, 0.0, 1, 0, 0, 1, 0, 0, 0, -1, 0, HALF, 0, 1, 0],
        [0.0, 1, 0.55, 0, 1, 0, 0, 1, 0, 0, 1, 0, -1, 0, 0, 0],
        [-1, 0, 4.0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0],
        [1, 0, -4.0, 0, 0, 1, 0, 0, 1, 1, 0, 1, HALF, 1, 0, 1],
    ],
    np.float32,
)


def changed(**parts: Any) -> dict[str, Any]:
    """The tree with other keys: `age__range = ...` for a column's key, None to leave out; `target__name` too."""
    tree = copy.deepcopy(TREE)
    for path, value in parts.items():
        place, _, key = path.partition("__")
        inner = tree if not key else tree["target"] if place == "target" else tree["columns"].setdefault(place, {})
        if value is None:
            del inner[key or place]
        else:
            inner[key or place] = value
    return tree


SCHEMA = Schema.read(TREE)


# --- reading and writing -------------------------------------------------------------------------------------


def test_a_schema_survives_toml_dict_and_json(tmp_path):
    path = tmp_path / "schema.toml"
    path.write_text(SCHEMA.to_toml(), encoding="utf-8")
    assert Schema.read(path) == Schema.read(str(path)) == Schema.read(SCHEMA) == SCHEMA
    assert Schema.read(json.loads(json.dumps(SCHEMA.to_dict()))) == SCHEMA
    assert Schema.read(tomllib.loads(SCHEMA.to_toml())).fingerprint == SCHEMA.fingerprint
    assert list(Schema.read(path).columns) == list(TREE["columns"])


def test_odd_names_and_texts_survive_toml():
    odd = {'a "b".c\t': {"kind": "category", "values": ['x"y\\', "line\nbreak\r", "é\x7f\x01"]}}
    schema = Schema.read({"target": {"name": "the target", "range": [-1e-9, 2.5e20]}, "columns": odd})
    assert Schema.read(tomllib.loads(schema.to_toml())) == schema


def test_a_toml_day_is_a_day():
    text = SCHEMA.to_toml().replace('"2020-01-01"', "2020-01-01").replace('"1970-01-01"', "1970-01-01T00:00:00")
    assert Schema.read(tomllib.loads(text)) == SCHEMA


def test_the_fingerprint_changes_with_every_key_and_with_the_order():
    prints = {SCHEMA.fingerprint}
    others = [
        changed(age__range=[0, 121]), changed(age__missing=61), changed(age__unit="a"), changed(silo="notes2"),
        changed(sex__values=["male", "female"]), changed(target__classes=["ill", "well"]),
        changed(pain__missing="none"), changed(born__range=[0, 99]),
        TREE | {"columns": dict(reversed(TREE["columns"].items()))},
    ]  # fmt: skip
    prints |= {Schema.read(tree).fingerprint for tree in others}
    assert len(prints) == len(others) + 1
    assert Schema.read(dict(reversed(TREE.items()))).fingerprint == SCHEMA.fingerprint
    assert Schema.read(changed(age__range=[0.0, 120.0])).fingerprint == SCHEMA.fingerprint
    assert len(SCHEMA.fingerprint) == 64


# --- raw rows ------------------------------------------------------------------------------------------------


def test_every_kind_as_text():
    assert SCHEMA.feature_names == NAMES
    encoded = SCHEMA.encode(ROWS)
    assert encoded.features.dtype == np.float32
    np.testing.assert_allclose(encoded.features, ENCODED, rtol=1e-6)
    np.testing.assert_array_equal(encoded.targets, np.array([0, 1, 1, 0], np.int32))
    assert encoded.targets.dtype == np.int32
    assert encoded.silos is not None and encoded.silos.tolist() == ["north", "north", "south", "south"]


def typed() -> pd.DataFrame:
    return ROWS.assign(
        age=[90.0, np.nan, -5, 1e3],
        weight=[70, 75.5, np.inf, -np.inf],
        sex=pd.Categorical(["female", "male", "f", None]),
        ward=[1.0, 2.0, 7.0, np.nan],
        born=pd.to_datetime(["1970-01-01", "2020-01-01 08:00:00", "1700-05-05", None], format="ISO8601"),
        smoker=pd.array([True, False, False, None], "boolean"),
    )


def test_typed_cells_and_text_are_the_same_records():
    np.testing.assert_allclose(SCHEMA.features(typed()), ENCODED, rtol=1e-6)
    days = typed().assign(
        born=[date(1970, 1, 1), date(2020, 1, 1), date(1700, 5, 5), None], age=pd.array([90, None, -5, 1000], "Int64")
    )
    np.testing.assert_allclose(SCHEMA.features(days), ENCODED, rtol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_columns_and_other_columns_do_not_matter_to_a_prediction(seed):
    order = np.random.default_rng(seed).permutation(ROWS.columns)
    shuffled = pd.DataFrame(ROWS[order]).assign(more=1).drop(columns=["outcome", "hospital", "notes"])
    np.testing.assert_array_equal(SCHEMA.features(shuffled), SCHEMA.features(ROWS))


def test_files_are_read_as_text(tmp_path):
    ROWS.to_csv(tmp_path / "a.csv", index=False)
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(("\n" + ROWS.to_csv(index=False)).encode("utf-8-sig")))
    for frame in read_checked(SCHEMA, [tmp_path / "a.csv", tmp_path / "b.csv.gz"]).values():
        np.testing.assert_allclose(SCHEMA.features(frame), ENCODED, rtol=1e-6)
    pytest.importorskip("pyarrow")
    typed().to_parquet(tmp_path / "c.parquet")
    np.testing.assert_allclose(SCHEMA.features(read_frame(tmp_path / "c.parquet")), ENCODED, rtol=1e-6)


def test_a_file_is_not_read_as_numbers(tmp_path):
    (tmp_path / "t.csv").write_text("x, outcome\n007,ill\nNA,well\n7,ill\n")
    schema = Schema.read({"target": TREE["target"], "columns": {"x": {"kind": "category", "values": ["007", "NA"]}}})
    (frame,) = read_checked(schema, [tmp_path / "t.csv"]).values()
    assert schema.features(frame).tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert schema.targets(frame).tolist() == [1, 0, 1]


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "c.parquet").write_text("")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match=r"Parquet needs pyarrow; install silodp\[parquet\]"):
        read_frame(tmp_path / "c.parquet")


def column(keys: dict[str, Any], cells: Any) -> list[Any]:
    schema = Schema.read({"target": TREE["target"], "columns": {"x": keys}})
    return schema.features(pd.DataFrame({"x": cells})).tolist()


def test_case_counts_only_where_the_schema_says_so():
    keys = {"kind": "category", "values": ["a", "B"]}
    assert column(keys, ["A", "b"]) == [[1, 0, 0], [0, 1, 0]]
    assert column(keys | {"case": True}, ["A", "B"]) == [[0, 0, 1], [0, 1, 0]]
    assert column({"kind": "category", "values": ["a", "A"], "case": True}, ["A", "a"]) == [[0, 1, 0], [1, 0, 0]]


def test_a_listed_value_is_never_missing_and_other_may_be_listed():
    assert column({"kind": "category", "values": ["none", "some"]}, ["None", "na"]) == [[1, 0, 0], [0, 0, 1]]
    assert column({"kind": "category", "values": ["Other", "x"]}, ["y", "x", None]) == [[1, 0], [0, 1], [1, 0]]
    keys = {"kind": "category", "values": ["x"], "missing": "x"}
    assert column(keys, ["", "x", "y"]) == [[1, 0, 1], [1, 0, 0], [0, 1, 0]]


def test_truth_values_and_whole_numbers_are_labels_too():
    keys = {"kind": "category", "values": [True, 3]}
    assert column(keys, ["TRUE", "3.0", "03"]) == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    schema = Schema.read(changed(target__classes=[False, True]))
    assert schema.targets(pd.DataFrame({"outcome": [True, False]})).tolist() == [1, 0]
    assert schema.labels(np.array([1, 0])).tolist() == [True, False]


def test_dates_in_other_units_and_formats():
    keys = {"kind": "date", "reference": "2024-03-01", "unit": "days", "range": [0, 20], "format": "%d.%m.%Y"}
    assert column(keys, ["20.02.2024", "01.03.2024", "2.3.2024"]) == [[0.0], [-1.0], [-1.0]]
    months = {"kind": "date", "reference": "2024-12-31", "unit": "months", "range": [-12, 12]}
    assert column(months, ["2023-12-31", "2025-12-31"]) == [[1.0], [pytest.approx(-0.9993, abs=1e-4)]]


def test_targets_in_a_range_and_back():
    schema = Schema.read(changed(target__classes=None, target__range=[0, 200]))
    frame = pd.DataFrame({"outcome": ["0", "150", "500"]})
    targets = schema.targets(frame)
    assert targets.dtype == np.float32 and targets.tolist() == [-1, 0.5, 1]
    assert schema.original(targets).tolist() == [0, 150, 200]
    assert (schema.task, SCHEMA.task) == ("regression", "classification")
    assert SCHEMA.labels(np.array([1, 0, 1])).tolist() == ["ill", "well", "ill"]
    with pytest.raises(ValueError, match="use original"):
        schema.labels(np.array([0]))
    with pytest.raises(ValueError, match="use labels"):
        SCHEMA.original(np.array([0.0]))


def test_private_ranges_wait_for_their_constants():
    schema = Schema.read(changed(age__range="private"))
    assert schema.private == ("age",) and SCHEMA.private == ()
    with pytest.raises(ConfigError, match=r"columns age: range = \"private\"; give constants"):
        schema.features(ROWS)
    assert schema.features(ROWS, constants={"age": (50.0, 10.0)})[:, 0].tolist() == [4.0, 1.0, -4.0, 4.0]
    assert schema.encode(ROWS, constants={"age": (50.0, 100.0)}).features[0, 0] == pytest.approx(0.4)
    assert schema.private_numbers(ROWS)["age"].tolist() == [90, 60, -5, 1000]
    for constants, told in (
        ({"age": (50.0, 0.0)}, "age needs a finite centre and a positive scale"),
        ({"age": (50.0, 1.0), "sex": (0.0, 1.0)}, 'sex is no column with range = "private"'),
    ):
        with pytest.raises(ConfigError, match=told):
            schema.features(ROWS, constants=constants)


def test_no_rows_to_predict_are_no_mistake():
    assert SCHEMA.features(ROWS[:0]).shape == (0, len(NAMES))


# --- mistakes in a schema ------------------------------------------------------------------------------------

MISTAKES_IN_A_SCHEMA: list[tuple[dict[str, Any], str]] = [
    (
        {"born__format": "DD.MM.YYYY"},
        "columns.born: format: 'DD.MM.YYYY' does not tell a day; write it as for strptime",
    ),
    ({"born__format": ["%d/%m/%Y", "%m/%d/%Y"]}, "columns.born: format: '%d/%m/%Y' and '%m/%d/%Y' read one text as"),
    ({"sex__empty": ["Male"]}, "columns.sex: empty: lists one of the values; take it out of one of them"),
    ({"age__rnage": [0, 1]}, "columns.age.rnage: unknown key (did you mean range?); known: identifier, empty, kind"),
    ({"sex__range": [0, 1]}, "columns.sex.range: unknown key; known: identifier, empty, kind, values, same, case"),
    ({"colums": {}}, "colums: unknown key (did you mean columns?); known: silo, target, columns"),
    ({"target__clases": []}, "target.clases: unknown key (did you mean classes?)"),
    ({"age__kind": "nmber"}, "columns.age.kind = 'nmber': unknown (did you mean number?); known: number, category"),
    ({"age__kind": None}, "columns.age: kind is missing; give one of number, category, ordered, date, flag, ignore"),
    ({"age__centre": 1.0}, "columns.age: range and centre are given together; give a range, or centre and scale"),
    ({"age__range": None, "age__centre": 1.0}, "columns.age: give range = [lowest, highest], or centre and scale"),
    ({"age__range": [120, 0]}, "columns.age.range = [120, 0]: give two numbers, the lowest first, e.g. [0, 120]"),
    ({"age__range": [0, float("inf")]}, "columns.age.range = [0, inf]: give two numbers"),
    ({"age__range": "TODO"}, "columns.age.range = 'TODO': give two numbers"),
    ({"age__missing": 130}, "columns.age: missing = 130: outside the range 0 to 120; give one inside"),
    ({"age__missing": "60"}, "columns.age.missing = '60': must be a number"),
    ({"age__missing": True}, "columns.age.missing = True: must be a number"),
    ({"weight__scale": 0.0}, "columns.weight.scale = 0.0: must be greater than 0"),
    ({"sex__values": []}, "columns.sex: values: lists 0; list all of them"),
    ({"sex__values": "female"}, "columns.sex.values = 'female': must be a list"),
    ({"sex__values": ["m", "M "]}, "columns.sex: values: 'm' and 'M ' are the same text; list it once, or set case"),
    ({"sex__values": ["m", ""]}, "columns.sex: values: an empty text stands for a missing cell"),
    ({"sex__missing": "x"}, "columns.sex: missing = 'x': not one of the values; give one of them, or \"other\""),
    ({"ward__values": [1, "1.0"]}, "columns.ward: values: 1 and '1.0' are the same text; list it once"),
    ({"pain__values": ["mild"]}, "columns.pain: values: lists 1; list two or more"),
    ({"pain__missing": "other"}, "columns.pain: missing = 'other': not one of the values; give one of them"),
    ({"born__reference": None}, "columns.born.reference: is missing; give it"),
    ({"born__reference": "1.1.2020"}, "columns.born.reference = '1.1.2020': give a day as 2024-12-31"),
    ({"born__unit": "weeks"}, "columns.born.unit = 'weeks': must be 'days', 'months' or 'years'"),
    ({"born__missing": "1870-01-01"}, "columns.born: missing = 1870-01-01 is 150.0 years: outside the range 0 to 100"),
    ({"smoker__missing": "no"}, "columns.smoker.missing = 'no': must be true or false"),
    ({"notes__missing": 1}, "columns.notes.missing: unknown key; known: kind"),
    ({"target__range": [0, 1]}, "target: give classes = [...], or range = [lowest, highest] for a number"),
    ({"target__classes": ["ill"]}, "target: classes: lists 1; list two or more"),
    ({"target__classes": ["ill", "Ill"]}, "target: classes: 'ill' and 'Ill' are the same text"),
    ({"target__name": ""}, "target.name = '': must not be empty"),
    ({"target": None}, "target: is missing; give it"),
    ({"target__name": "age"}, "columns.age: it is the target; leave it out of the columns"),
    ({"silo": "sex"}, "columns.sex: it is the silo; leave it out of the columns"),
    ({"silo": "outcome"}, "silo = 'outcome' is the target too; name another column"),
    ({"columns": {}}, "columns = {}: is empty; name at least one column"),
    ({"columns": {"a": {"kind": "ignore"}}}, "columns: all are ignored; give at least one a kind"),
    ({"columns": {"a": 3}}, "columns.a = 3: must be a table"),
    (
        {"patient_id__kind": "flag"},
        "columns.patient_id: named like an identifier of persons; set kind",
    ),
    ({"sex=male__kind": "flag"}, "columns: two features are called 'sex=male'; rename a column"),
]


@pytest.mark.parametrize(("parts", "told"), MISTAKES_IN_A_SCHEMA)
def test_a_mistake_in_a_schema_is_one_line(parts, told):
    with pytest.raises(Problems) as caught:
        Schema.read(changed(**parts))
    assert [line.removeprefix("schema: ")[: len(told)] for line in caught.value.lines] == [told]
    assert "\n" not in str(caught.value)


def test_all_mistakes_of_a_schema_are_told_at_once(tmp_path):
    path = tmp_path / "s.toml"
    wrong = changed(age__range=[1, 1], sex__valus=[], born__unit="weeks", target__name=3)
    path.write_text(json.dumps(wrong))
    with pytest.raises(ConfigError, match="not valid TOML"):
        Schema.read(path)
    with pytest.raises(Problems) as caught:
        Schema.read(wrong)
    starts = [line.split(": ")[1].split(" = ")[0] for line in caught.value.lines]
    assert starts == ["target.name", "columns.age.range", "columns.sex.valus", "columns.born.unit"]
    with pytest.raises(Problems) as caught:
        Schema.read(changed(mrn__kind="flag", email__kind="flag", silo="age"))
    assert len(caught.value.lines) == 3


def test_what_is_no_schema_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such file; give the path of a TOML file"):
        Schema.read(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="schema: a DataFrame; give the path of a TOML file, or a dict"):
        Schema.read(ROWS)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="rows: a ndarray; give a pandas DataFrame whose columns have names"):
        SCHEMA.features(np.zeros((2, 3)))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("name", "refused"),
    [("id", True), ("ID", True), ("patient_id", True), ("PatientID", True), ("patientId", True), ("patientid", True),
     ("MRN", True), ("ssn", True), ("name", True), ("first name", True), ("LastName", True), ("e-mail", True),
     ("email_hash", True), ("ssn last 4", True), ("phone", True), ("uuid", True), ("covid", False), ("acid", False),
     ("age", False), ("idle_time", False), ("grid", False), ("x1", False), ("", False)],
)  # fmt: skip
def test_identifiers_are_known_by_their_names(name, refused):
    assert identifies(name) is refused


def test_what_only_looks_like_an_identifier_may_be_used():
    tree = changed(device_id__kind="category", device_id__values=["a"], device_id__identifier=False)
    assert "device_id=a" in Schema.read(tree).feature_names


# --- mistakes in a table -------------------------------------------------------------------------------------


def mistake(**columns: Any) -> pd.DataFrame:
    return ROWS.assign(**columns)


SECRET = "CANARY"
ORDER = list(ROWS.columns)
MISTAKES_IN_A_TABLE: list[tuple[str, pd.DataFrame, list[str]]] = [
    ("text for a number", mistake(age=["1", SECRET, "2", "3"]), [
        "t: column 'age': fewer than 10 rows cannot be read; allowed: a number (years), with a decimal point, "
        "without thousands separators and without its unit; correct or empty them, or list codes of empty cells in"]),
    ("a decimal comma", mistake(weight=["70,5", "1", "2", "3"]), [
        "t: column 'weight': fewer than 10 rows cannot be read; allowed: a number, with a decimal point"]),
    ("thousands", mistake(weight=["1_000", "1", "2", "3"]), ["t: column 'weight': fewer than 10 rows cannot be read"]),
    ("truth for a number", mistake(weight=[True, False, True, True]), ["t: column 'weight': fewer than 10 rows"]),
    ("empty without missing", mistake(weight=["", None, "1", "NaN"]), [
        "t: column 'weight': fewer than 10 rows are empty; fill them in, or give the column missing = a public"]),
    ("an unlisted step", mistake(pain=["mild", SECRET, "none", "none"]), [
        "t: column 'pain': fewer than 10 rows cannot be read; allowed: one of none, mild, severe; correct or empty "
        'them, or use kind = "category"']),
    ("no date", mistake(born=["31.12.1999", SECRET, "", ""]), [
        "t: column 'born': fewer than 10 rows cannot be read; allowed: a day as 2024-12-31; correct or empty them"]),
    ("a number for a date", mistake(born=[19700101, 2, 3, 4]), ["t: column 'born': fewer than 10 rows cannot be read"]),
    ("no flag", mistake(smoker=["yes", SECRET, "no", "2"]), [
        "t: column 'smoker': fewer than 10 rows cannot be read; allowed: true or false, yes or no, 1 or 0; correct"]),
    ("an unknown class", mistake(outcome=["ill", SECRET, "well", "ill"]), [
        "t: target 'outcome': fewer than 10 rows cannot be read; allowed: one of well, ill; correct them"]),
    ("no class", mistake(outcome=["ill", None, "", "ill"]), [
        "t: target 'outcome': fewer than 10 rows are empty; fill them in or drop these rows"]),
    ("no silo", mistake(hospital=["north", None, "", "x"]), [
        "t: silo 'hospital': fewer than 10 rows are empty; fill them in or drop these rows"]),
    ("lists in cells", mistake(weight=[[1], [2], [3], [SECRET]]), ["t: column 'weight': fewer than 10 rows cannot be"]),
    ("no column", ROWS.drop(columns="age"), ["t: column 'age' is not there; add it, or take it out of the schema"]),
    ("another case", ROWS.rename(columns={"age": "Age"}), [
        "t: column 'age' is not there; rename 'Age'", "t: not in the schema: 'Age'; add each, at least with kind"]),
    ("no target", ROWS.drop(columns="outcome"), ["t: column 'outcome' is not there; add it"]),
    ("no silo column", ROWS.drop(columns="hospital"), ["t: column 'hospital' is not there; add it"]),
    ("more columns", mistake(height=1, bmi=2), ["t: not in the schema: 'height', 'bmi'; add each, at least with kind"]),
    ("the same twice", ROWS[[*ORDER, "age"]], ["t: column 'age' occurs twice; give every column its own name"]),
    ("the same but for spaces", mistake(**{" age": 1}), ["t: column 'age' occurs twice"]),
    ("no name", mistake(**{"": 1}), ["t: column 11 has no name; name it, or write the file without row numbers"]),
    ("no header", ROWS.set_axis([f"{SECRET}{i}" for i in range(10)], axis=1), [
        "t: no column of the schema is there; the first line has to hold the names of the columns"]),
    ("semicolons", pd.DataFrame({f"{SECRET};age": ["1;2"]}), ["t: columns are separated by ';'; read the file with"]),
    ("no rows", ROWS[:0], ["t: no records; give at least one row below the header"]),
    ("many rows", pd.concat([mistake(age=SECRET)] * 6), ["t: column 'age': about 20 rows cannot be read"]),
    ("everything", mistake(age=SECRET, smoker=SECRET, weight="", more=SECRET).drop(columns="born"), [
        "t: column 'born' is not there", "t: column 'age': fewer", "t: column 'weight': fewer than 10 rows are empty",
        "t: column 'smoker': fewer", "t: not in the schema: 'more'"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("frame", "told"), [m[1:] for m in MISTAKES_IN_A_TABLE], ids=[m[0] for m in MISTAKES_IN_A_TABLE]
)
def test_a_mistake_in_a_table_is_one_line_without_a_cell(frame, told):
    lines = SCHEMA.problems(frame, "t")
    assert [line[: len(start)] for line, start in zip(lines, told, strict=True)] == told
    assert SECRET not in "".join(lines)
    with pytest.raises(Problems) as caught:
        SCHEMA.encode(frame, source="t")
    assert list(caught.value.lines) == lines
    assert SECRET not in str(caught.value)


def test_a_prediction_needs_less_than_a_fit():
    bare = ROWS.drop(columns=["outcome", "hospital", "notes"]).assign(more=1)
    assert SCHEMA.problems(bare, fitting=False) == []
    assert len(SCHEMA.problems(bare)) == 3
    with pytest.raises(Problems, match="column 'age' is not there"):
        SCHEMA.features(bare.drop(columns="age"))
    with pytest.raises(Problems, match="target column 'outcome' is not there; add it"):
        SCHEMA.targets(bare)


def test_how_many_rows_is_rounded():
    told = [rows(n) for n in (1, 9, 10, 14, 17, 96, 1234, 56_789)]
    assert told == ["fewer than 10 rows"] * 2 + [f"about {n} rows" for n in (10, 10, 20, 100, 1000, 60000)]


def test_the_draft_of_unnamed_columns_can_be_added():
    with pytest.raises(Problems) as caught:
        SCHEMA.encode(mistake(**{"length of stay": 1, "visit_id": 2}))
    assert caught.value.draft in str(caught.value)
    with pytest.raises(Problems, match=r"columns\.length of stay\.range = 'TODO'"):
        Schema.read(tomllib.loads(SCHEMA.to_toml() + caught.value.draft))
    filled = tomllib.loads(SCHEMA.to_toml() + caught.value.draft.replace('"TODO"', "[0, 30]"))
    assert Schema.read(filled).feature_names[-1] == "length of stay"
    assert filled["columns"]["visit_id"] == {"kind": "ignore"}


# --- files and the command line ------------------------------------------------------------------------------


def typed_command(*arguments: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["schema", *map(str, arguments)])
    return done.exit_code, done.output


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("schema.toml").write_text(SCHEMA.to_toml(), encoding="utf-8")
    ROWS.to_csv("good.csv", index=False)
    return tmp_path


def test_check_tells_the_problems_of_all_files(folder):
    ROWS.to_csv("also.csv", index=False)
    code, told = typed_command("check", "schema.toml", "good.csv", "also.csv")
    assert code == 0 and told.endswith("\nno problems in 2 files\n") and told.count("note: good.csv: column") == 2
    assert typed_command("check", "schema.toml", "good.csv", folder / "good.csv")[0] == 1  # one file, two silos
    mistake(age=SECRET, more=SECRET).to_csv("one.csv", index=False)
    mistake(smoker=SECRET, more=SECRET).to_csv("two.csv", index=False)
    Path("three.csv").write_text(f"age,sex,age\n1,{SECRET},3\n")
    Path("four.csv").write_text(f"age,sex\n1,m\n1,{SECRET},3\n")
    Path("five.csv").write_bytes(f"age,sex\n1,{SECRET}\xe9\n".encode("latin-1"))
    files = ["one.csv", "good.csv", "two.csv", "three.csv", "four.csv", "five.csv", "six.csv", "seven.xls"]
    code, told = typed_command("check", "schema.toml", *files[:-1], folder / "seven.xls")
    assert code == 1 and SECRET not in told
    lines = told.splitlines()
    assert [line.split(":")[0] for line in lines[:8]] == ["one.csv", "one.csv", "two.csv", "two.csv", *files[3:7]]
    assert "three.csv: column 'age' occurs twice; give every column its own name" in lines
    assert "four.csv: not a readable CSV file (line 3 has 3 fields, expected 2)" in lines
    assert "five.csv: not a readable CSV file (its text is not UTF-8: save it as such)" in lines
    assert "six.csv: no such file" in lines
    assert lines.count("[columns.more]") == 1 and lines[-1] == "9 problems"


def test_check_tells_the_mistakes_of_the_schema_itself(folder):
    Path("schema.toml").write_text(SCHEMA.to_toml().replace("[0.0, 120.0]", "[]").replace("values", "valus"))
    code, told = typed_command("check", "schema.toml", "good.csv")
    assert code == 1 and told.endswith("\n7 problems\n")
    assert "schema.toml: columns.age.range = []: give two numbers" in told


def test_a_draft_looks_at_names_only_and_is_refused_until_it_is_filled_in(folder):
    text = "patient_id,age,sex,outcome\n" + f"{SECRET},1,{SECRET},{SECRET}\n" * 3 + "a,line,that,is,too,long\n"
    Path("raw.csv").write_text(text)
    code, draft = typed_command("draft", "raw.csv", "--target", "outcome")
    assert code == 0 and SECRET not in draft
    assert "no value was looked at" in draft.splitlines()[0]
    tree = tomllib.loads(draft)
    assert list(tree["columns"]) == ["patient_id", "age", "sex"] and tree["columns"]["patient_id"] == {"kind": "ignore"}
    with pytest.raises(Problems) as caught:
        Schema.read(tree)
    assert len(caught.value.lines) == 3  # age, sex and the target
    filled = draft.replace('"TODO"', "[0, 1]").replace("classes = []", 'classes = ["a", "b"]')
    assert Schema.read(tomllib.loads(filled)).feature_names == ("age", "sex")


def test_a_draft_from_values_says_so_and_fits_the_file(folder):
    code, draft = typed_command("draft", "good.csv", "--target", "outcome", "--silo", "hospital", "--from-values")
    assert code == 0 and draft.startswith("# NOT PRIVATE")
    schema = Schema.read(tomllib.loads(draft))
    kinds = {name: column.kind for name, column in schema.columns.items()}
    assert kinds == {"age": "number", "weight": "number", "sex": "category", "ward": "number", "pain": "category",
                     "born": "date", "smoker": "flag", "notes": "category"}  # fmt: skip
    assert schema.silo == "hospital" and schema.target.classes == ("ILL", "well")
    assert schema.problems(read_frame("good.csv")) == []
    assert typed_command("draft", "good.csv", "--out", "new.toml") == (0, "draft in new.toml\n")
    assert Path("new.toml").read_text().startswith("# Drafted from the names")


def test_a_draft_from_values_of_odd_columns_is_a_schema(folder):
    texts = [f"text {i}" for i in range(60)]
    odd = pd.DataFrame({"same": 5, "none": [None] * 60, "long": texts, "stay": range(60)})
    odd.to_csv("odd.csv", index=False)
    code, draft = typed_command("draft", "odd.csv", "--target", "stay", "--from-values")
    schema = Schema.read(tomllib.loads(draft))
    assert code == 0 and schema.target.range == (0, 59)
    assert {name: column.kind for name, column in schema.columns.items()} == {
        "same": "number", "none": "ignore", "long": "ignore",
    }  # fmt: skip


def test_a_draft_of_parquet_uses_its_types(folder):
    pytest.importorskip("pyarrow")
    typed().to_parquet("t.parquet")
    code, draft = typed_command("draft", "t.parquet", "--target", "outcome", "--silo", "hospital")
    kinds = {name: keys["kind"] for name, keys in tomllib.loads(draft)["columns"].items()}
    assert code == 0 and "names and types" in draft.splitlines()[0]
    assert (kinds["age"], kinds["sex"], kinds["born"], kinds["smoker"]) == ("number", "category", "date", "flag")


@pytest.mark.parametrize(
    ("text", "options", "told"),
    [
        (f"63,{SECRET},M\n", [], "raw.csv: the first line looks like a record; it has to hold the names"),
        (f"2020-01-01,{SECRET}\n", [], "raw.csv: the first line looks like a record"),
        (",a\n1,2\n", [], "raw.csv: the first line looks like a record"),
        ("a,b,a\n1,2,3\n", [], "raw.csv: column 'a' occurs twice"),
        ("a,b\n1,2\n", ["--target", "c"], "raw.csv: --target c: no such column; there are: a, b"),
        ("a,b\n1,2\n", ["--silo", "c"], "raw.csv: --silo c: no such column"),
        ("", [], "raw.csv: not a readable CSV file (it is empty)"),
        ("a,b\n1,2\n", ["--out", "schema.toml"], "schema.toml exists; give another path"),
    ],
)
def test_what_cannot_be_drafted(text, options, told, folder):
    Path("raw.csv").write_text(text)
    code, output = typed_command("draft", "raw.csv", *options)
    assert code == 2 and told in output and SECRET not in output


@pytest.mark.parametrize("sep", [";", "\t", "|"])
def test_a_file_is_read_with_what_its_first_line_has_in_the_place_of_commas(sep, folder):
    sex = ROWS["sex"].str.replace("f", "f, or w")  # commas further down do not matter
    pd.read_csv("good.csv", dtype=str).assign(sex=sex).to_csv("other.csv", sep=sep, index=False, encoding="utf-8-sig")
    assert list(read_frame("other.csv").columns) == ORDER and SCHEMA.problems(read_frame("other.csv")) == []
    assert typed_command("draft", "other.csv")[1].count("[columns") == len(ORDER)
    Path("quoted.csv").write_text('"a;b","c"\n1,2\n')
    assert list(read_frame("quoted.csv").columns) == ["a;b", "c"]


def test_codes_of_empty_cells_are_missing_as_text_and_as_numbers():
    marked = Schema.read(
        changed(age__empty=[-5, "unknown"], sex__empty=["f"], pain__empty=["Severe"], pain__values=["none", "mild"])
    )
    found = dict(zip(marked.feature_names, marked.encode(ROWS).features.T.tolist(), strict=True))
    assert found["age missing"] == [0, 1, 1, 0] and found["age"] == [0.5, 0, 0, 1]
    assert found["pain missing"] == [0, 1, 0, 1]
    numbers = ROWS.assign(age=[90, 1, -5, -5])
    assert marked.encode(numbers).features[:, marked.feature_names.index("age missing")].tolist() == [0, 0, 1, 1]
    assert [line for line in others(marked, ROWS, "t") if "sex" in line] == []
    assert Schema.read(marked.to_dict()) == marked != SCHEMA


def test_days_may_be_written_in_several_ways():
    several = Schema.read(changed(born__format=["%Y-%m-%d", "%d.%m.%Y"]))
    born = several.used["born"].read(pd.Series(["1970-01-02", "02.01.1970", "1970/01/02", ""]))
    assert born.values[0] == born.values[1] == date(1970, 1, 2).toordinal()
    assert born.wrong.tolist() == [False, False, True, False] and born.missing.tolist() == [False, False, False, True]


def test_rows_to_predict_are_not_told_to_change_the_schema():
    lines = SCHEMA.problems(ROWS.assign(weight=["", "1", "2", "3"], smoker="Ja"), "t", fitting=False)
    assert [line.partition("; ")[2] for line in lines] == [
        "fill them in", "allowed: true or false, yes or no, 1 or 0; correct or empty them",
    ]  # fmt: skip


def test_help_needs_neither_pandas_nor_jax():
    code = "import sys, silodp.cli; sys.exit(bool({'pandas', 'jax', 'sklearn'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_one_column_is_drafted_with_any_name():
    assert tomllib.loads(column_draft('a "b"'))["columns"]['a "b"']["kind"] == "number"


def test_the_page_shows_a_schema_that_is_one_and_names_every_kind_and_key():
    page = (Path(__file__).parents[1] / "docs" / "schema.md").read_text(encoding="utf-8")
    example = page.partition("```toml\n")[2].partition("```")[0]
    assert Schema.read(tomllib.loads(example)).feature_names[:2] == ("age", "age missing")
    named = set(re.findall(r"`([a-z]+)", page))
    keys = {key for kind in KINDS.values() for key in kind.model_fields} | set(Target.model_fields)
    assert set(KINDS) | keys - {"kind", "name"} <= named


# --- other spellings -------------------------------------------------------------------------------------------

SPELT: dict[str, Any] = {
    "target": {"name": "y", "classes": ["well", "ill"], "same": [["ill", "krank", 1]]},
    "columns": {
        "sex": {"kind": "category", "values": ["female", "male"], "same": [["female", "F", "w"], ["male", "M"]]},
        "pain": {"kind": "ordered", "values": ["low", "high"], "same": [["low", "L"]]},
    },
}


def test_sites_that_write_differently_are_joined_by_other_spellings():
    schema = Schema.read(SPELT)
    table = pd.DataFrame(
        {"sex": ["F", "female", "m", "x"], "pain": ["l", "high", "low", "High"], "y": [1, "Krank", "well", "ill"]}
    )
    assert schema.feature_names == ("sex=female", "sex=male", "sex=other", "pain")
    assert schema.features(table)[:, :3].argmax(axis=1).tolist() == [0, 0, 1, 2]
    assert schema.features(table)[:, 3].tolist() == [-1, 1, -1, 1]
    assert schema.targets(table).tolist() == [1, 1, 0, 1]
    assert Schema.read(tomllib.loads(schema.to_toml())) == schema
    told = list(others(schema, table, "north.csv"))
    assert len(told) == 1 and told[0].startswith("north.csv: column 'sex': fewer than 10 rows hold a text that is not")


@pytest.mark.parametrize(
    ("same", "told"),
    [
        ([["other", "x"]], "same: 'other' is not one of the values; begin each list with one"),
        ([["male", "female"]], "same: a spelling is empty, listed already or given twice"),
        ([["male", "M"], ["female", "m"]], "same: a spelling is empty, listed already or given twice"),
    ],
)
def test_spellings_that_mean_two_things_are_refused(same, told):
    tree = SPELT | {"columns": {"sex": {"kind": "category", "values": ["female", "male"], "same": same}}}
    with pytest.raises(ConfigError, match=re.escape(told)):
        Schema.read(tree)


def test_a_number_in_pieces_is_a_broken_line():
    schema = Schema.read(
        {
            "target": {"name": "y", "range": [0, 1]},
            "columns": {"age": {"kind": "number", "range": [0, 120], "missing": 60, "pieces": 5}},
        }
    )
    assert schema.feature_names == ("age", "age near 60", "age near 35", "age near 85", "age missing")
    rows = pd.DataFrame({"age": [0, 35, 60, 110, None]})
    usual = [bend.usual().mean for bend in bends(5)]
    np.testing.assert_allclose(
        schema.features(rows) + np.array([0, *usual, 0]),
        [[-1, 0, 0, 0, 0], [-5 / 12, 0.5, 1, 0, 0], [0, 1, 0, 0, 0], [5 / 6, 0, 0, 0, 0], [0, 1, 0, 0, 1]],
        atol=1e-6,
    )
    assert Schema.read(schema.to_dict()).fingerprint == schema.fingerprint


@pytest.mark.parametrize(
    ("column", "match"),
    [
        ({"range": [0, 1], "pieces": 7}, "columns.x: pieces = 7: knots of a broken line; give 0 for none, or one of 3"),
        ({"range": [0, 1], "pieces": -3}, "columns.x: pieces = -3: knots of a broken line; give 0 for none, or one of"),
        ({"range": "private", "pieces": 9}, "columns.x: pieces = 9: knots need a public range"),
    ],
)
def test_pieces_that_make_no_line_are_refused(column, match):
    tree = {"target": {"name": "y", "range": [0, 1]}, "columns": {"x": {"kind": "number"} | column}}
    with pytest.raises(ConfigError, match=match):
        Schema.read(tree)


def test_all_plain_numbers_become_broken_lines_and_others_keep_what_they_say():
    number = {"kind": "number", "range": [0, 1]}
    columns = {
        "a": number,
        "b": number | {"pieces": 0},
        "c": {"kind": "number", "range": "private"},
        "d": {"kind": "flag"},
    }
    schema = Schema.read({"target": {"name": "y", "range": [0, 1]}, "columns": columns}).in_pieces(5)
    assert [getattr(column, "pieces", None) for column in schema.columns.values()] == [5, 0, None, None]


def test_a_truth_value_is_no_number_whatever_comes_before_it():
    for cells in ([True, 1, 1.0, None], [1, True, 1.0, None], [1.0, 1, True, None]):
        read = read_cells(pd.Series(cells, dtype=object), number)
        assert [type(cell) for cell, wrong in zip(cells, read.wrong, strict=True) if wrong] == [bool]
        assert read.missing.tolist() == [False] * 3 + [True]


def test_knots_of_a_narrow_range_far_from_zero_have_names_of_their_own():
    """`auto` chooses knots by itself: a schema that is fine must not be refused for them."""
    number = {"kind": "number", "range": [1e6, 1e6 + 1]}
    tree = {"target": {"name": "y", "range": [0, 1]}, "columns": {"x": number}}
    names = Schema.read(tree).in_pieces(9).feature_names
    assert len(set(names)) == 8 and names[1] == "x near 1000000.5"
    tree["columns"]["x"] = number | {"range": [1e9, 1e9 + 1e-6]}  # closer than floats are
    assert len(set(Schema.read(tree).in_pieces(9).feature_names)) == 8


def test_a_range_too_wide_for_its_width_is_refused():
    for ends in ([-1e308, 1e308], [0, 10**400], [10**400, 10**400 + 1]):
        tree = {"target": {"name": "y", "range": [0, 1]}, "columns": {"x": {"kind": "number", "range": ends}}}
        with pytest.raises(ConfigError, match=r"columns\.x\.range.*: give two numbers, the lowest first"):
            Schema.read(tree)


def test_a_schema_may_begin_with_a_mark_of_its_encoding(tmp_path):
    tree = {"target": {"name": "y", "range": [0, 1]}, "columns": {"x": {"kind": "number", "range": [0, 1]}}}
    (tmp_path / "schema.toml").write_text(Schema.read(tree).to_toml(), encoding="utf-8-sig")
    assert Schema.read(tmp_path / "schema.toml") == Schema.read(tree)


def test_a_name_with_a_line_break_makes_no_second_line():
    """Spreadsheets write such headers."""
    tree = {"target": {"name": "y", "range": [0, 1]}, "columns": {"age\nin years": {"kind": "number", "range": [0, 1]}}}
    with pytest.raises(Problems) as caught:
        Schema.read(tree).encode(pd.DataFrame({"age\nin years": ["old"], "y": [1], "b\nc": [1]}))
    assert len(caught.value.lines) == 2 and not any("\n" in line for line in caught.value.lines)
    assert Schema.read(tomllib.loads(Schema.read(tree).to_toml())) == Schema.read(tree)
