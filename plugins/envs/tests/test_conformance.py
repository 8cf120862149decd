"""The core's kit of environments, over those of this plugin whose library is installed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from rlplug_devkit import EnvironmentConformance, make_prompt
from rlplug_envs.reasoning_gym import ReasoningGymEnvironment
from rlplug_rewards.reasoning_gym import ReasoningGymSource

from rlplug.types import Prompt


@pytest.mark.nightly
class TestReasoningGymEnvironment(EnvironmentConformance):
    def make_environment(self) -> ReasoningGymEnvironment:
        return ReasoningGymEnvironment(num_processes=2)

    def prompts(self) -> Sequence[Prompt]:
        rows = ReasoningGymSource("chain_sum", size=2, seed=3).rows()
        return [make_prompt(str(row.prompt), row.answer, **row.metadata) for row in rows]

    def turns(self) -> Sequence[str]:
        return ["I cannot tell", f"<answer>{self.prompts()[0].answer}</answer>"]
