"""``MultipleChoice``: reward of the letter that a completion chooses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rlplug.errors import ConfigError
from rlplug.types import Prompt, RewardError
from rlplug_rewards.answer_reward import AnswerReward
from rlplug_rewards.answers.choices import LETTERS, read_choice
from rlplug_rewards.answers.extraction import Found
from rlplug_rewards.answers.judging import is_same
from rlplug_rewards.answers.references import accepted_answers


class MultipleChoice(AnswerReward):
    r"""Reward of 1.0 when a completion chooses the prompt's letter, else 0.0.

    It reads ``The answer is D.``, ``(C)``, ``B) 12``, ``**B**`` and letters in boxes and tags. A completion that
    chooses several letters, or none, gets 0. The prompt's answer is a letter (``B``, ``(B)``, ``B. 12``), or the index
    of the choice from 0, as in MMLU; a list has those that are accepted.

    Args:
        choices_key: Field of a row with the texts of its choices in order: a list, or an object with ``text``, as ARC
            has it. Where a row has it, what a tag or box marks may be the text of a choice instead of its letter.
        answer_pattern: Regular expression with a capture group: the first group of its last match after the thought is
            the choice, and nothing else is.
        finished_only: Give 0 to completions that a limit of tokens or turns cut off.
        marked_only: Give 0 where nothing marks the answer.
        weight: Factor of this reward in the sum that trains.
        name: Key in metrics (``reward/<name>``); ``multiplechoice`` by default.
    """

    def __init__(
        self,
        choices_key: str = "choices",
        answer_pattern: str | None = None,
        finished_only: bool = False,
        marked_only: bool = False,
        weight: float = 1.0,
        name: str | None = None,
    ) -> None:
        super().__init__(answer_pattern, finished_only, marked_only, weight, name)
        if not choices_key:
            raise ConfigError("MultipleChoice.choices_key is empty: name the field of a row that has its choices.")
        self.choices_key = choices_key

    def pop_counts(self) -> Mapping[str, float]:
        return self.found.pop()

    def check_prompt(self, prompt: Prompt) -> None:
        self._letters(prompt)

    def score_answer(self, prompt: Prompt, found: Found) -> float | RewardError:
        if found.is_cut_off:
            return 0.0
        accepted, texts = self._letters(prompt), self._texts(prompt)
        letter = read_choice(found.text, found.is_marked, LETTERS[: len(texts)] if texts else LETTERS)
        if letter is None and found.is_marked:
            named = [index for index, text in enumerate(texts) if is_same(text, found.text)]
            letter = LETTERS[named[0]] if len(named) == 1 else None
        return float(letter is not None and letter in accepted)

    def _texts(self, prompt: Prompt) -> list[str]:
        choices: Any = prompt.metadata.get(self.choices_key)
        if isinstance(choices, Mapping):
            choices = choices.get("text")
        if hasattr(choices, "tolist"):
            choices = choices.tolist()
        return [str(choice) for choice in choices] if isinstance(choices, list | tuple) else []

    def _letters(self, prompt: Prompt) -> set[str]:
        """Return the letters that are accepted.

        Raises:
            ValueError: An answer is no letter and no index of a choice.
        """
        texts = self._texts(prompt)
        return {self._letter(answer, len(texts) or len(LETTERS)) for answer in accepted_answers(prompt.answer)}

    def _letter(self, answer: Any, num_choices: int) -> str:
        if isinstance(answer, float) and answer.is_integer():
            answer = int(answer)
        if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < min(num_choices, len(LETTERS)):
            return LETTERS[answer]
        text = str(answer).strip()
        if re.fullmatch("[a-j]", text):
            text = text.upper()
        letter = read_choice(text, is_marked=True) if isinstance(answer, str) else None
        if letter is None or LETTERS.index(letter) >= num_choices:
            raise ValueError(f"{answer!r} is neither the letter of one of {num_choices} choices nor an index from 0")
        return letter
