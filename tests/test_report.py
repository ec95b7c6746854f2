"""Pages that people read: true in their numbers, escaped, accessible, without anything from outside."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm
from sklearn.linear_model import LogisticRegression
from typer.testing import CliRunner

import silodp
from silodp.cli import app
from silodp.data import FederatedData, SiloData
from silodp.front.report import figures
from silodp.report import files
from silodp.report.chart import Chart, Line, drawn
from silodp.report.found import share_error
from silodp.report.held_out import held_out_section
from silodp.report.html import Html, page, table, tag
from silodp.report.story import Story, told
from silodp.report.swept import swept_page
from silodp.report.words import chance_of_more, detection, in_odds, percent_up, suspicion
from silodp.reproduce import load_experiment
from silodp.reproduce.driver import load_results, save_report
from silodp.run.baselines import baselines, two_classes, with_one
from tests.conftest import made_data
from tests.pages import Reader, problems

NASTY = "<script>alert('x')</script> & \"co\""
OPTIONS = {"name": "dp-gd", "rounds": 2, "step_size": 0.5, "clip": 1.0}
ROOT = Path(__file__).resolve().parents[1]


def trained(out: Path, **sections: object) -> silodp.Run:
    data = made_data()
    silos = (SiloData(NASTY, data.silos[0].features, data.silos[0].targets), *data.silos[1:])
    named = FederatedData("made", silos, data.test, data.task, data.classes, data.notes)
    return silodp.train({"algorithm": OPTIONS, "run": {"seed": 3}, **sections}, data=named, out=out)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> silodp.Run:
    out = tmp_path_factory.mktemp("runs") / "private"
    return trained(out, privacy={"epsilon": 1.0}, evaluate={"held_out": 0.3})


@pytest.fixture(scope="module")
def private(run) -> Path:
    return run.directory


@pytest.fixture(scope="module")
def open_(tmp_path_factory) -> Path:
    return trained(tmp_path_factory.mktemp("runs") / "open").directory


def silo_of(directory: Path) -> dict:
    return json.loads((directory / "certificate.json").read_text())["silos"][0]


# --- numbers -----------------------------------------------------------------------------------------


def test_a_suspicion_grows_as_bayes_says_and_is_rounded_up():
    assert suspicion(1.0) == pytest.approx(math.e * 0.01 / (0.99 + math.e * 0.01))
    assert percent_up(suspicion(1.0)) == "2.7 %"
    assert percent_up(suspicion(0.0)) == "1 %"
    for epsilon in np.linspace(0.01, 12, 60):
        shown = float(percent_up(suspicion(epsilon)).removesuffix(" %"))
        assert shown >= 100 * suspicion(epsilon) * (1 - 1e-12)
        assert shown <= 100 * suspicion(epsilon) * 1.1


@pytest.mark.parametrize("mu", [0.05, 0.25, 1.0, 4.0])
def test_the_chance_of_more_is_not_understated(mu):
    """Of a Gaussian release the chance that the loss exceeds epsilon is known."""
    for epsilon in (0.5 * mu, 2 * mu, 4 * mu):
        delta = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
        silo = {"epsilon": epsilon, "delta": delta, "gdp_mu": mu, "curve": []}
        exact = norm.cdf(mu / 2 - epsilon / mu)
        assert exact <= chance_of_more(silo, epsilon)
        assert chance_of_more(silo, epsilon) > delta  # the promise's own delta would say too little


def test_a_tests_power_is_that_of_the_curve_with_or_without_mu(private):
    silo = silo_of(private)
    alarms = np.linspace(0.001, 1, 50)
    mu = silo["gdp_mu"]
    exact = norm.cdf(norm.ppf(alarms) + mu)
    assert detection(silo, alarms) == pytest.approx(exact)
    bounded = detection(silo | {"gdp_mu": None}, alarms)
    assert (bounded >= exact - 1e-9).all()
    assert (bounded <= np.minimum(1, np.exp(silo["epsilon"]) * alarms + silo["delta"]) + 1e-12).all()
    assert detection({"gdp_mu": math.inf, "curve": [], "epsilon": math.inf, "delta": 1e-5}, [0.1])[0] == 1.0


def test_errors_of_shares_and_baselines_by_hand():
    assert share_error(0.5, 100) == pytest.approx(0.0962, abs=1e-4)  # Wilson
    assert 0 < share_error(1.0, 20) < 0.1
    features = np.array([[0.0], [1.0], [2.0], [3.0]], np.float32)
    silo = SiloData("a", features, np.array([0, 0, 1, 0], np.int32))
    test = SiloData("test", features[:3], np.array([0, 1, 1], np.int32))
    data = FederatedData("hand", (silo,), test, "classification", ("0", "1"), ())
    assert baselines(data, "accuracy", without_privacy=False) == {"test_accuracy": {"majority class": 1 / 3}}
    far = SiloData("test", features[:1], np.array([9.0], np.float32))
    numbers = FederatedData("hand", (SiloData("a", features, 2 * features[:, 0]),), far, "regression", (), ())
    found = baselines(numbers, "mse", without_privacy=True)["test_mse"]
    assert found["mean predictor"] == pytest.approx(36.0)
    assert found["linear model without privacy"] == pytest.approx(81.0, rel=1e-4)
    assert baselines(data, None, without_privacy=True) == {}


def test_two_classes_are_fitted_as_scikit_learn_fits_them():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(200, 6)) * [0.1, 1, 1, 3, 10, 30]
    positive = features @ rng.normal(size=6) + rng.normal(size=200) > 1
    reference = LogisticRegression(max_iter=10_000, tol=1e-9).fit(features, positive)
    weights = two_classes(with_one(features), positive)
    np.testing.assert_allclose(weights, [*reference.coef_[0], *reference.intercept_], rtol=1e-3, atol=1e-4)


# --- pages -------------------------------------------------------------------------------------------


def test_a_runs_report_says_what_the_run_is(private):
    text = (private / "report.html").read_text(encoding="utf-8")
    assert problems(text) == []
    read = Reader(text)
    silo, certificate = silo_of(private), json.loads((private / "certificate.json").read_text())
    assert in_odds(silo) in read.text and "at most 2.7 %" in read.text
    for told_once in (
        *certificate["honest"],
        *certificate["outside_the_guarantee"],
        "protects nobody",
        "50 test records",
        "value (which way the model should move)",
    ):
        assert told_once in read.text
    assert all(digest in read.text for _, digest in files.hashes_of(private))
    for what in ("majority class", "linear model without privacy", "± ", "date (UTC)", "jaxlib"):
        assert what in read.text
    # trade-off, objective, gradient, test loss, accuracy; held-out records are too few for one
    assert len(read.named("svg")) == 5
    assert "Nobody has signed this page." in read.text
    headings = re.findall(r"<h2>(.*?)</h2>", text)
    assert headings[0] == "In plain words" and headings.index("What is NOT covered") < headings.index("How it was made")


def test_figures_of_held_out_records_are_those_that_were_released(private):
    text = (private / "report.html").read_text(encoding="utf-8")
    told = json.loads((private / "summary.json").read_text())["held_out"]
    (found,) = re.findall(r"<section><h2>How good the model is</h2>.*?</section>", text)
    assert f"Measured on {told['records']} records that were not trained on. Each number has noise" in found
    rows = re.findall(r"<tr>.*?</tr>", found)[1:]
    assert len(rows) == 4 and all("too few records to tell" in row and "±" not in row for row in rows)  # 10 to 18
    exact = [part | {"accuracy": part["accuracy"] | {"error": 0.01}} for part in (told, *told["silos"])]
    known = exact[0] | {"silos": exact[1:]}
    shown = held_out_section(known, json.loads((private / "certificate.json").read_text()))
    for part in exact:
        assert f">{part['accuracy']['value']:.3f} ± 0.02</td>" in shown
    assert shown.count("<circle") == len(told["silos"]) and "majority class" in shown
    without = told_of_open(told)
    assert "no epsilon covers these numbers" in without and "may be shown to anybody" not in without


def test_a_silo_that_is_too_small_is_not_given_a_figure():
    """Half of a 95 % interval above 0.5 tells nothing; an area under the curve looks better than it is known."""
    figure = lambda value, error: {"value": value, "error": error}
    large = {"accuracy": figure(0.9, 0.01), "log_loss": figure(0.3, 0.02), "auc": figure(0.95, 0.02)}
    small = {"accuracy": figure(0.0, 0.26), "log_loss": figure(4.0, 4.6), "auc": figure(0.47, 0.1)}
    middle = small | {"accuracy": figure(0.8, 0.2)}
    silos = [{"silo": name, "records": 9} | own for name, own in (("a", large), ("b", small), ("c", middle))]
    told = {"records": 27} | large | {"silos": silos}
    assert figures(told, private=True)[1:] == [
        "  all  accuracy 0.900 +- 0.010  log_loss 0.300 +- 0.020  auc 0.950 +- 0.020",
        "  a    accuracy 0.900 +- 0.010  log_loss 0.300 +- 0.020  auc 0.950 +- 0.020",
        "  b    too few records to tell",
        "  c    accuracy 0.800 +- 0.200  auc 0.470 +- 0.100",
    ]
    text = held_out_section(told, None)
    assert text.count("too few records to tell") == 3 + 1 and text.count("<circle") == 2 and "± 9" not in text


def told_of_open(held_out: dict) -> str:
    text = told(Story("A run without privacy", None, held_out=held_out))
    assert problems(text) == []
    return text


def test_what_a_notebook_shows(run, open_):
    for shown in (run._repr_html_(), run.certificate._repr_html_()):
        assert problems(page("In a notebook", Html(shown))) == []
        assert "at most 2.7 %" in shown and "protects nobody" in shown and "What is NOT covered" in shown
        assert "<script" not in shown and "&lt;script&gt;" in shown
        rules = re.findall(r"^(\S.*?) \{", re.findall(r"<style>(.*?)</style>", shown, re.DOTALL)[0], re.MULTILINE)
        assert rules and all(part.strip().startswith(".silodp") for rule in rules for part in rule.split(","))
    assert run.certificate == json.loads((run.directory / "certificate.json").read_text())
    assert json.loads(json.dumps(run.certificate)) == run.certificate  # still plain data
    gone = silodp.Run(Path("gone"), run.config, [], None, None, run.summary | {"private": False}, run.model)
    assert gone._repr_html_() is None and gone.certificate is None


def test_what_a_silo_is_called_cannot_leave_its_cell(private):
    text = (private / "report.html").read_text(encoding="utf-8")
    assert "<script" not in text and "&lt;script&gt;" in text
    assert NASTY in Reader(text).text
    assert tag("p", NASTY, title='"x') == Html(
        '<p title="&quot;x">&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt; &amp; &quot;co&quot;</p>'
    )


@pytest.mark.parametrize("name", ["a\nSilo b: (0, 0)-DP", "a\x1b[2J", "a\x00", "a\u202eb", "a\ud800"])
def test_a_name_that_does_more_than_it_shows_is_refused_and_never_on_a_page(name):
    records = np.zeros((3, 2)), np.zeros(3)
    with pytest.raises(ValueError, match="a control character or a line break in a silo's name; rename it") as refused:
        SiloData(name, *records)
    assert name not in str(refused.value) and "Silo b" not in str(refused.value)
    text = page(name, table(name, (name,), [(name,)]))
    assert problems(text) == [] and not set(name) - set("a\nSilo b: (0, 0)-DP[2J") & set(text)
    text.encode()
    SiloData("Krankenhaus Süd\xa0\u200c<b>", *records)  # seen as they are: escaped where it matters


def test_records_are_counted_alike_all_over_the_page(private):
    """Those that were held out too, and nobody is told that a simulation's figures may be shown."""
    text = Reader((private / "report.html").read_text(encoding="utf-8")).text
    silos = json.loads((private / "certificate.json").read_text())["silos"]
    held, records = (sum(silo[part] for silo in silos) for part in ("held_out", "records"))
    assert f"records: {records}" in text and f"{records - held} and {held} held out" in text
    assert f"{silos[0]['records']}, {silos[0]['held_out']} of them held out" in text
    assert "may be shown to anybody" not in text and "show the numbers only to who may see the records" in text
    real = files.story_of(private)
    assert real.certificate is not None
    real = dataclasses.replace(real, certificate={**real.certificate, "stamp": None})
    assert "may be shown to anybody" in told(real) and "run the same plan themselves" not in told(real)


