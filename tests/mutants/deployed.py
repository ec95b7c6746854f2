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
        "answer-before-the-counter", "silodp/deploy/ledger.py",
        "        self.note_last()\n        return seen.reply\n", "        return seen.reply\n",
        "an answer leaves that a ledger from an older copy would not know of, and nobody would notice",
        "tests/test_deploy_ledger.py::test_the_counter_knows_of_an_entry_before_its_answer_leaves",
    ),
    Mutant(
        "counter-goes-back", "silodp/deploy/ledger.py",
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
        "if edited := self.ledger.edited():", "if edited := self.ledger.edited() and []:",
        "a guard works with a reservation that was edited",
        "tests/test_deploy_guard.py::test_every_edit_of_the_budget_is_found",
    ),
    Mutant(
        "shorter-ledger-believed", "silodp/deploy/vouch.py",
        "if now[site] <= entries.get(site, -1):", "if False:",
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
]  # fmt: skip
