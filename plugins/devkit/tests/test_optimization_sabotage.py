"""The first check of optimizations that fails on a sabotaged one is the check that was written for its mistake."""

from __future__ import annotations

from pathlib import Path

import drawn_optimizations
import pytest
import unusual_optimizations
from nested_pytest import Outcomes, run_checks

pytestmark = pytest.mark.nightly
CHECKS = Path(__file__).with_name("broken_optimization_checks.py")

CAUGHT_BY = {
    "HoldsALock": "test_it_can_be_copied",
    "AlwaysClaims": "test_without_a_model_it_claims_no_effect",
    "RefusesEverything": "test_it_takes_effect",
    "ClaimsNothing": "test_it_takes_effect",
    "SaysNothing": "test_it_takes_effect",
    "SetsDeterministicAlgorithms": "test_building_changes_nothing_else",
    "DrawsGlobally": "test_building_changes_nothing_else",
    "RenamesParameters": "test_it_takes_effect",
    "TiesTwoWeights": "test_a_sync_sends_the_same_weights",
    "ScalesHiddenStates": "test_values_equal_the_plain_path",
    "LeaksBetweenRows": "test_values_equal_the_plain_path",
    "DetachesABlock": "test_gradients_equal_the_plain_path",
    "KeepsTheFirstBatch": "test_micro_batches_add_up",
    "WritesIntoAWeight": "test_a_step_changes_the_weights_alike",
    "ForgetsItsPasses": "test_a_resume_repeats_the_next_step",
    "ChecksOnlyPlainBlocks": "test_it_works_with_another_optimization",
    "PatchesTheLibrary": "test_the_plain_path_is_left_as_it_was",
    "AppliesToNobody": "test_its_claims_are_well_formed",
    "ConflictsWithoutAReason": "test_its_claims_are_well_formed",
    "PlansByItsCalls": "test_its_claims_are_well_formed",
    "PlansAnew": "test_its_claims_are_well_formed",
    "SavesNothingIfNeeded": "test_its_claims_are_well_formed",
    "ClaimsWithoutAnEdit": "test_an_effect_is_in_the_model",
    "ReportsItsRank": "test_each_rank_reports_the_same",
    "FreezesTheEmbeddings": "test_parameters_and_checkpoints_are_the_same",
    "LeavesEvaluationMode": "test_parameters_and_checkpoints_are_the_same",
    "SharesAStaleCache": "test_later_steps_change_the_weights_alike",
    "SharesTheLastModel": "test_two_models_do_not_share",
    "ChangesTheConfiguration": "test_an_export_is_the_same",
    "NormalisesGradients": "test_a_pass_of_no_tokens_adds_nothing",
    "ScalesInEvaluation": "test_a_reference_has_the_same_values",
    "WritesIntoTheModelsFolder": "test_the_process_is_left_as_it_was",
    "DrawsInAPass": "test_the_process_is_left_as_it_was",
    "SetsAVariableInAPass": "test_the_process_is_left_as_it_was",
    "TruncatesProducts": "test_values_equal_the_plain_path",
    "ScalesOnOtherRanks": "test_gradients_equal_the_plain_path",
    "DetachesWithoutARow": "test_micro_batches_of_a_row_add_up",
    "StaleInEvaluation": "test_values_after_a_step_equal_the_plain_path",
    "CutsLongRows": "test_long_rows_equal_the_plain_path",
    "DiffersInBFloat16": "test_bfloat16_is_as_exact_as_the_plain_path",
    "RoundsInBFloat16": "test_bfloat16_is_as_exact_as_the_plain_path",
    "WorksOnce": "test_two_models_do_not_share",
    "SavesOnPaper": "test_claimed_memory_is_saved",
    "KeepsHiddenStates": "test_passes_leave_nothing_behind",
    "KeepsGraphs": "test_passes_leave_nothing_behind",
    "AddsHooks": "test_passes_leave_nothing_behind",
    "IsItsOwnCopy": "test_it_can_be_copied",
    "RotatesByLength": "test_other_rows_of_one_size_equal_the_plain_path",
    "ClipsLargeGradients": "test_gradients_grow_with_the_loss",
    "SavesWithoutGradients": "test_passes_without_gradients_keep_nothing",
    "CountsAllModels": "test_a_second_model_has_the_same_effects",
    "CountsWhatItSkips": "test_blocks_are_counted_on_the_model",
    "ForgetsTopP": "test_other_requests_equal_the_plain_path",
    "TakesAnyNumber": "test_wrong_options_are_refused",
    "HasAnotherDefault": "test_defaults_are_the_documented_ones",
    "AppliesToAll": "test_claims_are_the_expected_ones",
    "CountsOneMore": "test_effects_are_the_expected_ones",
    "PlansFusedNorms": "test_plans_are_the_expected_ones",
    "ConflictsWithASentence": "test_its_claims_are_well_formed",
    "ChunksOnPaper": "test_claimed_memory_is_saved",
    "TrainsMeasuredEntropies": "test_measured_entropies_have_no_gradient",
    "RecomputesReentrantly": "test_adapters_learn_alike",
    "UnfreezesEverything": "test_adapters_learn_alike",
    "ClampsHiddenStates": "test_large_activations_equal_the_plain_path",
    "ReadsTheHead": "test_a_critic_learns_alike",
    "NormsInModelDtype": "test_bfloat16_is_as_exact_as_the_plain_path",
    "RotatesFarPositions": "test_long_rows_equal_the_plain_path",
    "WatchesAllModules": "test_building_changes_nothing_else",
    "RegistersOverSdpa": "test_building_changes_nothing_else",
    "MarksModules": "test_what_it_marks_is_read",
    "RecomputesHalf": "test_claimed_memory_is_saved",
    "ForgetsFarGradients": "test_drawn_passes_equal_the_plain_path",
    "LeavesOutTheBias": "test_a_bias_of_the_output_layer_counts",
    "NormsAsLlama": "test_values_equal_the_plain_path",
    "WrapsTheClass": "test_it_works_with_another_optimization",
    "RoundsTheSoftmax": "test_an_output_layer_in_bfloat16_is_as_exact",
    "ReplacesAnEqual": "test_the_plain_path_is_left_as_it_was",
}
"""Each mistake, and the check that was written for it."""
ELSEWHERE = {"TruncatesProducts": "test_the_plain_path_is_left_as_it_was"}
"""What catches a mistake first on another processor: one without products in bfloat16 of float32."""
MISSED = ("SavesNothing",)
"""Mistakes that pass; ``docs/conformance.md`` says why."""
UNUSUAL = (*unusual_optimizations.__all__, *drawn_optimizations.__all__)
"""Correct ones that look different."""


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return run_checks([CHECKS])


