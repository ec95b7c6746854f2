"""The certificate is written from what was counted; whatever was not planned is an error."""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
import pytest

from silodp.algorithms.gradient import GradientDescent
from silodp.core import Account, Stream, Tally
from silodp.data.types import Note
from silodp.plan.certificate import AccountingError, Context, as_text, certificate, settle
from silodp.run.runner import prepare
from silodp.run.runner import train as run
from tests.cases import case
from tests.conftest import made_data

DATA = made_data()


def counted(plan, change=lambda tallies: tallies) -> Account:
    """The account of a run that did what its plan says, or something else."""
    silos = range(plan.facts.silos)
    tallies = {
        stream.name: Tally(
            jnp.array([plan.releases(i)[k].count for i in silos]),
            jnp.array([plan.protecting(stream.name)[i] for i in silos], jnp.float32),
        )
        for k, stream in enumerate(plan.releases(0))
    }
    return Account(change(tallies), jnp.zeros(plan.facts.silos))


def plan_of(name="spider", trust="untrusted", **changes):
    return prepare(case(name, trust, **changes), DATA).plan


@pytest.mark.parametrize("trust", ["trusted", "untrusted"])
def test_the_statement_follows_from_the_count(trust):
    plan = plan_of(trust=trust)
    tree = certificate(plan, settle(plan, counted(plan)), Context((Note(False, "fitted"), Note(True, "read"))))
    assert max(silo["epsilon"] for silo in tree["silos"]) == pytest.approx(4.0, rel=1e-3)
    assert all(silo["epsilon"] <= 4.0 + 1e-6 for silo in tree["silos"])
    assert tree["public_preprocessing"] == ["public: read"]
    text = as_text(tree)
    for phrase in (
        "simulation: seeded noise, not private",
        "replaced",
        "not private: fitted",
        "Silo silo 0",
        "5 records",
    ):
        assert phrase in text
    groups = tree["silos"][0]["several_records_of_one_person"]
    assert groups[1]["epsilon"] > groups[0]["epsilon"] > tree["silos"][0]["epsilon"]


def more(tallies):
    return tallies | {"value": eqx.tree_at(lambda t: t.count, tallies["value"], tallies["value"].count + 1)}


def fewer(tallies):
    return tallies | {"value": eqx.tree_at(lambda t: t.count, tallies["value"], tallies["value"].count - 1)}


def weaker(tallies):
    return tallies | {
        "value": eqx.tree_at(lambda t: t.multiplier, tallies["value"], tallies["value"].multiplier * 0.99)
    }


@pytest.mark.parametrize("change", [more, fewer, weaker])
def test_a_run_that_differs_from_its_plan_gets_no_certificate(change):
    plan = plan_of()
    with pytest.raises(AccountingError, match="silo 0, stream 'value'"):
        settle(plan, counted(plan, change))


def test_with_partial_participation_a_silo_may_be_asked_less_often():
    plan = plan_of(participation=2)
    assert settle(plan, counted(plan, fewer))
    with pytest.raises(AccountingError):
        settle(plan, counted(plan, more))


def test_an_algorithm_that_declares_too_little_is_caught(tmp_path, monkeypatch):
    honest = GradientDescent.releases

    def too_few(self, silo, sizes, rounds):
        return [Stream(s.name, s.count - 1, s.batch) for s in honest(self, silo, sizes, rounds)]

    monkeypatch.setattr(GradientDescent, "releases", too_few)
    with pytest.raises(AccountingError, match="6 releases were counted, the plan has 5"):
        run(case("dp-gd", "untrusted"), data=DATA, out=tmp_path / "run")
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_an_undeclared_stream_is_an_error():
    with pytest.raises(ValueError, match="'secret' is released but releases"):
        Account.empty(["value"]).spend("secret", jnp.float32(1.0))


def test_a_fixed_schedule_is_charged_as_it_is():
    worst = plan_of("dp-gd", participation=2)
    fixed = plan_of("dp-gd", participation=2, schedule="fixed")
    assert sum(fixed.releases(i)[0].count for i in range(3)) == 2 * 6
    assert all(worst.releases(i)[0].count == 6 for i in range(3))
    assert all(f <= w for f, w in zip(fixed.multipliers["value"], worst.multipliers["value"], strict=True))
