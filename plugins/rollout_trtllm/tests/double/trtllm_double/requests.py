"""Requests and their results: the contract's ``output``, and ``GenerationResult`` of the sources."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

from trtllm_double import sampling
from trtllm_double.contract import CONTRACT, FINISH_REASONS
from trtllm_double.model import Forward


class GenerationResult:
    """What ``generate_async`` returns: await it for its one output, in the loop of ``generate_async``."""

    def __init__(self, prompt: tuple[int, ...], params: Any, max_tokens: int) -> None:
        fields = dict.fromkeys(CONTRACT["output"]["outputs[i]"])
        self.outputs = [SimpleNamespace(**(fields | {"index": 0, "text": "", "token_ids": [], "logprobs": []}))]
        self._prompt, self._params, self._max_tokens = prompt, params, max_tokens
        self._random = random.Random(None if params.seed is None else params.seed << 32)
        self._cache: Any = None
        self._is_aborted = False
        self._error: Exception | None = None
        self._done = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    @property
    def finished(self) -> bool:
        """Whether the request has ended."""
        return self._done.is_set()

    def abort(self) -> None:
        """Have the request end with what it has, and with finish reason ``cancelled``. From any thread."""
        self._is_aborted = True

    def aborted(self) -> bool:
        """Return whether :meth:`abort` was called."""
        return self._is_aborted

    async def aresult(self) -> GenerationResult:
        """Wait for the end."""
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("a result can be awaited only in the event loop of its generate_async")
        await self._done.wait()
        if self._error is not None:
            raise self._error
        return self

    def __await__(self) -> Generator[Any, None, GenerationResult]:
        return self.aresult().__await__()

    def step(self, forward: Forward) -> None:
        """Draw a token, or end what was aborted; the engine's part."""
        if self._is_aborted:
            self._end("cancelled")
            return
        output, params = self.outputs[0], self._params
        tokens = output.token_ids
        if not tokens:
            logits, self._cache = forward.first(self._prompt)
        else:
            logits, self._cache = forward.following(tokens[-1], self._cache, is_shared=len(tokens) == 1)
        drawn_from = sampling.probabilities(logits, params)
        token = int(drawn_from.cumsum().searchsorted(self._random.random() * drawn_from.sum(), side="right"))
        tokens.append(token)
        if params.logprobs is not None:
            reported = sampling.logprobs_of(logits, drawn_from, params)
            output.logprobs.append(sampling.report(reported, token, params))
        self._check_end(token)

    def _check_end(self, token: int) -> None:
        """End at end tokens, as ``GenerationResultBase._handle_sequence`` of ``tensorrt_llm/executor/result.py`` does.

        ``end_id`` stays in ``token_ids``. One of ``stop_token_ids`` is cut off unless ``include_stop_str_in_output``;
        its logprob stays. ``ignore_eos`` turns both off.
        """
        params, output = self._params, self.outputs[0]
        if token == params.end_id and not params.ignore_eos:
            self._end("stop")
        elif token in (params.stop_token_ids or ()) and not params.ignore_eos:
            output.stop_reason = token
            if not params.include_stop_str_in_output:
                output.token_ids = output.token_ids[:-1]
            self._end("stop")
        elif len(output.token_ids) == self._max_tokens:
            self._end("length")

    def _end(self, reason: str) -> None:
        assert reason in FINISH_REASONS
        self.outputs[0].finish_reason = reason
        self._cache = None
        self._done.set()

    def fail(self, error: Exception) -> None:
        """End with an error."""
        self._error = error
        self._done.set()
