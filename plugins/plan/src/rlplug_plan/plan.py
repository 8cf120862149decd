"""The plan itself: for each phase, the bytes of every item on one GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypeAlias

from rlplug.interfaces.memory import PLAN_PHASES, PlanPhase
from rlplug.interfaces.memory_plan import CUDA_BYTES
from rlplug.training.batch_plan import PassKind
from rlplug_plan.activations import (
    FLOAT32,
    LOSS_BYTES,
    block_temporaries,
    kept_elements,
    output_layer,
)
from rlplug_plan.inputs import NCCL_BYTES, MemoryInputs, ModelInputs

PHASES: Final = PLAN_PHASES
LARGEST_FIRST: Final[tuple[PlanPhase, ...]] = ("update", "rollout", "logprobs", "sync")
CUDA: Final = "CUDA, libraries"
WEIGHTS: Final = "weights, float32"
ADAPTED: Final = "frozen weights, adapters"
STATE: Final = "optimizer state"
CRITIC: Final = "critic, float32"
REFERENCE: Final = "reference, float32"
ENGINE: Final = "engine"


@dataclass(frozen=True)
class Item:
    """Memory of one item in one phase."""

    num_bytes: int
    note: str = ""
    """Why it takes nothing, or less than it could: ``offloaded``, ``asleep``."""


Items: TypeAlias = dict[str, Item]


@dataclass(frozen=True)
class Pass:
    """Bytes that passes over one network allocate, beside its resident state."""

    gradients: int
    gathered: int
    """Weights in the dtype of the pass."""
    kept: int
    """Activations for the backward pass."""
    working: int
    """The output layer's tensors, or those of a block at work where they are more."""

    @property
    def total(self) -> int:
        return self.gradients + self.gathered + self.kept + self.working


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of each GPU, phase by phase."""

    facts: MemoryInputs

    @cached_property
    def phases(self) -> dict[PlanPhase, Items]:
        """Items by name, the same names in each phase."""
        return {phase: self._items(phase) for phase in PHASES}

    def need(self, phase: PlanPhase) -> int:
        return self._need(phase, self.phases[phase])

    def allocated(self, phase: PlanPhase) -> int:
        """Return the part that torch counts: neither CUDA's own memory nor the engine's."""
        items = self.phases[phase].items()
        return sum(item.num_bytes for name, item in items if name != CUDA and not name.startswith(ENGINE))

    def headroom(self, phase: PlanPhase) -> int:
        """Return what is left of the capacity; negative when the phase does not fit."""
        return self.facts.gpu.capacity - self.need(phase)

    @property
    def tightest(self) -> PlanPhase:
        return min(PHASES, key=self.headroom)

    @property
    def fits(self) -> bool:
        capacity = self.facts.gpu.capacity
        return all(self._need(phase, self._items(phase)) <= capacity for phase in LARGEST_FIRST)

    def _need(self, phase: PlanPhase, items: Items) -> int:
        return int(sum(item.num_bytes for item in items.values()) * self.facts.scales.get(phase, 1.0))

    # ---- items ----------------------------------------------------------------------------------------------------

    def _items(self, phase: PlanPhase) -> Items:
        facts = self.facts
        weights = WEIGHTS if facts.policy.adapters is None else ADAPTED
        items = {weights: self._weights(phase, facts.policy), STATE: self._state(phase)}
        if facts.critic is not None:
            items[CRITIC] = self._weights(phase, facts.critic)
        if facts.reference is not None:
            items[REFERENCE] = self._reference(phase, facts.reference)
        items |= self._pass_items(phase) | self._engine_items(phase)
        if facts.rewards_kept or facts.rewards_brought:
            brought = facts.rewards_brought if phase == "logprobs" else 0
            note = "" if brought or not facts.rewards_brought else "offloaded"
            items["reward models"] = Item(facts.rewards_kept + brought, note)
        items["sync buckets"] = Item(self._buckets() if phase == "sync" else 0)
        items[CUDA] = Item(CUDA_BYTES + (NCCL_BYTES if facts.num_gpus > 1 else 0))
        return items

    def _weights(self, phase: PlanPhase, network: ModelInputs) -> Item:
        if phase == "rollout" and self.facts.offload == "optimizer_and_weights":
            return Item(0, "offloaded")
        if network.adapters is None:
            return Item(self._shard(FLOAT32 * network.shape.parameters))
        frozen = self._shard(self.facts.itemsize * network.shape.parameters)
        return Item(frozen + self._shard(FLOAT32 * network.adapters))

    def _reference(self, phase: PlanPhase, network: ModelInputs) -> Item:
        if phase != "logprobs" and self.facts.offload == "optimizer_and_weights":
            return Item(0, "offloaded")
        return Item(self._shard(FLOAT32 * network.shape.parameters))

    def _state(self, phase: PlanPhase) -> Item:
        """Return that of all networks that learn; before its first step an optimizer has none."""
        if phase != "update" and self.facts.offload != "none":
            return Item(0, "offloaded")
        if phase == "logprobs" and not self.facts.logprobs_every_step:
            return Item(0, "first step")
        learning = [network for network in (self.facts.policy, self.facts.critic) if network is not None]
        return Item(sum(self._shard(network.state_bytes * network.trained) for network in learning))

    def _shard(self, num_bytes: float) -> int:
        return int(num_bytes / self.facts.shards)

    def _pass_items(self, phase: PlanPhase) -> Items:
        names = ("gradients", "gathered weights", "activations", "output layer, temporaries")
        if phase not in ("logprobs", "update"):
            return dict.fromkeys(names, Item(0))
        of = self.pass_of
        passes = [of("update" if phase == "update" else "forward", self.facts.policy)]
        if self.facts.critic is not None:
            passes.append(of("update" if phase == "update" else "forward", self.facts.critic, is_critic=True))
        if self.facts.reference is not None and phase == "logprobs":
            passes.append(of("forward", self.facts.reference))
        largest = max(passes, key=lambda found: found.total)  # networks take turns
        sizes = (largest.gradients, largest.gathered, largest.kept, largest.working)
        return {name: Item(size) for name, size in zip(names, sizes, strict=True)}

    def pass_of(self, phase: PassKind, network: ModelInputs, is_critic: bool = False) -> Pass:
        """Return what the largest pass over ``network`` takes."""
        facts, shape, traits = self.facts, network.shape, network.traits
        sizes = facts.sizes.of_critic if is_critic else facts.sizes
        num_tokens, is_update = sizes.tokens(phase), phase == "update"
        gathered = shape.parameters
        if facts.reshard_after_forward:  # a block, the one that is fetched ahead, and embeddings or output layer
            gathered = min(gathered, 2 * shape.block_parameters + shape.end_parameters)
        keeps_whole = sizes.needs_several_passes("update") and not facts.sync_every_micro_batch
        gradients = FLOAT32 * network.trained // (1 if keeps_whole else facts.shards)
        trained = sizes.scored(phase)
        kept = kept_elements(shape, traits) if is_update else 0
        return Pass(
            gradients=gradients if is_update else 0,
            gathered=facts.itemsize * gathered,
            kept=facts.itemsize * num_tokens * kept + (LOSS_BYTES * trained if is_update else 0),
            working=max(
                output_layer(shape, traits, 0 if is_critic else trained, facts.itemsize, is_update),
                facts.itemsize * num_tokens * block_temporaries(shape),
            ),
        )

    def _engine_items(self, phase: PlanPhase) -> Items:
        engine, names = self.facts.engine, (f"{ENGINE} weights", f"{ENGINE} KV cache", f"{ENGINE}, other")
        if engine is None:
            return {}
        if phase == "rollout" or (not self.facts.sleeps and engine.keeps_cache):
            items = [Item(engine.weights), Item(engine.kv_cache), Item(engine.other)]
        elif not self.facts.sleeps:
            items = [Item(engine.weights), Item(0, "freed"), Item(0, "freed")]
        elif phase == "sync":
            items = [Item(engine.weights), Item(0, "asleep"), Item(engine.asleep)]
        else:
            items = [Item(0, "asleep"), Item(0, "asleep"), Item(engine.asleep)]
        return dict(zip(names, items, strict=True))

    def _buckets(self) -> int:
        """Return the bytes of a bucket, which is there twice while it is made; without an engine here as well."""
        whole = self.facts.itemsize * self.facts.policy.shape.parameters
        return 2 * min(self.facts.bucket_bytes, whole)
