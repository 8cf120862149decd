"""``CodeReward`` for tests, on machines whose sandbox isolates calls."""

from __future__ import annotations

from typing import Any

import pytest
from rlplug_rewards.code import CodeReward

from rlplug.errors import ConfigError


def code_reward(**options: Any) -> CodeReward:
    """Return a code reward, or skip the test where it refuses to run code."""
    reward = CodeReward(**options)
    try:
        reward.notes()
    except ConfigError as problem:
        pytest.skip(str(problem))
    return reward
