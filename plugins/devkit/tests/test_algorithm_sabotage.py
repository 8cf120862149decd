"""The first check of algorithms that fails on a sabotaged one is the check that was written for its mistake."""

from __future__ import annotations

from pathlib import Path

import pytest
import unusual_algorithms
from nested_pytest import Outcomes, run_checks

pytestmark = pytest.mark.nightly
CHECKS = Path(__file__).with_name("broken_algorithm_checks.py")
SWITCHED_OFF = Path(__file__).with_name("switched_off_checks.py")

CAUGHT_BY = {
    "RaisesInAdvantages": "test_advantages_can_be_computed",
    "ReadsUndeclaredOldLogprobs": "test_what_advantages_read_is_declared",
    "ReadsUndeclaredRolloutLogprobs": "test_what_advantages_read_is_declared",
    "ReturnsDoubles": "test_advantages_are_well_formed",
    "ForgetsReturns": "test_advantages_are_well_formed",
    "ReturnsNaN": "test_advantages_are_well_formed",
    "ReturnsATextMetric": "test_advantages_are_well_formed",
    "SelectsCopies": "test_selected_samples_are_the_groups",
    "SelectsTwice": "test_selected_samples_are_the_groups",
    "SelectsByItsCalls": "test_selected_samples_are_the_groups",
    "DrawsPerObject": "test_advantages_repeat",
    "WritesIntoRewards": "test_the_step_is_left_as_it_was",
    "CountsFailedRewards": "test_failed_rewards_do_not_count",
    "TrainsOnFailedRewards": "test_failed_rewards_do_not_count",
    "FavoursTheFirst": "test_the_order_within_a_group_does_not_matter",
    "NeedsCompletions": "test_a_rank_without_completions_is_served",
    "NeedsRewards": "test_a_step_without_rewards_is_finite",
    "NormalisesPerRank": "test_ranks_get_what_one_rank_gets",
    "MeasuresItsRank": "test_ranks_get_what_one_rank_gets",
    "AsksWhereItHasCompletions": "test_ranks_get_what_one_rank_gets",
    "BlowsUpRoundOff": "test_equal_rewards_have_no_advantage",
    "RaisesInLoss": "test_losses_can_be_computed",
    "ForgetsTheValueLoss": "test_losses_can_be_computed",
    "DetachesLogprobs": "test_losses_are_well_formed",
    "ReturnsTheLossOfTokens": "test_losses_are_well_formed",
    "ReturnsADoubleLoss": "test_losses_are_well_formed",
    "KeepsTheGraphInMetrics": "test_losses_are_well_formed",
    "ZeroesAdvantagesInPlace": "test_the_micro_batch_is_left_as_it_was",
    "DividesByItsOwnTokens": "test_losses_divide_by_the_denominators",
    "NormalisesInTheMicroBatch": "test_micro_batches_add_up",
    "AddsAConstant": "test_a_filler_adds_nothing",
    "ClampsAfterExp": "test_gradients_are_finite_at_extreme_ratios",
    "HasTheWrongSign": "test_better_completions_become_more_likely",
    "RaisesAfterAStep": "test_steps_of_a_run_can_be_taken",
    "WritesIntoMetrics": "test_steps_of_a_run_can_be_taken",
    "DrawsGlobally": "test_global_random_generators_are_left_alone",
    "KeepsATensor": "test_the_state_is_plain",
    "ForgetsItsScale": "test_a_resumed_run_goes_on_as_it_would_have",
    "LoadsTheDefault": "test_a_resumed_run_goes_on_as_it_would_have",
    "SelectsByAnUnsavedStep": "test_a_resumed_run_goes_on_as_it_would_have",
    "ChangesAfterAHundredSteps": "test_a_late_resume_goes_on_as_it_would_have",
    "HandsOutItsList": "test_the_state_is_of_its_moment",
    "NeedsMoreLater": "test_needs_stay_the_same",
    "ReadsTheReferenceIfThere": "test_what_losses_read_is_declared",
    "AddsAnEntropyBonus": "test_an_entropy_term_is_declared",
    "NeedsAReferenceForNothing": "test_what_is_needed_is_used",
    "NeedsOldLogprobsForNothing": "test_what_is_needed_is_used",
    "NeedsEntropyForNothing": "test_what_is_needed_is_used",
    "NeverAsksItsCritic": "test_what_is_needed_is_used",
    "RefusesNoRun": "test_comparing_completions_is_declared",
    "LeavesOutTheLastToken": "test_every_token_learns",
    "FreezesItsCritic": "test_every_token_learns",
    "DetachesItsPenalty": "test_the_reference_term_has_a_gradient",
    "StreamsACritic": "test_groups_of_a_streamed_step_stand_alone",
    "StreamsWhatIsNormalised": "test_groups_of_a_streamed_step_stand_alone",
    "StreamsByTwoCounts": "test_streamed_losses_have_one_divisor",
    "AssertsInSetup": "test_a_run_is_refused_or_served",
    "FadesWithItsCalls": "test_a_second_call_gives_the_same",
    "DependsOnHashes": "test_steps_repeat_in_another_process",
    "RemembersTheFirstRun": "test_steps_repeat_in_another_process",
    "KeepsTheLastRun": "test_runs_do_not_share_their_options",
    "DependsOnItsRank": "test_steps_repeat_in_another_process",
    "LosesItsScaleInAPickle": "test_a_pickled_algorithm_goes_on_alike",
    "KeepsItsRewards": "test_what_it_gets_is_not_kept",
    "SortsItsGroup": "test_selection_leaves_samples_alone",
    "ClampsLogprobsInPlace": "test_losses_leave_their_inputs",
    "RecursesOverTokens": "test_long_completions_are_served",
    "DeviatesFromNothing": "test_a_single_completion_is_served",
    "ExponentiatesRewards": "test_large_rewards_stay_finite",
    "IndexesByGroup": "test_numbers_of_groups_do_not_matter",
    "LogsTokensBackwards": "test_other_rows_of_tokens_follow_their_rows",
    "LogsTokensWithAGradient": "test_other_rows_of_tokens_follow_their_rows",
    "LeavesOutMetricsOfNothing": "test_metrics_have_the_same_names_everywhere",
    "StartsAThread": "test_steps_leave_nothing_behind",
    "KeepsLogprobs": "test_steps_leave_nothing_behind",
    "SetsTheNumberOfThreads": "test_the_process_is_left_as_it_was",
    "SetsTheTimeoutOfSockets": "test_the_process_is_left_as_it_was",
    "SilencesWarnings": "test_the_process_is_left_as_it_was",
    "SetsTheMask": "test_the_process_is_left_as_it_was",
    "WritesBesideItsCode": "test_the_process_is_left_as_it_was",
    "ShiftsTheReference": "test_numbers_of_a_token_are_used_at_that_token",
    "ShiftsOldLogprobs": "test_every_token_learns",
    "RewardsTheDistance": "test_the_reference_holds_the_policy_back",
    "AddsTheDistanceToRewards": "test_the_reference_holds_the_policy_back",
    "PunishesEntropy": "test_a_term_of_the_entropy_raises_it",
    "DrivesValuesAway": "test_values_move_towards_their_targets",
    "ForgetsValuesInReturns": "test_the_last_target_is_of_the_reward",
    "ClipsBothSides": "test_a_move_the_wrong_way_is_undone",
    "TakesTheLarger": "test_a_move_the_wrong_way_is_undone",
    "ReadsRewardsInTheLoss": "test_the_loss_follows_the_advantages",
    "CachesByTheNumberOfRows": "test_the_order_within_a_group_does_not_matter",
    "SplitsRowsEvenly": "test_the_order_within_a_group_does_not_matter",
    "DividesByTheDeviation": "test_equal_rewards_have_no_advantage",
    "RoundsRatios": "test_small_changes_of_logprobs_are_seen",
    "RoundsAdvantages": "test_small_changes_of_rewards_are_seen",
    "RoundsRewards": "test_large_rewards_stay_finite",
    "RemembersEveryStep": "test_steps_leave_nothing_behind",
    "LogsEverything": "test_the_process_is_left_as_it_was",
    "HalvesItsAdvantages": "test_worked_examples_come_out",
    "TakesAnyScale": "test_options_are_taken_or_refused",
    "MeasuresStalenessInTheMicroBatch": "test_micro_batches_add_up",
    "SkipsWhatTeachesNothing": "test_every_loss_reaches_its_model",
    "SelectsWhatIsNew": "test_selection_knows_no_other_group",
    "KeepsAMeanOfShares": "test_drawn_steps_are_resumed_and_split",
    "KeepsTheMeanOfItsRank": "test_ranks_stay_alike_from_step_to_step",
    "SelectsByFailedRewards": "test_failed_rewards_do_not_count",
    "ClampsFarTargets": "test_the_micro_batch_is_left_as_it_was",
    "ForgetsItsAverage": "test_a_late_resume_goes_on_as_it_would_have",
    "ForgetsItsCount": "test_a_resumed_run_goes_on_as_it_would_have",
    "AsksWhatItPaysAtFirst": "test_needs_stay_the_same",
    "FollowsTheEntropyOfItsRank": "test_what_is_needed_is_used",
    "SubtractsSquares": "test_large_rewards_stay_finite",
}
"""Each mistake, and the check that was written for it."""
MISSED = ("NeedsALossEachStep",)
"""Mistakes that pass; ``docs/conformance.md`` says why."""
CAUGHT_ALONE = (
    *("RewardsTheDistance", "PunishesEntropy", "DrivesValuesAway", "ForgetsValuesInReturns", "ClipsBothSides"),
    *("ReadsRewardsInTheLoss", "RoundsRatios", "RemembersEveryStep", "DividesByTheDeviation", "SplitsRowsEvenly"),
    *("LogsEverything", "HalvesItsAdvantages", "TakesAnyScale", "RoundsAdvantages"),
)
"""Mistakes that come through when their check is switched off."""
UNUSUAL = ("Streamed", "WeighsByLength", *unusual_algorithms.__all__)
"""Correct ones that look different."""


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return run_checks([CHECKS], stops_at_first=True)


