"""Sentences of the interfaces that promise something, each with the checks of the kit that hold a plugin to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

ALGORITHM: Final[Mapping[str, Sequence[str]]] = {
    "sample selection, advantages and losses as pure functions on tensors": (
        "advantages_repeat",
        "a_second_call_gives_the_same",
        "the_step_is_left_as_it_was",
        "the_micro_batch_is_left_as_it_was",
        "losses_leave_their_inputs",
        "what_it_gets_is_not_kept",
        "global_random_generators_are_left_alone",
    ),
    "Inputs that the loop must prepare for an algorithm; anything else is not computed.": (
        "needs_stay_the_same",
        "what_advantages_read_is_declared",
        "what_losses_read_is_declared",
        "what_is_needed_is_used",
    ),
    "Whether it compares several completions of a prompt: ``group_size`` must be at least 2.": (
        "comparing_completions_is_declared",
        "what_is_needed_is_used",
    ),
    "Whether it reads ``ref_logprobs``, which need a frozen copy of the initial policy.": (
        "what_is_needed_is_used",
        "the_reference_term_has_a_gradient",
    ),
    "Whether it reads ``values``, of a critic that :meth:`Algorithm.value_loss` trains.": (
        "what_is_needed_is_used",
        "every_token_learns",
    ),
    "Whether its loss needs the entropy's gradient; otherwise entropy is a metric only.": (
        "an_entropy_term_is_declared",
        "what_is_needed_is_used",
    ),
    "A loss divides its sums by these, never by a count of its own micro-batch.": (
        "losses_divide_by_the_denominators",
    ),
    "The losses of all micro-batches on all ranks then add up to the same loss and gradients for every split.": (
        "micro_batches_add_up",
    ),
    "One of the first two fields is given.": ("advantages_can_be_computed", "advantages_are_well_formed"),
    "Numbers over the whole step, the same on every rank: ``batch.step`` computes them.": (
        "ranks_get_what_one_rank_gets",
        "ranks_stay_alike_from_step_to_step",
    ),
    "All tensors but ``per_token`` are float32 scalars.": ("losses_are_well_formed",),
    "the loop adds them up over micro-batches and ranks, as it does the loss.": (
        "micro_batches_add_up",
        "metrics_have_the_same_names_everywhere",
    ),
    "Numbers of each token for the token log, bool or float [K], which no gradient follows": (
        "other_rows_of_tokens_follow_their_rows",
    ),
    ":meth:`advantages` of a group depend on no other group, but for its metrics;": (
        "groups_of_a_streamed_step_stand_alone",
    ),
    ":meth:`loss` is proportional to ``1 / max(denominators.<this count>, 1)``, and depends on no other count;": (
        "streamed_losses_have_one_divisor",
    ),
    "the metrics of :meth:`loss` are means over tokens, divided by ``denominators.num_tokens``.": (
        "streamed_losses_have_one_divisor",
    ),
    "There is one optimizer step a rollout, and no critic.": ("groups_of_a_streamed_step_stand_alone",),
    "Largest number of extra rounds of prompts in a step, which replace groups that :meth:`select` left empty.": (
        "selected_samples_are_the_groups",
    ),
    "Check the algorithm's options against the run, before any model is loaded; another run has another object.": (
        "a_run_is_refused_or_served",
        "runs_do_not_share_their_options",
    ),
    "Return which of a prompt's scored samples train.": (
        "selected_samples_are_the_groups",
        "selection_leaves_samples_alone",
    ),
    "in no order that an algorithm may rely on: a random draw is seeded by the run's seed, the step and "
    "``group[0].group``.": (
        "selected_samples_are_the_groups",
        "selection_knows_no_other_group",
        "steps_repeat_in_another_process",
    ),
    "A rank may have none.": ("a_rank_without_completions_is_served", "ranks_get_what_one_rank_gets"),
    "whose methods all ranks must call in the same order": ("ranks_get_what_one_rank_gets",),
    "Those with ``reward_valid`` false must neither count in a statistic nor get an advantage.": (
        "failed_rewards_do_not_count",
        "a_step_without_rewards_is_finite",
    ),
    "K is 0 where a rank has no rows left, and the loss 0.": ("a_filler_adds_nothing", "every_loss_reaches_its_model"),
    "Return the critic loss of a micro-batch, as a term of the mini-batch's; called when ``needs.critic``.": (
        "losses_can_be_computed",
        "every_token_learns",
    ),
    "Observe the metrics of a step, the same on every rank, for example to adapt a coefficient.": (
        "steps_of_a_run_can_be_taken",
    ),
    "Return the algorithm's state for a checkpoint: numbers, strings, and lists and dicts of them.": (
        "the_state_is_plain",
        "the_state_is_of_its_moment",
    ),
    "Restore the state that :meth:`state_dict` returned.": (
        "a_resumed_run_goes_on_as_it_would_have",
        "a_late_resume_goes_on_as_it_would_have",
    ),
}
OPTIMIZATION: Final[Mapping[str, Sequence[str]]] = {
    "One change that an optimisation made, described so that a user can check it": (
        "it_takes_effect",
        "effects_are_the_expected_ones",
    ),
    "One without an effect stops the run.": (
        "it_takes_effect",
        "an_effect_is_in_the_model",
        "what_it_marks_is_read",
    ),
    "Return the changes that were made, counted on this model, after both edits.": (
        "without_a_model_it_claims_no_effect",
        "a_second_model_has_the_same_effects",
        "blocks_are_counted_on_the_model",
    ),
    "Each model of ``applies_to`` that the run has gets a copy of its own.": (
        "it_can_be_copied",
        "two_models_do_not_share",
        "the_plain_path_is_left_as_it_was",
    ),
    "modules can be replaced and methods wrapped, but values can be neither read nor set.": (
        "a_sync_sends_the_same_weights",
        "parameters_and_checkpoints_are_the_same",
    ),
    "Models that it changes, an instance perhaps fewer.": ("its_claims_are_well_formed", "a_critic_learns_alike"),
    "A reference policy runs forward only.": ("a_reference_has_the_same_values",),
    "Class names of optimisations that this one excludes, each with the reason": ("its_claims_are_well_formed",),
    "Whether a GPU run leaves it out when the memory plan fits without it.": (
        "its_claims_are_well_formed",
        "claims_are_the_expected_ones",
    ),
    "Return the properties of the training step with this optimisation; unchanged by default.": (
        "its_claims_are_well_formed",
        "claimed_memory_is_saved",
        "plans_are_the_expected_ones",
    ),
    "Edit the whole model, before its parameters are sharded.": (
        "building_changes_nothing_else",
        "values_equal_the_plain_path",
        "gradients_equal_the_plain_path",
        "micro_batches_add_up",
        "micro_batches_of_a_row_add_up",
        "a_pass_of_no_tokens_adds_nothing",
        "other_requests_equal_the_plain_path",
        "measured_entropies_have_no_gradient",
        "other_rows_of_one_size_equal_the_plain_path",
        "gradients_grow_with_the_loss",
        "passes_without_gradients_keep_nothing",
        "an_export_is_the_same",
        "long_rows_equal_the_plain_path",
        "bfloat16_is_as_exact_as_the_plain_path",
        "adapters_learn_alike",
        "large_activations_equal_the_plain_path",
        "a_bias_of_the_output_layer_counts",
        "an_output_layer_in_bfloat16_is_as_exact",
        "drawn_passes_equal_the_plain_path",
    ),
    "Edit the sharded model.": (
        "a_step_changes_the_weights_alike",
        "later_steps_change_the_weights_alike",
        "values_after_a_step_equal_the_plain_path",
        "passes_leave_nothing_behind",
        "a_resume_repeats_the_next_step",
        "each_rank_reports_the_same",
        "it_works_with_another_optimization",
    ),
}
PROMISED: Final[Mapping[str, tuple[str, Mapping[str, Sequence[str]]]]] = {
    "algorithm": ("rlplug.interfaces.algorithm", ALGORITHM),
    "optimization": ("rlplug.interfaces.optimization", OPTIMIZATION),
}
"""By kind: the module whose docstrings have the sentences, and the checks of each, without ``test_``."""
OF_EVERY_PLUGIN: Final[Mapping[str, Sequence[str]]] = {
    "A call leaves the process, its threads, and files of others as they were.": (
        "the_process_is_left_as_it_was",
        "steps_leave_nothing_behind",
    ),
    "The same input gives the same result in another process, after a pickle, and in another order.": (
        "steps_repeat_in_another_process",
        "a_pickled_algorithm_goes_on_alike",
        "drawn_steps_are_resumed_and_split",
        "the_order_within_a_group_does_not_matter",
        "numbers_of_groups_do_not_matter",
    ),
    "Any size and any value that a run may bring gives finite numbers.": (
        "long_completions_are_served",
        "a_single_completion_is_served",
        "large_rewards_stay_finite",
        "gradients_are_finite_at_extreme_ratios",
    ),
    "It does what its kind is for.": (
        "better_completions_become_more_likely",
        "equal_rewards_have_no_advantage",
        "the_reference_holds_the_policy_back",
        "a_term_of_the_entropy_raises_it",
        "values_move_towards_their_targets",
        "the_last_target_is_of_the_reward",
        "a_move_the_wrong_way_is_undone",
        "the_loss_follows_the_advantages",
        "numbers_of_a_token_are_used_at_that_token",
        "small_changes_of_logprobs_are_seen",
        "small_changes_of_rewards_are_seen",
    ),
    "It computes what its author says that it computes.": ("worked_examples_come_out",),
    "A configuration that makes no sense is refused before a run begins.": (
        "options_are_taken_or_refused",
        "wrong_options_are_refused",
        "defaults_are_the_documented_ones",
    ),
}
"""What no interface says in a sentence of its own, and every kind promises."""
