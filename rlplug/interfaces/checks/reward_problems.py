"""What rewards cannot work with, and what to do about it: messages that most runs do not need."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from typing import Any, Final

from rlplug.errors import ConfigError, did_you_mean
from rlplug.types import ENVIRONMENT, TRAJECTORY, Prompt

_ANSWERS: Final = ("solution", "target", "label", "ground_truth", "gold", "reference", "expected", "output", "response")
"""Names that data sets give their answers."""


def explain_missing(reward: str, prompts: Sequence[Prompt]) -> str:
    """Return a message that counts prompts without an answer, and names the first and the field that may be meant."""
    lacking = [prompt for prompt in prompts if prompt.answer is None]
    fields = lacking[0].metadata
    field = next((field for field in fields if field.lower() in _ANSWERS), None)
    field = field or next(iter(difflib.get_close_matches("answer", fields, 1)), None)
    if len(lacking) < len(prompts):
        fix = f"Correct its field {field!r}" if field else "Give it one, or remove it"
    elif field:
        fix = f"Set answer_key of this source to {field!r}"
    else:
        fix = f"Give them one; beside the prompt they have {', '.join(fields) or 'no field'}"
    return (
        f"{len(lacking):,} of {len(prompts):,} prompts ha{'s' if len(lacking) == 1 else 've'} no answer, and {reward} "
        f"of model.rewards needs one. The first is {lacking[0].uid}. {fix}. (A function that can do without takes "
        "answer=None.)"
    )


def explain_parameter(function: str, name: str, fields: Collection[str]) -> str:
    """Return a message about a parameter of a function that is none of the fields of a sample."""
    return (
        f"FunctionReward.function is {function}, whose parameter {name!r} is not a field of a sample."
        f"{did_you_mean(name, fields)} Name its parameters out of {', '.join(fields)}; "
        "a single parameter of another name gets the sample."
    )


def explain_failed(name: str, source: str, message: str, uid: str) -> str:
    """Return a message about the first failed reward of too many, and what to correct or raise."""
    if name == ENVIRONMENT:
        fix = "Correct model.environment or its data, raise model.turns.step_deadline_s if it needs longer"
    elif name == TRAJECTORY:
        fix = "Raise model.partial_rollout.trajectory_deadline_s if trajectories need longer"
    else:
        fix = "Correct that reward in model.rewards or its data, raise model.limits.reward_deadline_s if it is slow"
    return (
        f"First error, of reward {name!r}{source} on prompt {uid!r}: {message}. {fix}, or raise "
        "model.limits.max_reward_error_share."
    )


def check_group_rewards(rewards: Sequence[Any], group_size: int, num_validated: int | None) -> None:
    """Raise ``ConfigError`` for a reward that compares a prompt's samples where it has one (``None``: not held out)."""
    for reward in rewards:
        problem = ""
        if (reward.compares_group or reward.scales_group) and group_size < 2:
            problem = f"model.batch.group_size is {group_size}: give at least 2"
        elif reward.compares_group and num_validated == 1:
            problem = (
                "model.validation.num_samples is 1: give at least 2 with a temperature above 0, or switch validation "
                "off (at_start: false, every_n_steps: null)"
            )
        if problem:
            raise ConfigError(f"model.rewards: {reward.name!r} compares the completions of a prompt, and {problem}.")
