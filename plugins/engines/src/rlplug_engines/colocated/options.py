"""Options of an engine: the checks that all engines make, and arguments that pass through to the engine's library."""

# no postponed annotations: jsonargparse evaluates those of a base class among the names of the subclass's module
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Final

import torch

from rlplug.errors import ConfigError, did_you_mean
from rlplug.interfaces.rollout import PolicySpec
from rlplug_engines.colocated.scheduler_advice import AdviceKeys

SHARED_NAMES: Final = {
    "share_key": "gpu_memory_utilization",
    "context_key": "max_model_len",
    "requests_key": "max_num_seqs",
    "prefill_key": "max_num_batched_tokens",
}
"""Names that every engine takes beside its own, so that a run changes its engine in one line: those of vLLM, which verl
and TRL use too. Keys are the attributes of :class:`EngineOptions` that name an engine's own options."""


def deciding(default: Any) -> Any:
    """Return a field of :class:`EngineOptions` whose option decides the numbers beyond rounding; a dict is copied."""
    given = {"default_factory": default.copy} if isinstance(default, dict) else {"default": default}
    return field(**given, metadata={"decides": True})


def deciding_options(options: Any) -> list[str]:
    """Return the names of the options that :func:`deciding` marks."""
    return [each.name for each in fields(options) if each.metadata.get("decides")]


@dataclass(frozen=True)
class PassThrough:
    """An option that hands any other argument to the engine's library by name, and the names that it refuses."""

    key: str
    """The option, such as ``engine_args``."""
    engine: str
    """Name of the engine, for messages."""
    reserved: Mapping[str, str]
    """Arguments that the plugin sets itself, or that cannot be set beside what it sets, and why."""
    own_names: Mapping[str, str]
    """Arguments for which there is an option of another name, and that option."""
    weight_formats: Collection[str] = ()
    """Arguments that cannot be set when ``model.weight_sync`` sends FP8 weights."""

    def check(self, given: Collection[str], options: Collection[str], known: Collection[str], in_fp8: bool) -> None:
        """Refuse arguments that cannot be passed.

        Args:
            given: Names of the arguments.
            options: Names of the engine's options.
            known: Names of all arguments of the installed library.
            in_fp8: Whether weights travel in FP8.

        Raises:
            ConfigError: An argument has an option of its own, is set by the plugin, contradicts ``model.weight_sync``,
                or is unknown.
        """
        for name in given:
            key = f"rollout.{self.key}.{name}"
            if name in self.own_names or name in options:
                raise ConfigError(f"{key}: set rollout.{self.own_names.get(name, name)} instead.")
            if name in self.reserved:
                raise ConfigError(f"{key} cannot be set: {self.reserved[name]}.")
            if name not in known:
                nearest = did_you_mean(name, known)
                raise ConfigError(f"{key} is no argument of the installed {self.engine}.{nearest}")
            if in_fp8 and name in self.weight_formats:
                raise ConfigError(f"{key} and model.weight_sync both say what weights are: remove one.")


