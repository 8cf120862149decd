"""The first check of hooks that fails on a sabotaged plugin is the check that was written for its mistake."""

from __future__ import annotations

from pathlib import Path

import pytest
from nested_pytest import Outcomes, run_checks

pytestmark = pytest.mark.nightly
CHECKS = Path(__file__).with_name("broken_hook_checks.py")

CAUGHT_BY = {
    "IsForAnotherApi": "test_a_run_takes_the_plugin",
    "MisspellsAnArgument": "test_a_run_takes_the_plugin",
    "RegistersOnce": "test_registrations_can_be_repeated",
    "NeedsAMetric": "test_hooks_can_be_called",
    "YieldsTwice": "test_hooks_can_be_called",
    "ForgetsToReturn": "test_wrappers_return_what_the_hook_returns",
    "DropsRows": "test_wrappers_return_what_the_hook_returns",
    "ReadsTheBuckets": "test_wrappers_call_the_core_once",
    "ReadsOneBucket": "test_wrappers_call_the_core_once",
    "MakesAReportOfItsOwn": "test_wrappers_nest",
    "LosesMetrics": "test_wrappers_nest",
    "SwallowsErrors": "test_errors_pass_through_wrappers",
    "StaysInsideAfterAnError": "test_errors_pass_through_wrappers",
    "ReturnsAText": "test_metrics_are_numbers",
    "ReturnsNaN": "test_metrics_are_numbers",
    "ReplacesTheMeanReward": "test_metrics_have_names_of_their_own",
    "NormalisesPerRank": "test_ranks_get_what_one_rank_gets",
    "SkipsEmptyRanks": "test_ranks_get_what_one_rank_gets",
    "AsksWhereItHasRows": "test_ranks_get_what_one_rank_gets",
    "CountsWhatIsThere": "test_ranks_have_the_same_metrics",
    "AveragesOverItsMicroBatch": "test_micro_batches_add_up",
    "ClampsInPlace": "test_arguments_are_left_as_they_were",
    "ScalesTheMicroBatch": "test_arguments_are_left_as_they_were",
    "DrawsGlobally": "test_global_random_generators_are_left_alone",
    "LeavesAnEnvironmentVariable": "test_the_process_is_left_as_it_was",
    "LeavesGradientsOffAfterAnError": "test_the_process_is_left_as_it_was",
    "TakesAllTokenizers": "test_other_tokenizers_are_left_to_the_core",
}
"""Each mistake, and the check that was written for it."""
MISSED = ("HalvesAdvantages", "SumsOverItsRank")
"""Mistakes that pass; ``docs/conformance.md`` says why."""


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return run_checks([CHECKS])


@pytest.mark.parametrize("mistake", CAUGHT_BY)
def test_the_first_check_that_fails_is_the_one_for_the_mistake(outcomes: Outcomes, mistake: str) -> None:
    failed = [check.partition("[")[0] for check in outcomes.failed_in_order(f"Test{mistake}")]
    assert failed[:1] == [CAUGHT_BY[mistake]], failed


@pytest.mark.parametrize("plugin", ["Fine", *MISSED])
def test_what_has_no_mistake_that_the_kit_knows_passes(outcomes: Outcomes, plugin: str) -> None:
    assert outcomes.failed_in_order(f"Test{plugin}") == []
    assert [check for of, check in outcomes.passed if of == f"Test{plugin}"]


def test_every_check_is_the_first_to_catch_some_mistake(outcomes: Outcomes) -> None:
    assert {check for of, check in outcomes.passed if of == "TestFine"} == set(CAUGHT_BY.values())
