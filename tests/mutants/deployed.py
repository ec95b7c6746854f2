"""Seeded bugs of guards, ledgers and runs that are resumed."""

from __future__ import annotations

from tests.mutants.harness import Mutant

DEPLOYED = [
    Mutant(
        "sums-that-stand-nobody", "silodp/deploy/policy.py",
        "stands < limits.colluding:", "stands < 0:",
        "a server proposes sums that one silo which works for it can take apart",
        "tests/test_deploy_attacks.py::test_an_honest_plan_beyond_the_limits_is_refused",
    ),
    Mutant(
        "alone-of-one-record", "silodp/deploy/policy.py",
        "plan.config.privacy.delta, plan.together(index))", "plan.config.privacy.delta)",
        "a plan that protects several records together is held against a limit as if it protected one",
        "tests/test_deploy_mixer.py::test_what_is_left_alone_is_of_as_many_records_as_the_plan_protects_together",
    ),
    Mutant(
        "collusion-levels-believed", "silodp/deploy/certify.py",
        'if not same_levels(body["collusion"], left):', "if False:",
        "a certificate says that colluding sites learn nothing",
        "tests/test_deploy_sums.py::test_a_run_without_missing_sites",
    ),
    Mutant(
        "fewer-releases-believed", "silodp/deploy/certify.py",
        'least = right["count"] if surely_asked else 1', "least = 1",
        "a site whose ledger was put back after its last answer certifies what is left in it",
        "tests/test_deploy_sums.py::test_a_run_without_missing_sites",
    ),
    Mutant(
        "audit-imports-a-strangers-code", "silodp/cli.py",
        "            only_listed(outside)\n", "",
        "whoever looks at a stranger's answers runs the stranger's code",
        "tests/test_deploy_attacks.py::test_no_command_imports_what_a_strangers_run_names",
    ),
    Mutant(
        "answer-before-the-counter", "silodp/deploy/ledger.py",
        "        self.note_last()\n        return seen.reply\n", "        return seen.reply\n",
        "an answer leaves that a ledger from an older copy would not know of, and nobody would notice",
        "tests/test_deploy_ledger.py::test_the_counter_knows_of_an_entry_before_its_answer_leaves",
    ),
    Mutant(
        "counter-goes-back", "silodp/deploy/counter.py",
        "if known is None or known.seq < head.seq:", "if True:",
        "the counter forgets an entry, and a ledger from the copy before it is not noticed",
        "tests/test_deploy_ledger.py::test_the_counter_never_goes_back",
    ),
    Mutant(
        "deleted-run-forgotten", "silodp/deploy/chain.py",
        "sorted(rows.keys() | self.runs.keys())", "sorted(rows.keys() & self.runs.keys())",
        "a run is deleted from the ledger, and what it has spent may be spent again",
        "tests/test_deploy_guard.py::test_every_edit_of_the_budget_is_found",
    ),
    Mutant(
        "edited-ledger-worked-with", "silodp/deploy/office.py",
        "            self.ledger.check_unedited()\n", "            pass\n",
        "a guard works with a reservation that was edited",
        "tests/test_deploy_guard.py::test_every_edit_of_the_budget_is_found",
    ),
    Mutant(
        "shorter-ledger-believed", "silodp/deploy/vouch.py",
        "if before is not None and head.seq <= before.seq:", "if False:",
        "a site that was put back from a copy draws its noise again, and the others go on with it",
        "tests/test_deploy_ledger.py::test_other_sites_notice_a_folder_that_was_put_back_whole",
    ),
    Mutant(
        "peers-forgotten-between-runs", "silodp/deploy/desk.py",
        "witness.of_sites(ledger.peers())", "{}",
        "a site that was put back from a copy forgets an earlier run, and the others go on with it",
        "tests/test_deploy_ledger.py::test_other_sites_notice_in_the_next_run_that_a_folder_was_put_back",
    ),
    Mutant(
        "run-begins-twice", "silodp/deploy/chain.py",
        'self._follows(told is None, run, "it begins twice")', "True",
        "two entries after the last one empty a run, and what it has spent may be spent again",
        "tests/test_deploy_edits.py::test_entries_that_no_guard_writes_are_found",
    ),
    Mutant(
        "count-falls", "silodp/deploy/chain.py",
        "now.get(stream, NOTHING)[0] >= count", "True",
        "an entry after the last one says that less was released",
        "tests/test_deploy_edits.py::test_entries_that_no_guard_writes_are_found",
    ),
    Mutant(
        "a-stream-counted-twice", "silodp/deploy/chain.py",
        "len(now) == len(counted)", "True",
        "an entry after the last one holds a second line of a stream, which takes back what the first one counts",
        "tests/test_deploy_edits.py::test_entries_that_no_guard_writes_are_found",
    ),
    Mutant(
        "noise-grows-afterwards", "silodp/deploy/chain.py",
        " and rest == most[stream][1]", "",
        "an entry after the last one says that what was released had more noise",
        "tests/test_deploy_edits.py::test_entries_that_no_guard_writes_are_found",
    ),
    Mutant(
        "entries-beyond-the-counter", "silodp/deploy/book.py",
        "if head.seq > noted.seq + 1:", "if False:",
        "somebody appends entries to a ledger, and the counter's file does not say otherwise",
        "tests/test_deploy_edits.py::test_entries_that_no_guard_writes_are_found",
    ),
    Mutant(
        "counter-may-be-missing", "silodp/deploy/book.py",
        "if noted is None and head.seq:", "if False:",
        "without its counter a ledger from an older copy is not noticed",
        "tests/test_deploy_ledger.py::test_a_guard_that_was_killed_before_its_counter_had_an_entry_starts_again",
    ),
    Mutant(
        "reservation-of-somebody-else", "silodp/deploy/guard.py",
        "document is not None:\n        runs[", "document is not None and document.run not in runs:\n        runs[",
        "a run that somebody has begun in the ledger with nothing reserved costs nothing",
        "tests/test_deploy_edits.py::test_a_run_that_somebody_has_begun_with_nothing_is_charged_with_its_plan",
    ),
    Mutant(
        "edited-while-the-guard-works", "silodp/deploy/guard.py",
        "        self.ledger.check_unedited()  # what is decided here is decided by its rows\n", "",
        "a reservation is edited while the guard works, and a plan is taken that the total does not allow",
        "tests/test_deploy_edits.py::test_a_guard_that_works_and_an_operator_notice_edits",
    ),
    Mutant(
        "approved-on-an-edited-ledger", "silodp/deploy/approval.py",
        "        ledger.check_unedited()\n        if is_shuffler", "        if is_shuffler",
        "an operator approves a plan by a total that was edited",
        "tests/test_deploy_edits.py::test_a_guard_that_works_and_an_operator_notice_edits",
    ),
    Mutant(
        "peers-deleted", "silodp/deploy/ledger.py",
        "digest_of(peers) != told.peers", "False",
        "what was known of another site's ledger is deleted, and it may go back",
        "tests/test_deploy_ledger.py::test_other_sites_notice_in_the_next_run_that_a_folder_was_put_back",
    ),
    Mutant(
        "longer-ledger-believed", "silodp/deploy/vouch.py",
        "hash_at(own.seq)[:SHORT] != own.hash", "False",
        "a ledger that was put back and made longer draws its noise again, and nobody notices",
        "tests/test_deploy_ledger.py::test_a_ledger_that_was_put_back_and_made_longer_is_noticed",
    ),
    Mutant(
        "servers-word-of-the-last-entry", "silodp/deploy/desk.py",
        '        self.ledger.check_has(header.get("last"))\n', "",
        "an honest server knows an entry that was put back, and the guard does not listen",
        "tests/test_deploy_ledger.py::test_a_ledger_that_was_put_back_and_made_longer_is_noticed",
    ),
    Mutant(
        "server-believes-a-clone", "silodp/deploy/remote.py",
        "        if head[0] < least:", "        if False:",
        "two ledgers of one site answer in turn",
        "tests/test_deploy_ledger.py::test_a_server_notices_a_ledger_that_does_not_grow",
    ),
    Mutant(
        "kept-silo-takes-another-plan", "silodp/deploy/kept.py",
        "if (each.run, each.fingerprint) != (run, fingerprint):", "if False:",
        "a restarted silo takes a new plan and forgets what it has spent",
        "tests/test_deploy_state.py::test_a_kept_silo_gives_the_same_bytes_and_takes_no_other_plan",
    ),
    Mutant(
        "side-file-unchecked", "silodp/deploy/blobs.py",
        "if hashlib.sha256(data).hexdigest() != cell:", "if False:",
        "a silo goes on from a state that is not its own",
        "tests/test_deploy_ledger.py::test_a_file_that_changed_is_noticed",
    ),
    Mutant(
        "memory-ahead-of-the-disk", "silodp/deploy/desk.py",
        "self.ahead = not refused or self.silo.answered is not before", "self.ahead = False",
        "a silo whose answer could not be written goes on as if it had been",
        "tests/test_deploy_guard.py::test_a_ledger_that_cannot_be_written_sends_nothing",
    ),
    Mutant(
        "ledger-written-anew",
        "silodp/deploy/book.py",
        "            self._check_still_alone()\n",
        "",
        "runs are erased under a guard at work",
        "tests/test_deploy_edits.py::test_a_ledger_that_is_written_anew_under_a_guard_stops_it",
    ),
    Mutant(
        "two-copies-write-at-once",
        "silodp/deploy/book.py",
        "if not self.has(self.counter.note(head)):",
        "if self.counter.note(head) is None:",
        "copies of a ledger answer one question twice",
        "tests/test_deploy_edits.py::test_copies_with_one_counter_do_not_both_answer",
    ),
    Mutant(
        "older-state-restored",
        "silodp/deploy/desk.py",
        "row.counted and row.counted != self.counted(self.asked)",
        "False",
        "a state of before answers a question once more",
        "tests/test_deploy_edits.py::test_a_state_that_is_older_than_its_entries_answers_nothing",
    ),
]  # fmt: skip
