"""Attacks on a federation, each a test: `python -m tests.attacks` tries all of them and prints the table.

A line names an attack and the tests that make it. A test with several cases counts as often as it has cases. A line
with [case; case] has these, and a line without has those that no other line names.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import pytest

EDITS = "test_deploy_attacks::test_a_changed_plan_is_refused"
LIMITS = "test_deploy_attacks::test_an_honest_plan_beyond_the_limits_is_refused"
QUESTIONS = "test_deploy_attacks::test_a_question_outside_the_plan_is_refused"
PARCELS = "test_deploy_mixer::test_what_is_not_a_whole_batch_of_the_plan_is_refused"
ANSWERS = "test_deploy_state::test_an_answer_that_no_honest_silo_sends_is_refused"
FILLED = "one silo fills the batch; a larger share; one message twelve times; another's messages once more"
ATTACKS: dict[str, tuple[str, ...]] = {
    "a plan names code that is to be run": (
        EDITS + "[code of the interpreter as a model; a system call as an algorithm; a compressor from outside; "
        "a trust model from outside; a randomizer from outside]",
        "test_deploy_messages::test_a_server_cannot_make_a_silo_import_what_it_names",
        "test_deploy_messages::test_a_trust_model_that_a_server_names_is_not_imported_either",
        "test_deploy_attacks::test_no_command_imports_what_a_plan_names",
        "test_deploy_attacks::test_no_command_imports_what_a_strangers_run_names",
        "test_deploy_mixer::test_a_shuffler_imports_nothing_that_a_plan_names",
    ),
    "a clip norm whose noise is lost": (
        EDITS + "[a clip whose noise is lost; a clip below the site's; a clip of differences below the site's]",
    ),
    "noise from a known seed": (
        EDITS + "[a seed]",
        "test_deploy_messages::test_less_noise_than_the_config_needs_and_a_seed_are_refused",
    ),
    "no privacy, a trusted server, a paper's noise, epsilon 1e6, delta 0.999, hardly any noise": (
        EDITS + "[no target; a trusted server; a paper's noise; delta 0.999; fitted preprocessing; "
        "less noise than the config needs; more noise than the config needs; noise without end; no noise; "
        "another target than the noise]",
        "test_deploy_mixer::test_a_site_is_charged_with_the_level_that_its_messages_have",
        LIMITS,
    ),
    "other plans than the honest one": (EDITS, "test_deploy_attacks::test_a_text_that_is_no_plan_is_refused"),
    "approvals that are missing, or of something else": (
        "test_deploy_attacks::test_approvals_are_everybodys_for_this_plan",
        "test_deploy_attacks::test_what_the_operator_has_not_seen_is_not_approved",
        "test_deploy_attacks::test_another_plan_is_not_answered_meanwhile",
        "test_deploy_mixer::test_nobody_begins_without_the_shufflers_signature_and_it_not_without_the_sites",
    ),
    "a fictitious site of 100,000 records, or a known one with another key": (
        "test_deploy_attacks::test_a_fictitious_site_is_not_believed",
        "test_deploy_attacks::test_a_known_site_with_another_key_is_not_believed",
        "test_deploy_mixer::test_a_site_may_limit_what_is_left_if_all_others_collude",
        "test_deploy_mixer::test_what_is_left_alone_is_of_as_many_records_as_the_plan_protects_together",
        "test_deploy_guard::test_a_signature_is_for_one_purpose_and_one_body",
    ),
    "a silo that starts again, or was cloned, forgets its budget or draws noise anew": (
        "test_deploy_state::test_a_restarted_silo_answers_nothing_again",
        "test_deploy_state::test_a_kept_silo_gives_the_same_bytes_and_takes_no_other_plan",
        "test_deploy_state::test_a_refused_question_leaves_the_round_as_it_was",
        "test_deploy_guard::test_a_ledger_that_was_put_back_is_noticed",
        "test_deploy_guard::test_every_edit_of_the_budget_is_found",
        "test_deploy_guard::test_two_guards_do_not_work_in_one_folder",
        "test_deploy_guard::test_a_ledger_that_cannot_be_written_sends_nothing",
        "test_deploy_ledger::test_a_server_notices_a_ledger_that_does_not_grow",
        "test_deploy_ledger::test_a_server_that_resumes_notices_a_ledger_that_was_put_back",
        "test_deploy_ledger::test_other_sites_notice_a_folder_that_was_put_back_whole",
        "test_deploy_ledger::test_other_sites_notice_in_the_next_run_that_a_folder_was_put_back",
        "test_deploy_ledger::test_the_counter_knows_of_an_entry_before_its_answer_leaves",
        "test_deploy_ledger::test_a_guard_that_was_killed_before_its_counter_had_an_entry_starts_again",
        "test_deploy_edits::test_entries_that_no_guard_writes_are_found",
        "test_deploy_edits::test_a_run_that_somebody_has_begun_with_nothing_is_charged_with_its_plan",
        "test_deploy_edits::test_a_guard_that_works_and_an_operator_notice_edits",
        "test_deploy_ledger::test_a_ledger_that_was_put_back_and_made_longer_is_noticed",
        "test_deploy_ledger::test_a_site_that_is_shown_its_own_signature_of_another_history_stops",
        "test_deploy_ledger::test_words_of_a_ledger_that_are_none_are_refused",
    ),
    "a question twice, out of order, or that the plan does not have": (
        QUESTIONS,
        "test_deploy_attacks::test_a_third_value_is_refused_also_under_a_server_that_counts_itself",
        "test_deploy_guard::test_a_revoked_plan_gets_no_further_answer",
        "test_deploy_missing::test_a_silo_is_asked_once_even_if_its_sum_was_never_opened",
    ),
    "sites are shown different points": (
        QUESTIONS + "[no word of what the others saw; others' word that is none]",
        "test_deploy_attacks::test_a_site_that_was_shown_another_point_is_noticed_one_round_later",
        "test_deploy_sums::test_a_server_must_show_what_the_others_saw",
    ),
    "the server names itself as the shuffler": (
        "test_deploy_mixer::test_the_server_cannot_name_itself_as_the_shuffler",
        "test_deploy_mixer::test_a_plan_without_its_shuffler_or_with_one_too_many_is_refused",
        "test_deploy_mixer::test_the_server_can_neither_open_a_parcel_nor_tell_who_sent_what",
    ),
    "one colluding silo fills a batch": (
        PARCELS + f"[{FILLED}]",
        "test_deploy_shuffler::test_a_batch_is_of_as_many_silos_as_the_plan_has_each_with_its_whole_share",
    ),
    "a batch that is not whole, or of something else": (
        PARCELS,
        "test_deploy_mixer::test_a_batch_is_released_once_and_the_same_parcels_get_the_same_bytes",
        "test_deploy_mixer::test_a_batch_is_of_the_silos_that_the_plan_has_in_this_round",
        "test_deploy_shuffler::test_what_is_not_a_whole_batch_is_refused",
        "test_deploy_shuffler::test_bad_frames_are_refused_and_not_fatal",
    ),
    "much is sent, or many connections are kept, by who has no right to": (
        "test_deploy_listen::test_only_the_relays_user_and_the_guards_own_are_heard",
        "test_deploy_listen::test_whoever_announces_much_is_not_listened_to",
        "test_deploy_listen::test_a_crowd_gets_no_more_threads_than_there_are_places",
        "test_deploy_listen::test_who_is_being_answered_does_not_give_way",
        "test_deploy_listen::test_a_frame_has_begun_with_its_first_byte",
        "test_deploy_listen::test_a_header_is_not_read_when_it_is_larger_than_any_plan",
        "test_deploy_mixer::test_a_message_that_is_too_large_is_not_read",
    ),
    "a mask's key is replaced": (
        "test_deploy_attacks::test_a_server_cannot_replace_a_masks_key",
        "test_deploy_state::test_keys_are_agreed_on_with_everybodys_signature",
        "test_deploy_messages::test_nothing_is_sent_before_keys_are_agreed",
    ),
    "a silo answers NaN, 3e38, with another clip or other records": (
        ANSWERS + "[NaN; infinite; 3e38; other records; other parameters; another stream]",
        "test_channels::test_parts_of_one_sum_have_one_clip_norm",
    ),
    "malformed answers end the server": (
        ANSWERS,
        "test_deploy_state::test_no_answer_of_one_silo_ends_the_server_in_a_traceback",
        "test_deploy_server::test_an_answer_that_no_honest_site_sends_is_refused",
        "test_deploy_server::test_a_certificate_is_more_than_a_signature",
        "test_deploy_server::test_what_a_certificate_counts_is_what_was_planned",
        "test_deploy_sums::test_a_run_without_missing_sites",
        "test_deploy_server::test_silos_that_do_not_say_which_keys_they_took_are_noticed",
        "test_deploy_missing::test_words_around_a_sum_that_are_none_end_the_run_in_a_line",
    ),
    "a stopped party hangs the others": (
        "test_deploy_state::test_a_stopped_silo_does_not_hang_the_server",
        "test_deploy_listen::test_who_connects_to_a_guard_that_is_stopped_does_not_wait",
        "test_deploy_listen::test_nobody_waits_for_ever_behind_another_question",
    ),
    "frames that are empty, too large or cut": (
        "test_deploy_attacks::test_bytes_that_are_no_message_are_refused",
        "test_deploy_attacks::test_a_frame_that_is_too_long_ends_the_connection_only",
        "test_deploy_messages::test_bytes_that_are_no_message_are_refused",
    ),
    "words that do something to a terminal, or tell of a record": (
        "test_deploy_state::test_a_silos_words_cannot_reach_a_terminal",
        "test_deploy_attacks::test_no_text_of_an_error_leaves_a_guard",
        "test_deploy_messages::test_an_error_of_the_compiled_program_is_not_passed_on",
        "test_deploy_messages::test_a_refusal_shows_nothing_of_the_records",
    ),
    "two programs resume one directory": (
        "test_deploy_guard::test_two_servers_do_not_work_in_one_folder",
        "test_deploy_server::test_a_folder_holds_the_run_of_one_plan",
        "test_run_directory::test_one_program_at_a_time_and_nobody_else_reads",
    ),
    "a checkpoint with another bit, a history that was cut": (
        "test_deploy_guard::test_a_checkpoint_with_another_bit_is_found_at_once",
        "test_run_directory::test_a_flipped_bit_of_a_checkpoint_is_noticed_at_once",
        "test_run_directory::test_a_history_that_was_cut_or_changed_is_noticed",
    ),
}


def cases_of(test: str) -> list[str] | int:
    """The names of a test's cases, if a table of them gives each its own; otherwise how many there are."""
    module, _, function = test.partition("::")
    marks = getattr(getattr(importlib.import_module(f"tests.{module}"), function), "pytestmark", [])
    tables: list[Sequence[Any]] = [list(mark.args[1]) for mark in marks if mark.name == "parametrize"]
    if len(tables) == 1 and all(isinstance(case, str) for case in tables[0]):
        return list(tables[0])
    return len(list(itertools.product(*tables)))


