"""Seeded bugs of sums and noise in real arithmetic."""

# ruff: noqa: E501 (a patch is quoted as it stands)
from __future__ import annotations

from tests.mutants.harness import Mutant

NOISE, SUMS = "silodp/noise.py", "tests/rounding/test_arithmetic.py::"
DRAWN = "tests/rounding/test_drawn_records.py::"
REAL = DRAWN + "test_a_real_batch_has_each_record_in_each_slot_as_often_as_any_other"
DRAWS = "tests/test_noise.py::"
BOUNDARY = DRAWS + "test_a_boundary_within_the_word_is_decided_by_further_bits"
TAILS = DRAWS + "test_tails_beyond_five_standard_deviations"
EVERY = DRAWS + "test_every_draw_is_the_slow_exact_one"

ARITHMETIC = [
    # --- sums over records ---
    Mutant(
        "one-long-run", "silodp/gradients/blocks.py", "RUN = 256", "RUN = 1 << 20",
        "records are rounded against all others", SUMS + "test_crafted_neighbours_do_not_move_a_sum_beyond_its_bound[general-25000-32]",
    ),
    Mutant(
        "pairs-of-any-length", "silodp/gradients/blocks.py", "min(max(1, PAIRED // run).bit_length() - 1, (len(sums) - 1).bit_length())", "(len(sums) - 1).bit_length()",
        "sums of runs are rounded against all others", SUMS + "test_pairs_are_of_no_more_records_than_the_proof_has[24-256]",
    ),
    Mutant(
        "long-pairs", "silodp/gradients/blocks.py", "PAIRED = 8 * RUN", "PAIRED = 64 * RUN",
        "sums of runs are rounded against all others", SUMS + "test_what_is_proven_fits_the_slack",
    ),
    Mutant(
        "slack-forgotten", "silodp/gradients/blocks.py", "SLACK = 2.0**-7", "SLACK = 2.0**-12",
        "rounding is not part of the bound", SUMS + "test_what_is_proven_fits_the_slack",
    ),
    Mutant(
        "products-contracted", "silodp/doubles.py", "return jnp.where(value == value, value, jnp.inf)", "return value",
        "what is added to a sum depends on the sum", SUMS + "test_products_are_rounded_before_they_are_added",
    ),
    Mutant(
        "drawn-side-by-side", "silodp/sampling.py", "        rows = silo.randomness.scattered(f\"batch/{purpose}\", rows, step)\n", "",
        "a record that is drawn moves others to other slots", REAL + "[SystemRandomness-FixedSize]",
    ),
    Mutant(
        "slots-in-order", "silodp/randomness.py", "return rows[_draw(_system_order, rows.shape, jnp.int32)]", "return rows",
        "a record that is drawn moves others to other slots", REAL + "[SystemRandomness-Poisson]",
    ),
    Mutant(
        "shared-slots-in-order", "silodp/randomness.py", "return self.source.scattered(purpose, rows, step)  #", "return rows  #",
        "a record that is drawn moves others to other slots", REAL + "[SharedBatch-Poisson]",
    ),
    Mutant(
        "ties-keep-their-order", "silodp/randomness.py", "if (np.diff(words[order]) > 0).all():", "if True:",
        "words that tie favour the slots of some", DRAWN + "test_an_order_with_words_that_tie_is_drawn_again",
    ),
    Mutant(
        "drawn-squares-nearer", "silodp/sampling.py", "return MOVES if drawn else moves", "return moves",
        "a batch without the record is as far as the record is long", DRAWN + "test_a_drawn_square_is_no_nearer_to_a_batch_without_it_than_any_vector",
    ),
    Mutant(
        "overflow-forgotten", "silodp/privacy/kinds.py", "return OVERFLOW if self.sampling_rate < 1 else 0.0", "return 0.0",
        "a batch that is cut has another law", "tests/test_privacy_accountant.py::test_batches_that_are_too_large_for_their_slots_are_part_of_delta[kind0]",
    ),
    Mutant(
        "drawn-points", "silodp/releases.py", "        self._check_points()\n", "",
        "three terms' roundings on both sides of one clip norm", SUMS + "test_a_drawn_batch_of_more_points_than_the_proof_has_is_refused",
    ),
    Mutant(
        "tables-of-large-batches", "silodp/sampling.py", "        _check_sum(name, self.batch, self.most_drawn)\n", "",
        "changes of a table's sum that its proof does not count", SUMS + "test_a_sum_that_is_too_long_for_the_proof_is_refused[rule8-131072]",
    ),
    Mutant(
        "penalties-of-any-length", "silodp/gradients/structured.py", "check_length(weights.shape[-1], MOST_OF_FEWER,", "check_length(0, MOST_OF_FEWER,",
        "what is summed beside a penalty is longer", SUMS + "test_a_long_sum_with_a_penalty_inside_is_refused",
    ),
    Mutant(
        "drawn-batches-of-any-length", "silodp/sampling.py", "    _check_sum(name, batch, MOST_OF_FEWER)\n", "    _check_sum(name, batch)\n",
        "one clip norm has both roundings beside it", SUMS + "test_a_sum_that_is_too_long_for_the_proof_is_refused",
    ),
    Mutant(
        "empty-slots-decide", "silodp/gradients/structured.py", "computed_once([keep_only(layer, kept) for layer in numbers])", "computed_once(numbers)",
        "a record that takes the last free slot turns its block to another program", SUMS + "test_an_empty_slot_does_not_decide_how_its_block_is_summed",
    ),
    Mutant(
        "share-of-nearly-all", "silodp/sampling.py", "        return self.rate >= 1\n", "        return jnp.float32(self.rate) >= 1\n",
        "a record that is always drawn is accounted as sampled", "tests/test_sampling.py::test_a_share_just_below_one_still_tosses_coins",
    ),
    Mutant(
        "low-half-dropped", "silodp/doubles.py", "return normal(high, self.low + rest)", "return normal(high, self.low)",
        "runs are added in float32", "tests/rounding/test_long_memories.py::test_the_outer_sum_of_the_most_records_is_off_by_no_more_than_is_proven",
    ),
    Mutant(
        "rest-of-few-blocks-dropped", "silodp/gradients/blocks.py", "return Double(high, total.low + rest)", "return Double(high, total.low)",
        "blocks are added in float32", SUMS + "test_a_sum_of_few_blocks_that_cancels_keeps_twice_the_digits",
    ),
    Mutant(
        "tokens-clipped-apart", "silodp/gradients/factors.py", "return lax.fori_loop(0, jnp.max(count), move, cotangents)", "return cotangents",
        "what one row's tokens do together is not what is clipped", SUMS + "test_tokens_of_one_row_are_added_before_they_are_clipped",
    ),
    Mutant(
        "penalty-cancels", "silodp/gradients/structured.py", "CANCELLED, PENALISED_RUN = 1 / 4", "CANCELLED, PENALISED_RUN = 1 / 100",
        "large gradients that a penalty cancels are rounded", SUMS + "test_what_is_proven_fits_the_slack",
    ),
    Mutant(
        "sums-of-any-length", "silodp/sampling.py", "    if records > most:\n        raise ValueError(", "    if False:\n        raise ValueError(",
        "sums longer than the proof", SUMS + "test_a_sum_that_is_too_long_for_the_proof_is_refused",
    ),
    Mutant(
        "two-level-slack-of-one-sum", "silodp/sampling.py", "+ SLACK * (2 * in_batch + in_all)", "+ SLACK * in_all",
        "three sums are rounded, one is counted", "tests/rounding/test_worst_neighbours.py::test_the_noise_is_scaled_to_the_bound_that_is_accounted",
    ),
    Mutant(
        "epsilon-rounded-down", "silodp/digits.py", "digits, ROUND_CEILING)", "digits, ROUND_FLOOR)",
        "a printed epsilon is less than the real one", "tests/test_digits.py",
    ),
    Mutant(
        "noise-halved", "silodp/channels/channel.py", "release.exact, std, step)", "release.exact, std / 2, step)",
        "half of the noise", "tests/test_fresh_coins.py::test_a_silo_adds_noise_of_its_own_multiplier_and_counts_it[Untrusted]", quick=True,
    ),
    Mutant(
        "floor-of-noise-forgotten", "silodp/channels/channel.py", "jnp.maximum(release.bound, SMALLEST_BOUND)", "release.bound",
        "what float32 flushes to zero leaves without noise", "tests/test_digits.py::test_a_bound_that_vanishes_still_gets_noise",
    ),
    Mutant(
        "bound-below-zero-certified", "silodp/channels/channel.py", "jnp.where(bound < 0, jnp.nan, ", "jnp.where(bound < 0, jnp.inf, ",
        "a release that no noise fits is certified", "tests/test_outside.py::test_a_clip_below_zero_is_an_error[trusted]",
    ),
    Mutant(
        "parts-one-by-one", "silodp/doubles.py", "            return self + Double.of(parts).halved()", "            return Double.of(self.high + parts[0]).plus(parts[1:])",
        "a long sum is rounded once for every part", SUMS + "test_several_parts_are_added_to_each_other_before_they_meet_a_long_sum",
    ),
    Mutant(
        "any-number-of-points", "silodp/gradients/__init__.py", "if len(points) > MOST_POINTS:", "if False:",
        "more roundings than the slack has room for", SUMS + "test_more_points_than_the_proof_has_are_refused",
    ),
    Mutant(
        "features-computed-twice", "silodp/gradients/structure.py", "not (data.depends or data.computed)", "not data.depends",
        "what is clipped is not what is added", SUMS + "test_what_a_record_computes_before_its_first_layer_is_computed_once",
    ),
    Mutant(
        "loop-removed", "silodp/gradients/blocks.py", "for leaf in jax.tree.leaves(vectors)])", "for leaf in jax.tree.leaves(vectors)[:1]])",
        "what is clipped is not what is added", SUMS + "test_no_compiler_removes_the_loop_that_computes_once[structured]",
    ),
    Mutant(
        "penalty-computed-twice", "silodp/gradients/__init__.py", "penalty = computed_once(general", "penalty = (general",
        "what is clipped is not what is added", SUMS + "test_a_penalty_is_computed_once",
    ),
    Mutant(
        "padding-shows-the-undrawn", "silodp/sampling.py", "mode=\"fill\", fill_value=0)", "mode=\"clip\")",
        "a record that was not drawn has a say in the sum", "tests/test_sampling.py::test_padding_shows_no_record_that_was_not_drawn",
    ),
    Mutant(
        "underflown-products-forgotten", "silodp/gradients/factors.py", "return jnp.maximum(of_outputs * of_inputs, 0) + lost", "return jnp.maximum(of_outputs * of_inputs, 0)",
        "what underflow takes from the products of a combination's terms is not in the norm", SUMS + "test_products_of_terms_that_underflow_count_as_the_largest_they_may_have_been",
    ),
    Mutant(
        "leaves-not-clipped", "silodp/gradients/factors.py", "return _square_rows(self.weight) + (0 if self.bias is None else _square_rows(self.bias))", "return 0.0 * _square_rows(self.weight)",
        "parameters that are kept do not count in the norm", "tests/rounding/test_mixed_networks.py::test_no_record_moves_the_sum_of_a_mixed_network_beyond_its_bound[shared-value]",
    ),
    Mutant(
        "mu2-sum-in-float32", "silodp/algorithms/mu2.py", "silo.memory = silo.memory + s.exact", "silo.memory = Double.of(silo.memory.high + s.value)",
        "a running sum rounds neighbours apart", "tests/rounding/test_long_memories.py::test_a_running_sum_of_many_rounds_moves_by_no_more_than_its_bound",
    ),
    Mutant(
        "table-never-renewed", "silodp/algorithms/soteria.py", "old = table.age >= RENEWED if silo.alone", "old = jnp.bool_(False) if silo.alone",
        "the rounding of a table's sum grows for ever", "tests/rounding/test_long_memories.py::test_sagas_estimates_move_by_no_more_than_their_bound_over_all_refreshes",
    ),
    # --- the exact Gaussian ---
    Mutant("no-doubt", NOISE, "> 0.5 - (ERROR * spread + BEYOND)", "> 0.5", "float64 decides what it cannot know", BOUNDARY),
    Mutant("too-little-doubt", NOISE, "ERROR = 2.0**-37", "ERROR = 2.0**-60", "an error bound that does not hold", BOUNDARY),
    Mutant("no-far-tail", NOISE, "    unsure |= tail < SMALLEST_TAIL\n", "", "the tail ends at five standard deviations", TAILS),
    Mutant("half-a-word", NOISE, "tail = words ^ (words >> 63)  #", "words = words & ~0xFFFFFFFF; tail = words ^ (words >> 63)  #", "32 bits for 64", BOUNDARY),
    Mutant("one-sided", NOISE, "np.copysign(special.ndtri(place, out=place), words.view(np.float64), out=place)", "special.ndtri(place, out=place)", "noise of one sign", EVERY),
    Mutant("tail-doubled", NOISE, "SMALLEST_TAIL), 2.0**-WORD, out", "SMALLEST_TAIL), 2.0**-63, out", "half of the noise", EVERY),
    Mutant("a-step-beside", NOISE, "Fraction(2 * k + 1, 2)", "Fraction(2 * k - 1, 2)", "decided against the wrong boundary", TAILS),
    Mutant("same-bits-again", NOISE, "self.tail << WORD | int(self.entropy.words(1)[0]) % 2**WORD", "self.tail << WORD | (1 << 63)", "further bits are not drawn", BOUNDARY),
    Mutant("few-digits", NOISE, "precision = size * size / 2, bits + WORD", "precision = size * size / 2, 53", "the exact way is not exact", DRAWS + "test_close_to_a_boundary_the_exact_answer_is_taken"),
    Mutant("less-noise", NOISE, "spread = std / step", "spread = 0.995 * std / step", "noise half a percent too small", EVERY),
    Mutant("key-for-ever", NOISE, "        self.left -= count\n", "", "a key is used for ever", DRAWS + "test_a_key_is_given_up_after_a_while"),
    Mutant("fork-repeats", NOISE, "stream.process != _process() or ", "", "a forked process repeats its parent's noise", DRAWS + "test_a_forked_process_repeats_no_word"),
    Mutant("known-key", NOISE, "return os.urandom(32)", "return bytes(32)", "everybody knows the noise", DRAWS + "test_a_forked_process_repeats_no_word"),
    Mutant("threads-share", NOISE, "threading.local()", "type('Own', (), {})()", "two threads draw the same words", DRAWS + "test_threads_share_no_key_and_no_words"),
    Mutant("silent-noise", NOISE, "std > 0)", "std >= 0)", "a release without noise", DRAWS + "test_what_has_no_exact_answer_is_refused"),
    Mutant("near-rows-kept", NOISE, "        drawn[left[sure]] = rows[sure]\n        left = left[~sure]", "        drawn[left] = rows\n        left = left[:0]", "a message near a boundary is sent", "tests/test_channels_randomizers.py::test_rows_near_a_boundary_are_drawn_again"),
    Mutant("mu2-rest-dropped", "silodp/algorithms/mu2.py", ', "value", rest=silo.memory.low)', ', "value")', "the running sum is rounded to float32", SUMS + "test_mu2_releases_both_halves_of_its_running_sum"),
    Mutant("norm-rounding-forgotten", "silodp/gradients/blocks.py", " * (1 + (addends / 2 + 8) * UNIT)", "", "a norm is taken for less than it is", SUMS + "test_a_norms_own_rounding_is_counted_against_its_record"),
    Mutant("underflow-forgotten", "silodp/gradients/blocks.py", "SMALLEST_SQUARE = 1e-30", "SMALLEST_SQUARE = 0.0", "squares that vanish count as no length", SUMS + "test_a_norm_that_may_have_underflown_counts_as_the_largest_that_could_have"),
    Mutant("shifted-norm-rounding-forgotten", "silodp/gradients/structured.py", "(1 + 2 * (_addends(layers) + 8) * UNIT) * apart", "apart", "a penalised norm is taken for less than it is", SUMS + "test_the_worst_rounding_of_a_penalised_norm_is_counted_against_its_record"),
    Mutant("distance-floor-forgotten", "silodp/core.py", "jnp.where(length < 1e-15, 0.0, length)", "length", "clip norms that underflow", SUMS + "test_points_that_float32_cannot_tell_apart_have_no_distance"),
    Mutant("errors-of-jax-passed-on", "silodp/deploy/silo.py", "except jax.errors.JaxRuntimeError:  # its text may quote numbers: not passed on\n            raise Refused(f\"query {name!r} of round {round}: no noise could be drawn; nothing was sent\") from None", "except jax.errors.JaxRuntimeError as error:\n            raise Refused(str(error)) from None", "an error's text may quote numbers", "tests/test_deploy_messages.py::test_an_error_of_the_compiled_program_is_not_passed_on"),
    Mutant("squares-move-less", "silodp/sampling.py", "SQUARES_MOVE = 2**0.5 + 2 * SLACK", "SQUARES_MOVE = 1 + 2 * SLACK", "a second moment moves further than its bound", "tests/test_whiten.py::test_squares_are_clipped_sums_and_move_by_at_most_their_bound[3]"),
    Mutant("whitened-again", "silodp/deploy/silo.py", "        if told != name:", "        if False:", "a stage is entered twice, its questions are fresh again", "tests/test_whiten.py::test_a_silo_goes_through_its_stages_once_and_in_order"),
    Mutant("vectors-computed-twice", "silodp/gradients/blocks.py", "    return lax.fori_loop(0, turns, lambda _, kept: jax.tree.map(rounded, kept), vectors)", "    return vectors", "the norm of one vector clips another", "tests/rounding/test_arithmetic.py::test_gradients_that_a_combination_cancels_do_not_move_its_sum_beyond_its_bound"),
    Mutant("long-chunks", "silodp/sampling.py", "        _check_sum(name, self.chunk or records // self.rounds)\n", "", "a chunk of one pass is longer than the proof allows", "tests/rounding/test_arithmetic.py::test_a_sum_that_is_too_long_for_the_proof_is_refused"),
    Mutant("long-running-sums", "silodp/sampling.py", "if self.rounds**2 * chunk > MOST_ADDED:", "if self.rounds > MOST_ADDED:", "a running sum is added up longer than the proof allows", "tests/rounding/test_arithmetic.py::test_a_running_sum_of_too_many_rounds_for_the_proof_is_refused"),
    Mutant("small-blocks", "silodp/gradients/blocks.py", "if size < SMALLEST_BLOCK:", "if False:", "more additions of blocks than the proof allows", "tests/rounding/test_arithmetic.py::test_a_sum_of_blocks_that_are_too_small_for_the_proof_is_refused"),
    Mutant("coarse-tails", "silodp/noise.py", "tails = ((entropy.words(count) & LARGEST) + more) * 2.0 ** (1 - WORD)", "entropy.words(count)\n    tails = more", "beyond a far threshold a randomizer has few values", "tests/test_channels_randomizers.py::test_far_out_a_component_has_as_many_values_as_anywhere"),
]  # fmt: skip
