"""Each check of trainers fails on the trainer that was sabotaged for it, and no other does."""

from __future__ import annotations

from pathlib import Path

import pytest
from nested_pytest import Outcomes, run_checks

pytestmark = pytest.mark.nightly
CHECKS = Path(__file__).with_name("broken_trainer_checks.py")

GRADIENTS = {
    "test_gradients_equal_transformers",
    "test_gradient_norm_is_that_of_whole_tensors",
    "test_output_layer_can_be_fused",
    "test_sync_after_a_step_sends_new_weights",
}
"""Checks that read gradients by their names."""
SENT = {
    *GRADIENTS,
    "test_sync_sends_each_weight_once",
    "test_sync_in_fp8_sends_values_and_scales",
    "test_random_weights_are_those_of_transformers",
}
"""Checks that read weights by their names."""
PACKED, BACKWARDS, ALONE = (
    f"test_logprobs_equal_transformers[{packing}]" for packing in ("packed", "backwards", "alone")
)
LONG = "test_long_rows_equal_transformers"

CAUGHT_BY = {
    "TestLeaks": {
        "LeaksBetweenSequences": {
            *(*GRADIENTS, PACKED, BACKWARDS, LONG, "test_sequences_do_not_see_each_other"),
            *("test_gradients_do_not_depend_on_micro_batches", "test_export_opens_in_transformers"),
        }
    },
    "TestPadding": {"TrainsThePadding": GRADIENTS},
    "TestAverages": {"AveragesOverTokens": {*GRADIENTS, "test_gradients_do_not_depend_on_micro_batches"}},
    "TestNoise": {
        "KeepsItsDropout": {
            *(*GRADIENTS, "test_training_passes_repeat", "test_gradients_do_not_depend_on_micro_batches"),
            "test_resume_repeats_the_next_step",
        }
    },
    "TestMissingName": {"DropsAName": {*SENT, "test_export_opens_in_transformers"}},
    "TestTied": {"SendsTiedEndsTwice": SENT},
    "TestKeys": {"SwapsKeysAndValues": {*SENT, "test_export_opens_in_transformers"}},
    "TestKeysBothWays": {
        "SwapsKeysAndValuesBothWays": {*GRADIENTS, PACKED, BACKWARDS, ALONE, LONG, "test_export_opens_in_transformers"}
    },
    "TestQueries": {"PermutesRowsOfQueries": {*SENT, "test_export_opens_in_transformers"}},
    "TestGenerationConfig": {"LosesTheGenerationConfig": {"test_export_opens_in_transformers"}},
    "TestCareless": {
        "KeepsBordersByLength": {BACKWARDS},
        "CutsLongRows": {LONG},
        "KeepsOutputs": {"test_passes_leave_nothing_behind"},
        "WritesBesideTheWeights": {"test_the_process_is_left_as_it_was"},
        "ReturnsACopyOfLogits": {"test_output_layer_can_be_fused"},
        "DrawsOtherWeights": {"test_random_weights_are_those_of_transformers"},
        "ExportsTheTrunk": {"test_export_opens_in_transformers"},
        "ForgetsOnResume": {"test_resume_repeats_the_next_step"},
        "GathersEverythingAtOnce": {"test_blocks_gather_their_parameters_on_their_own"},
        "MovesTheGlobalGenerator": {"test_global_random_generator_is_left_alone"},
        "AcceptsAnyModel": {"test_unknown_model_type_is_refused"},
    },
    "TestCarelessOnRanks": {
        "KeepsPartialGradients": {"test_gradient_norm_is_that_of_whole_tensors[shard 2]"},
        "SplitsNothing": {
            "test_every_rank_keeps_its_part[tensor 2]",
            "test_sizes_that_do_not_divide_are_refused",
        },
        "RefusesReplicas": {"test_axis_is_claimed_or_refused[replicate]"},
    },
    "TestOnTheHost": {  # whose build is refused, so that no rank says what the others ask for
        "BuildsOnTheHost": {
            "test_empty_network_takes_no_memory",
            "test_every_rank_keeps_its_part",
            "test_global_random_generator_is_left_alone",
        }
    },
    "TestClosed": {
        "RefusesItsModels": {"test_what_it_trains_is_not_refused"},
        "MisspellsAnAxis": {"test_claims_are_known"},
    },
}
"""For each class of checks: the mistakes of its trainer, and the checks that find each, without model and one rank."""
SAYS = {
    "TestLeaks": "other tokens in row 2 change the logprobs of rows [3, 4, 6, 7]",
    "TestNoise": "Dropout, noise of routers and state of earlier passes must be off in training too",
    "TestMissingName": "1 are missing, first 'model.layers.1.mlp.up_proj.weight'",
    "TestQueries": "model.layers.0.self_attn.q_proj.weight is off by",
    "TestGenerationConfig": "must keep the folder's as generation_config",
    "TestCareless": "names architectures ['LlamaModel'], and not ['LlamaForCausalLM']",
    "TestCarelessOnRanks": "claims replicate, and refuses each model on it",
    "TestClosed": "claims.axes has ['tensors']",
}
"""Parts of messages, which tell an author what is wrong."""


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return run_checks([CHECKS])


def short(check: str) -> str:
    """Return a check's name without its model, and without a single rank."""
    name, _, parameters = check.rstrip("]").partition("[")
    kept = [part for part in parameters.split("-") if part not in ("llama", "tied_llama", "1 rank", "")]
    return f"{name}[{'-'.join(kept)}]" if kept else name


@pytest.mark.parametrize("tests", CAUGHT_BY)
def test_mistakes_are_caught_by_the_checks_for_them(outcomes, tests):
    expected = {check for checks in CAUGHT_BY[tests].values() for check in checks}
    assert {short(check) for of, check in outcomes.failed if of == tests} == expected, outcomes.output[-20_000:]


def test_every_check_can_fail(outcomes):
    """And no class of checks was left out of the table."""
    checks = {check.partition("[")[0] for _, check in outcomes.passed | outcomes.failed}
    assert checks == {check.partition("[")[0] for _, check in outcomes.failed}
    assert {tests for tests, _ in outcomes.passed | outcomes.failed} == CAUGHT_BY.keys()


@pytest.mark.parametrize("tests", SAYS)
def test_messages_say_what_is_wrong(outcomes, tests):
    messages = [message for (of, _), message in outcomes.messages.items() if of == tests]
    assert any(SAYS[tests] in message for message in messages), "\n".join(messages)


def test_report_says_what_was_claimed_and_checked(outcomes):
    _, _, rest = outcomes.output.partition(" conformance of CarelessOnRanks ===")
    counts = [line for line in rest.splitlines()[2:] if not line.startswith("    ")]  # without the names of checks
    assert [" ".join(line.split()) for line in counts[:4]] == [
        "every trainer 26 passed, 3 failed",
        "replicate claimed 20 not applied",
        "sequence not claimed not checked by this kit",
        "tensor claimed 19 passed, 1 failed",
    ]