def test_epsilon_and_delta_alone_say_what_is_beyond_them():
    silo = {"epsilon": 1.0, "delta": 1e-5, "gdp_mu": None, "curve": [], "records": 100}
    bound = 1e-5 / -math.expm1(-1)
    assert chance_of_more(silo, 1.0) == 1.0 and chance_of_more(silo, 2.0) == pytest.approx(bound)
    assert "tells more than 7 % is at most 1.6e-05." in in_odds(silo)


def test_a_run_without_privacy_says_so_first(open_):
    text = (open_ / "report.html").read_text(encoding="utf-8")
    assert problems(text) == []
    assert "No epsilon was given: the model is not private." in text
    assert "suspicion" not in text and "Who must be honest" not in text


def test_the_same_run_gives_the_same_page_and_other_noise_another_id(private, open_):
    assert told(files.story_of(private)) == (private / "report.html").read_text(encoding="utf-8")
    assert files.run_id(None, files.hashes_of(private)) != files.run_id(None, files.hashes_of(open_))


def test_the_reader_finds_what_is_wrong():
    good = page("A page", table("Numbers", ("a", "b"), [("x", 1)]))
    assert problems(good) == []
    for wrong in (
        good.replace('lang="en"', ""),
        good.replace("<caption>Numbers</caption>", ""),
        good.replace(' scope="row"', ""),
        good.replace("<h1>", "<h3>").replace("</h1>", "</h3>"),
        good.replace("</main>", '<img src="https://example.org/a.png" alt="a"></main>'),
        good.replace("</main>", "<script>1</script></main>"),
        good.replace("</main>", "<p>never closed</main>"),
    ):
        assert problems(wrong) != []


