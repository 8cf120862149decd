"""Each check of rewards, environments and sources fails on the part that was sabotaged for it, and no other does."""

from __future__ import annotations

import builtins
import contextlib
import csv
import logging
import os
import resource
import shutil
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import broken_environments
import broken_rewards
import broken_sources
import careless_tasks
import drawn_rewards
import drawn_tasks
import hasty_tasks
import likely_tasks
import published_tasks
import pytest
import torch
import unusual_tasks
from nested_pytest import Outcomes, run_checks

pytestmark = pytest.mark.nightly
CHECKS = Path(__file__).with_name("broken_task_checks.py")
HOSTILE = "test_any_text_gets_a_number_or_an_error"

CAUGHT_BY = {
    "reward": {
        "NamedMean": {"test_name_weight_and_batch_size_are_usable"},
        "NotesAText": {"test_notes_are_texts"},
        "TakesTooLong": {"test_calls_end_by_their_deadline"},
        "RaisesOnOrdinaryText": {"test_samples_are_scored_without_exceptions"},
        "DropsTheLast": {"test_there_is_one_value_for_each_sample"},
        "ReturnsTexts": {"test_values_are_numbers_or_errors"},
        "FailsAlways": {"test_samples_have_different_rewards"},
        "CountsItsCalls": {"test_rewards_repeat"},
        "SortsItsBatch": {"test_rewards_do_not_depend_on_the_batch"},
        "FavoursTheFirst": {"test_rewards_do_not_depend_on_the_batch"},
        "CountsForEver": {"test_counts_are_numbers_since_the_last_call"},
        "KeepsTheSampleInSelf": {"test_concurrent_calls_do_not_mix"},
        "DrawsGlobally": {"test_global_random_generators_are_left_alone"},
        "SplitsAtTheFirstCharacter": {f"{HOSTILE}[white space]"},
        "SetsTheUmaskOnce": {"test_the_process_is_left_as_it_was"},
        "WaitsShorterEverywhere": {"test_the_process_is_left_as_it_was"},
        "WritesWhereItStands": {"test_the_process_is_left_as_it_was"},
        "LosesItsOffset": {"test_a_pickled_reward_scores_alike"},
        "ForgetsTheLargest": {"test_scaling_goes_on_from_its_state"},
        "ScalesToNothing": {"test_scaled_values_are_numbers"},
        "NeedsAnAnswer": {"test_a_prompt_without_an_answer_gets_a_number_or_an_error"},
    },
    "environment": {
        "ToolsWithoutNames": {"test_tools_and_notes_are_readable"},
        "AnswersLate": {"test_calls_end_by_their_deadline"},
        "RaisesAtTheSecondTurn": {"test_turns_are_answered_without_exceptions"},
        "RewardsWithNaN": {"test_answers_are_well_formed"},
        "ClosesWhatTheFirstStepOpened": {"test_close_succeeds_after_any_call"},
        "DrawsUnseeded": {"test_the_same_turns_have_the_same_answers"},
        "KeepsTheAnswerInItsClass": {"test_trajectories_do_not_see_each_other"},
        "IgnoresThePrompt": {"test_the_task_decides_the_answers"},
        "SeedsTorch": {"test_global_random_generators_are_left_alone"},
        "NeedsAFirstCharacter": {"test_any_text_is_answered[nothing]"},
        "CutsBytes": {"test_any_text_is_answered[letters of two bytes behind one]"},
        "RepeatsTheTurn": {"test_observations_are_bounded"},
    },
    "source": {
        "Empty": {"test_rows_can_be_read"},
        "MixesForms": {"test_prompts_are_of_one_form"},
        "HalvesOfPairs": {"test_rows_are_well_formed"},
        "EmptyPrompts": {"test_prompts_are_texts_or_messages"},
        "OneUid": {"test_uids_are_unique"},
        "Shuffles": {"test_rows_repeat"},
        "KeepsItsPlace": {"test_readers_do_not_share_their_place"},
        "ForgetsItsPlace": {"test_training_prompts_go_on_at_their_place"},
        "ReturnsAList": {"test_rows_are_read_when_they_are_asked_for"},
        "SeedsGlobally": {"test_global_random_generators_are_left_alone"},
        "RaisesKeyErrors": {"test_what_cannot_be_read_is_a_configuration_error"},
    },
}
"""For each kind: its mistakes, and the checks that find each."""
for kind, more in zip(CAUGHT_BY, (broken_rewards, broken_environments, broken_sources), strict=True):
    CAUGHT_BY[kind] |= more.CAUGHT_BY | careless_tasks.CAUGHT_BY[kind] | hasty_tasks.CAUGHT_BY[kind]
    CAUGHT_BY[kind] |= likely_tasks.CAUGHT_BY[kind] | published_tasks.CAUGHT_BY.get(kind, {})
    CAUGHT_BY[kind] |= drawn_tasks.CAUGHT_BY.get(kind, {})
