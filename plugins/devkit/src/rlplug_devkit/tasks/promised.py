"""Sentences that promise something of rewards, environments and sources, each with the checks that hold them to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

REWARD: Final[Mapping[str, Sequence[str]]] = {
    "Factor of this reward in the sum that trains.": (
        "name_weight_and_batch_size_are_usable",
        "values_are_not_weighted",
    ),
    "Number of samples in one :meth:`score` call.": (
        "there_is_one_value_for_each_sample",
        "rewards_do_not_depend_on_the_batch",
    ),
    "Whether a :meth:`score` call gets all samples of one prompt, and none of another, because their": (
        "groups_of_one_and_of_equals_have_values",
        "rewards_do_not_depend_on_the_batch",
    ),
    "Whether no prompt can be scored without its answer: :meth:`check_prompts` refuses those.": (
        "prompts_without_a_needed_answer_are_refused",
        "a_needed_answer_is_read",
        "a_prompt_without_an_answer_gets_a_number_or_an_error",
        "a_missing_answer_is_no_value",
        "completions_that_solve_nothing_do_not_pay",
        "answers_in_other_scripts_are_told_apart",
    ),
    "Longest time that the reward itself gives one call, in seconds.": (
        "claims_are_of_their_kinds",
        "calls_end_by_their_deadline",
    ),
    "A failed or late call fails for all of them": ("time_does_not_explode_with_the_length",),
    "Most :meth:`score` calls at once, where it is not ``async``": ("claims_are_of_their_kinds",),
    "Whether a training scales its values": (
        "claims_are_of_their_kinds",
        "scaled_values_are_numbers",
        "scaled_values_are_the_expected_ones",
        "scaling_compares_groups_as_it_claims",
        "scaling_goes_on_from_its_state",
        "an_undone_step_leaves_no_trace_in_scaling",
        "scaling_leaves_samples_alone",
        "errors_do_not_count_in_scaling",
        "ranks_scale_as_one",
    ),
    "Return what the reward takes of each of the trainer's GPUs: bytes, and whether it keeps them between phases.": (
        "claims_are_of_their_kinds",
    ),
    "Start what scoring needs, and return what a person should know of it; called once, before the first step.": (
        "notes_are_texts",
    ),
    "Called before anything is loaded, with the prompts of each source": ("ordinary_prompts_are_accepted",),
    "of a streamed source, with its first ones.": ("prompts_that_were_never_checked_score_alike",),
    "A prompt's answer or metadata is not what the reward needs; the message names its uid.": (
        "prompts_without_a_needed_answer_are_refused",
        "prompts_that_cannot_be_scored_are_refused",
        "a_missing_field_is_no_value",
        "answers_of_other_kinds_are_scored_or_refused",
    ),
    "Return a number of size 1e15 at most, or a :class:`RewardError`, for each sample; may be ``async``.": (
        "samples_are_scored_without_exceptions",
        "there_is_one_value_for_each_sample",
        "values_are_numbers_or_errors",
        "samples_have_different_rewards",
        "samples_have_the_expected_rewards",
        "any_text_gets_a_number_or_an_error",
        "cut_samples_and_several_turns_are_scored",
        "what_cannot_be_reached_is_an_error",
        "failed_calls_hold_nothing_back",
    ),
    "Calls run concurrently, in threads (or on an event loop when ``async``)": (
        "concurrent_calls_do_not_mix",
        "first_calls_at_once_score_alike",
        "calls_replace_nothing_of_the_process",
    ),
    "Return counts since the last call, such as requests or tokens": ("counts_are_numbers_since_the_last_call",),
    "Other threads may be in :meth:`score`.": ("no_count_is_lost_while_others_score",),
}
ENVIRONMENT: Final[Mapping[str, Sequence[str]]] = {
    "Answer of an environment to one turn of the policy.": (
        "answers_are_well_formed",
        "turns_have_the_expected_answers",
        "the_task_decides_the_answers",
    ),
    "Reward of this turn, of size 1e15 at most": ("answers_are_well_formed",),
    "the mean over the step's answers that have it.": ("metrics_of_ends_are_shares",),
    "Every trajectory has an object of its own, made with the ``init_args`` of the YAML file.": (
        "trajectories_do_not_see_each_other",
        "trajectories_of_one_prompt_do_not_see_each_other",
        "trajectories_leave_nothing_behind",
    ),
    "Calls of many objects run at once, each in a thread, or on an event loop where a method is ``async``, and each": (
        "turns_are_answered_without_exceptions",
        "calls_end_by_their_deadline",
        "a_cancelled_call_ends",
        "trajectories_do_not_see_each_other",
        "first_trajectories_at_once_are_answered_alike",
        "async_calls_let_others_run",
        "calls_replace_nothing_of_the_process",
    ),
    "a resumed run makes a new object and repeats the same calls.": (
        "the_same_turns_have_the_same_answers",
        "every_seed_repeats",
        "the_time_between_turns_changes_nothing",
        "another_process_has_the_same_answers",
        "drawn_trajectories_are_answered_as_by_another_process",
    ),
    "Randomness must therefore come from ``random.Random(seed)`` alone.": (
        "the_same_turns_have_the_same_answers",
        "global_random_generators_are_left_alone",
    ),
    "Return the JSON schemas of the tools, for the chat template; called on one object at start.": (
        "tools_and_notes_are_readable",
        "tools_are_the_same_each_time",
        "objects_that_were_not_asked_answer_alike",
    ),
    "Return what a person should know of it; called on one object at start": ("tools_and_notes_are_readable",),
    "Text of the turn, without the end token but with all other special tokens.": (
        "any_text_is_answered",
        "digits_of_other_scripts_are_answered",
        "turns_that_are_costly_to_read_are_answered",
        "observations_are_bounded",
        "many_turns_are_answered",
    ),
    "Release the trajectory's resources; called once, also after a failure, with the deadline of a step.": (
        "close_succeeds_after_any_call",
        "close_ends_a_call_that_runs",
        "trajectories_leave_nothing_behind",
    ),
}
DATA_SOURCE: Final[Mapping[str, Sequence[str]]] = {
    "Yield every row, an object of its own, in the same order and with the same uids each time, on every rank.": (
        "rows_can_be_read",
        "rows_are_the_expected_ones",
        "rows_are_objects_of_their_own",
        "uids_are_unique",
        "rows_repeat",
        "another_process_reads_the_same_rows",
        "readers_do_not_share_their_place",
        "rows_are_read_when_they_are_asked_for",
        "readers_leave_nothing_behind",
    ),
    "The source cannot be read; the message says what to write instead.": (
        "what_cannot_be_read_is_a_configuration_error",
    ),
    "by default all are read now, and drawn once an epoch.": ("rows_end",),
    "Its name in a mixture, which :func:`~rlplug.data.rows.of_part` gives its rows.": (
        "rows_for_training_are_known_by_their_part",
        "prompts_of_a_part_are_found_by_their_uids",
    ),
    "The source cannot be read or has no prompts; the message begins with the key.": (
        "rows_can_be_read",
        "what_cannot_be_read_is_a_configuration_error",
        "errors_of_rows_are_told_by_the_key",
    ),
    "Return the training prompts in the order in which they are drawn, the same on every rank.": (
        "training_prompts_are_as_they_say",
        "training_prompts_go_on_at_their_place",
        "observed_samples_go_on_too",
        "ranks_learn_the_same",
        "a_state_of_other_prompts_is_refused",
        "training_draws_are_the_expected_ones",
        "draws_of_any_size_go_on_at_their_place",
        "prompts_go_on_whatever_all_rewards_are",
        "a_later_pass_goes_on_at_its_place",
        "drawn_steps_are_resumed_and_shared",
        "a_state_of_another_process_is_taken",
        "lists_of_draws_stay_as_they_were",
        "a_state_stays_as_it_was",
        "draws_do_not_depend_on_their_size",
        "another_process_draws_the_same_prompts",
        "prompts_are_of_their_rows",
    ),
    "Seed of the order.": ("the_seed_gives_the_order", "a_seed_may_be_a_text"),
    "A row makes no prompt that can be trained on.": (
        "what_cannot_train_is_refused",
        "prompts_that_are_too_long_do_not_train",
        "prompts_that_a_reward_refuses_do_not_train",
        "rows_are_well_formed",
        "prompts_are_texts_or_messages",
        "prompts_are_of_one_form",
    ),
}
OF_EVERY_TASK: Final[Mapping[str, Sequence[str]]] = {
    "A call leaves the process, its threads, and files of others as they were.": (
        "the_process_is_left_as_it_was",
        "global_random_generators_are_left_alone",
        "calls_leave_nothing_behind",
        "readers_leave_nothing_behind",
        "trajectories_leave_nothing_behind",
    ),
    "A wrong option is refused before a run trains, by a message that names it; defaults are the documented ones.": (
        "wrong_options_are_refused",
        "defaults_are_the_documented_ones",
    ),
    "The same input gives the same result in another process, after a pickle, and in another order.": (
        "rewards_repeat",
        "another_process_scores_alike",
        "what_was_scored_before_changes_nothing",
        "odd_samples_do_not_get_what_others_got",
        "a_pickled_reward_scores_alike",
        "drawn_samples_are_scored_as_by_another_process",
    ),
}
"""What no interface says in a sentence of its own, and every task promises."""
