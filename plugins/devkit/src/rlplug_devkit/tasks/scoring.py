"""Samples for rewards, and calls of a reward as a run makes them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np
import torch

from rlplug.errors import describe
from rlplug.interfaces.plain_values import as_reward
from rlplug.interfaces.reward import Reward
from rlplug.rewards.scores import own_copy
from rlplug.timeouts import Call, CallError
from rlplug.types import Prompt, RewardError, Sample, Segment
from rlplug_devkit.tasks.refusals import RefusalChecks

NUM_PAUSES: Final = 6
PAUSE_S: Final = 1e-4
"""Pauses of a sample, and how long each takes, in seconds."""
Values = list[float | None]
"""Rewards of samples, with ``None`` for an error."""


def make_sample(completion: str, answer: Any = None, prompt: str = "2+2=", **metadata: Any) -> Sample:
    """Return a finished sample of one turn, with a token for each character.

    Args:
        completion: Text of the completion.
        answer: The prompt's reference answer.
        prompt: Text of the prompt.
        metadata: The prompt's other fields.
    """
    tokens = np.array([ord(character) % 1000 for character in prompt + completion], np.int32)
    mask = np.arange(len(tokens)) >= len(prompt)
    uid = f"made-up:{zlib.crc32(repr((prompt, answer, metadata)).encode('utf-8', 'replace'))}"
    return Sample(
        prompt=Prompt(uid, tuple(tokens[: len(prompt)].tolist()), prompt, answer, metadata),
        group=0,
        token_ids=tokens,
        response_mask=mask,
        rollout_logprobs=np.where(mask, np.float32(-1), np.float32(0)),
        completion=completion,
        finish_reason="stop",
        policy_version=0,
        segments=(Segment(len(prompt), len(tokens), policy_version=0, ends_turn=True),),
        last_turn=completion,
    )


class Interrupting(Sample):
    """A sample that lets other threads go on when it is first read, so that calls meet in the middle."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("completion", "prompt", "token_ids"):
            left: int = vars(self).setdefault("_pauses", NUM_PAUSES)
            vars(self)["_pauses"] = left - 1
            if left > 0:
                time.sleep(PAUSE_S)
        return super().__getattribute__(name)


def interrupting(sample: Sample) -> Sample:
    """Return a copy, as a run makes it, that lets other threads go on when it is read."""
    made = own_copy(sample)
    return Interrupting(**{each.name: getattr(made, each.name) for each in dataclasses.fields(made)})


