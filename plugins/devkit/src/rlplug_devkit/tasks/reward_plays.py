"""Checks of a reward on drawn samples: any mixture of the parts that completions, tasks and calls may have."""

from __future__ import annotations

import dataclasses
import functools
import pickle
import random
import time
from collections.abc import Iterator, Sequence
from typing import Final, Literal

from rlplug.interfaces.reward import Reward
from rlplug.rewards.function import FunctionReward
from rlplug.rewards.scores import own_copy
from rlplug.types import Sample
from rlplug_devkit.other_process import of_children
from rlplug_devkit.tasks.likenesses import MIDDLE
from rlplug_devkit.tasks.reward_texts import RewardTextChecks
from rlplug_devkit.tasks.scoring import Values, same_values, with_answer, without_field

NUM_DRAWN: Final = 160
"""Samples, of few parts: many agree with an earlier one in all parts but one."""
NUM_FAILING: Final = 40
"""Calls at once, of a sample that may have no reward."""
MOST_AT_ONCE: Final = 8
"""Most samples of a call."""
PLAY_S: Final = 10.0
"""About how long a process may score drawn samples, in seconds."""
FORMS: Final = (
    "{}", " {}\n", "{}.", "{} {}", "The answer is {}.", "\\boxed{{{}}}", "<answer>{}</answer>", "<think>{}</think> {}",
    "#### {}", "**{}**", f"{MIDDLE}{{}}", f"{{}}{MIDDLE}", "",
)  # fmt: skip
"""What completions put around a text, and where they leave it out."""


class RewardPlayChecks(RewardTextChecks):
    """Checks that compare a reward with itself on samples that no author has written down."""

    num_drawn = NUM_DRAWN
    """Fewer where calls are slow; the other process is told."""

    def test_drawn_samples_are_scored_as_by_another_process(self) -> None:
        """Of each in a process of its own, in which nothing was scored before."""
        self._needs_repetition()
        began = time.monotonic()
        self._values(self._ready(), self._drawn()[0][:1])
        self.num_drawn = max(1, min(NUM_DRAWN, int(PLAY_S / (time.monotonic() - began))))
        here, there = self._drawn_values(), self._elsewhere("_drawn_values_one_by_one", is_fresh=True)
        for call, found, expected in zip(self._drawn(), here, there, strict=True):
            assert same_values(found, expected), (
                f"samples of {[(each.completion[:40], each.prompt.answer) for each in call]} got {found} in one call, "
                f"after others, and {expected} of a new object in another process: a reward is of its sample alone. "
                "Keep nothing between calls, or under a key that has all that a reward depends on."
            )

    def test_failed_calls_hold_nothing_back(self) -> None:
        """A slot, a lock or a connection is given back where there is no reward, by many calls at once, too."""
        self._needs_repetition()
        reward, samples, began = self._ready(), self.samples(), time.monotonic()
        (expected,) = self._values(reward, samples)
        for failing in self._without_a_part(samples[0]):
            if time.monotonic() - began < PLAY_S:
                self._score(reward, *[[failing]] * NUM_FAILING)
        (found,) = self._values(reward, samples)
        assert same_values(found, expected), (
            f"samples got {expected}, and {found} after many without an answer or metadata: let a call that fails keep "
            "nothing."
        )

    def _without_a_part(self, sample: Sample) -> Iterator[Sample]:
        """Yield samples that a reward may be unable to score: without an answer, without a field, and broken ones."""
        yield from (with_answer(sample, None), with_answer(sample, ""))
        yield from (without_field(sample, field) for field in sample.prompt.metadata)
        yield from (dataclasses.replace(sample, prompt=prompt) for prompt in self.broken_prompts())

    def _drawn_values(self) -> list[Values]:
        """Return the values of the drawn calls, of one object."""
        reward = self._ready()
        return [self._values(reward, call, whole=True, make=_made_anew)[0] for call in self._drawn()]

    def _drawn_values_one_by_one(self) -> list[Values]:
        """Return the values of the drawn calls, each sample by an object of its own, in a process of its own."""
        compares = of_children([lambda: self.make_reward().compares_group])[0]
        calls = of_children([self._drawn])[0]
        found = []
        for call in calls:
            parts = [call] if compares else [[each] for each in call]
            values = of_children([functools.partial(self._values_of_a_new_object, part) for part in parts])
            found.append([value for each in values for value in each])
        return found

    def _values_of_a_new_object(self, samples: Sequence[Sample]) -> Values:
        return self._values(self._ready(), samples)[0]

    def _of_other_types(self, reward: Reward, sample: Sample) -> list[Sample]:
        """Return the sample, and those whose answer is the same number of another type, if the reward takes them."""
        answer = sample.prompt.answer
        if not isinstance(answer, str) or not answer.isdecimal() or isinstance(reward, FunctionReward):
            return [sample]
        others = [with_answer(sample, number) for number in (int(answer), float(answer))]
        return [sample, *(each for each in others if not self._is_refused(reward, each.prompt))]

    def _drawn(self) -> list[list[Sample]]:
        """Return samples as calls, the same each time: of one task where the reward compares them."""
        draw, reward, asked = random.Random(0), self._ready(), self.make_reward()
        samples = [other for each in self.samples() for other in self._of_other_types(asked, each)]
        size = MOST_AT_ONCE if reward.compares_group else min(reward.batch_size, MOST_AT_ONCE)
        texts = [*(each.completion[:1000] for each in samples), *(str(each.prompt.answer)[:1000] for each in samples)]
        calls: list[list[Sample]] = []
        while sum(map(len, calls)) < self.num_drawn:
            tasks = [draw.choice(samples)] * size if reward.compares_group else draw.choices(samples, k=size)
            calls.append([_drawn_sample(draw, task, texts) for task in tasks[: draw.randint(1, size)]])
        return calls


def _made_anew(sample: Sample) -> Sample:
    """Return a copy that shares no object with the sample, and that nothing keeps: another will have its address."""
    try:
        made: Sample = pickle.loads(pickle.dumps(sample))
    except Exception:  # noqa: BLE001 - whatever it raises, it cannot be pickled
        return own_copy(sample)
    return made


def _drawn_sample(draw: random.Random, task: Sample, texts: Sequence[str]) -> Sample:
    """Return a sample of a task, whose uid another source has too."""
    text = draw.choice(FORMS).format(draw.choice(texts), draw.choice(texts))
    made = with_answer(dataclasses.replace(task, completion=text), task.prompt.answer)
    prompt = dataclasses.replace(made.prompt, uid="rows:0", source=f"of {task.prompt.uid}")
    reasons: Sequence[Literal["stop", "length"]] = ("stop", "length")
    return dataclasses.replace(
        made,
        prompt=prompt,
        group=draw.randrange(4),
        policy_version=draw.randrange(3),
        finish_reason=draw.choice(reasons),
        last_turn=draw.choice([text, text[len(text) // 2 :]]),
    )
