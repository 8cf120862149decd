"""Trajectories: token ids that grow from a prompt by turns and observations, and become samples to train on."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from rlplug.interfaces.router_replay import NOT_RECORDED
from rlplug.types import ENVIRONMENT, Completion, FinishReason, Prompt, Request, RewardError, Sample, Segment


@dataclass
class Trajectory:
    """One sample while it grows. The engine's tokens are never changed; observations are appended to them.

    A trajectory that used up its budget of one step resumes in the next step from its tokens, with newer weights.
    """

    key: str
    """Name of run, first step, group and sample, from which its seeds are derived."""
    group: int
    """Number of its group within the step."""
    prompt: Prompt
    token_ids: list[int]
    """Ids of all tokens, those of the prompt included."""
    response_mask: list[bool]
    """Whether the policy produced each token."""
    logprobs: list[float]
    """The engine's logprob of each token; 0 where the policy did not produce it."""
    segments: list[Segment] = field(default_factory=list)
    """Spans of tokens that single requests produced."""
    reward: float = 0.0
    """Sum of the environment's rewards so far."""
    error: str = ""
    """Why the environment failed; empty if it did not."""
    routed_experts: np.ndarray[Any, Any] | None = None
    """int8 or int16 [tokens, L, k]: experts by which the engine read each token, -1 where they are not known; ``None``
    where a run replays no experts."""
    turn_was_cut: bool = False
    """Whether the newest turn was cut by the trajectory's token limit."""
    finish_reason: FinishReason | None = None
    """``None`` while the trajectory is unfinished."""

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
        return Request(
            self.request_id, tuple(self.token_ids), random.Random(self.request_id).getrandbits(63), max_new_tokens
        )

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
        self.token_ids += completion.token_ids
        self.response_mask += [True] * len(completion.token_ids)
        self.logprobs += completion.logprobs
        self.segments.append(Segment(start, len(self.token_ids), completion.policy_version, ends_turn))

    def add_observation(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the policy did not produce."""
        self.token_ids += token_ids
        self.response_mask += [False] * len(token_ids)
        self.logprobs += [0.0] * len(token_ids)

    def experts_of_all_tokens(self) -> np.ndarray[Any, Any] | None:
        """Return ``routed_experts`` for all tokens: -1 for an observation that no request has read."""
        if self.routed_experts is None:
            return None
        missing = len(self.token_ids) - len(self.routed_experts)
        filling = np.full((missing, *self.routed_experts.shape[1:]), NOT_RECORDED, dtype=self.routed_experts.dtype)
        return np.concatenate([self.routed_experts, filling])

    def turns(self) -> list[list[int]]:
        """Return the token ids of each turn that has ended."""
        turns: list[list[int]] = []
        turn: list[int] = []
        for segment in self.segments:
            turn += self.token_ids[segment.start : segment.end]
            if segment.ends_turn:
                turns.append(turn)
                turn = []
        return turns

    # ---- in a checkpoint ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return a copy as plain data, with the prompt's ``uid`` in place of the prompt."""
        state = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        copies = {name: list(value) for name, value in state.items() if isinstance(value, list)}
        segments = [dataclasses.astuple(segment) for segment in self.segments]
        # as a tensor, which a checkpoint loads without unpickling; the array itself is never changed in place
        experts = None if self.routed_experts is None else torch.from_numpy(self.routed_experts)
        return state | copies | {"prompt": self.prompt.uid, "segments": segments, "routed_experts": experts}

    @staticmethod
    def from_state(state: dict[str, Any], prompt: Prompt) -> Trajectory:
        """Return the trajectory of a :meth:`state_dict`."""
        copies = {name: list(value) for name, value in state.items() if isinstance(value, list)}
        segments = [Segment(*values) for values in state["segments"]]
        experts = state.get("routed_experts")  # checkpoints of rlplug before router replay have none
        experts = None if experts is None else experts.numpy()
        return Trajectory(**state | copies | {"prompt": prompt, "segments": segments, "routed_experts": experts})


def new_trajectories(prompts: Sequence[Prompt], groups: Sequence[int], num_samples: int, key: str) -> list[Trajectory]:
    """Return ``num_samples`` new trajectories of each prompt.

    Args:
        prompts: The prompts.
        groups: Group number of each prompt.
        num_samples: Trajectories per prompt.
        key: Name of run and step.
    """
    return [
        Trajectory(
            key=f"{key}/{group}/{sample}",
            group=group,
            prompt=prompt,
            token_ids=list(prompt.token_ids),
            response_mask=[False] * len(prompt.token_ids),
            logprobs=[0.0] * len(prompt.token_ids),
        )
        for prompt, group in zip(prompts, groups, strict=True)
        for sample in range(num_samples)
    ]


def to_samples(
    trajectories: Sequence[Trajectory], tokenizer: PreTrainedTokenizerBase, has_environment: bool
) -> list[Sample]:
    """Return finished trajectories as samples, with decoded text for rewards and logs."""
    after_prompts = [trajectory.token_ids[len(trajectory.prompt.token_ids) :] for trajectory in trajectories]
    texts = tokenizer.batch_decode(after_prompts, skip_special_tokens=True) if trajectories else []
    last_turns = texts
    if has_environment and trajectories:
        last_turns = tokenizer.batch_decode([t.turns()[-1] for t in trajectories], skip_special_tokens=True)
    samples = []
    for trajectory, text, last_turn in zip(trajectories, texts, last_turns, strict=True):
        assert trajectory.finish_reason is not None
        sample = Sample(
            prompt=trajectory.prompt,
            group=trajectory.group,
            token_ids=tuple(trajectory.token_ids),
            response_mask=tuple(trajectory.response_mask),
            rollout_logprobs=tuple(trajectory.logprobs),
            completion=text,
            finish_reason=trajectory.finish_reason,
            policy_version=min(segment.policy_version for segment in trajectory.segments),
            segments=tuple(trajectory.segments),
            last_turn=last_turn,
            routed_experts=trajectory.experts_of_all_tokens(),
        )
        samples.append(_with_reward(sample, trajectory) if has_environment else sample)
    return samples


def _with_reward(sample: Sample, trajectory: Trajectory) -> Sample:
    """Return the sample with the environment's reward, or with its error."""
    value = RewardError(trajectory.error) if trajectory.error else trajectory.reward
    reward = math.nan if trajectory.error else trajectory.reward
    return dataclasses.replace(sample, rewards={ENVIRONMENT: value}, reward=reward)
