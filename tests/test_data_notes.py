"""A note says whether it is public; what is not stands outside the guarantee and is shown."""

import json

import numpy as np

from silodp import show
from silodp.data import Note, load_data
from silodp.plan.certificate import Context, outside
from silodp.run.runner import train


def test_a_note_is_read_back_from_its_text():
    for note in (Note(True, "divide:2: features over a constant"), Note(False, "fitted: a: b"), Note(True, "")):
        assert Note.read(str(note)) == note
    assert str(Note(False, "x")) == "not private: x" and str(Note(True, "x")) == "public: x"


def test_the_mark_decides_and_not_the_words():
    notes = (Note(True, "not private: says a public note"), Note(False, "public: says another"))
    first, *others = outside(Context(notes))
    assert first == "not private: public: says another"
    assert not any("says" in line for line in others)


def test_a_run_tells_its_notes(tmp_path, capsys):
    rng = np.random.default_rng(0)
    data = load_data((rng.normal(size=(40, 3)), np.arange(40) % 2), 2, preprocess=["standardise", "normalise"])
    tree = {
        "model": {"kind": "logistic"},
        "privacy": {"trust": "untrusted", "epsilon": 2.0, "delta": 1e-3},
        "algorithm": {"name": "dp-gd", "rounds": 1, "step_size": 0.1, "clip": 1.0},
    }
    run = train(tree, data=data, out=tmp_path / "run")
    fitted = "not private: fitted on private data: standardise: mean and deviation of every feature"
    certificate = json.loads((run.directory / "certificate.json").read_text())
    assert certificate["outside_the_guarantee"][0] == fitted
    assert certificate["public_preprocessing"][-1] == "public: normalise: every record to unit norm, by itself"
    summary = json.loads((run.directory / "summary.json").read_text())
    assert summary["preprocessing"] == [str(note) for note in data.notes]
    show.print_summary(summary, run.directory)
    printed = capsys.readouterr().out
    assert fitted in printed and "unit norm" not in printed