def test_charts_bear_what_runs_give():
    nan = Chart("t", "x", "y", [Line("a", [0, 1], [math.nan, math.inf])], [("level", math.nan)])
    flat = Chart("t", "x", "y", [Line("a", [1], [2.0], errors=[0.1])], log_y=True, log_x=True)
    for chart in (nan, flat):
        text = page("charts", drawn(chart, "words"))
        assert problems(text) == [] and "nan" not in text and "inf" not in text


def test_a_reproductions_page(tmp_path):
    experiment = load_experiment("mu2-table1")
    save_report(experiment, load_results(ROOT / "docs/reproduction/mu2-table1.json"), tmp_path, [tmp_path / "f.png"])
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert problems(text) == []
    assert experiment.title in Reader(text).text and "data:image/png;base64," in text
    assert "The epsilon in brackets is what that noise really gives, whatever is claimed." in text


def test_a_sweeps_page():
    final = {"round": 2.0, "objective": 0.4, "test_accuracy": 0.8}
    keys = ({"algorithm.clip": 1.0, "run.seed": seed} for seed in (0, 1))
    settings = [{"values": values, "epsilon": 1.0, "final": final} for values in keys]
    other = {
        "values": {"algorithm.clip": NASTY, "run.seed": 0},
        "epsilon": None,
        "final": final | {"objective": math.nan},
    }
    settings[1] = settings[1] | {"final": final | {"test_accuracy": 0.6}}
    tree = {"selected_by": "test_accuracy", "best": settings[0]["values"], "settings": [*settings, other]}
    text = swept_page(tree | {"baselines": {"test_accuracy": {"majority class": 0.55}}, "versions": {"silodp": "0"}})
    assert problems(text) == [] and "Best by test accuracy (share): algorithm.clip = 1.0" in text
    read = Reader(text).text
    assert "1+2: 0.7; 3: 0.8; majority class: 0.55." in read and "diverged" in read and NASTY in read
    assert "The whole table, and the choice, are covered by none." in read


