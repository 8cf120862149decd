"""Conformance kit of environments: the checks that an environment must pass, from general to special."""

from __future__ import annotations

import functools

from rlplug_devkit.tasks.playing import make_prompt as make_prompt
from rlplug_devkit.tasks.policy_texts import PolicyTextChecks


class EnvironmentConformance(PolicyTextChecks):
    """Checks of an environment. A subclass must override ``make_environment``, and may override the rest.

    Attributes:
        is_deterministic: Whether the same prompt, seed and turns always have the same answers; without that a run
            cannot be resumed.
    """

    # ---- what it leaves behind ------------------------------------------------------------------------------------

    def test_trajectories_leave_nothing_behind(self) -> None:
        """Those that end before they are done, and whole ones."""
        for turns in (self.turns()[:1], self.turns()):
            self._require_nothing_left("a trajectory", functools.partial(self._play, self.prompts()[0], turns))

    def test_the_process_is_left_as_it_was(self) -> None:
        """Also by a first call, in an earlier check: a change that is made once is there in all later ones."""
        self._play(self.prompts()[0], self.turns())
        self._require_unchanged_process("an environment")