class EngineOptions:
    """Base of an engine's options. A subclass is a frozen dataclass that has the fields below, among others.

    It takes each of :data:`SHARED_NAMES` for which it has a field of that name, ``None`` by default. The value goes to
    the engine's own option, which must be ``None`` then, or the same.
    """

    share_key: ClassVar[str]
    """The option for the engine's share of the GPU's memory."""
    default_share: ClassVar[float] = 0.5
    """Where it is ``None``."""
    share_may_be_one: ClassVar[bool] = False
    context_key: ClassVar[str]
    """The option for the longest prompt and completion together."""
    requests_key: ClassVar[str] = ""
    """The option for the requests that run at once."""
    prefill_key: ClassVar[str] = ""
    """The option for the tokens of a forward pass, or of a prompt's part in it."""
    positive: ClassVar[tuple[str, ...]]
    """Options that are positive numbers or ``None``, beside ``tensor_parallel_size``."""
    batch_sizes_key: ClassVar[str | None] = None
    """The option that lists the batch sizes of CUDA graphs, where ``disable_cuda_graph`` turns these off; beside it
    ``cuda_graph_max_batch_size``."""
    pass_through: ClassVar[PassThrough]

    dtype: str
    """``auto`` is the policy's."""
    kv_cache_dtype: str
    tensor_parallel_size: int

    def __post_init__(self) -> None:
        self._take_shared_names()
        share = self.share
        if not 0 < share <= 1 or (share == 1 and not self.share_may_be_one):
            upper = "up to 1" if self.share_may_be_one else "below 1"
            raise ConfigError(f"rollout.{self.written(self.share_key)} is {share}: give a share above 0, {upper}.")
        for name, value in self.given("tensor_parallel_size", *self.positive).items():
            if value <= 0:
                raise ConfigError(f"rollout.{self.written(name)} is {value}: give a positive number.")
        sizes = None if self.batch_sizes_key is None else getattr(self, self.batch_sizes_key)
        if sizes is not None and (not sizes or min(sizes) < 1):
            raise ConfigError(
                f"rollout.{self.batch_sizes_key} is {sizes}: give positive numbers, or set disable_cuda_graph."
            )

    def _take_shared_names(self) -> None:
        """Give the values of shared names to the engine's own options.

        Raises:
            ConfigError: Both are given, and differ.
        """
        for attribute, shared in SHARED_NAMES.items():
            own, value = getattr(self, attribute), getattr(self, shared, None)
            if own in ("", shared) or value is None:
                continue
            if (own_value := getattr(self, own)) not in (None, value):
                raise ConfigError(
                    f"rollout.{own} is {own_value}, and rollout.{shared} {value}, another name of the same option: "
                    "remove one."
                )
            object.__setattr__(self, own, value)

    @property
    def share(self) -> float:
        """The engine's share of the GPU's memory; what it is a share of, each engine says of its own option."""
        share: float | None = getattr(self, self.share_key)
        return self.default_share if share is None else share

    def written(self, own: str) -> str:
        """Return the name by which the user set one of the engine's options: a shared name, or its own."""
        for attribute, shared in SHARED_NAMES.items():
            if own and getattr(self, attribute) == own and getattr(self, shared, None) is not None:
                return shared
        return own

    def advice_keys(self, on_gpu: bool = True) -> AdviceKeys:
        """Return the options that advice names, as the user writes them; a subclass adds those of its engine alone."""
        share = f"rollout.{self.written(self.share_key)} from {self.share:g}"
        requests, prefill = (
            f"rollout.{self.written(key)}" if key else "" for key in (self.requests_key, self.prefill_key)
        )
        return AdviceKeys(share, share if on_gpu else "", requests, prefill if on_gpu else "")

    def given(self, *names: str) -> dict[str, Any]:
        """Return those of the options that are not ``None``, by name."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def sizes_for(self, policy: PolicySpec, requests: int, prompt_tokens: int) -> dict[str, Any]:
        """Return options, by name, for ``requests`` at once and passes over ``prompt_tokens``, with graphs for them."""
        return {}

    def changes_for(self, policy: PolicySpec, requests: int, prompt_tokens: int) -> dict[str, Any]:
        """Return those of :meth:`sizes_for` that differ from what is set."""
        wanted = self.sizes_for(policy, requests, prompt_tokens)
        return {self.written(name): value for name, value in wanted.items() if getattr(self, name) != value}

    def graphs_for(self, requests: int) -> dict[str, Any]:
        """Return options with which CUDA graphs cover ``requests``, of an engine that has ``batch_sizes_key``."""
        assert self.batch_sizes_key is not None
        sizes: list[int] | None = getattr(self, self.batch_sizes_key)
        if sizes is None:
            return {"cuda_graph_max_batch_size": requests}
        return {} if max(sizes) >= requests else {self.batch_sizes_key: sorted({*sizes, requests})}

    def longest(self, policy: PolicySpec) -> int:
        """Return the longest prompt and completion together, in tokens."""
        context: int | None = getattr(self, self.context_key)
        return policy.max_context if context is None else min(context, policy.max_context)

    def torch_dtype(self, policy: PolicySpec) -> torch.dtype:
        """Return the dtype of weights and activations."""
        dtype: torch.dtype = policy.dtype if self.dtype == "auto" else getattr(torch, self.dtype)
        return dtype

    def dtype_name(self, policy: PolicySpec) -> str:
        """Return the dtype of weights and activations as engines spell it, such as ``bfloat16``."""
        return str(self.torch_dtype(policy)).removeprefix("torch.")

    def passed_arguments(self, policy: PolicySpec, known: Collection[str]) -> dict[str, Any]:
        """Return the arguments that pass through to the engine's library.

        Args:
            known: Names of all arguments of the installed library.

        Raises:
            ConfigError: One cannot be passed.
        """
        arguments: dict[str, Any] = getattr(self, self.pass_through.key)
        options = {field.name for field in fields(self)}  # type: ignore[arg-type]  # subclasses are dataclasses
        self.pass_through.check(arguments, options, known, in_fp8=policy.fp8 is not None)
        return dict(arguments)