def _failed(outcomes: Outcomes, optimization: str) -> list[str]:
    """Return the checks that failed for an optimization, the first one first."""
    return [check.partition("[")[0] for of, check in outcomes.order if _is_of(of, check, optimization)]


def _is_of(tests: str, check: str, optimization: str) -> bool:
    """Return whether a check is of an optimization: of its own class, or with its name among the parameters."""
    return tests == f"Test{optimization}" or optimization in check.partition("[")[2].removesuffix("]").split("-")


@pytest.mark.parametrize("mistake", CAUGHT_BY)
def test_the_first_check_that_fails_is_the_one_for_the_mistake(outcomes: Outcomes, mistake: str) -> None:
    failed = _failed(outcomes, mistake)
    assert failed[:1] in ([CAUGHT_BY[mistake]], [ELSEWHERE.get(mistake)]), failed


@pytest.mark.parametrize("optimization", ["Fine", "Stated", *MISSED, *UNUSUAL])
def test_what_has_no_mistake_that_the_kit_knows_passes(outcomes: Outcomes, optimization: str) -> None:
    assert _failed(outcomes, optimization) == []
    assert any(_is_of(of, check, optimization) for of, check in outcomes.passed)


def test_every_check_is_the_first_to_catch_some_mistake(outcomes: Outcomes) -> None:
    assert not [check for of, check in outcomes.failed if of == "TestCorrect"]
    checks = {check.partition("[")[0] for of, check in outcomes.passed if of == "TestCorrect"}
    assert checks == set(CAUGHT_BY.values())