@pytest.mark.parametrize("mistake", CAUGHT_BY)
def test_the_first_check_that_fails_is_the_one_for_the_mistake(outcomes: Outcomes, mistake: str) -> None:
    failed = [check.partition("[")[0] for check in outcomes.failed_in_order(f"Test{mistake}")]
    assert failed[:1] == [CAUGHT_BY[mistake]], failed


@pytest.mark.parametrize("algorithm", ["Fine", *MISSED, *UNUSUAL])
def test_what_has_no_mistake_that_the_kit_knows_passes(outcomes: Outcomes, algorithm: str) -> None:
    assert outcomes.failed_in_order(f"Test{algorithm}") == []
    assert [check for of, check in outcomes.passed if of == f"Test{algorithm}"]


def test_every_check_is_the_first_to_catch_some_mistake(outcomes: Outcomes) -> None:
    correct = ("TestFine", *(f"Test{name}" for name in UNUSUAL))
    checks = {check.partition("[")[0] for of, check in outcomes.passed if of in correct}
    assert checks == set(CAUGHT_BY.values())


def test_without_its_check_a_mistake_comes_through() -> None:
    """It alone catches a table in which another check than the one of a mistake would do."""
    outcomes = run_checks([SWITCHED_OFF], stops_at_first=True)
    assert {mistake: outcomes.failed_in_order(f"Test{mistake}") for mistake in CAUGHT_ALONE} == {
        mistake: [] for mistake in CAUGHT_ALONE
    }
    assert {of for of, _ in outcomes.passed} == {f"Test{mistake}" for mistake in CAUGHT_ALONE}
