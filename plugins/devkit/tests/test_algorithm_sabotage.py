"""The first check of algorithms that fails on a sabotaged one is the check that was written for its mistake."""

from __future__ import annotations

from pathlib import Path

import pytest
from nested_pytest import Outcomes, run_checks

pytestmark = pytest.mark.nightly
CHECKS = Path(__file__).with_name("broken_algorithm_checks.py")

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
    "KeepsTheGraphInMetrics": "test_losses_are_well_formed",
    "ZeroesAdvantagesInPlace": "test_the_micro_batch_is_left_as_it_was",
    "DividesByItsOwnTokens": "test_losses_divide_by_the_denominators",
    "NormalisesInTheMicroBatch": "test_micro_batches_add_up",
    "AddsAConstant": "test_a_filler_adds_nothing",
    "ClampsAfterExp": "test_gradients_are_finite_at_extreme_ratios",
    "HasTheWrongSign": "test_better_completions_become_more_likely",
    "DrawsGlobally": "test_global_random_generators_are_left_alone",
    "KeepsATensor": "test_the_state_is_plain",
    "ForgetsItsScale": "test_a_resumed_run_goes_on_as_it_would_have",
    "LoadsTheDefault": "test_a_resumed_run_goes_on_as_it_would_have",
    "SelectsByAnUnsavedStep": "test_a_resumed_run_goes_on_as_it_would_have",
}
"""Each mistake, and the check that was written for it."""
MISSED = ("HalvesItsAdvantages", "ChangesAfterAHundredSteps", "RefusesNoRun")
"""Mistakes that pass; ``docs/conformance.md`` says why."""


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return run_checks([CHECKS])


@pytest.mark.parametrize("mistake", CAUGHT_BY)
def test_the_first_check_that_fails_is_the_one_for_the_mistake(outcomes: Outcomes, mistake: str) -> None:
    failed = [check.partition("[")[0] for check in outcomes.failed_in_order(f"Test{mistake}")]
    assert failed[:1] == [CAUGHT_BY[mistake]], failed


@pytest.mark.parametrize("algorithm", ["Fine", *MISSED])
def test_what_has_no_mistake_that_the_kit_knows_passes(outcomes: Outcomes, algorithm: str) -> None:
    assert outcomes.failed_in_order(f"Test{algorithm}") == []
    assert [check for of, check in outcomes.passed if of == f"Test{algorithm}"]


def test_every_check_is_the_first_to_catch_some_mistake(outcomes: Outcomes) -> None:
    checks = {check.partition("[")[0] for of, check in outcomes.passed if of == "TestFine"}
    assert checks == set(CAUGHT_BY.values())
