"""Rollout interface: an engine takes token ids and weights, and returns token ids with its own logprobs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeAlias

import torch

from rlplug.errors import ConfigError, RunError, did_you_mean
from rlplug.interfaces.weight_sync import AdapterWeights, Bucket, FP8Weights, SyncReport
from rlplug.types import Completion, Request, SamplingParams

MYPY = False  # in place of TYPE_CHECKING, whose imports jsonargparse carries out
if MYPY:
    from rlplug.interfaces.memory import EngineMemory, EngineMemoryRequest
    from rlplug.interfaces.router_replay import RouterShape

SleepingPart: TypeAlias = Literal["weights", "kv_cache"]


@dataclass(frozen=True)
class EngineCapabilities:
    """Capabilities of an engine. A run that needs others stops at start and names the engines that have them.

    Attributes:
        colocated: Whether it runs on the trainer's devices.
        disaggregated: Whether it runs on devices of its own.
        logprobs: Whether it returns the logprobs of the tokens that it sampled; otherwise they are NaN.
        sleep: Whether it can release device memory between rollouts.
        restart: Whether it can start again after ``close`` in the same process; otherwise a fault ends the run.
        streaming: Whether it has ``submit``, ``collect`` and ``abort``.
        in_flight_update: Whether it takes weights while requests run.
        fp8_refit: Whether it takes FP8 weights with block scales.
        multi_turn: Whether it keeps a conversation's KV cache between turns.
        tensor_parallel: Whether it can split one model over several devices.
        routed_experts: Whether it returns the experts that its routers chose, when ``PolicySpec.routers`` asks for
            them.
        adapters: Whether it serves low-rank adapters beside frozen weights that it gets once, as
            :class:`~rlplug.interfaces.weight_sync.AdapterWeights` says.
        stop_strings: Whether it ends a completion at ``PolicySpec.stop``; otherwise it generates on, and the core cuts
            off what follows.
    """

    colocated: bool = True
    disaggregated: bool = False
    logprobs: bool = True
    sleep: bool = False
    restart: bool = True
    streaming: bool = False
    in_flight_update: bool = False
    fp8_refit: bool = False
    multi_turn: bool = False
    tensor_parallel: bool = False
    routed_experts: bool = False
    adapters: bool = False
    stop_strings: bool = False


@dataclass(frozen=True)
class PolicySpec:
    """Description from which an engine builds the policy. Weights follow with the first ``update_weights``.

    Attributes:
        path: Folder, or model name on the Hugging Face Hub, with configuration and tokenizer.
        dtype: Dtype of the weights that ``update_weights`` gets.
        eos_token_ids: Ids that end a completion: all that tokenizer, ``config.json`` and ``generation_config.json``
            name. Nothing else of the last may have an effect.
        pad_token_id: Padding of batches; inside a prompt it is a token like others.
        max_context: Longest prompt and completion together, in tokens.
        fp8: Weights that are sent in FP8; ``None`` when all are sent in ``dtype``.
        vocab_size: Tokens that the policy embeds, which an engine's token ids must stay below; ``None`` where it is not
            known.
        routers: Routers whose choices the engine must return in ``Completion.routed_experts``; ``None`` when it need
            not.
        adapters: Low-rank adapters that the engine serves; ``None`` when weight syncs send whole weights.
        stop: Strings that end a completion, those of ``SamplingParams.stop``, for which an engine needs the tokenizer.
    """

    path: str
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    max_context: int
    fp8: FP8Weights | None = None
    vocab_size: int | None = None
    routers: RouterShape | None = None
    adapters: AdapterWeights | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Placement:
    """Device and rank on which an engine runs."""

    device: torch.device
    rank: int
    world_size: int


@dataclass(frozen=True)
class ScrapeTargets:
    """Servers of an engine that serve metrics to Prometheus at ``/metrics``.

    Attributes:
        engine: Name of the engine, such as ``vLLM``.
        urls: Addresses of the servers.
        needs_key: Whether ``/metrics`` asks for a key, as ``Authorization: Bearer``.
        keys: Of servers that the run started, in the order of ``urls``; none where they run already with the user's.
    """

    engine: str
    urls: tuple[str, ...]
    needs_key: bool = False
    keys: tuple[str, ...] = field(default=(), repr=False)


class EngineFault(RunError):
    """Error of an engine that died or missed a deadline.

    The core restarts the engines of all ranks, and requests the missing completions again.

    Args:
        message: Description of the fault.
        completions: Completions that were finished before the fault.
    """

    def __init__(self, message: str, completions: Sequence[Completion] = ()) -> None:
        super().__init__(message)
        self.completions = list(completions)


class RolloutEngine(ABC):
    """Base class of rollout engines, which generate completions with the policy's newest weights.

    Each trainer rank has one of these objects.

    The core makes the calls in the order of :mod:`rlplug.rollout.engine_states`, and refuses any other before it
    reaches the engine: no engine has to check whether it was started, has weights, or is awake.

    In an asynchronous rollout, for which an engine must be ``disaggregated`` and ``streaming``, a thread calls
    ``submit``, ``collect`` and ``abort``, and meanwhile the main thread may call ``stats``, and nothing else.

    Attributes:
        capabilities: Capabilities of the class; an object may have fewer where an option disables one.
        is_stopping: Function that returns whether the run is told to stop, which the core sets; it is quick, and not
            collective. Then ``generate`` may end early: what is not complete has the tokens so far and the finish
            reason ``abort``.
        compile_cache_variables: Environment variables with which the engine's library is told where to keep what it
            compiles, and for each a folder below ``run.compile_cache``. The core sets those that are not set, for this
            process and those that it starts, before ``prepare``.
        context_key: Key that sets :meth:`max_context`, such as ``rollout.max_model_len``, for messages.
        sampling_extra: Options of its library's sampling that it takes in ``SamplingParams.extra``.
        deciding_options: Its options that change the numbers beyond rounding: a resumed run stops where one differs.
    """

    capabilities: EngineCapabilities = EngineCapabilities()
    compile_cache_variables: ClassVar[Mapping[str, str]] = MappingProxyType({})
    is_stopping: Callable[[], bool] = staticmethod(lambda: False)
    context_key: str = ""
    sampling_extra: ClassVar[frozenset[str]] = frozenset()
    deciding_options: Sequence[str] = ()

    @classmethod
    def preference(cls, device_type: str) -> int:
        """Return how much a run on devices such as ``cuda`` prefers this engine where its configuration names none.

        0 lets it generate only where it is named. rlplug's own engines have up to 30, where their library is there.
        """
        return 0

    @property
    def ranks_per_engine(self) -> int:
        """Number of trainer ranks that run one engine; they get the same requests and return the same completions."""
        return 1

    def check(self, policy: PolicySpec) -> None:  # noqa: B027 - overriding is optional
        """Refuse a policy that this engine cannot run, before anything is loaded.

        Raises:
            ConfigError: The engine cannot run the policy; the message names the reason and the fix.
        """

    def check_sampling(self, sampling: SamplingParams, key: str) -> None:
        """Refuse sampling that this engine does not know, before anything is loaded.

        Args:
            sampling: How completions will be drawn.
            key: Its key, such as ``model.sampling``, for the message.

        Raises:
            ConfigError: An option in ``extra`` is not among :attr:`sampling_extra`.
        """
        for name in sampling.extra.keys() - self.sampling_extra:
            known = f"It knows {', '.join(sorted(self.sampling_extra))}." if self.sampling_extra else "It knows none."
            raise ConfigError(
                f"{key}.extra.{name}: {type(self).__name__} knows no such option."
                f"{did_you_mean(name, self.sampling_extra)} {known}"
            )

    def prepare(self, policy: PolicySpec, placement: Placement) -> None:  # noqa: B027 - overriding is optional
        """Refuse a machine on which this engine cannot start, before anything is loaded.

        The core calls it on every rank that trains or validates, and not for ``rlplug plan``. It starts nothing.

        Raises:
            ConfigError: A library or a device is missing; the message says how to get it.
        """

    @abstractmethod
    def start(self, policy: PolicySpec, placement: Placement) -> None:
        """Build the engine, also again after ``close``. All ranks call it at the same time.

        Imports of the engine's library belong here, not at the top of the plugin.
        """

    @abstractmethod
    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        """Return one completion per request, in the order of the requests, which stay as they are.

        Raises:
            RunError: A prompt fills ``max_context``; the engine can go on.
            EngineFault: The engine cannot go on.
        """

    @abstractmethod
    def update_weights(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        """Replace all weights of the policy; later completions carry ``version``.

        With ``PolicySpec.adapters``, only the first sync after a start brings all weights; later ones replace the
        adapters.

        Every bucket must be consumed on every rank: producing one is a collective operation.

        Raises:
            RunError: The sync has an unknown name, or lacks one of the engine's weights. Another sync may follow.
            EngineFault: The engine cannot go on.
        """

    @abstractmethod
    def close(self) -> None:
        """Release devices and processes; safe to call twice."""

    def plan_memory(self, policy: PolicySpec, needs: EngineMemoryRequest) -> EngineMemory | None:
        """Return the memory that it will take on one of its GPUs, or ``None`` when that is unknown.

        The core calls this before ``start``, and ``rlplug plan`` does so on machines that may have neither a GPU nor
        the engine's library. The default returns ``None``.
        """
        return None

    def size_options(self, policy: PolicySpec, requests: int, prompt_tokens: int) -> Mapping[str, Any]:
        """Return what to change of its options for ``requests`` at once and passes over that many prompt tokens."""
        return {}

    def max_context(self, policy: PolicySpec) -> int:
        """Return the longest prompt and completion together that it generates, in tokens: at most the policy's.

        The core asks before ``start``, where options say it, and after, where servers do: it refuses a run whose
        prompts and completions do not fit, before a step does.
        """
        return policy.max_context

    def stats(self) -> dict[str, float]:
        """Return counters since the last call, logged as ``rollout/<key>``; also while the engine sleeps.

        The core asks once a step, which may have several rollouts.
        """
        return {}

    def advice(self) -> list[str]:
        """Return suggestions for settings that follow from the counters so far.

        The core prints each one once, and not again with other numbers.
        """
        return []

    def scrape_targets(self) -> ScrapeTargets | None:
        """Return the servers that run now and serve metrics; ``None`` when the engine has no servers."""
        return None

    def sleep(self) -> None:
        """Release the device memory of weights and KV cache, whose contents are lost."""
        raise self._cannot("sleep")

    def wake(self, part: SleepingPart) -> None:
        """Allocate memory for a part again: first for the weights, then, after ``update_weights``, for the KV cache."""
        raise self._cannot("sleep")

    def submit(self, requests: Sequence[Request], sampling: SamplingParams) -> None:
        """Start requests without waiting for them."""
        raise self._cannot("streaming")

    def collect(self, timeout_s: float) -> list[Completion]:
        """Return the completions that are ready, waiting at most ``timeout_s`` for the first."""
        raise self._cannot("streaming")

    def abort(self, request_ids: Sequence[str]) -> None:
        """Stop requests; :meth:`collect` returns their tokens so far with finish reason ``abort``."""
        raise self._cannot("streaming")

    def _cannot(self, capability: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} does not have the capability {capability!r}")


def require_capability(
    engine: RolloutEngine, capability: str, key: str, others: Iterable[type], instead: str = ""
) -> None:
    """Stop the run at start when ``engine`` lacks what configuration key ``key`` asks for.

    Args:
        capability: A field of :class:`EngineCapabilities`.
        others: Registered engine classes; the message names those that have the capability.
        instead: Another way out, for the message, such as ``Or set model.lora.sync to merged.``

    Raises:
        ConfigError: The engine lacks it.
    """
    assert capability in {field.name for field in fields(EngineCapabilities)}, capability
    if getattr(engine.capabilities, capability):
        return
    able = [other.__name__ for other in others if getattr(other.capabilities, capability, False)]  # type: ignore[attr-defined]
    remedy = f"Engines here that can: {', '.join(able)}." if able else "No installed engine can."
    raise ConfigError(
        f"{key} needs an engine with {capability!r}, which {type(engine).__name__} lacks. {remedy} {instead}".rstrip()
    )
