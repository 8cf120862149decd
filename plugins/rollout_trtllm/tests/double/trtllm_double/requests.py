"""Requests and their results: the contract's ``output``, and ``GenerationResult`` of the sources."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable, Generator
from typing import Any

from trtllm_double import sampling
from trtllm_double.contract import CONTRACT, FINISH_REASONS
from trtllm_double.journal import record
from trtllm_double.model import Forward

_DEFAULTS: dict[str, Any] = {"text": str, "token_ids": list, "logprobs": list}


def _fields() -> list[tuple[str, Any, Any]]:
    names = CONTRACT["output"]["outputs[i]"]
    return [(name, Any, dataclasses.field(default_factory=_DEFAULTS.get(name, lambda: None))) for name in names]


CompletionOutput = dataclasses.make_dataclass("CompletionOutput", _fields())
"""One completion, with the contract's fields."""


class Sequence:
    """One of a request's ``n`` completions, a token at a time."""

    def __init__(self, index: int, prompt: tuple[int, ...], params: Any, max_tokens: int, seed: Any) -> None:
        self.output = CompletionOutput(index=index)
        self.is_done = False
        self._prompt, self._params, self._max_tokens = prompt, params, max_tokens
        self._random = random.Random(seed)
        self._cache: Any = None

    def step(self, forward: Forward) -> None:
        """Draw a token."""
        tokens, params = self.output.token_ids, self._params
        if not tokens:
            logits, self._cache = forward.first(self._prompt)
        else:
            logits, self._cache = forward.following(tokens[-1], self._cache, is_shared=len(tokens) == 1)
        drawn_from = sampling.probabilities(logits, params)
        token = int(drawn_from.cumsum().searchsorted(self._random.random() * drawn_from.sum(), side="right"))
        tokens.append(token)
        if params.logprobs is not None:
            reported = sampling.logprobs_of(logits, drawn_from, params)
            self.output.logprobs.append(sampling.report(reported, token, params))
        self._check_end(token)

    def _check_end(self, token: int) -> None:
        """End at end tokens, as ``GenerationResultBase._handle_sequence`` of ``tensorrt_llm/executor/result.py`` does.

        ``end_id`` stays in ``token_ids``. One of ``stop_token_ids`` is cut off unless ``include_stop_str_in_output``;
        its logprob stays. ``ignore_eos`` turns both off.
        """
        params, output = self._params, self.output
        if token == params.end_id and not params.ignore_eos:
            self.end("stop")
        elif token in (params.stop_token_ids or ()) and not params.ignore_eos:
            output.stop_reason = token
            if not params.include_stop_str_in_output:
                output.token_ids = output.token_ids[:-1]
            self.end("stop")
        elif len(output.token_ids) == self._max_tokens:
            self.end("length")

    def end(self, reason: str) -> None:
        """End with one of the contract's finish reasons."""
        assert reason in FINISH_REASONS
        self.output.finish_reason = reason
        self.is_done, self._cache = True, None


class GenerationResult:
    """What ``generate_async`` returns: await it for the outputs, in the loop of ``generate_async``."""

    def __init__(
        self, request_id: int, prompt: tuple[int, ...], sequences: list[Sequence], decode: Callable[[Any], str] | None
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = list(prompt)
        self._sequences = sequences
        self._decode = decode
        self._is_aborted = False
        self._error: Exception | None = None
        self._done = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    @property
    def outputs(self) -> list[Any]:
        """The completions so far."""
        return [sequence.output for sequence in self._sequences]

    @property
    def finished(self) -> bool:
        """Whether the request has ended."""
        return self._done.is_set()

    def abort(self) -> None:
        """Have the request end with what it has, and with finish reason ``cancelled``. From any thread."""
        record("abort", self.request_id)
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
        """Draw a token for each sequence that goes on; the engine's part."""
        for sequence in self._sequences:
            if not sequence.is_done and self._is_aborted:
                sequence.end("cancelled")
            elif not sequence.is_done:
                sequence.step(forward)
        if all(sequence.is_done for sequence in self._sequences):
            if self._decode is not None:
                for output in self.outputs:
                    output.text = self._decode(output.token_ids)
            self._done.set()

    def fail(self, error: Exception) -> None:
        """End with an error."""
        self._error = error
        self._done.set()
