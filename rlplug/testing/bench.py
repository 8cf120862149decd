"""Bench of the checks: one engine for a class of checks, started late, and synced when a check needs other weights."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy
import pytest
import torch

from rlplug.interfaces import ModelConfig
from rlplug.interfaces.rollout import Placement, PolicySpec, RolloutEngine
from rlplug.interfaces.weight_sync import Bucket, SyncReport
from rlplug.models.config import load_spec, load_tokenizer
from rlplug.models.routers import router_shape
from rlplug.plugin_manager import plugins
from rlplug.rollout.engine_states import EngineStateMachine
from rlplug.testing.models import Family
from rlplug.testing.reference import ReferencePolicy, Tolerances, compare, greedy_gap
from rlplug.types import Completion, Request, SamplingParams
from rlplug.weight_sync.config import WeightSyncConfig
from rlplug.weight_sync.fp8_layers import choose_fp8_weights
from rlplug.weight_sync.manifest import meta_model

Variant: TypeAlias = Literal["first", "changed", "endless", "ending"]
"""Weights of the folder, changed weights, and weights that never or soon sample an end token."""

IN_FP8 = WeightSyncConfig(dtype="fp8_block")
FP8_FAMILIES = ("fp8", "fp8_experts")
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0)


@dataclasses.dataclass(frozen=True)
class BenchSettings:
    """Settings of the engine that a class of checks gives."""

    make_engine: Callable[[], RolloutEngine]
    folders: dict[Family, Path]
    dtype: torch.dtype
    max_context: int
    placement: Placement
    tolerances: Tolerances
    fp8_tolerances: Tolerances
    weight_change: float


class Bench:
    """Holder of at most one engine, which makes its calls as the core does and tracks its weights."""

    def __init__(self, settings: BenchSettings) -> None:
        self.settings = settings
        self.version = 0
        self.moved_generators: set[str] = set()
        """Names of the global random generators that a start or a sync has advanced."""
        self._unstarted: RolloutEngine | None = settings.make_engine()
        self.engine_name = type(self._unstarted).__name__
        self.capabilities = self._unstarted.capabilities
        self._engine: RolloutEngine | None = None
        self._life = EngineStateMachine(self.engine_name, settings.placement.device)
        self._was_started = False
        self.family: Family = "llama"
        """Family of the engine's model."""
        self._held: Variant | None = None
        self._policies: dict[tuple[Family, Variant], ReferencePolicy] = {}
        self.spec = self._load_spec(self.family)

    # ---- which engine, with which weights -------------------------------------------------------------------------

    def unsynced(self) -> RolloutEngine:
        """Return an engine that never had weights: the shared one, if it had no sync yet."""
        if self._engine is None or self.version > 0:
            self._make("llama")
        return self.running()

    def holding(self, variant: Variant = "first", family: Family = "llama") -> RolloutEngine:
        """Return the engine with these weights, ready for any call."""
        if self._engine is None or self.family != family:
            self._make(family)
        if self._held != variant:
            self.sync(variant)
        assert self._life.state == "ready"
        return self.running()

    def running(self) -> RolloutEngine:
        """Return the running engine with whichever weights it has."""
        assert self._engine is not None
        return self._engine

    def discard(self) -> None:
        """Close the engine; the next check makes another."""
        if self._engine is not None:
            try:
                self.close()
            finally:
                self._engine = None

    def _make(self, family: Family) -> None:
        if self._was_started and not self.capabilities.restart:
            pytest.skip(f"{self.engine_name} starts once in a process: run this check alone, with pytest -k")
        self._was_started = True
        self.discard()
        self.family, self.version, self.spec = family, 0, self._load_spec(family)
        self._engine, self._unstarted = self._unstarted or self.settings.make_engine(), None
        self._life = EngineStateMachine(self.engine_name, self.settings.placement.device)
        self.start()

    # ---- its calls, in the order that the core keeps --------------------------------------------------------------

    def start(self) -> None:
        """Start the engine, also after it was closed."""
        before = generator_states()
        with self._life.calls("start"):
            self.running().start(self.spec, self.settings.placement)
        self.moved_generators |= moved(before)

    def close(self) -> None:
        """Close the engine without discarding it."""
        self._held = None
        with self._life.calls("close"):
            self.running().close()

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        """Return completions of the running engine."""
        with self._life.calls("generate"):
            return self.running().generate(requests, sampling)

    def update_weights(self, buckets: Iterable[Bucket]) -> SyncReport:
        """Send any buckets under the next version, after which the engine's weights are not known."""
        self._held = None
        self.version += 1
        with self._life.calls("update_weights"):
            return self.running().update_weights(buckets, self.version)

    def sync(self, variant: Variant = "first", max_bytes: int = 1 << 30) -> SyncReport:
        """Send the weights of a variant to the running engine."""
        buckets = self.policy(variant).buckets(self.settings.placement.device, max_bytes)
        before = generator_states()
        report = self.update_weights(buckets)
        self.moved_generators |= moved(before)
        self._held = variant
        return report

    def sleep(self) -> None:
        """Put the engine to sleep, which loses its weights."""
        self._held = None
        with self._life.calls("sleep"):
            self.running().sleep()

    def wake_and_sync(self, variant: Variant = "changed") -> None:
        """Wake the engine as a step does: the KV cache last, so that it is never in memory with a sync's buckets."""
        with self._life.calls("wake_weights"):
            self.running().wake("weights")
        self.sync(variant)
        with self._life.calls("wake_kv_cache"):
            self.running().wake("kv_cache")

    # ---- what it is asked, and what it should say -----------------------------------------------------------------

    def _load_spec(self, family: Family) -> PolicySpec:
        config = ModelConfig(path=str(self.settings.folders[family]))
        spec = load_spec(config, load_tokenizer(config, make=plugins().hook.rlplug_make_tokenizer))
        max_context = min(spec.max_context, self.settings.max_context)
        fp8 = choose_fp8_weights(meta_model(spec.path), IN_FP8) if family in FP8_FAMILIES else None
        routers = router_shape(meta_model(spec.path), "routed_experts") if family == "routed" else None
        return dataclasses.replace(spec, dtype=self.settings.dtype, max_context=max_context, fp8=fp8, routers=routers)

    def policy(self, variant: Variant = "first") -> ReferencePolicy:
        """Return the reference for a variant of the running model."""
        key = (self.family, variant)
        if key not in self._policies:
            if variant == "first":
                made = ReferencePolicy(str(self.settings.folders[self.family]), self.settings.dtype, self.spec.fp8)
            elif variant == "changed":
                made = self.policy().changed(self.settings.weight_change)
            else:
                made = self.policy().unigram(self.spec.eos_token_ids, 1e-30 if variant == "endless" else 0.2)
            self._policies[key] = made
        return self._policies[key]

    @property
    def held_policy(self) -> ReferencePolicy:
        """Reference for the weights that the engine holds."""
        assert self._held is not None
        return self.policy(self._held)

    def prompts(self, key: str, lengths: Sequence[int]) -> list[tuple[int, ...]]:
        """Return prompts of random ordinary tokens that no other ``key`` has."""
        special = {*self.spec.eos_token_ids, self.spec.pad_token_id}
        ordinary = [token for token in range(self.policy().model.config.vocab_size) if token not in special]
        return [tuple(random.Random(f"{key}/{i}").choices(ordinary, k=length)) for i, length in enumerate(lengths)]

    def requests(self, key: str, lengths: Sequence[int], num_samples: int = 1) -> list[Request]:
        """Return requests for ``num_samples`` completions of each of :meth:`prompts`."""
        return requests_for(key, self.prompts(key, lengths), num_samples)

    @property
    def tolerances(self) -> Tolerances:
        """Largest differences between the running engine's logprobs and the reference's."""
        return self.settings.fp8_tolerances if self.family in FP8_FAMILIES else self.settings.tolerances

    def assert_greedy(self, requests: Sequence[Request], completions: Sequence[Completion], advice: str) -> None:
        """Fail unless each token of greedy completions is the reference's likeliest one, up to round-off."""
        gap = greedy_gap(self.held_policy, requests, completions)
        assert gap <= self.tolerances.max, (
            f"greedy completions have a token that is {gap:.3g} nats less likely than the reference's best one "
            f"(round-off is at most {self.tolerances.max:.3g}). {advice}"
        )

    def assert_logprobs(
        self, requests: Sequence[Request], completions: Sequence[Completion], sampling: SamplingParams, advice: str
    ) -> None:
        """Fail unless the completions' logprobs are the reference's."""
        difference = compare(self.held_policy, requests, completions, sampling)
        assert difference.within(self.tolerances), (
            f"logprobs differ from the reference's: {difference}, but at most {self.tolerances} is allowed. {advice}"
        )

    def assert_holds(self, variant: Variant, key: str, lengths: Sequence[int], advice: str) -> None:
        """Fail unless greedy completions and their logprobs are those of the weights that were just synced."""
        assert self._held == variant
        requests = self.requests(key, lengths)
        completions = self.generate(requests, GREEDY)
        self.assert_greedy(requests, completions, advice)
        if self.capabilities.logprobs:
            self.assert_logprobs(requests, completions, GREEDY, advice)