CAUGHT_BY["reward"] |= drawn_rewards.CAUGHT_BY

BY_ORDER = {"RemembersTurns": {"test_another_process_has_the_same_answers"}}
"""Checks that catch a mistake in place of the table's, where the threads of another process begin with another task."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    """Mistakes change this process, its working folder and the folder of temporary files: all are put back."""
    deadline, mask, digits = socket.getdefaulttimeout(), os.umask(0o022), sys.get_int_max_str_digits()
    functions, files = (builtins.exit, builtins.input), resource.getrlimit(resource.RLIMIT_NOFILE)
    threads, field = torch.get_num_threads(), csv.field_size_limit()
    loggers = [logging.getLogger(name) for name in ("transformers", "asyncio")]
    levels = [logger.level for logger in loggers]
    try:
        with contextlib.chdir(tmp_path_factory.mktemp("mistakes")), pytest.MonkeyPatch.context() as environment:
            environment.setenv("HF_HUB_OFFLINE", "1")
            yield run_checks([CHECKS])
    finally:
        os.umask(mask)
        socket.setdefaulttimeout(deadline)
        sys.set_int_max_str_digits(digits)
        builtins.exit, builtins.input = functions
        resource.setrlimit(resource.RLIMIT_NOFILE, files)
        torch.set_grad_enabled(True)
        torch.set_default_device(None)
        torch.set_num_threads(threads)
        csv.field_size_limit(field)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        _release(broken_rewards.LEFT)


def _release(left: list[object]) -> None:
    for each in left:
        if isinstance(each, threading.Event):
            each.set()
        elif isinstance(each, Path):
            shutil.rmtree(each) if each.is_dir() else each.unlink(missing_ok=True)
        else:
            each.close()  # type: ignore[attr-defined]
    left.clear()


@pytest.mark.parametrize("mistake", [mistake for mistakes in CAUGHT_BY.values() for mistake in mistakes])
def test_mistakes_are_caught_by_the_checks_for_them(outcomes: Outcomes, mistake: str) -> None:
    (expected,) = [mistakes[mistake] for mistakes in CAUGHT_BY.values() if mistake in mistakes]
    failed = {check for of, check in outcomes.failed if of == f"Test{mistake}"}
    assert failed in (expected, BY_ORDER.get(mistake, expected))


@pytest.mark.parametrize(
    "part", ["Fine", "FineAndScaled", "Guess", "Rows", *unusual_tasks.CHECKS, *drawn_rewards.CHECKS]
)
def test_a_part_without_mistakes_passes(outcomes: Outcomes, part: str) -> None:
    assert [check for of, check in outcomes.failed if of == f"Test{part}"] == []
    assert [check for of, check in outcomes.passed if of == f"Test{part}"]


def test_every_check_is_the_only_one_to_catch_some_mistake(outcomes: Outcomes) -> None:
    for mistakes in CAUGHT_BY.values():
        tests = {f"Test{mistake}" for mistake in mistakes}
        checks = {check.partition("[")[0] for of, check in outcomes.passed | outcomes.failed if of in tests}
        alone = {check.partition("[")[0] for (check, *others) in mistakes.values() if not others}
        assert checks == alone
