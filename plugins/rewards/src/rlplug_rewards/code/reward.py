"""Reward of tests that a completion's code passes."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rlplug_sandbox.sandbox import Limits, SandboxError, ToolPool

from rlplug.errors import ConfigError
from rlplug.interfaces.reward import Reward
from rlplug.types import Prompt, RewardError, Sample
from rlplug_rewards.answers.extraction import after_thought, begins_thought
from rlplug_rewards.code.fences import PYTHON, blocks
from rlplug_rewards.code.row_tests import RowTests, read_row
from rlplug_rewards.isolation import VARIABLES

MODULE: Final = Path(__file__).with_name("code_checker.py")
FUNCTION: Final = f"{MODULE.stem}.check"
MAX_PROCESSES: Final = 32
LONGEST_CODE: Final = 1 << 18
"""Longest code in characters; a longer one passes no test."""
LATE_S: Final = 2.0
"""Time in seconds for the end of the last test's processes."""


class CodeReward(Reward):
    """Reward of the share of tests that the Python code in a completion passes.

    The code is the last fenced block of the policy's last turn, after its thought, that is marked as Python or not at
    all. Without one the reward is 0. Tests are in the row of the prompt: statements such as ``assert double(2) == 4``
    in one field, cases of standard input and output in another. Code and tests run in the sandbox of tools, each test
    in processes of its own, apart from what it expects; code that is late, crashes, or ends the test passes none.

    Args:
        tests_key: Field of a row with tests: a list of texts, each one or more Python statements.
        cases_key: Field of a row with cases: a list of objects with ``input`` and ``output``, both texts.
        entry_point_key: Field of a row with the name of the function under test. It is needed where that is the name of
            a built-in, such as ``sum``, and the tests use other built-ins too.
        all_or_nothing: Give 1 for all tests, and else 0.
        test_s: Longest time for one test, in seconds.
        timeout_s: Longest time for all tests of a sample, in seconds. The tests that are left then count as failed.
        memory_mib: Memory limit of each process, in MiB.
        num_processes: Samples that are tested at once, per rank.
        allow_visible_files: Also run where files, such as the expected answers, cannot be hidden from the code.
        weight: Factor of this reward in the sum that trains.
        name: Key in metrics (``reward/<name>``); ``codereward`` by default.
    """

    def __init__(
        self,
        tests_key: str = "tests",
        cases_key: str = "cases",
        entry_point_key: str = "entry_point",
        all_or_nothing: bool = False,
        test_s: float = 4.0,
        timeout_s: float = 15.0,
        memory_mib: int = 1024,
        num_processes: int = 4,
        allow_visible_files: bool = False,
        weight: float = 1.0,
        name: str | None = None,
    ) -> None:
        super().__init__(weight, name)
        for key, value in (("test_s", test_s), ("timeout_s", timeout_s)):
            if not 0 < value <= 3600:
                raise ConfigError(f"CodeReward.{key} is {value}: give a positive number of seconds, up to an hour.")
        if num_processes < 1:
            raise ConfigError(f"CodeReward.num_processes is {num_processes}: give at least 1.")
        if memory_mib < 64:
            raise ConfigError(f"CodeReward.memory_mib is {memory_mib}: give at least 64, which Python needs to start.")
        self.tests_key, self.cases_key, self.entry_point_key = tests_key, cases_key, entry_point_key
        self.max_calls = num_processes
        self.all_or_nothing, self.test_s, self.timeout_s = all_or_nothing, test_s, timeout_s
        self.allow_visible_files = allow_visible_files
        self._pool = ToolPool(
            [FUNCTION],
            Limits(timeout_s + LATE_S, memory_mib, 1000, MAX_PROCESSES, network=False, folders=(str(MODULE.parent),)),
            num_processes,
            environment={name: value for name, value in os.environ.items() if name in VARIABLES},
            module_path=[*sys.path, str(MODULE.parent)],  # the module alone, without rlplug, whose import loads torch
        )

    def notes(self) -> list[str]:
        self._require_isolation()
        return [f"{self.name}: {self._pool.isolation}"]

    def score(self, samples: Sequence[Sample]) -> list[float | RewardError]:
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> float | RewardError:
        try:
            row = self._row(sample.prompt)
        except ValueError as problem:
            return RewardError(f"the prompt's row has no tests that CodeReward can run: {problem}")
        text = after_thought(sample.last_turn or sample.completion, begins_thought(sample.prompt.text))
        code = None if text is None else code_of(text)
        if code is None:
            return 0.0
        try:
            self._require_isolation()
            arguments = {"code": code, "needs_all": self.all_or_nothing, **dataclasses.asdict(row)}
            times = {"test_s": self.test_s, "time_s": self.timeout_s}
            result = self._pool.call(FUNCTION, arguments | times, seed="0")
        except (SandboxError, ConfigError) as problem:
            return RewardError(str(problem))
        # an error, such as a killed checker, is the doing of the code: what else could fail has raised
        num_tests = len(row.tests) + len(row.cases)
        passed = int(result.text) if not result.is_error and result.text.isdecimal() else 0
        return float(passed == num_tests) if self.all_or_nothing else passed / num_tests

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            try:
                self._row(prompt)
            except ValueError as problem:
                raise ConfigError(
                    f"reward {self.name!r} cannot run the tests of prompt {prompt.uid!r}: {problem}. Correct "
                    "the row, or "
                    "leave it out."
                ) from problem

    def _row(self, prompt: Prompt) -> RowTests:
        return read_row(prompt.metadata, self.tests_key, self.cases_key, self.entry_point_key)

    def _require_isolation(self) -> None:
        """Start a worker, and refuse a machine on which code could reach the trainer or its files.

        Raises:
            ConfigError: Calls of the sandbox are not isolated here.
        """
        if self._is_walled():
            return
        try:
            self._pool.check()
        except SandboxError as error:
            raise ConfigError(f"CodeReward cannot run code here. {error}") from error
        if not self._pool.is_isolated:
            raise ConfigError(
                "CodeReward runs code that a model wrote, and this machine's sandbox does not isolate it: "
                f"{self._pool.isolation}. Allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, or the "
                "container's security profile) or run as root, on x86_64 or aarch64; it does not run without."
            )
        if not self._is_walled():
            raise ConfigError(
                "CodeReward runs code that a model wrote, and this machine's sandbox does not hide this user's files "
                f"from it, the expected answers among them: {self._pool.isolation}. Allow namespaces, or take a kernel "
                "with Landlock (Linux 5.13); with allow_visible_files: true it runs all the same."
            )

    def _is_walled(self) -> bool:
        return self._pool.is_isolated and (self._pool.hides_files or self.allow_visible_files)


def code_of(text: str) -> str | None:
    """Return the last closed code block of a text that is marked as Python or not at all, or ``None``."""
    found = [block.code for block in blocks(text) if block.language in PYTHON]
    return found[-1] if found and len(found[-1]) <= LONGEST_CODE else None