def requests_for(key: str, prompts: Sequence[Sequence[int]], num_samples: int = 1) -> list[Request]:
    """Return requests with seeds from ``key``, the number of the prompt and that of the sample."""
    names = [f"{key}/{prompt}/{sample}" for prompt in range(len(prompts)) for sample in range(num_samples)]
    return [
        Request(name, tuple(prompts[index // num_samples]), random.Random(name).getrandbits(63))
        for index, name in enumerate(names)
    ]


def generator_states() -> dict[str, Any]:
    """Return the states of the global random generators, by name."""
    return {
        "random": random.getstate(),
        "numpy.random": numpy.random.get_state()[1].tobytes(),  # type: ignore[index]
        "torch": torch.get_rng_state().numpy().tobytes(),
    }


def moved(before: dict[str, Any]) -> set[str]:
    """Return the names of the generators whose state differs from ``before``."""
    after = generator_states()
    return {name for name in before if before[name] != after[name]}


def num_equal(some: Sequence[Completion], other: Sequence[Completion], first: int | None = None) -> int:
    """Return how many completions have the same tokens as the other one: all of them, or the ``first`` ones."""
    pairs = zip(some, other, strict=True)
    return sum(numpy.array_equal(one.token_ids[:first], two.token_ids[:first]) for one, two in pairs)
