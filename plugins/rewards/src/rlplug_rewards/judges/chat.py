"""Questions to a judge's model, and its answers as text, with counts of tokens and cost."""

from __future__ import annotations

import asyncio
import sqlite3
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, TypeVar

from rlplug.errors import brief, describe, encodable
from rlplug.timeouts import waiting
from rlplug_rewards.judges.endpoint import Endpoint
from rlplug_rewards.requests.answer_cache import AnswerCache, cache_key
from rlplug_rewards.requests.counts import Counts
from rlplug_rewards.requests.json_client import JSONClient, RequestError, malformed

Result = TypeVar("Result")
ROUTE: Final = "chat/completions"
MOST_TOKENS: Final = 10**9
"""A count of tokens above this is no count."""


class ChatModel:
    """A judge's model.

    Args:
        owner: Name of the reward's class, for messages.
        endpoint: Where the model is, and how it is asked.
        schema: JSON schema that answers must have; ``None`` for plain text. The server is told, and answers are checked
            whether it obeys or not.
    """

    def __init__(self, owner: str, endpoint: Endpoint, schema: Mapping[str, Any] | None) -> None:
        self.endpoint, self.counts = endpoint, Counts()
        key = f"{owner}.endpoint"
        self._client = JSONClient(
            key,
            endpoint.url,
            endpoint.api_key_env,
            endpoint.limits,
            self.counts,
            plain_http=endpoint.plain_http,
            use_proxy=endpoint.use_proxy,
        )
        self._cache = None
        if endpoint.cache is not None:
            self._cache = AnswerCache(endpoint.cache, endpoint.cache_mib, f"{key}.cache")
        self._cache_name = f"{key}.cache"
        self._schema = schema
        self._has_warned = False
        self._asked: dict[tuple[asyncio.AbstractEventLoop, bytes], asyncio.Future[RequestError | None]] = {}
        """Questions that are asked just now: equal ones wait for its failure, or for the cache to have the answer."""

    def check(self) -> str:
        """Open the cache, ask the server for its models, and return what a person should know.

        Raises:
            ConfigError: One of them cannot be used.
        """
        if self._cache is not None:
            self._cache.open()
        self._client.check("models")
        limits = self.endpoint.limits
        cache = "without a cache" if self._cache is None else f"with the cache {self._cache.path}"
        return (
            f"{self.endpoint.model} at {self._client.url}{self._client.via}, "
            f"up to {limits.max_concurrency} requests of a rank at once, "
            f"{limits.max_retries} retries, {limits.deadline_s:g} s for each answer, {cache}"
        )

    async def ask(self, question: str, read: Callable[[str], Result]) -> Result:
        """Return what ``read`` makes of the model's answer to a question.

        With a cache, equal questions at once are one request, and a kept answer that ``read`` refuses, as after a
        change of its range, is asked for again.

        Args:
            question: The user's message.
            read: Reads the answer; raises :class:`RequestError` where it is malformed. Such an answer is not kept in
                the cache, and is not asked for again.

        Raises:
            RequestError: There is no usable answer; the failure is counted.
        """
        payload = self._payload(question)
        if self._cache is None:
            return (await self._answer(payload, read))[1]
        key = cache_key(self._client.url, payload)
        loop = asyncio.get_running_loop()
        while (asked := self._asked.get((loop, key))) is not None:
            with waiting():
                await asyncio.wait({asked})
            if (failure := asked.result()) is not None:
                raise RequestError(str(failure), failure.count)
        self._asked[loop, key] = own = loop.create_future()
        failure = None
        try:
            kept = await self._kept(key)
            if kept is not None:
                with suppress(RequestError):
                    result = read(kept)
                    self.counts.add(cache_hits=1)
                    return result
            text, result = await self._answer(payload, read)
            await self._keep(key, text)
            return result
        except RequestError as error:
            failure = error
            raise
        finally:
            del self._asked[loop, key]
            own.set_result(failure)  # nothing where this call was cancelled: an equal one asks then

    async def _answer(self, payload: dict[str, Any], read: Callable[[str], Result]) -> tuple[str, Result]:
        return await self._client.post(ROUTE, payload, lambda answer: self._read(answer, read))

    def _payload(self, question: str) -> dict[str, Any]:
        messages = [{"role": "user", "content": question}]
        if self.endpoint.system is not None:
            messages.insert(0, {"role": "system", "content": self.endpoint.system})
        payload = {**self.endpoint.sampling, "model": self.endpoint.model, "messages": messages}
        if self._schema is not None:
            form = {"name": "verdict", "strict": True, "schema": self._schema}
            payload["response_format"] = {"type": "json_schema", "json_schema": form}
        return payload

    def _read(self, answer: Any, read: Callable[[str], Result]) -> tuple[str, Result]:
        self._count_tokens(answer)
        text = text_of(answer)
        return text, read(text)

    def _count_tokens(self, answer: Any) -> None:
        usage = answer.get("usage") if isinstance(answer, dict) else None
        counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")] if isinstance(usage, dict) else []
        numbers = [count for count in counts if type(count) is int and 0 <= count <= MOST_TOKENS]
        if len(numbers) != 2:
            self.counts.add(answers_without_usage=1)
            return
        prompt_tokens, completion_tokens = numbers
        cost = self.endpoint.prices.cost(prompt_tokens, completion_tokens)
        self.counts.add(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, cost=cost)

    # ---- cache: an error of it is counted and said, and costs a request -------------------------------------------

    async def _kept(self, key: bytes) -> str | None:
        if self._cache is None:
            return None
        try:
            return await asyncio.to_thread(self._cache.get, key)
        except (OSError, sqlite3.Error) as problem:
            self._cache_failed(problem)
            return None

    async def _keep(self, key: bytes, text: str) -> None:
        if self._cache is None:
            return
        try:
            await asyncio.to_thread(self._cache.put, key, text)
        except (OSError, sqlite3.Error) as problem:
            self._cache_failed(problem)

    def _cache_failed(self, problem: Exception) -> None:
        self.counts.add(cache_errors=1)
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{self._cache_name} {self.endpoint.cache} failed ({describe(problem)}): answers that it lacks are "
                "asked for again. reward_counts/.../cache_errors counts failures.",
                stacklevel=2,
            )


def text_of(answer: Any) -> str:
    """Return the text of the one choice of a chat completion, which must be whole.

    Raises:
        RequestError: It is something else.
    """
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise malformed(f"the answer has no single choice: {brief(answer, 200)}")
    (choice,) = choices
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else None
    reason = choice.get("finish_reason")
    if reason != "stop":
        hint = ": raise endpoint.sampling.max_tokens" if reason == "length" else ""
        raise malformed(f"the answer ended with finish_reason {brief(reason)}, not 'stop'{hint}")
    if not isinstance(text, str):
        refusal = message.get("refusal") if isinstance(message, dict) else None
        said = f"a refusal: {brief(refusal, 200)}" if refusal else f"{brief(text)}"
        raise malformed(f"the answer is no text but {said}")
    return encodable(text)
