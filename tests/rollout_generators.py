"""Rollout generators on an engine driver, without the rest of a run."""

from __future__ import annotations

from rlplug.rollout.config import TurnOptions
from rlplug.rollout.source import RolloutGenerator
from rlplug.rollout.trajectory import to_samples
from rlplug.rollout.turns.environment_calls import EnvironmentCalls
from rlplug.rollout.turns.observation_tokens import ObservationTokens
from rlplug.rollout.turns.trajectory_turns import TurnRules


class TextlessTokenizer:
    def batch_decode(self, rows, skip_special_tokens):
        return ["" for _ in rows]


def generator_of(driver, tokenizer=None, make_environment=None, options=None, gather=list):
    """Return the generator on a driver, with observations that are plain text."""
    tokenizer, options = tokenizer or TextlessTokenizer(), options or TurnOptions()
    observations = ObservationTokens(tokenizer, chat=False)

    def make_rules():
        if make_environment is None:
            return TurnRules(options)
        end_tokens = driver.spec.eos_token_ids
        environments = EnvironmentCalls(make_environment, tokenizer, end_tokens, options, observations)
        return TurnRules(options, environments, observations)

    return RolloutGenerator(driver, tokenizer, make_rules, gather)


def samples_of(trajectories, completions, tokenizer=None):
    """Return samples of one turn each."""
    for trajectory, completion in zip(trajectories, completions, strict=True):
        trajectory.add_completion(completion, ends_turn=True)
        trajectory.finish_reason = completion.finish_reason
    return to_samples(trajectories, tokenizer or TextlessTokenizer(), has_environment=False)
