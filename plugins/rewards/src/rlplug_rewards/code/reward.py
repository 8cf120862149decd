"""Reward of tests that a completion's code passes."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rlplug_sandbox.sandbox import Limits, SandboxError, ToolPool

from rlplug.errors import ConfigError, brief, describe
from rlplug.interfaces.reward import Reward
from rlplug.types import RewardError, Sample
from rlplug_rewards.isolation import VARIABLES

MODULE: Final = Path(__file__).with_name("code_checker.py")
FUNCTION: Final = f"{MODULE.stem}.check"
BLOCK: Final = re.compile(r"^```(?:python|py|python3|Python)?[ \t]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
MAX_PROCESSES: Final = 32
LONGEST_CODE: Final = 1 << 18
"""Longest code in characters; a longer one passes no test."""
LATE_S: Final = 2.0
"""Time in seconds for the end of the last test's processes."""


class CodeReward(Reward):
    """Reward of the share of tests that the Python code in a completion passes.

    The code is the last fenced block of the policy's last turn that is marked as Python or not at all. Without one the
    reward is 0. Tests are in the row of the prompt: statements such as ``assert double(2) == 4`` in one field, cases of
    standard input and output in another. Code and tests run in the sandbox of tools, each test in processes of its own,
    apart from what it expects; code that is late, crashes, or ends the test passes none.

    Args:
        tests_key: Field of a row with tests: a list of texts, each one or more Python statements.
        cases_key: Field of a row with cases: a list of objects with ``input`` and ``output``, both texts.
        all_or_nothing: Give 1 for all tests, and else 0.
        test_s: Longest time for one test, in seconds.
        timeout_s: Longest time for all tests of a sample, in seconds. The tests that are left then count as failed.
        memory_mib: Memory limit of each process, in MiB.
        num_processes: Samples that are tested at once, per rank.
        weight: Factor of this reward in the sum that trains.
        name: Key in metrics (``reward/<name>``); ``codereward`` by default.
    """

    def __init__(
        self,
        tests_key: str = "tests",
        cases_key: str = "cases",
        all_or_nothing: bool = False,
        test_s: float = 4.0,
        timeout_s: float = 15.0,
        memory_mib: int = 1024,
        num_processes: int = 4,
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
        self.tests_key, self.cases_key = tests_key, cases_key
        self.all_or_nothing, self.test_s, self.timeout_s = all_or_nothing, test_s, timeout_s
        self._pool = ToolPool(
            [FUNCTION],
            Limits(timeout_s + LATE_S, memory_mib, 1000, MAX_PROCESSES, network=False, read_only=True),
            num_processes,
            environment={name: value for name, value in os.environ.items() if name in VARIABLES},
            module_path=[*sys.path, str(MODULE.parent)],  # the module alone, without rlplug, whose import loads torch
        )

    def notes(self) -> list[str]:
        self._require_walls()
        return [f"{self.name}: {self._pool.walls}"]

    def score(self, samples: Sequence[Sample]) -> list[float | RewardError]:
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> float | RewardError:
        try:
            tests, cases = self._tests_of(sample.prompt.metadata)
        except (ValueError, SyntaxError, RecursionError, MemoryError) as problem:
            return RewardError(f"the prompt's row has no tests that CodeReward can run: {describe(problem)}")
        code = code_of(sample.last_turn or sample.completion)
        if code is None:
            return 0.0
        try:
            self._require_walls()
            arguments = {"code": code, "tests": tests, "cases": cases, "needs_all": self.all_or_nothing}
            times = {"test_s": self.test_s, "time_s": self.timeout_s}
            result = self._pool.call(FUNCTION, arguments | times, seed="0")
        except (SandboxError, ConfigError) as problem:
            return RewardError(str(problem))
        # an error, such as a killed checker, is the doing of the code: what else could fail has raised
        num_tests = len(tests) + len(cases)
        passed = int(result.text) if not result.is_error and result.text.isdecimal() else 0
        return float(passed == num_tests) if self.all_or_nothing else passed / num_tests

    def _require_walls(self) -> None:
        """Start a worker, and refuse a machine on which code could reach the trainer.

        Raises:
            ConfigError: The sandbox lacks a wall.
        """
        if self._pool.is_walled:
            return
        try:
            self._pool.check()
        except SandboxError as error:
            raise ConfigError(f"CodeReward cannot run code here. {error}") from error
        if not self._pool.is_walled:
            raise ConfigError(
                f"CodeReward runs code that a model wrote, and this machine's sandbox lacks a wall around it: "
                f"{self._pool.walls}. Allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, or the "
                "container's security profile) or run as root, on x86_64 or aarch64; it does not run without."
            )

    def _tests_of(self, row: Mapping[str, Any]) -> tuple[list[str], list[tuple[str, str]]]:
        """Return the tests and cases of a row.

        Raises:
            ValueError: They are malformed, or there are none.
            SyntaxError: A test is no Python.
        """
        tests, cases = row.get(self.tests_key) or [], row.get(self.cases_key) or []
        if not isinstance(tests, list) or not all(isinstance(test, str) for test in tests):
            raise ValueError(f"{self.tests_key!r} is {brief(tests)}, not a list of texts")
        for test in tests:
            compile(test, f"<{self.tests_key}>", "exec")
        if not isinstance(cases, list) or not all(_is_case(case) for case in cases):
            raise ValueError(f"{self.cases_key!r} is {brief(cases)}, not a list of objects with input and output")
        if not tests and not cases:
            raise ValueError(f"it has neither {self.tests_key!r} nor {self.cases_key!r}")
        return tests, [(case["input"], case["output"]) for case in cases]


def _is_case(case: Any) -> bool:
    return isinstance(case, Mapping) and all(isinstance(case.get(name), str) for name in ("input", "output"))


def code_of(text: str) -> str | None:
    """Return the last closed code block of a text that is marked as Python or not at all, or ``None``."""
    blocks: list[str] = BLOCK.findall(text)
    return blocks[-1] if blocks and len(blocks[-1]) <= LONGEST_CODE else None
