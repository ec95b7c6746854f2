"""The certificate is written from what was counted; whatever was not planned is an error."""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
import pytest

from silodp.algorithms.gradient import GradientDescent
from silodp.data.types import Note
from silodp.facts import Stream
from silodp.plan.certificate import AccountingError, Context, as_text, certificate, settle
from silodp.releases import Account, Tally
from silodp.run.prepare import prepare
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


def test_the_statement_names_the_dearest_silo():
    plan = plan_of("dp-gd", "trusted", weights="equal")
    tree = certificate(plan, settle(plan, counted(plan)), Context())
    assert min(silo["epsilon"] for silo in tree["silos"]) < 0.7 * 4.0
    assert "every silo would be (4, 0.0001)-differentially private" in tree["statement"]


def changed(stream, field, change):
    """Accounts that tell something else of one stream."""
    return lambda tallies: (
        tallies | {stream: eqx.tree_at(lambda t: getattr(t, field), tallies[stream], replace_fn=change)}
    )


more = changed("value", "count", lambda count: count + 1)
fewer = changed("value", "count", lambda count: count - 1)
DIFFERENT = {
    "more releases": more,
    "fewer releases": fewer,
    "less noise": changed("value", "multiplier", lambda multiplier: multiplier * 0.99),
    "more noise": changed("value", "multiplier", lambda multiplier: multiplier * 1.01),
    "no number": changed("value", "multiplier", lambda multiplier: multiplier * jnp.nan),
}


@pytest.mark.parametrize("change", DIFFERENT)
@pytest.mark.parametrize("trust", ["trusted", "untrusted"])
def test_a_run_that_differs_from_its_plan_gets_no_certificate(change, trust):
    plan = plan_of(trust=trust)
    with pytest.raises(AccountingError, match="silo 0, stream 'value'"):
        settle(plan, counted(plan, DIFFERENT[change]))


def test_an_inflated_tally_says_that_it_is_too_large():
    plan = plan_of()
    with pytest.raises(AccountingError, match=r"noise multiplier 6\.06\d*, more than the plan's"):
        settle(plan, counted(plan, changed("value", "multiplier", lambda m: 4 * m)))


def test_with_absent_silos_the_noise_may_be_as_large_as_with_all_and_no_larger():
    """A trusted server's noise is scaled to the worst record present: the plan knows both ends, and certifies one."""
    plan = plan_of("dp-gd", "trusted", participation=2, weights="equal")
    least, most = plan.protection("value")
    assert most[1] == pytest.approx(least[1]) and most[0] == pytest.approx(least[0] * 40 / 25)
    certified = lambda told: settle(plan, counted(plan, changed("value", "multiplier", lambda _: jnp.array(told))))
    assert certified(least) == certified(most) == [plan.spent(i) for i in range(3)]
    for told in (most * 1.001, least * 0.999):
        with pytest.raises(AccountingError, match="silo 0"):
            certified(told)


def test_releases_that_moved_nothing_are_certified_as_planned():
    plan = plan_of()
    still = changed("difference", "multiplier", lambda m: m + jnp.inf)
    assert settle(plan, counted(plan, still)) == settle(plan, counted(plan))


def test_fewer_than_no_releases_are_refused():
    plan = plan_of(participation=2)
    with pytest.raises(AccountingError, match="-2 releases were counted"):
        settle(plan, counted(plan, changed("value", "count", lambda count: -count)))


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


def test_an_account_keeps_every_release_and_the_least_noise():
    account = Account.empty(["other", "value"])
    for multiplier in (3.0, 1.0, 2.0):
        account = account.spend("value", jnp.float32(multiplier))
    assert (int(account.tallies["value"].count), float(account.tallies["value"].multiplier)) == (3, 1.0)
    assert int(account.tallies["other"].count) == 0


def test_an_undeclared_stream_is_an_error():
    with pytest.raises(ValueError, match="'secret' is released but releases"):
        Account.empty(["value"]).spend("secret", jnp.float32(1.0))


def test_a_fixed_schedule_is_charged_as_it_is():
    worst = plan_of("dp-gd", participation=2)
    fixed = plan_of("dp-gd", participation=2, schedule="fixed")
    assert sum(fixed.releases(i)[0].count for i in range(3)) == 2 * 6
    assert all(worst.releases(i)[0].count == 6 for i in range(3))
    assert all(f <= w for f, w in zip(fixed.multipliers["value"], worst.multipliers["value"], strict=True))


@pytest.mark.parametrize(
    ("name", "trust", "words"),
    [
        ("spider", "untrusted", "an exact Gaussian"),
        ("spider", "trusted", "an exact Gaussian"),
        ("ce-psgm", "shuffled", "a local randomizer"),
        ("sdp-spider", "shuffled", "fair coins"),
    ],
)
def test_the_noise_is_named_as_it_was_drawn(name, trust, words):
    plan = plan_of(name, trust)
    spent = [plan.spent(i) for i in range(plan.facts.silos)]
    assert certificate(plan, spent, Context(stamp=None))["noise"].startswith(words)
    assert certificate(plan, spent, Context())["noise"].startswith("of a simulation, in float32")