def counted() -> dict[str, int]:
    """How many attacks every line has. A test or a case that is not there is an error."""
    tests = [each.partition("[")[0] for told in ATTACKS.values() for each in told]
    left = {test: cases_of(test) for test in tests}
    counts = dict.fromkeys(ATTACKS, 0)
    for line, told in ATTACKS.items():
        for test, _, named in (each.rstrip("]").partition("[") for each in told):
            for case in filter(None, named.split("; ")):
                cases = left[test]
                assert isinstance(cases, list) and case in cases, f"{test}: no case {case!r}, or named twice"
                cases.remove(case)
                counts[line] += 1
    for line, told in ATTACKS.items():
        for test in (each for each in told if "[" not in each):
            rest = left.pop(test)  # a test that stands in two lines without cases is an error too
            counts[line] += rest if isinstance(rest, int) else len(rest)
    return counts


class Outcomes:
    """What pytest tells of every case."""

    def __init__(self) -> None:
        self.passed, self.others = 0, list[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.passed and report.when == "call"
        if not report.passed:
            self.others.append(f"{report.nodeid}: {report.outcome}")


def main() -> None:
    outcomes = Outcomes()
    tests = sorted({each.partition("[")[0] for told in ATTACKS.values() for each in told})
    files = [f"tests/{test.replace('::', '.py::')}" for test in tests]
    pytest.main(["-q", "-n", "0", "-m", "slow or not slow", "--no-header", *files], plugins=[outcomes])
    counts = counted()
    print("\n| attack | tests |\n|---|---:|")
    print("\n".join(f"| {line} | {count} |" for line, count in counts.items()))
    print(f"\n{outcomes.passed} attacks, {len(outcomes.others)} through")
    print("\n".join(outcomes.others))
    sys.exit(bool(outcomes.others) or outcomes.passed != sum(counts.values()))


if __name__ == "__main__":
    main()
