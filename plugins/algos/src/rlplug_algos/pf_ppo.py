"""PF-PPO: PPO on the completions whose rewards are most reliable.

Shen and Zhang, "Policy Filtration for RLHF to Mitigate Noise in Reward Models", arXiv:2409.06957.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from rlplug.types import Sample
from rlplug_algos.options import require
from rlplug_algos.ppo import PPO


@dataclass(kw_only=True, eq=False)
class PFPPO(PPO):
    """PPO on the best and worst of a prompt's completions by reward, where a reward model errs least.

    Args:
        keep: Completions to train on: ``best``, the best one; ``best_worst``, the best and the worst; ``best_random``,
            the best and a random other one, drawn by the run's seed and the step. Among equal rewards the earlier
            completion counts as better. Completions whose reward failed are left out.
    """

    compares_groups: ClassVar[bool] = True

    keep: Literal["best", "best_worst", "best_random"] = "best_worst"

    def __post_init__(self) -> None:
        super().__post_init__()
        choices = ("best", "best_worst", "best_random")
        require(self, "keep", self.keep in choices, f"give one of {', '.join(choices)}")
        self._steps_done = 0

    def select(self, group: Sequence[Sample]) -> Sequence[Sample]:
        valid = [sample for sample in group if not sample.errors]
        ranked = sorted(valid, key=lambda sample: sample.trained_reward, reverse=True)
        best, others = ranked[:1], ranked[1:]
        if self.keep == "best" or not others:
            return best
        if self.keep == "best_worst":
            return [*best, others[-1]]
        assert self.run is not None
        # every rank draws the same, and a resumed run what it would have drawn
        draw = random.Random(f"{self.run.seed}/{self._steps_done + 1}/{best[0].group}")
        return [*best, draw.choice(others)]

    def after_step(self, metrics: Mapping[str, float]) -> None:
        super().after_step(metrics)
        self._steps_done += 1

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"steps_done": self._steps_done}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._steps_done = state.get("steps_done", 0)
