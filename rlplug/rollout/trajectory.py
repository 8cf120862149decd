"""Trajectories: token ids that grow from a prompt by turns and observations, and become samples to train on."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from rlplug.token_arrays import TokenFloats, TokenIds, TokenMask, TokenRecord, as_tokens, joined, read_only
from rlplug.types import (
    ENVIRONMENT,
    NO_VERSION,
    NOT_RECORDED,
    TRAJECTORY,
    Completion,
    FinishReason,
    Prompt,
    Request,
    RewardError,
    Sample,
    Segment,
)
from rlplug.types.samples import ErrorKind

DECODED_AT_ONCE: Final = 64
"""Trajectories that the tokenizer decodes at a time."""


@dataclass(eq=False)
class Trajectory(TokenRecord):
    """One sample while it grows. The engine's tokens are never changed; observations are appended to them.

    A trajectory that used up its budget of one step resumes in the next step from its tokens, with newer weights.
    """

    key: str
    """Name of run, first step, group and sample, from which its seeds are derived."""
    group: int
    """Number of its group within the step."""
    prompt: Prompt
    token_ids: TokenIds
    """int32 [n], read-only: ids of all tokens, those of the prompt included."""
    response_mask: TokenMask
    """bool [n], read-only: whether the policy produced each token."""
    logprobs: TokenFloats
    """float32 [n], read-only: the engine's logprob of each token; 0 where the policy did not produce it."""
    segments: list[Segment] = field(default_factory=list)
    """Spans of tokens that single requests produced."""
    reward: float = 0.0
    """Sum of the environment's rewards so far."""
    error: str = ""
    """Why the environment failed; empty if it did not."""
    error_kind: ErrorKind = "late"
    routed_experts: np.ndarray[Any, Any] | None = None
    """int8 or int16 [tokens, L, k]: experts by which the engine read each token, -1 where they are not known; ``None``
    where a run replays no experts."""
    turn_was_cut: bool = False
    """Whether the newest turn was cut by the trajectory's token limit."""
    awaits_answer: bool = False
    """Whether the newest turn has ended, and its environment has not answered yet."""
    finish_reason: FinishReason | None = None
    """``None`` while the trajectory is unfinished."""
    seconds: float = 0.0
    """Time that engine and environment had for it, where trajectories have a deadline."""
    is_late: bool = False
    """Whether that was more than the deadline."""

    @property
    def request_id(self) -> str:
        """Id of its next request, unique in the run."""
        return f"{self.key}/{len(self.segments)}" if self.segments else self.key

    @property
    def num_after_prompt(self) -> int:
        """Number of tokens of turns and observations."""
        return len(self.token_ids) - len(self.prompt.token_ids)

    @property
    def num_turns(self) -> int:
        """Number of turns that have ended."""
        return sum(segment.ends_turn for segment in self.segments)

    @property
    def num_in_turn(self) -> int:
        """Number of tokens of the turn that has not ended; 0 without one."""
        num_tokens = 0
        for segment in reversed(self.segments):
            if segment.ends_turn:
                break
            num_tokens += segment.end - segment.start
        return num_tokens

    def request(self, max_new_tokens: int | None) -> Request:
        """Return the request for the next tokens; its seed is the same on every rank and after a restart."""
        prompt_ids = tuple(self.token_ids.tolist()) if self.num_after_prompt else self.prompt.token_ids
        return Request(self.request_id, prompt_ids, random.Random(self.request_id).getrandbits(63), max_new_tokens)

    def add_completion(self, completion: Completion, ends_turn: bool) -> None:
        """Append the engine's completion of :meth:`request`, and its experts where none are known yet.

        Experts that are known stay, though a later request reads the same tokens again, maybe with newer weights: the
        logprobs of what followed came from the earlier pass.
        """
        start = len(self.token_ids)
        if completion.routed_experts is not None:
            known, merged = self.routed_experts, completion.routed_experts.copy()
            if known is not None:
                merged[: len(known)] = np.where(known == NOT_RECORDED, merged[: len(known)], known)
            self.routed_experts = merged
        self._append(completion.token_ids, True, completion.logprobs)
        self.segments.append(Segment(start, len(self.token_ids), completion.policy_version, ends_turn))

    def give_up(self, error: str) -> None:
        """End an unfinished trajectory that is not to train, with the tokens so far."""
        self.error, self.finish_reason = error, "abort"
        if self.segments and not self.segments[-1].ends_turn:
            self.segments[-1] = dataclasses.replace(self.segments[-1], ends_turn=True)

    def add_observation(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the policy did not produce."""
        self._append(as_tokens(token_ids, np.int32), False, np.zeros(len(token_ids), np.float32))

    def experts_of_all_tokens(self) -> np.ndarray[Any, Any] | None:
        """Return ``routed_experts`` for all tokens: -1 for an observation that no request has read."""
        if self.routed_experts is None:
            return None
        missing = len(self.token_ids) - len(self.routed_experts)
        filling = np.full((missing, *self.routed_experts.shape[1:]), NOT_RECORDED, dtype=self.routed_experts.dtype)
        return np.concatenate([self.routed_experts, filling])

    def _append(self, token_ids: TokenIds, is_produced: bool, logprobs: TokenFloats) -> None:
        self.token_ids = joined(self.token_ids, token_ids)
        self.response_mask = joined(self.response_mask, np.full(len(token_ids), is_produced))
        self.logprobs = joined(self.logprobs, logprobs)

    def turns(self) -> list[TokenIds]:
        """Return the token ids of each turn that has ended."""
        turns: list[TokenIds] = []
        turn: list[TokenIds] = []
        for segment in self.segments:
            turn.append(self.token_ids[segment.start : segment.end])
            if segment.ends_turn:
                turns.append(joined(*turn))
                turn = []
        return turns

    # ---- in a checkpoint ------------------------------------------------------------------------------------------

    def copy(self) -> Trajectory:
        """Return a copy that does not grow with this one; the arrays are shared, since nothing changes them."""
        return dataclasses.replace(self, segments=list(self.segments))

    def state_dict(self) -> dict[str, Any]:
        """Return a copy as plain data and tensors, with the prompt's ``uid`` in place of the prompt."""
        state = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        tensors = {name: torch.tensor(value) for name, value in state.items() if isinstance(value, np.ndarray)}
        segments = [dataclasses.astuple(segment) for segment in self.segments]
        return state | tensors | {"prompt": self.prompt.uid, "segments": segments}

    @staticmethod
    def from_state(state: dict[str, Any], prompt: Prompt) -> Trajectory:
        """Return the trajectory of a :meth:`state_dict`."""
        arrays = {name: read_only(value.numpy()) for name, value in state.items() if isinstance(value, torch.Tensor)}
        segments = [Segment(*values) for values in state["segments"]]
        return Trajectory(**state | arrays | {"prompt": prompt, "segments": segments})


def new_trajectories(prompts: Sequence[Prompt], groups: Sequence[int], num_samples: int, key: str) -> list[Trajectory]:
    """Return ``num_samples`` new trajectories of each prompt, whose group has a number; ``key`` names run and step."""
    trajectories = []
    for prompt, group in zip(prompts, groups, strict=True):
        token_ids = as_tokens(prompt.token_ids, np.int32)
        mask, logprobs = read_only(np.zeros(len(token_ids), np.bool_)), read_only(np.zeros(len(token_ids), np.float32))
        for sample in range(num_samples):
            trajectories.append(Trajectory(f"{key}/{group}/{sample}", group, prompt, token_ids, mask, logprobs))
    return trajectories


def to_samples(
    trajectories: Sequence[Trajectory], tokenizer: PreTrainedTokenizerBase, has_environment: bool
) -> list[Sample]:
    """Return finished trajectories as samples, with decoded text for rewards and logs."""
    texts = _texts([t.token_ids[len(t.prompt.token_ids) :] for t in trajectories], tokenizer)
    # one that was given up before its first token has no turn
    last_turns = [turns[-1] if (turns := t.turns()) else t.token_ids[:0] for t in trajectories]
    last_texts = _texts(last_turns, tokenizer) if has_environment else texts
    samples = []
    for trajectory, text, last_turn in zip(trajectories, texts, last_texts, strict=True):
        assert trajectory.finish_reason is not None
        sample = Sample(
            prompt=trajectory.prompt,
            group=trajectory.group,
            token_ids=trajectory.token_ids,
            response_mask=trajectory.response_mask,
            rollout_logprobs=trajectory.logprobs,
            completion=text,
            finish_reason=trajectory.finish_reason,
            policy_version=min((segment.policy_version for segment in trajectory.segments), default=NO_VERSION),
            segments=tuple(trajectory.segments),
            last_turn=last_turn,
            routed_experts=trajectory.experts_of_all_tokens(),
        )
        if has_environment:
            sample = _with_reward(sample, trajectory)
        elif trajectory.error:
            error = RewardError(trajectory.error, trajectory.error_kind)
            sample = dataclasses.replace(sample, rewards={TRAJECTORY: error}, reward=math.nan)
        samples.append(sample)
    return samples


def _texts(rows: Sequence[TokenIds], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Decode rows, a few at a time: the tokenizer takes lists, which need much more memory than arrays."""
    texts: list[str] = []
    for start in range(0, len(rows), DECODED_AT_ONCE):
        some = [row.tolist() for row in rows[start : start + DECODED_AT_ONCE]]
        texts += tokenizer.batch_decode(some, skip_special_tokens=True)
    return texts


def _with_reward(sample: Sample, trajectory: Trajectory) -> Sample:
    """Return the sample with the environment's reward, or with its error."""
    value = RewardError(trajectory.error, trajectory.error_kind) if trajectory.error else trajectory.reward
    reward = math.nan if trajectory.error else trajectory.reward
    return dataclasses.replace(sample, rewards={ENVIRONMENT: value}, reward=reward)
