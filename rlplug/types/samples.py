"""What trains: samples with rewards, and the groups of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlplug.token_arrays import TokenFloats, TokenIds, TokenMask, TokenRecord, read_only
from rlplug.types.completions import NO_VERSION, FinishReason, Prompt


@dataclass(frozen=True)
class Segment:
    """Tokens of a trajectory that an engine returned at once, with one version of the policy.

    Attributes:
        start: Index of the first token in the trajectory's ``token_ids``, which begin with the prompt.
        end: Index one past the last token.
        ends_turn: Whether the turn ends with this segment; false where the next segment continues it.
    """

    start: int
    end: int
    policy_version: int
    ends_turn: bool


ErrorKind: TypeAlias = Literal["late", "raised", "invalid", "refused"]


@dataclass(frozen=True)
class RewardError:
    """A reward that could not be computed. It is counted and excluded from the advantage, never read as 0.

    Attributes:
        kind: Past the deadline, an exception, no usable number, or an error that the reward itself returned.
    """

    message: str
    kind: ErrorKind = "refused"


@dataclass(frozen=True, eq=False)
class Sample(TokenRecord):
    """One trajectory: the token ids of prompt and completion, of which the policy produced those of ``response_mask``.

    Sequences that are given for the arrays become arrays.

    Attributes:
        group: Index of the group: the same number for all samples of one prompt in one step.
        token_ids: int32 [n], read-only: token ids of prompt and completion.
        response_mask: bool [n], read-only: true where the policy produced the token.
        rollout_logprobs: float32 [n], read-only: the engine's logprobs, 0 where ``response_mask`` is false.
        completion: Text after the prompt, observations of the environment included; only rewards and logs read it.
        finish_reason: Finish reason of the trajectory: ``length`` where a limit of tokens or turns cut it.
        policy_version: Version of the policy that produced the oldest tokens.
        segments: Segments that the engine returned, in order; only one for a completion of a single turn.
        routed_experts: int8 or int16 [tokens, L, k]: experts by which the engine read each token, -1 where they are not
            known; ``None`` where a run replays no experts.
        last_turn: Text of the policy's last turn: the whole completion when there is a single turn.
        turns: Who spoke, ``policy`` or ``environment``, and the text, in order; only of samples that are written or
            shown, and empty where no environment answered.
        rewards: Unweighted value of each reward, by name. Before the rewards phase, only an environment's own reward is
            in it.
        reward: Weighted sum of ``rewards``; meaningless when ``errors`` is not empty.
        scaled_reward: The same of scaled rewards, in a training that scales some.
    """

    prompt: Prompt
    group: int
    token_ids: TokenIds
    response_mask: TokenMask
    rollout_logprobs: TokenFloats
    completion: str
    finish_reason: FinishReason
    policy_version: int
    segments: tuple[Segment, ...] = ()
    routed_experts: np.ndarray[Any, Any] | None = None
    last_turn: str = ""
    turns: tuple[tuple[str, str], ...] = ()
    rewards: Mapping[str, float | RewardError] = field(default_factory=dict)
    reward: float = 0.0
    scaled_reward: float | None = None

    def __post_init__(self) -> None:
        self.convert(token_ids=np.int32, response_mask=np.bool_, rollout_logprobs=np.float32)

    @property
    def errors(self) -> dict[str, RewardError]:
        return {name: value for name, value in self.rewards.items() if isinstance(value, RewardError)}

    @property
    def trained_reward(self) -> float:
        """What algorithms get: ``scaled_reward``, or ``reward`` where none is scaled."""
        return self.reward if self.scaled_reward is None else self.scaled_reward

    @property
    def num_response_tokens(self) -> int:
        return int(np.count_nonzero(self.response_mask))

    def policy_versions(self) -> NDArray[np.int32]:
        """Return the version that produced each token, int32 [n]; ``NO_VERSION`` for prompt and observations."""
        versions = np.where(self.response_mask, np.int32(self.policy_version), np.int32(NO_VERSION))
        for segment in self.segments:
            versions[segment.start : segment.end] = segment.policy_version
        return read_only(versions)

    @property
    def transcript(self) -> str:
        """The completion as a person reads it: with ``turns``, each begins with who spoke."""
        return "\n".join(f"{speaker}: {text.strip()}" for speaker, text in self.turns) or self.completion

    @property
    def num_turns(self) -> int:
        return sum(segment.ends_turn for segment in self.segments)


@dataclass(frozen=True)
class Rollout:
    """The scored samples of a step that this rank has; groups are whole and contiguous.

    Attributes:
        samples: Samples that train.
        rejected: Samples that the algorithm did not select.
        surplus: Samples of groups that a step generates beyond what it trains on.
        num_groups: Number of prompts with samples that train, over all ranks.
        num_drawn: Number of prompts with samples of any kind, over all ranks.
        num_rounds: Rounds of prompts whose groups are all here; those after the first are refills.
    """

    samples: tuple[Sample, ...] = ()
    rejected: tuple[Sample, ...] = ()
    surplus: tuple[Sample, ...] = ()
    num_groups: int = 0
    num_drawn: int = 0
    num_rounds: int = 0

    @property
    def drawn(self) -> tuple[Sample, ...]:
        """All samples of this rank: those that train, the rejected and the surplus."""
        return self.samples + self.rejected + self.surplus

    def with_group(self, group: Sequence[Sample], chosen: Sequence[Sample]) -> Rollout:
        """Return the rollout with one more group, of which ``chosen`` train."""
        rejected = tuple(sample for sample in group if not any(sample is other for other in chosen))
        return dataclasses.replace(self, samples=self.samples + tuple(chosen), rejected=self.rejected + rejected)

    def by_group(self) -> Rollout:
        """Return the rollout with the samples that train by ascending group."""
        return dataclasses.replace(self, samples=tuple(sorted(self.samples, key=lambda sample: sample.group)))

    def with_surplus(self, group: Sequence[Sample]) -> Rollout:
        """Return the rollout with one more surplus group."""
        return dataclasses.replace(self, surplus=self.surplus + tuple(group))


def groups_of(samples: Sequence[Sample]) -> list[tuple[Sample, ...]]:
    """Return the samples of each prompt, in order."""
    by_group: dict[int, list[Sample]] = {}
    for sample in samples:
        by_group.setdefault(sample.group, []).append(sample)
    return [tuple(group) for group in by_group.values()]
