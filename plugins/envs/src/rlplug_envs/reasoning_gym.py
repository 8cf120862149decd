"""Environment for puzzles of reasoning-gym with several attempts."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Final

import numpy as np
from rlplug_rewards.verifiers import ReasoningGymReward

from rlplug.errors import ConfigError
from rlplug.interfaces import Environment, StepResult
from rlplug.types import Prompt, RewardError, Sample, reaches

FEEDBACK: Final = "That is not right. Try again."


class ReasoningGymEnvironment(Environment):
    """Environment that scores an answer to a puzzle, and lets the policy try again after a wrong one.

    Prompts come from ``ReasoningGymSource``. Each turn is an attempt, parsed and scored as ``ReasoningGymReward`` does,
    in child processes which the trajectories of a rank share. A trajectory's reward is the score of its last attempt,
    less ``attempt_penalty`` for each one before. Trajectories that this environment ends have the metrics ``attempts``
    and ``solved``.

    Args:
        max_attempts: Largest number of attempts, with which the trajectory ends.
        attempt_penalty: Deduction from the reward for each wrong attempt that is followed by another one.
        solved_at: Score from which on an attempt is right. Some tasks score an answer that is nearly right between 0
            and 1.
        feedback: Text that the policy gets after a wrong attempt; ``{attempts_left}`` in it becomes their number.
        answer_pattern: Regular expression with a capture group for the answer, as in ``ReasoningGymReward``.
        timeout_s: Longest time for scoring one attempt, in seconds.
        num_processes: Child processes per rank, started when they are needed.
    """

    def __init__(
        self,
        max_attempts: int = 3,
        attempt_penalty: float = 0.0,
        solved_at: float = 1.0,
        feedback: str = FEEDBACK,
        answer_pattern: str | None = None,
        timeout_s: float = 5.0,
        num_processes: int = 4,
    ) -> None:
        if max_attempts < 1:
            raise ConfigError(f"ReasoningGymEnvironment.max_attempts is {max_attempts}: give at least 1.")
        if attempt_penalty < 0:
            raise ConfigError(f"ReasoningGymEnvironment.attempt_penalty is {attempt_penalty}: give 0 or more.")
        if not 0 < solved_at <= 1:
            raise ConfigError(f"ReasoningGymEnvironment.solved_at is {solved_at}: give a score above 0, up to 1.")
        self.max_attempts = max_attempts
        self.attempt_penalty = attempt_penalty
        self.solved_at = solved_at
        self.feedback = feedback
        self._scorer = _shared_scorer(answer_pattern, timeout_s, num_processes)
        self._prompt: Prompt
        self._num_attempts = 0

    def notes(self) -> list[str]:
        return self._scorer.notes()

    def reset(self, prompt: Prompt, seed: int) -> None:
        metadata = prompt.metadata
        if not isinstance(metadata.get("task"), str) or not isinstance(metadata.get("entry"), Mapping):
            raise ConfigError(
                f"The prompt {prompt.uid!r} is not a reasoning-gym puzzle, which ReasoningGymEnvironment needs: set "
                "data.train and data.val to ReasoningGymSource."
            )
        self._prompt = prompt
        self._num_attempts = 0

    def step(self, completion: str) -> StepResult:
        self._num_attempts += 1
        score = self._score(completion)
        is_solved = reaches(score, self.solved_at)
        if is_solved or self._num_attempts == self.max_attempts:
            metrics = {"attempts": float(self._num_attempts), "solved": float(is_solved)}
            return StepResult(reward=score, done=True, metrics=metrics)
        attempts_left = self.max_attempts - self._num_attempts
        feedback = self.feedback.replace("{attempts_left}", str(attempts_left))
        return StepResult(observation=feedback, reward=-self.attempt_penalty)

    def _score(self, completion: str) -> float:
        attempt = Sample(
            prompt=self._prompt,
            group=0,
            token_ids=np.zeros(0, np.int32),
            response_mask=np.zeros(0, np.bool_),
            rollout_logprobs=np.zeros(0, np.float32),
            completion=completion,
            finish_reason="stop",
            policy_version=0,
        )
        [score] = self._scorer.score([attempt])
        if isinstance(score, RewardError):
            raise RuntimeError(f"reasoning-gym could not score an attempt: {score.message}")
        return score


@functools.cache
def _shared_scorer(answer_pattern: str | None, timeout_s: float, num_processes: int) -> ReasoningGymReward:
    """Return the one scorer with these settings, which the environments of all trajectories share."""
    try:
        return ReasoningGymReward(answer_pattern, timeout_s=timeout_s, num_processes=num_processes)
    except ConfigError as error:
        # the options are those of the reward, but the user has written the environment's name
        raise ConfigError(str(error).replace("ReasoningGymReward", "ReasoningGymEnvironment")) from error
