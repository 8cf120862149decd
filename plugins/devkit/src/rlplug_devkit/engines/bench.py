"""Bench of the checks: one engine for a class of checks, started late, and synced when a check needs other weights."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy
import psutil
import pytest
import torch

from rlplug.interfaces import ModelConfig
from rlplug.interfaces.checks.engines import max_context_of
from rlplug.interfaces.rollout import Placement, PolicySpec, RolloutEngine
from rlplug.interfaces.weight_sync import AdapterWeights, Bucket, SyncReport
from rlplug.models.config import load_spec, load_tokenizer
from rlplug.models.routers import router_shape
from rlplug.plugin_manager import plugins
from rlplug.rollout.engine_states import Call, EngineStateMachine
from rlplug.types import Completion, Request, SamplingParams
from rlplug.weight_sync.config import WeightSyncConfig
from rlplug.weight_sync.fp8_layers import choose_fp8_weights
from rlplug.weight_sync.manifest import meta_model
from rlplug_devkit.claims import STARTS_ONCE
from rlplug_devkit.engines.diagnosis import cause_of_logprobs, cause_of_tokens
from rlplug_devkit.models import Family
from rlplug_devkit.process_guard import ProcessGuard
from rlplug_devkit.process_state import children
from rlplug_devkit.reference import Array, ReferencePolicy, Tolerances, compare, greedy_gap

Variant: TypeAlias = Literal["first", "changed", "nudged", "endless", "ending"]
"""Weights of the folder, changed weights, weights after a small update, and weights that never or soon sample an end
token."""

IN_FP8 = WeightSyncConfig(dtype="fp8_block")
FP8_FAMILIES = ("fp8", "fp8_experts")
STOP_STRINGS = ("A", " K", "M N")
"""Of the tokenizer of the tiny models, which puts a space between letters: the last two need two tokens."""
ADAPTED = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
"""Layers with adapters: among them some, and not all, of those that engines fuse."""
ADAPTERS = AdapterWeights(3, 7.0, tuple(f"model.layers.{layer}.{name}" for layer in range(2) for name in ADAPTED))
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0)
NUDGED_PROMPTS = 2
"""Prompts whose next tokens the small update makes likelier."""


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
        self.guard = ProcessGuard(tuple(settings.folders.values()), only_kept=True)
        """What calls of the engine have changed."""
        self.others_processes = frozenset(process.pid for process in children())
        """Ids of processes below this one that are not the engine's."""
        self.nudge = 1e-6
        """Size of the small update, a learning rate's."""
        self._unstarted: RolloutEngine | None = settings.make_engine()
        self.engine_name = type(self._unstarted).__name__
        self.capabilities = self._unstarted.capabilities
        self._engine: RolloutEngine | None = None
        self._life = EngineStateMachine(self.engine_name, settings.placement.device)
        self._was_started = False
        self.family: Family = "llama"
        """Family of the engine's model."""
        self._held: Variant | None = None
        self._has_frozen = False
        self._policies: dict[tuple[Family, Variant], ReferencePolicy] = {}
        self.spec = self.spec_of(self.family)

    # ---- which engine, with which weights -------------------------------------------------------------------------

    def unsynced(self) -> RolloutEngine:
        """Return an engine that never had weights: the shared one, if it had no sync yet."""
        if self._engine is None or self.version > 0:
            self._make("llama")
        return self.running()

    def holding(self, variant: Variant = "first", family: Family = "llama", path: str = "") -> RolloutEngine:
        """Return the engine with these weights, ready for any call; with ``path``, a new one of a copy of its model."""
        if self._engine is None or self.family != family or path:
            self._make(family, path)
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

    def _make(self, family: Family, path: str = "") -> None:
        if self._was_started and not self.capabilities.restart:
            pytest.skip(f"{self.engine_name} {STARTS_ONCE}: run this check alone, with pytest -k")
        self._was_started = True
        self.discard()
        self.family, self.version, self.spec = family, 0, self.spec_of(family)
        if path:
            self.spec = dataclasses.replace(self.spec, path=path)
        self._engine, self._unstarted = self._unstarted or self.settings.make_engine(), None
        self._life = EngineStateMachine(self.engine_name, self.settings.placement.device)
        self.start()

    # ---- its calls, in the order that the core keeps --------------------------------------------------------------

    @contextmanager
    def _calls(self, call: Call) -> Iterator[None]:
        """Surround a call: check its order, and note what it changes of the process."""
        with self.guard.around(call), self._life.calls(call):
            yield

    def start(self) -> None:
        """Start the engine, also after it was closed."""
        with self._calls("start"):
            self.running().check(self.spec)
            self.running().prepare(self.spec, self.settings.placement)
            self.running().start(self.spec, self.settings.placement)

    def close(self) -> None:
        """Close the engine without discarding it."""
        self._held, self._has_frozen = None, False
        with self._calls("close"):
            self.running().close()

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        """Return completions of the running engine."""
        with self._calls("generate"):
            return self.running().generate(requests, sampling)

    def update_weights(self, buckets: Iterable[Bucket], version: int | None = None) -> SyncReport:
        """Send any buckets, under the next version by default, after which the engine's weights are not known."""
        self._held = None
        self.version = self.version + 1 if version is None else version
        with self._calls("update_weights"):
            return self.running().update_weights(buckets, self.version)

    def sync(self, variant: Variant = "first", max_bytes: int = 1 << 30, version: int | None = None) -> SyncReport:
        """Send the weights of a variant to the running engine; adapters alone, once it has the frozen weights."""
        buckets = self.policy(variant).buckets(self.settings.placement.device, max_bytes, self._has_frozen)
        report = self.update_weights(buckets, version)
        self._held, self._has_frozen = variant, self.spec.adapters is not None
        return report

    def sleep(self) -> None:
        """Put the engine to sleep, which loses its weights."""
        self._held = None
        with self._calls("sleep"):
            self.running().sleep()

    def wake_and_sync(self, variant: Variant = "changed") -> None:
        """Wake the engine as a step does: the KV cache last, so that it is never in memory with a sync's buckets."""
        with self._calls("wake_weights"):
            self.running().wake("weights")
        self.sync(variant)
        with self._calls("wake_kv_cache"):
            self.running().wake("kv_cache")

    def own_processes(self) -> list[psutil.Process]:
        """Return the engine's processes."""
        return [process for process in children() if process.pid not in self.others_processes]

    # ---- what it is asked, and what it should say -----------------------------------------------------------------

    def meta_model(self, family: Family) -> Any:
        """Return the model of a family without memory for its weights."""
        return meta_model(str(self.settings.folders[family]))

    def spec_of(self, family: Family) -> PolicySpec:
        """Return what an engine is told of the model of a family."""
        config = ModelConfig(path=str(self.settings.folders[family]))
        spec = load_spec(config, load_tokenizer(config, make=plugins().hook.rlplug_make_tokenizer))
        max_context = min(spec.max_context, self.settings.max_context)
        fp8 = choose_fp8_weights(meta_model(spec.path), IN_FP8) if family in FP8_FAMILIES else None
        routers = router_shape(meta_model(spec.path), "routed_experts") if family == "routed" else None
        adapters = ADAPTERS if family == "adapters" else None
        stop = STOP_STRINGS if family == "stopping" else ()
        return dataclasses.replace(
            spec,
            dtype=self.settings.dtype,
            max_context=max_context,
            fp8=fp8,
            routers=routers,
            adapters=adapters,
            stop=stop,
        )

    def policy(self, variant: Variant = "first") -> ReferencePolicy:
        """Return the reference for a variant of the running model."""
        key = (self.family, variant)
        if key not in self._policies:
            if variant == "first":
                folder, dtype = str(self.settings.folders[self.family]), self.settings.dtype
                made = ReferencePolicy(folder, dtype, self.spec.fp8, self.spec.adapters)
            elif variant == "changed":
                made = self.policy().changed(self.settings.weight_change)
            elif variant == "nudged":
                made = self._nudged()
            else:
                made = self.policy().unigram(self.spec.eos_token_ids, 1e-30 if variant == "endless" else 0.2)
            self._policies[key] = made
        return self._policies[key]

    def _nudged(self) -> ReferencePolicy:
        """Return the weights after an update that is as small as possible and changes logprobs visibly."""
        prompts = self.nudged_prompts()
        before = [self.policy().logits(ids)[0] for ids in prompts]
        while True:
            made = self.policy().nudged(prompts, self.nudge)
            changes = [
                float(numpy.abs(log_softmax(made.logits(p)[0]) - log_softmax(b)).max())
                for p, b in zip(prompts, before, strict=True)
            ]
            if min(changes) > 5 * self.tolerances.max or self.nudge > 1e-2:
                return made
            self.nudge *= 3

    def nudged_prompts(self) -> list[tuple[int, ...]]:
        """Return the prompts whose logprobs the small update changes visibly."""
        return self.prompts("nudged", [12] * NUDGED_PROMPTS)

    @property
    def max_context(self) -> int:
        """Context of the running engine, as it says, in tokens."""
        return max_context_of(self.running(), self.spec)

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

    def limited(self, key: str, limits: Sequence[int | None]) -> list[Request]:
        """Return requests with limits of their own."""
        requests = self.requests(key, [3 + index for index in range(len(limits))])
        return [dataclasses.replace(r, max_new_tokens=limit) for r, limit in zip(requests, limits, strict=True)]

    @property
    def tolerances(self) -> Tolerances:
        """Largest differences between the running engine's logprobs and the reference's."""
        return self.settings.fp8_tolerances if self.family in FP8_FAMILIES else self.settings.tolerances

    def assert_greedy(self, requests: Sequence[Request], completions: Sequence[Completion], advice: str) -> None:
        """Fail unless each token of greedy completions is the reference's likeliest one, up to round-off."""
        held, limit = self.held_policy, self.tolerances.max
        gap = greedy_gap(held, requests, completions)
        if gap > limit:
            known: tuple[Variant, ...] = ("first", "changed")  # of the others, every token is as likely
            others = {str(v): self.policy(v) for v in known if v != self._held}
            cause = cause_of_tokens(held, others, requests, completions, limit)
            pytest.fail(
                f"greedy completions have a token that is {gap:.3g} nats less likely than the reference's best one "
                f"(round-off is at most {limit:.3g}). {cause or advice}"
            )

    def assert_logprobs(
        self, requests: Sequence[Request], completions: Sequence[Completion], sampling: SamplingParams, advice: str
    ) -> None:
        """Fail unless the completions' logprobs are the reference's."""
        difference = compare(self.held_policy, requests, completions, sampling)
        if not difference.within(self.tolerances):
            cause = cause_of_logprobs(self.held_policy, requests, completions, sampling, self.tolerances.mean)
            pytest.fail(
                f"logprobs differ from the reference's: {difference}, but at most {self.tolerances} is allowed. "
                f"{cause or advice}"
            )

    def doubt(self, requests: Sequence[Request], completions: Sequence[Completion], sampling: SamplingParams) -> str:
        """Return what to add where completions are too long or too short, and the sync is to blame; else nothing."""
        if not self.capabilities.logprobs:
            return ""
        is_held = compare(self.held_policy, requests, completions, sampling).within(self.tolerances)
        return "" if is_held else " Logprobs are not those of the weights that were sent last: look at update_weights."

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


def log_softmax(logits: Array) -> Array:
    """Return logprobs [..., V] of logits."""
    shifted: Array = logits - logits.max(axis=-1, keepdims=True)
    logprobs: Array = shifted - numpy.log(numpy.exp(shifted).sum(axis=-1, keepdims=True))
    return logprobs


def num_equal(some: Sequence[Completion], other: Sequence[Completion], first: int | None = None) -> int:
    """Return how many completions have the same tokens as the other one: all of them, or the ``first`` ones."""
    pairs = zip(some, other, strict=True)
    return sum(numpy.array_equal(one.token_ids[:first], two.token_ids[:first]) for one, two in pairs)
