"""The rollout seam: an engine takes token ids and weights, and returns token ids with its own logprobs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

import torch

from rlplug.errors import ConfigError, RunError
from rlplug.interfaces.memory import EngineMemory, EngineMemoryRequest
from rlplug.interfaces.weight_sync import Bucket, FP8Weights, SyncReport
from rlplug.types import Completion, Request, SamplingParams

SleepingPart: TypeAlias = Literal["weights", "kv_cache"]


@dataclass(frozen=True)
class EngineCapabilities:
    """What an engine can do. Asking for more stops the run at start and names the engines that can."""

    colocated: bool = True
    """Runs on the trainer's devices."""
    disaggregated: bool = False
    """Runs on devices of its own."""
    logprobs: bool = True
    """Returns the logprobs of the tokens that it sampled; without this they are NaN."""
    sleep: bool = False
    """Gives device memory back between rollouts."""
    restart: bool = True
    """Starts again after ``close``, in the same process; without this, a fault ends the run."""
    streaming: bool = False
    """``submit``, ``collect`` and ``abort``."""
    in_flight_update: bool = False
    """Takes weights while requests run."""
    fp8_refit: bool = False
    """Takes FP8 weights with block scales."""
    multi_turn: bool = False
    """Keeps a conversation's cache between turns."""
    tensor_parallel: bool = False
    """Splits one model over several devices."""


@dataclass(frozen=True)
class PolicySpec:
    """What an engine must know to build the policy. Weights follow with the first ``update_weights``."""

    path: str
    """Hugging Face folder or hub name: configuration and tokenizer."""
    dtype: torch.dtype
    """Of the weights that ``update_weights`` brings."""
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    max_context: int
    """Prompt and completion together, in tokens."""
    fp8: FP8Weights | None = None
    """Which weights travel in FP8, and how; ``None`` when all travel in ``dtype``."""


@dataclass(frozen=True)
class Placement:
    """Where an engine runs."""

    device: torch.device
    rank: int
    world_size: int


class EngineFault(RunError):
    """An engine died, or missed a deadline. The core starts all ranks' engines anew and asks for what is missing.

    Args:
        message: What happened.
        completions: Those that were finished before.
    """

    def __init__(self, message: str, completions: Sequence[Completion] = ()) -> None:
        super().__init__(message)
        self.completions = list(completions)


class RolloutEngine(ABC):
    """Generates completions with the policy's newest weights. Each trainer rank has one of these objects.

    The core makes the calls in the order of :mod:`rlplug.rollout.engine_states`, and refuses any other before it
    reaches the engine: no engine has to check whether it was started, has weights, or is awake.
    """

    capabilities: EngineCapabilities = EngineCapabilities()
    """Of the class; an object may narrow its own where an option takes something away."""

    @property
    def ranks_per_engine(self) -> int:
        """Trainer ranks that run one engine together. They get the same requests and return the same completions."""
        return 1

    def check(self, policy: PolicySpec) -> None:  # noqa: B027 - overriding is optional
        """Refuse a policy that this engine cannot run, before anything is loaded.

        Raises:
            ConfigError: The message names what it cannot take, and the fix.
        """

    @abstractmethod
    def start(self, policy: PolicySpec, placement: Placement) -> None:
        """Build the engine, also anew after ``close``. All ranks call it at the same time.

        Imports of the engine's library belong here, not at the top of the plugin.
        """

    @abstractmethod
    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        """Return one completion per request, in the order of the requests.

        Raises:
            RunError: A prompt leaves no room for a token in ``max_context``; the engine can go on.
            EngineFault: The engine cannot.
        """

    @abstractmethod
    def update_weights(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        """Take every weight of the policy; completions from now on carry ``version``.

        Every bucket must be consumed on every rank: producing one is a collective operation.

        Raises:
            RunError: A name is unknown to the engine, or one that it has was not sent. Another sync may follow.
            EngineFault: The engine cannot go on.
        """

    @abstractmethod
    def close(self) -> None:
        """Release devices and processes; safe to call twice."""

    def plan_memory(self, policy: PolicySpec, needs: EngineMemoryRequest) -> EngineMemory | None:
        """Return what it will take of one of the trainer's GPUs; ``None``, the default, when that is not known or none.

        Called before ``start``, and by ``rlplug plan`` where neither a GPU nor the engine's library need be.
        """
        return None

    def stats(self) -> dict[str, float]:
        """Return counters since the last call, logged as ``rollout/<key>``."""
        return {}

    def advice(self) -> list[str]:
        """Return what the counters so far suggest to set, in plain words; the core prints each piece once."""
        return []

    def sleep(self) -> None:
        """Give all device memory back that can be: weights and KV cache. What slept is lost."""
        raise self._cannot("sleep")

    def wake(self, part: SleepingPart) -> None:
        """Take memory for a part again: first for the weights, then, after ``update_weights``, for the KV cache."""
        raise self._cannot("sleep")

    def submit(self, requests: Sequence[Request], sampling: SamplingParams) -> None:
        """Start requests without waiting for them."""
        raise self._cannot("streaming")

    def collect(self, timeout_s: float) -> list[Completion]:
        """Return the completions that are ready, waiting at most ``timeout_s`` for the first."""
        raise self._cannot("streaming")

    def abort(self, request_ids: Sequence[str]) -> None:
        """Stop requests; what they have so far comes back with finish reason ``abort``."""
        raise self._cannot("streaming")

    def _cannot(self, capability: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} does not have the capability {capability!r}")


def require_capability(engine: RolloutEngine, capability: str, key: str, others: Iterable[type]) -> None:
    """Stop the run at start when ``engine`` lacks what configuration key ``key`` asks for.

    Args:
        capability: A field of :class:`EngineCapabilities`.
        others: The registered engine classes, among which the message names those that have the capability.

    Raises:
        ConfigError: The engine lacks it.
    """
    assert capability in {field.name for field in fields(EngineCapabilities)}, capability
    if getattr(engine.capabilities, capability):
        return
    able = [other.__name__ for other in others if getattr(other.capabilities, capability, False)]  # type: ignore[attr-defined]
    remedy = f"Engines here that can: {', '.join(able)}." if able else "No installed engine can."
    raise ConfigError(f"{key} needs an engine with {capability!r}, which {type(engine).__name__} lacks. {remedy}")
