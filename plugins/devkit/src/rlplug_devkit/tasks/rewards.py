"""Conformance kit of rewards: the checks that a reward must pass, from general to special."""

from __future__ import annotations

from rlplug_devkit.tasks.reward_plays import RewardPlayChecks
from rlplug_devkit.tasks.scoring import make_sample as make_sample


# pytest runs the checks of base classes from the last to the first
class RewardConformance(RewardPlayChecks):
    """Checks of a reward. A subclass must override ``make_reward``, and may override the rest."""

    def test_calls_leave_nothing_behind(self) -> None:
        reward = self._ready()
        self._require_nothing_left("a call of score", lambda: self._score(reward, self.samples()[:1]))

    def test_the_process_is_left_as_it_was(self) -> None:
        """Also by a first call, in an earlier check: a change that is made once is there in all later ones."""
        self._score(self._ready(), self.samples())
        self._require_unchanged_process("a reward")

    def test_calls_replace_nothing_of_the_process(self) -> None:
        """Not for a moment either: other calls run meanwhile."""
        self._skip_after_failure()
        self._require_nothing_borrowed("a reward", lambda: self._score(self._ready(), self.samples()))