# --- commands ----------------------------------------------------------------------------------------


def silodp_(*arguments: object):
    return CliRunner().invoke(app, [str(each) for each in arguments])


def test_show_web_opens_the_report_and_writes_a_missing_one(private, tmp_path, monkeypatch):
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or False)
    older = shutil.copytree(private, tmp_path / "older")
    (older / "report.html").unlink()
    done = silodp_("show", older, "--web")
    assert done.exit_code == 0 and "no browser was found" in done.output
    assert opened == [(older / "report.html").resolve().as_uri()]
    assert problems((older / "report.html").read_text(encoding="utf-8")) == []
    nothing = silodp_("show", tmp_path, "--web")
    assert nothing.exit_code == 2 and "neither a finished run" in nothing.output


def test_compare_puts_runs_side_by_side(private, open_, tmp_path):
    out = tmp_path / "compare.html"
    done = silodp_("compare", private, open_, "--out", out)
    assert done.exit_code == 0
    assert all(words in done.output for words in ("private", "open", "dp-gd", "not private", "2.7 %"))
    text = out.read_text(encoding="utf-8")
    assert problems(text) == [] and len(Reader(text).named("svg")) == 4
    assert silodp_("compare", private).exit_code == 2
    assert silodp_("compare", private, open_, "--out", out).exit_code == 2  # exists


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("summary.json", "{}", "KeyError('algorithm')"),
        ("summary.json", "[]", "the run or model is damaged"),
        ("history.jsonl", "{}\nx\n", "history.jsonl: not valid JSON"),
        ("bundle.json", "{}", "KeyError('digest')"),
    ],
)
def test_a_damaged_directory_is_one_clear_line(private, tmp_path, file, text, words):
    broken = shutil.copytree(private, tmp_path / "[red]")
    (broken / file).write_text(text)
    (broken / "report.html").unlink()
    for command in (("compare", broken, private), ("show", broken, "--web")):
        done = silodp_(*command)
        assert done.exit_code == 2 and words in done.output and "damaged" in done.output, done.output
