"""Reward that a language model gives: one number for each completion."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from rlplug.interfaces.reward import Reward
from rlplug.types import RewardError, Sample
from rlplug_rewards.judges.chat import ChatModel
from rlplug_rewards.judges.endpoint import Endpoint
from rlplug_rewards.judges.template import OF_PROMPT, PromptTemplate
from rlplug_rewards.judges.verdicts import AnswerForm, VerdictReader, score_reader
from rlplug_rewards.requests.json_client import RequestError


class JudgeBase(Reward):
    """Base class of rewards that ask a model.

    Args:
        endpoint: The model.
        reader: Reads its verdicts.
        template: The prompt's template.
        weight: Factor of this reward in the sum that trains.
        name: Key in metrics.
    """

    def __init__(
        self, endpoint: Endpoint, reader: VerdictReader, template: PromptTemplate, weight: float, name: str | None
    ) -> None:
        super().__init__(weight, name)
        self.deadline_s = endpoint.limits.deadline_s
        self.model = ChatModel(type(self).__name__, endpoint, reader.schema)
        self._reader, self._template = reader, template

    def notes(self) -> list[str]:
        return [f"{self.name}: {self.model.check()}"]

    def pop_counts(self) -> Mapping[str, float]:
        return self.model.counts.pop()


class Judge(JudgeBase):
    """Reward that a language model behind an OpenAI-compatible server gives, as a number in its answer.

    An answer that is late, malformed or out of range is an error of its sample, never a score. The reward is the number
    as it is: choose ``weight`` for the range.

    Args:
        endpoint: The model that judges.
        template: File with the prompt's template, in jinja2: it gets ``prompt``, ``completion``, ``last_turn``,
            ``answer`` and ``metadata``.
        answer: Form of the answer. ``json``: an object with ``reason`` and ``score``, which the server is asked to
            enforce. ``plain``: the number alone. ``regex``: the first group of ``pattern``'s matches, which must agree.
        pattern: Regular expression with one capture group, for ``regex``.
        minimum: Lowest score.
        maximum: Highest score.
        weight: Factor of this reward in the sum that trains.
        name: Key in metrics (``reward/<name>``); ``judge`` by default.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        template: str,
        answer: AnswerForm = "json",
        pattern: str | None = None,
        minimum: float = 0.0,
        maximum: float = 1.0,
        weight: float = 1.0,
        name: str | None = None,
    ) -> None:
        seen = ("completion", "last_turn")
        super().__init__(
            endpoint,
            score_reader("Judge", answer, pattern, minimum, maximum),
            PromptTemplate("Judge", template, [*OF_PROMPT, *seen], seen),
            weight,
            name,
        )

    async def score(self, samples: Sequence[Sample]) -> list[float | RewardError]:
        return await asyncio.gather(*(self._score(sample) for sample in samples))

    async def _score(self, sample: Sample) -> float | RewardError:
        try:
            question = self._template.render(sample, completion=sample.completion, last_turn=sample.last_turn)
            verdict: float = await self.model.ask(question, self._reader.read)
        except RequestError as error:
            return RewardError(str(error))
        return verdict
