"""Rows of the stages beside training: they pass the code as it is, and convict it once it is broken."""

import pytest

from silodp.audit import stages
from silodp.audit.rows import EXCEEDED, OK
from silodp.channels import channel, trusted

ROWS = [(stages.middle_row, 0.95), (stages.metric_row, 0.88), (stages.rates_row, 0.95)]


@pytest.mark.parametrize(("row", "reached"), ROWS)
def test_a_stages_noise_is_read_near_its_claim(row, reached):
    found = row()
    assert found.verdict == OK
    assert found.measured_mu > reached * found.claim_mu
    assert found.convicts_from < 1.3


@pytest.mark.parametrize(("row", "reached"), ROWS)
def test_a_stages_noise_that_is_too_small_is_caught(monkeypatch, row, reached):
    honest = channel.privatise
    for module in (channel, trusted):
        monkeypatch.setattr(module, "privatise", lambda release, own, *rest: honest(release, own / 1.4, *rest))
    assert row().verdict == EXCEEDED
