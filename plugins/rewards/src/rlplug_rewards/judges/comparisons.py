"""Rewards that compare the completions of a prompt: in pairs, or the best of the group."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Sequence
from typing import Final

from rlplug.errors import ConfigError
from rlplug.types import RewardError, Sample
from rlplug_rewards.judges.endpoint import Endpoint
from rlplug_rewards.judges.judge import JudgeBase
from rlplug_rewards.judges.template import OF_PROMPT, PromptTemplate
from rlplug_rewards.judges.verdicts import AnswerForm, choice_reader
from rlplug_rewards.requests.json_client import RequestError, malformed

ALONE: Final = RewardError("the prompt has no other sample to compare with: give groups of at least 2")
MOST_SHOWN: Final = 64
"""Most completions in one request of :class:`BestOfGroup`."""
FAILED: Final = RewardError("the sample's trajectory failed, so that it cannot be compared")


class ComparingJudge(JudgeBase):
    """Base class of rewards that compare the completions of a prompt.

    Equal completions are compared once, and get the same reward. Completions are put in the order of their text, so
    that a reward does not depend on the order of samples.
    """

    compares_group = True

    async def score(self, samples: Sequence[Sample]) -> list[float | RewardError]:
        whole = [sample for sample in samples if not sample.errors]
        if len(whole) < 2:
            return [FAILED if sample.errors else ALONE for sample in samples]
        texts = sorted({sample.completion for sample in whole})
        scores = dict(zip(texts, await self._compare(whole[0], texts), strict=True))
        return [FAILED if sample.errors else scores[sample.completion] for sample in samples]

    def _compare(self, sample: Sample, texts: Sequence[str]) -> Awaitable[list[float | RewardError]]:
        """Return the reward of each text, of which all differ; ``sample`` has the prompt."""
        raise NotImplementedError

    async def _verdict(self, sample: Sample, **values: object) -> str | RequestError:
        try:
            verdict: str = await self.model.ask(self._template.render(sample, **values), self._reader.read)
        except RequestError as error:
            return error
        return verdict


class PairwiseJudge(ComparingJudge):
    """Reward of the share of comparisons with the prompt's other completions that a completion wins.

    A language model is shown two completions, and again in the other order, because models favour a place. A win is one
    in both orders; all else is a tie, which counts 0.5 for both. Comparisons that fail are left out. A completion of
    which half or more have failed is an error, and so is one without another to compare with.

    Args:
        endpoint: The model that judges.
        template: File with the prompt's template, in jinja2: it gets ``prompt``, ``first``, ``second``, ``answer`` and
            ``metadata``.
        answer: Form of the answer. ``json``: an object with ``reason`` and ``winner``, which the server is asked to
            enforce. ``plain``: the winner alone. ``regex``: the first group of ``pattern``'s matches, which must agree.
            The winner is ``first``, ``second`` or ``tie``.
        pattern: Regular expression with one capture group, for ``regex``.
        opponents: Other completions that each is compared with; by default all, which takes ``n * (n - 1)`` requests
            for n different completions. An even number.
        weight: Factor of this reward in the sum that trains.
        name: Key in metrics (``reward/<name>``); ``pairwisejudge`` by default.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        template: str,
        answer: AnswerForm = "json",
        pattern: str | None = None,
        opponents: int | None = None,
        weight: float = 1.0,
        name: str | None = None,
    ) -> None:
        if opponents is not None and (opponents < 2 or opponents % 2):
            raise ConfigError(f"PairwiseJudge.opponents is {opponents}: give an even number from 2, or null for all.")
        shown = ("first", "second")
        super().__init__(
            endpoint,
            choice_reader("PairwiseJudge", answer, pattern, "winner", [*shown, "tie"]),
            PromptTemplate("PairwiseJudge", template, [*OF_PROMPT, *shown], shown),
            weight,
            name,
        )
        self.opponents = opponents

    async def _compare(self, sample: Sample, texts: Sequence[str]) -> list[float | RewardError]:
        if len(texts) == 1:
            return [0.5]
        pairs = pairs_of(len(texts), self.opponents)
        shares = await asyncio.gather(*(self._share(sample, texts[one], texts[other]) for one, other in pairs))
        won: list[list[float]] = [[] for _ in texts]
        failed: list[list[RequestError]] = [[] for _ in texts]
        for (one, other), share in zip(pairs, shares, strict=True):
            if isinstance(share, RequestError):
                failed[one].append(share)
                failed[other].append(share)
            else:
                won[one].append(share)
                won[other].append(1.0 - share)
        return [_mean(*found) for found in zip(won, failed, strict=True)]

    async def _share(self, sample: Sample, one: str, other: str) -> float | RequestError:
        """Return 1 where ``one`` wins in both orders, 0 where ``other`` does, and else 0.5."""
        asked = [self._verdict(sample, first=a, second=b) for a, b in ((one, other), (other, one))]
        verdict, swapped = await asyncio.gather(*asked)
        for answer in (verdict, swapped):
            if isinstance(answer, RequestError):
                self.model.counts.add(failed_comparisons=1)
                return answer
        is_swayed = verdict == swapped != "tie"
        self.model.counts.add(comparisons=1, swayed_by_order=is_swayed)
        if (verdict, swapped) == ("first", "second"):
            return 1.0
        return 0.0 if (verdict, swapped) == ("second", "first") else 0.5


