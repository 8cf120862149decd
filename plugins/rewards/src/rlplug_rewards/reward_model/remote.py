"""Reward of a trained reward model behind a server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence

from rlplug.interfaces.reward import Reward
from rlplug.types import RewardError, Sample
from rlplug_rewards.requests.json_client import RequestError
from rlplug_rewards.reward_model.classifier import batches_of
from rlplug_rewards.reward_model.conversations import ALL, Conversations, require_positive
from rlplug_rewards.reward_model.endpoint import RewardEndpoint
from rlplug_rewards.reward_model.server import RewardServer, ServedModel


class RemoteRewardModel(Reward):
    """Reward that a trained reward model behind a server of vLLM or SGLang gives: a sequence classifier with one label.

    It reads prompt and completion as ``RewardModel`` does, with the model's tokenizer and chat template here, and
    sends token ids. The score is the number of the model's head, without an activation. A request that fails in the
    end, or whose answer is not exactly a score for each conversation, is an error of its samples. Before the first
    step the server is asked for its model, its longest conversation, tokens of some texts, and their scores.

    Args:
        path: Folder of the model's tokenizer, or the model's name on the hub; its weights are not read.
        endpoint: The server.
        max_tokens: Most tokens of a request, counted as if all its conversations were as long as the longest.
        max_length: Longest conversation in tokens; a longer one, or one that is longer than the server takes, is an
            error of its sample. By default, what the server takes.
        prompt_key: Field of the row with the question as text or as a list of messages; by default, the prompt's own
            text or messages, without the policy's template.
        chat_template: File with a chat template, in place of the tokenizer's.
        weight: Factor of this reward in the sum that trains.
        name: Key in metrics (``reward/<name>``); ``remoterewardmodel`` by default.
    """

    batch_size = 64

    def __init__(
        self,
        path: str,
        endpoint: RewardEndpoint,
        max_tokens: int = 16384,
        max_length: int | None = None,
        prompt_key: str | None = None,
        chat_template: str | None = None,
        weight: float = 1.0,
        name: str | None = None,
    ) -> None:
        super().__init__(weight, name)
        require_positive("RemoteRewardModel", max_tokens=max_tokens, max_length=max_length)
        self.path, self.max_tokens, self.max_length = path, max_tokens, max_length
        self.deadline_s = endpoint.limits.deadline_s
        self.server = RewardServer("RemoteRewardModel", endpoint)
        self._conversations = Conversations("RemoteRewardModel", path, chat_template, prompt_key)
        self._lock = threading.Lock()
        self._served: ServedModel | None = None

    def notes(self) -> list[str]:
        longest = self._longest(self._start())
        endpoint, limits = self.server.endpoint, self.server.endpoint.limits
        length = "of any length" if longest == ALL else f"of up to {longest} tokens"
        return [
            f"{self.name}: {endpoint.model} at {self.server.url} ({endpoint.server}), conversations {length}, up to "
            f"{self.max_tokens} tokens a request and {limits.max_concurrency} requests of a rank at once, "
            f"{limits.max_retries} retries, {limits.deadline_s:g} s for each"
        ]

    def pop_counts(self) -> Mapping[str, float]:
        return self.server.counts.pop()

    async def score(self, samples: Sequence[Sample]) -> list[float | RewardError]:
        served, rows = await asyncio.to_thread(self._rows, samples)
        scores: dict[int, float | RewardError] = {}
        usable: dict[int, list[int]] = {}
        for index, row in enumerate(rows):
            if isinstance(row, RewardError):
                scores[index] = row
            else:
                usable[index] = row
        indices = list(usable)
        places = batches_of([len(row) for row in usable.values()], self.max_tokens)
        batches = [[indices[place] for place in batch] for batch in places]
        found = await asyncio.gather(*(self._scores([usable[index] for index in batch], served) for batch in batches))
        for batch, values in zip(batches, found, strict=True):
            scores.update(zip(batch, values, strict=True))
        return [scores[index] for index in range(len(samples))]

    async def _scores(self, rows: Sequence[list[int]], served: ServedModel) -> Sequence[float | RewardError]:
        try:
            return await self.server.scores(rows, served.names)
        except RequestError as error:
            self.server.counts.add(failed_samples=len(rows))
            return [RewardError(str(error))] * len(rows)

    def _rows(self, samples: Sequence[Sample]) -> tuple[ServedModel, list[list[int] | RewardError]]:
        served = self._start()
        longest = self._longest(served)
        return served, [self._conversations.tokens(sample, longest) for sample in samples]

    def _start(self) -> ServedModel:
        """Return the served model, which is checked once.

        Raises:
            ConfigError: It cannot be used.
        """
        with self._lock:
            if self._served is None:
                self._conversations.load()
                self._served = self.server.check(self._conversations)
            return self._served

    def _longest(self, served: ServedModel) -> int:
        return min(self.max_length or ALL, served.longest)
