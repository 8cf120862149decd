"""Strings that end a completion, found in its text whichever tokens spell them."""

from __future__ import annotations

import bisect
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, StoppingCriteria

from rlplug.interfaces.checks.engines import SourceOfTokens
from rlplug.interfaces.rollout import EngineFault, PolicySpec
from rlplug.rollout.trajectory import Trajectory
from rlplug.token_arrays import TokenIds, joined
from rlplug.types import Completion


class StopStrings:
    """Finds the token with which a stop string is complete.

    A string may be spelled by any tokens, and begin or end within one. Special tokens count as their text.

    Args:
        tokenizer: The policy's tokenizer.
        policy: Has the stop strings and the end tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, policy: PolicySpec) -> None:
        self._tokenizer = tokenizer
        self._strings, self._end_tokens = policy.stop, policy.eos_token_ids
        self.most_tokens = max(len(string.encode()) for string in policy.stop)
        """Most tokens that spell a stop string: one for each byte."""

    def end(self, before: int, token_ids: TokenIds | list[int]) -> int | None:
        """Return how many tokens a completion has up to its first stop string, or ``None`` without one.

        Args:
            before: The token before the completion: some tokenizers drop the space of a text's first token.
            token_ids: The completion, from its first token on.
        """
        ids = list(map(int, token_ids))
        if not self.is_in(before, ids):
            return None
        return bisect.bisect_left(range(len(ids)), True, key=lambda num_tokens: self.is_in(before, ids[:num_tokens]))

    def is_in(self, before: int, token_ids: list[int]) -> bool:
        """Return whether the text of tokens, without that of the token before, has a stop string."""
        text = self._decode([before, *token_ids])[len(self._decode([before])) :]
        return any(string in text for string in self._strings)

    def criterion(self, prompt_length: int) -> StoppingCriteria:
        """Return what ends each sequence of transformers' ``generate`` at its first stop string."""
        return _AtStopString(self, prompt_length)

    def cut(self, source: SourceOfTokens, trajectory: Trajectory, completion: Completion) -> Completion:
        """Return an engine's completion up to the first stop string of its turn, which may begin in an earlier request.

        Raises:
            EngineFault: It stopped without an end token, and its text has no stop string.
        """
        turn_start = len(trajectory.token_ids) - trajectory.num_in_turn
        turn = joined(trajectory.token_ids[turn_start:], completion.token_ids)
        end = self.end(int(trajectory.token_ids[turn_start - 1]), turn)
        if end is None:
            if completion.finish_reason == "stop" and completion.token_ids[-1] not in self._end_tokens:
                raise EngineFault(f"{source} returned finish reason 'stop' without an end token or a stop string.")
            return completion
        num_all = turn_start + end
        num_tokens, experts = num_all - len(trajectory.token_ids), completion.routed_experts
        return replace(
            completion,
            token_ids=completion.token_ids[:num_tokens],
            logprobs=completion.logprobs[:num_tokens],
            finish_reason="stop",
            routed_experts=None if experts is None else experts[:num_all],
        )

    def _decode(self, ids: list[int]) -> str:
        text: Any = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)


class _AtStopString(StoppingCriteria):
    """Criterion that ends each sequence with the token that completes a stop string in what was generated."""

    def __init__(self, stop: StopStrings, prompt_length: int) -> None:
        self._stop, self._prompt_length = stop, prompt_length

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        first = max(self._prompt_length, input_ids.shape[1] - self._stop.most_tokens)
        rows = input_ids[:, first - 1 :].tolist()
        return torch.tensor(
            [self._stop.is_in(before, generated) for before, *generated in rows], device=input_ids.device
        )
