"""Seeded privacy bugs: each is caught by the test that its line names. `make mutants` tries them all."""

from __future__ import annotations

import pytest

from tests.mutants.harness import ROOT, Mutant, honest, patched, tried
from tests.mutants.seeded import MUTANTS


def test_every_patch_fits_one_place_and_changes_it():
    assert len(MUTANTS) >= 60
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert len([mutant for mutant in MUTANTS if mutant.quick]) >= 10
    for mutant in MUTANTS:
        source = (ROOT / mutant.file).read_text(encoding="utf-8")
        compile(patched(mutant, source), mutant.file, "exec")
        assert mutant.old != mutant.new


def test_a_patch_without_a_place_is_an_error():
    for old in ("no such text", "import"):
        with pytest.raises(ValueError, match=r"nowhere: its old text occurs \d+ times"):
            patched(Mutant("nowhere", "silodp/core.py", old, "", "", ""), "import a\nimport b\n")


@pytest.mark.parametrize(
    "mutant", [pytest.param(m, id=m.name, marks=() if m.quick else pytest.mark.slow) for m in MUTANTS]
)
def test_a_seeded_bug_is_caught(mutant):
    verdict = tried(mutant)
    assert verdict.caught, f"{mutant.breaks}: {verdict.words}"


@pytest.mark.slow
def test_without_a_bug_the_same_tests_pass():
    verdict = honest(MUTANTS)
    assert verdict.caught, verdict.words
