"""Client of a server that has a reward model: it is checked before a run, and each of its answers where it comes in."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from rlplug.errors import ConfigError, brief, did_you_mean, safe_repr
from rlplug_rewards.requests.counts import Counts
from rlplug_rewards.requests.json_client import JSONClient, RequestError, malformed, parsed
from rlplug_rewards.reward_model.answers import sglang_scores, vllm_scores
from rlplug_rewards.reward_model.conversations import ALL, Conversations
from rlplug_rewards.reward_model.endpoint import RewardEndpoint

ROUTE: Final = "classify"
PROBES: Final = (
    "1 + 1 = 2",
    "What is the capital of France?",
    "def double(x):\n    return 2 * x\n",
    "Größe, naïve, 東京 and 7 5 3 1 9 0 2 4 6 8",
)
"""Texts that are scored, and whose tokens are compared, before a run."""
LEAST_EFFECT: Final = 0.05
"""Scores that differ by less may be the same, computed twice in bfloat16."""


@dataclass(frozen=True)
class ServedModel:
    """A model as its server describes it.

    Args:
        names: Names that the model has there.
        longest: Most tokens of a row.
    """

    names: frozenset[str]
    longest: int


class RewardServer:
    """A server of vLLM or SGLang.

    Args:
        owner: Name of the reward's class, for messages.
        endpoint: Where it is, and how it is asked.
    """

    def __init__(self, owner: str, endpoint: RewardEndpoint) -> None:
        self.endpoint, self.counts = endpoint, Counts()
        self._owner = owner
        self._key = f"{owner}.endpoint"
        self._client = self._new_client(self.counts)

    @property
    def url(self) -> str:
        return self._client.url

    async def scores(self, rows: Sequence[Sequence[int]], names: Collection[str]) -> list[float]:
        """Return the score of each row of token ids: what the model's head gives, without an activation.

        Args:
            rows: Token ids, at least one row.
            names: Names that the model has at the server.

        Raises:
            RequestError: There is no usable answer; the failure is counted.
        """
        scores = await self._scores(self._client, rows, names)
        self.counts.add(prompt_tokens=sum(len(row) for row in rows))
        return scores

    # ---- the start --------------------------------------------------------------------------------------------------

    def check(self, conversations: Conversations) -> ServedModel:
        """Ask the server which model it has, and whether it reads tokens and gives scores as the model's own files do.

        Requests of it are not counted.

        Args:
            conversations: The reward's own tokenizer.

        Raises:
            ConfigError: The server cannot be used, or has another model.
        """
        client = self._new_client(Counts())
        status, body = client.check("v1/models")
        with self._explained("v1/models"):
            if status != 200:
                raise malformed(f"it answered with status {status}")
            served = self._served(parsed(body))
        texts = {text: conversations.tokens_of_text(text) for text in PROBES}
        with self._explained("tokenize"):
            asyncio.run(self._compare_tokens(client, texts))
        with self._explained(ROUTE):
            rows = [row[: served.longest] for row in texts.values() if row]
            asyncio.run(self._try_scores(client, rows, served.names))
        return served

    @contextmanager
    def _explained(self, route: str) -> Iterator[None]:
        try:
            yield
        except RequestError as error:
            raise ConfigError(
                f"{self._key}.url is {self.url}, whose {route} gave no answer of a reward model's server: {error}. "
                "Serve a sequence classifier with one label, by vllm serve MODEL --runner pooling (server: vllm), or "
                "by SGLang with --is-embedding (server: sglang)."
            ) from None

    def _served(self, answer: Any) -> ServedModel:
        """Return the endpoint's model out of a list of models.

        Raises:
            RequestError: It is no list of models.
            ConfigError: The model is not in it.
        """
        cards = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(cards, list) or not all(
            isinstance(card, dict) and isinstance(card.get("id"), str) for card in cards
        ):
            raise malformed(f"it gave no list of models but {brief(answer, 200)}")
        model, all_names = self.endpoint.model, [card["id"] for card in cards]
        if model not in all_names:
            raise ConfigError(
                f"{self._key}.model is {model!r}, and {self.url} serves "
                f"{', '.join(map(safe_repr, all_names)) or 'no model'}.{did_you_mean(model, all_names)}"
            )
        mine = cards[all_names.index(model)]
        # a server with several names for a model answers with the first of them
        root = mine.get("root")
        names = {card["id"] for card in cards if root is not None and card.get("root") == root} | {model}
        longest = mine.get("max_model_len")
        if longest is not None and (type(longest) is not int or longest < 1):
            raise malformed(f"max_model_len of {model!r} is {brief(longest)}")
        return ServedModel(frozenset(names), longest or ALL)

    async def _compare_tokens(self, client: JSONClient, texts: dict[str, list[int]]) -> None:
        for text, own in texts.items():
            payload = {"model": self.endpoint.model, "prompt": text, "add_special_tokens": False}
            found = await client.post("tokenize", payload, _tokens)
            if found != own:
                raise ConfigError(
                    f"{self._owner}.path has another tokenizer than {self.endpoint.model!r} at {self.url}: of {text!r} "
                    f"it makes {own[:20]}, and the server {found[:20]}. Give the path of the model that is served."
                )

    async def _try_scores(self, client: JSONClient, rows: Sequence[Sequence[int]], names: Collection[str]) -> None:
        scores = await self._scores(client, rows, names)
        if self.endpoint.server == "sglang":
            return
        others = await self._scores(client, rows, names, use_activation=True)
        has_effect = any(abs(score - other) > LEAST_EFFECT for score, other in zip(scores, others, strict=True))
        if not has_effect and all(0 <= score <= 1 for score in scores):
            # a server that does not know the field ignores it
            raise ConfigError(
                f"{self._key}.url is {self.url}, whose scores from 0 to 1 are the same with use_activation true and "
                "false, so that they may be a sigmoid instead of the reward model's own. Serve it with a vLLM that "
                "knows use_activation, or load it with RewardModel."
            )

    # ---- one request ------------------------------------------------------------------------------------------------

    async def _scores(
        self,
        client: JSONClient,
        rows: Sequence[Sequence[int]],
        names: Collection[str],
        use_activation: bool = False,
    ) -> list[float]:
        lengths = [len(row) for row in rows]
        if self.endpoint.server == "sglang":
            # its route v1/classify has the model's name, and a softmax: 1 for any score of a single label
            return await client.post(
                ROUTE, {"input_ids": [*map(list, rows)]}, lambda answer: sglang_scores(answer, lengths)
            )
        payload = {"model": self.endpoint.model, "input": [*map(list, rows)], "use_activation": use_activation}
        return await client.post(ROUTE, payload, lambda answer: vllm_scores(answer, lengths, names))

    def _new_client(self, counts: Counts) -> JSONClient:
        endpoint = self.endpoint
        given = {"plain_http": endpoint.plain_http, "use_proxy": endpoint.use_proxy}
        return JSONClient(self._key, endpoint.url, endpoint.api_key_env, endpoint.limits, counts, **given)


def _tokens(answer: Any) -> list[int]:
    found = answer.get("tokens") if isinstance(answer, dict) else None
    if not isinstance(found, list) or not all(type(token) is int for token in found):
        raise malformed(f"the route tokenize gave no token ids but {brief(answer, 200)}")
    return found