class Scores(RefusalChecks):
    """Base class of the kit: makes a reward and calls it.

    Attributes:
        sample_rows: Arguments of :func:`make_sample` for each sample, such as ``{completion: (B), answer: B, choices:
            [3, 4]}``: at least three, with different rewards.
    """

    sample_rows: ClassVar[Sequence[Mapping[str, Any]]] = [
        {"completion": text, "answer": "4"} for text in ("4", "the answer is 5", "", "2+2=4, so 4")
    ]

    def make_reward(self) -> Reward:
        """Return the reward, as a YAML file would make it."""
        raise NotImplementedError(f"{type(self).__name__}.make_reward must return the reward to test")

    def samples(self) -> Sequence[Sample]:
        """Return at least three samples that it can score, with different rewards: those of ``sample_rows``."""
        return [make_sample(**row) for row in self.sample_rows]

    def expected(self) -> Values | None:
        """Return the rewards of ``samples()``, ``None`` for an error; without them, any that differ will do."""
        return None

    def expected_notes(self) -> Sequence[str] | None:
        """Return what ``notes`` returns; without it, any texts will do."""
        return None

    def broken_prompts(self) -> Sequence[Prompt]:
        """Return prompts that ``check_prompts`` has to refuse, each alone, for an answer or metadata of theirs."""
        return ()

    def _subject(self) -> str:
        return type(self.make_reward()).__name__

    def _make(self) -> Reward:
        return self.make_reward()

    def _prepare(self, made: Any) -> None:
        made.place(torch.device("cpu"))
        made.notes()

    def _ready(self, checked: Sequence[Prompt] = ()) -> Reward:
        """Return a new reward after what a run calls before the first step.

        Args:
            checked: Prompts that ``check_prompts`` gets; without them it is not called.
        """
        reward = self.make_reward()
        try:
            with self._guard().around("check_prompts, place and notes"):
                if checked:
                    reward.check_prompts(checked)
                reward.place(torch.device("cpu"))
                reward.notes()
        except Exception as error:  # noqa: BLE001 - the check of notes says what it is
            self._not_compared(f"check_prompts, place or notes raised {describe(error)}")
        return reward

    def _score(
        self,
        reward: Reward,
        *batches: Sequence[Sample],
        whole: bool = False,
        make: Callable[[Sample], Sample] = own_copy,
    ) -> list[list[Call]]:
        """Score batches at once, each one call after another, and return their calls, which get copies, as in a run.

        Args:
            reward: The reward.
            batches: Samples; those of a batch are of one prompt where the reward compares them.
            whole: Give one call all samples of a batch, whatever ``batch_size`` is.
            make: Makes the copies.
        """
        size = max(map(len, batches)) if whole or reward.compares_group else reward.batch_size
        parts = [[batch[start : start + size] for start in range(0, len(batch), size)] for batch in batches]
        found: list[list[Call]] = [[] for _ in batches]
        with self._guard().around("score"):
            for place in range(max(map(len, parts))):
                indices = [index for index, of_batch in enumerate(parts) if place < len(of_batch)]
                copies = [[make(sample) for sample in parts[index][place]] for index in indices]
                for sample in itertools.chain(*copies):
                    self._watch(sample)
                calls = self._calls([functools.partial(reward.score, samples) for samples in copies])
                for index, call in zip(indices, calls, strict=True):
                    found[index].append(call)
        return found

    def _values(
        self,
        reward: Reward,
        *batches: Sequence[Sample],
        whole: bool = False,
        make: Callable[[Sample], Sample] = own_copy,
    ) -> list[Values]:
        """Return the values of batches; end the check where calls fail or are malformed."""
        found: list[Values] = []
        for batch, calls in zip(batches, self._score(reward, *batches, whole=whole, make=make), strict=True):
            values: Values = []
            for call in calls:
                if call.error or not isinstance(call.value, list):
                    self._not_compared(f"score {call.error or 'returned no list'}")
                try:
                    values += [None if isinstance(each, RewardError) else as_reward(each) for each in call.value]
                except CallError as problem:
                    self._not_compared(f"score returned {problem}")
            if len(values) != len(batch):
                self._not_compared(f"score returned {len(values)} values for {len(batch)} samples")
            found.append(values)
        return found


def with_answer(sample: Sample, answer: Any, prompt: str | None = None) -> Sample:
    """Return the sample of another task: with another answer, and with another prompt where one is given."""
    return _of_task(sample, sample.completion, answer, sample.prompt.text if prompt is None else prompt)


def with_completion(sample: Sample, text: str) -> Sample:
    """Return another sample of the same task, with another completion."""
    return _of_task(sample, text, sample.prompt.answer, sample.prompt.text)


def with_failed(samples: Sequence[Sample], reward: float) -> list[Sample]:
    """Return samples in which another number stands for each reward that failed."""
    return [dataclasses.replace(each, reward=reward) if each.errors else each for each in samples]


def without_field(sample: Sample, field: str) -> Sample:
    """Return the sample of a prompt whose metadata lack a field."""
    metadata = {name: value for name, value in sample.prompt.metadata.items() if name != field}
    return dataclasses.replace(sample, prompt=dataclasses.replace(sample.prompt, metadata=metadata))


def _of_task(sample: Sample, completion: str, answer: Any, prompt: str) -> Sample:
    """Return a sample with the other fields of a sample's prompt."""
    made = make_sample(completion, answer, prompt, **sample.prompt.metadata)
    return dataclasses.replace(made, prompt=dataclasses.replace(made.prompt, messages=sample.prompt.messages))


def same_values(first: Sequence[float | None], second: Sequence[float | None]) -> bool:
    """Return whether values are equal to seven digits: a model in a batch of another size rounds differently."""
    return [_rounded(value) for value in first] == [_rounded(value) for value in second]


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6e}")


def is_reward(value: Any) -> bool:
    """Return whether a value is a number that can train."""
    try:
        as_reward(value)
    except CallError:
        return False
    return True