class BestOfGroup(ComparingJudge):
    """Reward of the share of votes in which a language model chooses a completion as the best of its prompt's.

    The model sees all completions at once, each with its number, and names one. It is asked ``votes`` times with the
    completions in other orders, because models favour a place. Votes that fail are left out; when half or more have
    failed, all completions of the prompt are errors.

    Args:
        endpoint: The model that judges.
        template: File with the prompt's template, in jinja2: it gets ``prompt``, ``completions`` (a list; the first has
            number 1), ``answer`` and ``metadata``.
        answer: Form of the answer. ``json``: an object with ``reason`` and ``best``, a number in a text, which the
            server is asked to enforce. ``plain``: the number alone. ``regex``: the first group of ``pattern``'s
            matches, which must agree.
        pattern: Regular expression with one capture group, for ``regex``.
        votes: Requests for each prompt: half of them with the order of the other half turned round. An even number.
        weight: Factor of this reward in the sum that trains.
        name: Key in metrics (``reward/<name>``); ``bestofgroup`` by default.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        template: str,
        answer: AnswerForm = "json",
        pattern: str | None = None,
        votes: int = 2,
        weight: float = 1.0,
        name: str | None = None,
    ) -> None:
        if votes < 2 or votes % 2:
            raise ConfigError(f"BestOfGroup.votes is {votes}: give an even number from 2.")
        shown = ("completions",)
        super().__init__(
            endpoint,
            choice_reader("BestOfGroup", answer, pattern, "best", [str(number) for number in range(1, MOST_SHOWN + 1)]),
            PromptTemplate("BestOfGroup", template, [*OF_PROMPT, *shown], shown),
            weight,
            name,
        )
        self.votes = votes

    async def _compare(self, sample: Sample, texts: Sequence[str]) -> list[float | RewardError]:
        if len(texts) > MOST_SHOWN:
            return [RewardError(f"the prompt has more than {MOST_SHOWN} different completions")] * len(texts)
        orders = orders_of(len(texts), self.votes)
        shown = [[texts[index] for index in order] for order in orders]
        verdicts = await asyncio.gather(*(self._verdict(sample, completions=each) for each in shown))
        votes: list[int] = []
        failed: list[RequestError] = []
        for order, verdict in zip(orders, verdicts, strict=True):
            if isinstance(verdict, RequestError):
                failed.append(verdict)
            elif int(verdict) > len(order):
                self.model.counts.add(malformed=1)
                failed.append(malformed(f"the judge chose {verdict} of {len(order)} completions"))
            else:
                votes.append(order[int(verdict) - 1])
        self.model.counts.add(votes=len(votes), failed_votes=len(failed))
        return [_mean([float(vote == index) for vote in votes], failed) for index in range(len(texts))]


def pairs_of(num_texts: int, opponents: int | None) -> list[tuple[int, int]]:
    """Return pairs of indices: all, or those at most ``opponents / 2`` places apart on a ring."""
    if opponents is None or opponents >= num_texts - 1:
        return list(itertools.combinations(range(num_texts), 2))
    steps = range(1, opponents // 2 + 1)
    return [(index, (index + step) % num_texts) for step in steps for index in range(num_texts)]


def orders_of(num_texts: int, votes: int) -> list[list[int]]:
    """Return that many orders of indices: rotations, each followed by itself turned round."""
    orders = []
    for turn in range(votes // 2):
        start = turn * num_texts // (votes // 2)
        order = [(start + index) % num_texts for index in range(num_texts)]
        orders += [order, order[::-1]]
    return orders


def _mean(values: Sequence[float], failed: Sequence[RequestError]) -> float | RewardError:
    if len(failed) >= len(values):
        return RewardError(f"{len(failed)} of {len(values) + len(failed)} comparisons failed: {failed[0]}")
    return sum(values) / len(values)
