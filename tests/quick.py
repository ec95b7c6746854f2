"""Which cases of dear tests `make test` runs. The others are slow: they are tried by `make test-all`.

By file and test, patterns of the cases that stay; () leaves none. A pattern that fits no case is an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

# Of the conformance table, a row for every kind of loop, channel and batch.
SOME_RUNS = (
    "ce-psgm-shuffled", "diff2-bvr-l-sgd-untrusted", "diff2-gd-shuffled", "dp-gd-untrusted", "local-sgd-untrusted",
    "mb-psgm-trusted", "mu2-trusted", "prox-pl-svrg-untrusted", "sdp-spider-shuffled", "soteria-saga-untrusted",
    "soteria-saga-aggregated",
)  # fmt: skip
MORE_RUNS = ("dp-gd-shuffled", "dp-gd-trusted", "gd-untrusted", "prox-svrg-trusted", "sdp-prox-svrg-shuffled")
QUICK: dict[str, tuple[str, ...]] = {
    "test_algorithms::test_some_silos_may_be_absent": (
        "dp-sgd", "local-sgd", "mb-psgm", "prox-svrg", "sdp-spider", "soteria-saga", "spider-alt",
    ),
    "test_audit::test_a_difference_that_is_not_clipped_is_caught": ("untrusted",),
    "test_audit::test_a_doubled_local_level_is_caught": (),
    "test_audit::test_a_mask_that_hides_nothing_is_caught": (),
    "test_audit::test_a_randomizer_that_repeats_its_coins_is_caught": (),
    "test_audit::test_a_shuffler_that_keeps_the_order_is_caught": (),
    "test_audit::test_a_key_used_in_two_rounds_is_caught": ("trusted",),
    "test_audit::test_clean_code_passes": ("dp-gd-trusted", "diff2-gd-untrusted"),
    "test_audit::test_clipping_each_gradient_instead_of_the_difference_is_caught": ("<lambda>0",),
    "test_audit::test_forgotten_factor_two_of_replacement_is_caught": ("dp-sgd-untrusted",),
    "test_audit::test_noise_is_convicted_above_the_stated_factor_and_not_below": ("dp-gd-trusted",),
    "test_audit::test_two_level_noise_that_is_too_small_is_caught": (),
    "test_channels_randomizers::test_unbiased_with_the_stated_variance": ("5-*",),
    "test_channels_randomizers::test_halved_scale_is_caught_by_the_unbiasedness_test": ("*0", "*2"),
    "test_channels_shuffled::test_a_first_batch_is_released_once_and_settled": (),
    "test_channels_shuffled::test_a_record_of_one_pass_may_be_in_the_first_batch_too": ("True",),
    "test_conformance::test_message_mode_is_the_simulation": ("dp-gd-aggregated-None", "sdp-spider-shuffled-2"),
    "test_privacy_adaptive::test_a_run_is_covered_by_its_gaussian_at_every_epsilon": ("a few rounds", "shuffled"),
    "test_deploy_messages::test_a_header_tells_the_planned_size_of_a_batch_and_not_the_drawn_one": (
        "untrusted", "trusted",
    ),
    "test_deploy_messages::test_a_shuffled_round_has_no_more_messages_than_were_accounted_together": (
        "spider-*", "mb-psgm-options2-*", "ce-psgm-*",
    ),
    "test_gradients::test_both_engines_equal_the_float64_definition_near_and_far": (
        "coefficients0-regularised", "coefficients1-relu",
    ),
    "test_gradients::test_padding_and_non_finite_records_contribute_nothing": ("relu-structured", "embedding-general"),
    "test_habits::test_a_sweep_whose_rounds_call_lapack_ends": (),
    "test_habits::test_own_metrics_are_measured_in_every_row": (),
    "test_habits::test_silos_columns_are_those_of_each_silo_alone": (),
    "test_mu2_mnist::test_the_published_losses_are_reproduced": (),
    "test_readme::test_the_errata_are_those_of_the_table": (),
    "test_reproduce::test_a_description_makes_configs_that_can_be_accounted": (
        "quick-mu2-table1", "quick-spider-fig5", "quick-soteria-fig4", "quick-diff2-fig1",
    ),
    "test_reproduce_checks::test_the_whole_grids_of_the_papers_can_run": ("psgm-fig1",),
    "test_sensitivity_runs::test_no_release_of_a_run_moves_beyond_its_bound": ("mu2", "soteria-saga"),
    "test_whiten::test_auto_asks_for_the_moment_that_pays": ("*-123-*", "*-784-*", "*-30-*"),
    "test_whiten::test_messages_are_the_simulation": (),
    "test_audit::test_a_batch_drawn_too_often_is_caught": (),
    "test_audit::test_sums_with_too_few_coins_are_caught": (),
    "test_audit_real::test_batches_that_are_never_redrawn_are_caught": (),
    "test_audit_recorded::test_a_run_without_answers_says_how_to_keep_them": (),
    "test_channels_randomizers::test_level_is_eps0_and_not_less": ("*0", "*2"),
    "test_channels_shuffled::test_one_local_step_is_the_minibatch_method_and_the_certificate_has_three_levels": (),
    "test_compressors::test_bits_are_those_on_the_wire": ("*5*",),
    "test_conformance::test_resumes_bit_equal": (
        "local-sgd-untrusted", "mu2-trusted", "prox-pl-svrg-untrusted", "soteria-saga-aggregated",
    ),
    "test_conformance::test_runs_and_releases_what_it_declares": (*SOME_RUNS, *MORE_RUNS),
    "test_conformance::test_without_noise_and_clip_it_is_the_textbook_method": (
        "dp-gd-untrusted", "local-sgd-untrusted", "mu2-untrusted", "prox-svrg-untrusted", "soteria-saga-untrusted",
        "spider-untrusted",
    ),
    "test_data_pytrees::test_messages_are_the_simulation": (),
    "test_gradients::test_a_loss_may_close_over_what_is_stacked": (),
    "test_gradients::test_factors_sum_to_the_clipped_sum_and_can_be_replaced_one_by_one": (
        "embedding-structured",
    ),
    "test_gradients::test_stacked_silos_equal_silos_on_their_own_also_beside_non_finite_records": ("9-relu",),
    "test_habits::test_settings_of_different_names_have_programs_of_their_own": (),
    "test_habits::test_what_on_round_raises_stops_the_run_and_resume_goes_on": (),
    "test_plan::test_json_brings_the_same_plan": ("*-untrusted", "*-shuffled"),
    "test_prox::test_firmly_non_expansive": ("l1", "ball"),
    "test_prox::test_optimal_against_every_other_point": ("l1", "simplex"),
    "test_reproduce_files::test_the_files_in_the_docs_are_sound": (),
    "test_whiten::test_both_stages_share_the_budget_and_are_settled_together": ("untrusted",),
    "test_audit_recorded::test_nothing_that_is_not_public_is_kept": (),
    "test_data_pytrees::test_both_engines_agree": (),
    "test_sampling::test_places_are_those_of_nonzero": ("0.1-300", "*-51"),
    "test_audit_recorded::test_smaller_noise_is_convicted": (),
    "test_channels_shuffled::test_a_sweep_over_epsilon_is_one_program_with_the_noise_of_each": (),
    "test_data_pytrees::test_squares_of_whole_numbers_do_not_overflow_the_norm": ("*structured",),
    "test_fresh_coins::test_rounds_of_a_simulation_have_noise_of_their_own": ("untrusted",),
    "test_algorithms::test_soteria_with_the_identity_is_ldp_sgd": (),
    "test_algorithms::test_variance_reduction_on_all_records_is_gd_with_the_same_noise": (),
    "test_audit::test_the_first_stage_is_audited": (),
    "test_audit_recorded::test_an_interrupted_run_keeps_what_was_heard": (),
    "test_bundle::test_networks_numbers_and_bare_arrays_come_back_too": (),
    "test_data_pytrees::test_a_sweep_runs_and_predictions_have_the_targets_shape": (),
    "test_habits::test_a_private_selection_over_names_is_charged_for_the_mixture": (),
    "test_habits::test_own_metrics_in_a_sweep_can_choose_the_best": (),
    "test_outside::test_it_is_swept_and_accounted": (),
    "test_outside::test_it_runs_message_by_message": (),
    "test_reproduce::test_the_figure_is_drawn_in_the_formats_asked_for": (),
    "test_sweep::test_what_shapes_the_program_is_grouped": (),
    "test_algorithms::test_estimators_channels_compressors_and_prox_mix": ("dp-gd-*",),
    "test_audit_real::test_silos_in_processes_pass": (),
    "test_audit_recorded::test_more_answers_than_planned_are_convicted": (),
    "test_cli_deploy::test_the_plan_command_still_tells_what_would_be_run": (),
    "test_estimators::test_few_records_are_all_trained_on_unless_a_look_is_asked_for": (),
    "test_expect::test_numbers_alone_are_enough": (),
    "test_habits::test_figures_in_every_format_that_is_asked_for": (),
    "test_habits::test_histories_and_sweeps_as_tables": (),
    "test_models::test_a_cnn_takes_images_with_channels_first_or_last": (),
    "test_privacy_accountant::test_renyi_route_is_above_the_convolution": (),
    "test_privacy_accountant::test_trials_have_the_stated_mean": ("trials0",),
    "test_reproduce::test_one_column_alone_keeps_what_is_known_of_the_others": (),
    "test_sweep::test_parts_in_threads_give_each_setting_its_own_run": (),
    "test_whiten::test_the_average_of_the_last_iterates_is_the_result": (),
    "test_audit_recorded::test_honest_answers_pass_and_the_output_says_what_it_cannot_see": (),
    "test_certificate::test_the_noise_is_named_as_it_was_drawn": ("spider-*", "sdp-*"),
    "test_deploy_messages::test_a_killed_silo_ends_the_run_without_a_model_and_resume_goes_on": (),
    "test_deploy_missing::test_silos_whose_processors_round_differently_come_to_one_grid": ("aside0-*",),
    "test_deploy_state::test_a_restart_between_rounds_changes_no_bit": (),
    "test_docs::test_the_site_is_built_without_a_warning": (),
    "test_estimators::test_clone_pipeline_and_cross_validation_with_silos": (),
    "test_estimators::test_numbers_become_broken_lines_where_that_pays_and_nothing_else_is_asked_for": (),
    "test_gradients::test_engine_is_chosen_with_a_reason_and_agrees_with_the_general_one": (
        "shared_weight-*", "*layer4", "looked_up_beyond-*",
    ),
    "test_gradients::test_factors_of_a_regularised_loss_are_plain_gradients": (),
    "test_gradients::test_parameters_of_no_layer_are_clipped_with_the_others": ("difference-norm",),
    "test_outside::test_a_part_from_outside_runs_and_is_certified": ("scaffold*", "topk"),
    "test_reproduce::test_nothing_is_run_twice_unless_its_description_changed": (),
    "test_server::test_an_optimiser_changes_the_path_and_not_the_cost": ("spider",),
    "test_shuffle_binomial::test_a_poisson_share_of_coins_is_no_worse_than_a_gaussian_one": ("0.1-*",),
    "test_twins::test_where_nothing_is_clipped_a_regulariser_may_be_in_or_out": ("mu2-*", "local-sgd-*"),
    "test_advice::test_a_run_tells_what_is_unsafe": ("epsilon", "delta"),
    "test_algorithms::test_absent_silos_are_not_charged": ("mb-psgm-*",),
    "test_algorithms::test_bvr_with_one_local_step_is_diff2": ("untrusted",),
    "test_algorithms::test_measurements_cut_into_pieces_count_every_record_once": ("7",),
    "test_audit_shuffled::test_shuffled_count_stays_within_the_claim_and_catches_a_doubled_level": (),
    "test_audit_stages::test_a_stages_noise_that_is_too_small_is_caught": ("middle_row-*",),
    "test_channels_randomizers::test_every_number_of_a_microbatch_is_its_own": ("PrivUnitG",),
    "test_data_pytrees::test_images_of_whole_numbers_are_clipped": ("4",),
    "test_equivalences::test_a_batch_of_all_records_is_full_batch": ("fixed",),
    "test_equivalences::test_diff2_that_restarts_every_round_is_dp_gd": ("untrusted",),
    "test_equivalences::test_silos_that_are_asked_a_few_at_a_time_give_the_same_mean_accounts_and_bits": ("untrusted",),
    "test_estimators::test_a_range_is_found_privately_and_a_tenth_is_held_out_for_a_private_look": (),
    "test_fresh_coins::test_silos_of_a_simulation_have_noise_of_their_own": (),
    "test_gradients::test_a_penalty_is_part_of_what_is_clipped": ("structured",),
    "test_gradients::test_memory_does_not_grow_with_records_times_parameters": ("coefficients1",),
    "test_gradients::test_nearly_opposite_lookups_of_one_row_are_clipped_by_their_sum": (),
    "test_gradients::test_vmap_over_silos_and_settings_inside_a_compiled_loop": ("structured-9",),
    "test_inclusion::test_a_silo_passes_the_step_and_the_stream_on_to_its_batches": ("fixed",),
    "test_models::test_every_kind_trains_predicts_and_gets_the_structured_engine": ("mlp", "cnn"),
    "test_audit_real::test_low_bits_of_naive_noise_tell_the_data_sets_apart": ("8.0",),
    "test_privacy_accountant::test_masked_covers_every_spread": ("1",),
    "test_privacy_golden::test_local_steps": ("2000-*",),
    "test_prox::test_vmap_and_traced_strengths_agree_with_single_calls": ("l1", "simplex"),
    "test_randomness::test_seeded_numbers_are_those_of_jax_random": ("shape2",),
    "test_reproduce::test_results_of_another_description_are_not_shown": (),
    "test_reproduce_checks::test_the_columns_are_those_of_a_history": ("regression-linear",),
    "test_reproduce::test_the_settings_chosen_are_shown_and_marked_at_an_end_of_their_grid": (),
    "test_selection::test_the_number_of_trials_is_shown_nowhere": (),
    "test_twins_batches::test_spider_with_two_sizes_of_batches_absent_silos_and_adam": (),
    "test_server::test_the_operator_of_a_sum_is_the_minimum_of_the_sum": ("parts0", "parts2"),
    "test_shuffle_binomial::test_without_a_clip_norm_nothing_is_sent": ("nan",),
    "test_theorems::test_a_theorem_is_named_only_where_its_conditions_hold": (
        "*options[0-57-9]-*", "*options1[0-24-9]-*", "*options2?-*", "*options3[0-37-9]-*",
    ),
    "test_twins_batches::test_cdp_sgd_compresses_what_it_sends": (),
    "test_weights::test_a_weight_counts_after_the_clip": ("general",),
    "test_weights::test_no_weight_moves_a_sum_beyond_its_bound": ("1.0-structured", "*-general"),
    "test_arithmetic::test_a_statistic_of_any_type_of_number_is_clipped": ("int32-50000", "int8-16", "float16-*"),
    "test_drawn_records::test_a_record_that_is_drawn_moves_a_poisson_batch_by_half_the_bound": (
        "*-statistic", "1893-structured",
    ),
    "test_drawn_records::test_another_record_of_a_fixed_batch_moves_it_by_no_more_than_the_bound": ("statistic",),
    "test_mixed_networks::test_no_record_moves_the_sum_of_a_mixed_network_beyond_its_bound": (
        "tokens-difference", "images-value", "shared-value",
    ),
    "test_sensitivity::test_no_release_moves_beyond_its_bound": (
        "difference-fixed-general", "difference-poisson-structured", "value-poisson-general", "value-full-structured",
    ),
    "test_worst_neighbours::test_a_gradient_that_rounding_turns_does_not_exceed_the_bound_of_svrg": ("structured",),
    "test_worst_neighbours::test_the_bound_is_reached_and_never_exceeded": ("soteria-saga-*",),
    "test_whiten::test_squares_are_clipped_sums_and_move_by_at_most_their_bound": ("3", "256"),
}  # fmt: skip


def unfit(cases: Iterable[tuple[str, str]]) -> list[str]:
    """Patterns of tests that were collected, but that fit none of their cases."""
    found: dict[str, list[str]] = {}
    for name, case in cases:
        found.setdefault(name, []).append(case)
    return [
        f"{name}[{pattern}]"
        for name, own in found.items()
        for pattern in QUICK.get(name, ())
        if not any(fnmatchcase(case, pattern) for case in own)
    ]


def is_slow(name: str, case: str) -> bool:
    return name in QUICK and not any(fnmatchcase(case, pattern) for pattern in QUICK[name])
