"""Checks of training prompts that a first pass over a source alone does not show: later passes, parts, lists."""

from __future__ import annotations

from typing import Final

import pytest

from rlplug_devkit.tasks.calls import is_same
from rlplug_devkit.tasks.training_prompts import TrainingPromptChecks

NUM_LATER: Final = 6
"""Prompts that are drawn behind a place."""
MOST_IN_A_PASS: Final = 1000
"""Prompts of a pass that is drawn whole."""


class DrawChecks(TrainingPromptChecks):
    """Checks of what ``take`` returns, and of the prompts by their uids."""

    def test_prompts_of_a_part_are_found_by_their_uids(self) -> None:
        """In a mixture uids begin with the part's name; samples are found by them."""
        if not self.is_part:
            pytest.skip("does not apply: is_part is False")
        prompts = self._training_prompts(name="part")
        by_uid = prompts.by_uid
        lost = [each.uid for each in self._taken(prompts, NUM_LATER) if by_uid and each.uid not in by_uid]
        assert not lost, f"by_uid has no {lost[0]!r}, which was drawn: its keys are the uids of prompts, not of rows."

    def test_lists_of_draws_stay_as_they_were(self) -> None:
        """A step keeps its prompts while the next ones are drawn."""
        prompts = self._training_prompts()
        first = self._taken(prompts, NUM_LATER)
        before = list(first)
        self._taken(prompts, 1)
        assert is_same(first, before), "take changes the list that it returned before: return a new one each time."

    def test_draws_of_any_size_go_on_at_their_place(self) -> None:
        """A step that is refilled draws a few prompts more, and the last one of a pass may fall within a draw."""
        size = self._training_prompts().num_prompts
        passes = [(size - 1, 3), (2 * size + 1, 3)] if size is not None and size <= MOST_IN_A_PASS else []
        for portions in ((2, 3), *passes):
            prompts = self._training_prompts()
            found = [len(self._taken(prompts, number)) for number in portions]
            assert found == [*portions], (
                f"take returned {found} prompts, asked for {[*portions]}: go on in a new pass, and in the one after it."
            )
        assert self._goes_on(2, 3), (
            "after draws of 2 and of 3 training prompts a resumed run draws others: count prompts, not draws."
        )

    def test_a_later_pass_goes_on_at_its_place(self) -> None:
        """A run of many passes is resumed in one of them: the first prompt of a pass, and the one behind it."""
        size = self._training_prompts().num_prompts
        if size is None or size > MOST_IN_A_PASS:
            pytest.skip(f"does not apply: a pass has no number of prompts, or more than {MOST_IN_A_PASS}")
        for place in (size, size + 1):
            assert self._goes_on(place), (
                f"after {place} training prompts, of which a pass has {size}, a resumed run draws others: the order of "
                "a pass follows from its number, which belongs into state_dict."
            )

    def _goes_on(self, *portions: int) -> bool:
        """Return whether a run that is resumed after some draws goes on as the other one does."""
        went_on, resumed = self._training_prompts(), self._training_prompts()
        for number in portions:
            self._taken(went_on, number)
        resumed.load_state_dict(self._state(went_on))
        return is_same(*(self._taken(each, NUM_LATER) for each in (went_on, resumed)))
