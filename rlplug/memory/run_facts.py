"""The facts of a configured run, found out without loading a weight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from rlplug.batching import BatchPlan
from rlplug.critic import CriticConfig, empty_critic
from rlplug.interfaces.memory import EngineMemory, EngineNeeds, UpdateTraits
from rlplug.interfaces.optimization import Network, Optimization
from rlplug.interfaces.rollout import PolicySpec, RolloutEngine
from rlplug.loading import empty_model
from rlplug.memory.decide import Decisions, SleepSetting, decide
from rlplug.memory.facts import GPU, MemoryFacts, NetworkFacts, Sizes
from rlplug.memory.shape import ModelShape
from rlplug.mesh import MeshSizes
from rlplug.offload import OffloadMode, distinct_storages
from rlplug.policy import PolicyConfig
from rlplug.strategy import RLFSDP2Strategy

if TYPE_CHECKING:
    from rlplug.module_setup import RLModuleSetup

MakeOptimizer = Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer]
ADAM_BYTES: Final = 8.0
PROBE_SIZE: Final = 256
PROBE_NAME: Final = "model.layers.0.mlp.up_proj.weight"


@dataclass(frozen=True)
class PlannedRun:
    """What a run has configured that decides on its memory."""

    policy: PolicyConfig
    reference: PolicyConfig | None
    """``None`` for a run without."""
    critic: CriticConfig | None
    make_optimizer: Any
    batch: BatchPlan
    longest: int
    max_new_tokens: int
    mesh: MeshSizes
    strategy: RLFSDP2Strategy
    """For its options alone."""
    engine: RolloutEngine
    spec: PolicySpec
    offload: OffloadMode
    bucket_bytes: int
    logprobs_every_step: bool
    optimizations: Sequence[Optimization]
    sleep: SleepSetting

    @classmethod
    def of(cls, module: RLModuleSetup, strategy: RLFSDP2Strategy, mesh: MeshSizes, longest: int) -> PlannedRun:
        """Read the options of ``module``, which has its batch plan; the strategy need not be set up."""
        reference = module.reference_config or module.policy_config
        return cls(
            policy=module.policy_config,
            reference=reference if module.algorithm.needs.reference_policy else None,
            critic=module.critic_config,
            make_optimizer=module.make_optimizer,
            batch=module.plan,
            longest=longest,
            max_new_tokens=module.sampling.max_new_tokens,
            mesh=mesh,
            strategy=strategy,
            engine=module.engine,
            spec=module.spec,
            offload=module.offload_mode,
            bucket_bytes=module.sync_bucket_bytes,
            logprobs_every_step=not module.plan.is_on_policy or module.on_policy_pass is not None,
            optimizations=module.optimizations,
            sleep=module.sleep_between_rollouts,
        )

    def decide(self, gpu: GPU) -> Decisions:
        """Plan for ``gpu``."""
        return decide(self.optimizations, self.sleep, self.facts(gpu))

    def facts(self, gpu: GPU) -> Callable[[Sequence[Optimization]], MemoryFacts]:
        """Return the function from optimizations to facts, of an engine that stays awake."""
        policy = ModelShape.of(empty_model(self.policy))
        reference = None if self.reference is None else ModelShape.of(empty_model(self.reference, "model.reference"))
        critic = None
        if self.critic is not None and not self.critic.share_trunk:
            critic = ModelShape.of(empty_critic(self.critic, self.policy))
        state = optimizer_state_bytes(self.make_optimizer)
        critic_state = None if self.critic is None else optimizer_state_bytes(self.critic.make_optimizer)
        engine = self._engine_memory(gpu, policy)

        def facts_with(optimizations: Sequence[Optimization]) -> MemoryFacts:
            def network(name: Network, shape: ModelShape | None, state_bytes: float) -> NetworkFacts | None:
                if shape is None:
                    return None
                return NetworkFacts(shape.split(self.mesh.tensor), traits_of(name, optimizations), state_bytes)

            trained = network("policy", policy, ADAM_BYTES if state is None else state)
            assert trained is not None
            return MemoryFacts(
                gpu=gpu,
                policy=trained,
                reference=network("reference", reference, 0.0),
                critic=network("critic", critic, ADAM_BYTES if critic_state is None else critic_state),
                sizes=self._sizes(),
                num_gpus=self.mesh.world_size,
                shards=self.mesh.shard * self.mesh.sequence,
                itemsize=self.policy.torch_dtype.itemsize,
                reshard_after_forward=self.strategy.reshard_after_forward,
                sync_every_micro_batch=self.strategy.sync_every_micro_batch,
                offload=self.offload,
                engine=engine,
                # what a class says of sleep may be true of this machine alone
                engine_can_sleep=engine is not None
                and engine.can_sleep
                and (self.engine.capabilities.sleep or not gpu.is_here),
                bucket_bytes=self.bucket_bytes,
                completions=self._completions * self.engine.ranks_per_engine,
                logprobs_every_step=self.logprobs_every_step,
                assumes_state=state is None,
            )

        return facts_with

    @property
    def _completions(self) -> int:
        """Of one rank, in a step."""
        return self.batch.num_completions // self.mesh.world_size

    def _sizes(self) -> Sizes:
        return Sizes(
            update_rows=-(-self.batch.mini_batch_size // self.batch.data_size),
            forward_rows=-(-self.batch.num_completions // self.batch.data_size),
            longest=self.longest,
            max_new_tokens=self.max_new_tokens,
            max_tokens=self.batch.max_tokens,
            micro_batch_size=self.batch.micro_batch_size,
            sequence_size=self.batch.sequence_size,
        )

    def _engine_memory(self, gpu: GPU, shape: ModelShape) -> EngineMemory | None:
        needs = EngineNeeds(
            device_bytes=gpu.total,
            parameters=shape.parameters,
            kv_bytes_per_token=shape.kv_elements * self.spec.dtype.itemsize,
            completions=self._completions,
            longest=self.longest,
            vocab_size=shape.vocab,
        )
        return self.engine.plan_memory(self.spec, needs)


def traits_of(network: Network, optimizations: Iterable[Optimization]) -> UpdateTraits:
    """Return what passes over ``network`` are like with the optimizations that apply to it."""
    traits = UpdateTraits()
    for optimization in optimizations:
        if network in optimization.applies_to:
            traits = optimization.plan_memory(traits)
    return traits


def optimizer_state_bytes(make_optimizer: MakeOptimizer) -> float | None:
    """Return the bytes of state per parameter, found by a step on a small matrix; ``None`` when that fails.

    Only sizes are read: some optimizers run on GPUs alone, and what they keep is then assumed to be AdamW's.
    """
    parameter = nn.Parameter(torch.zeros(PROBE_SIZE, PROBE_SIZE))
    parameter.grad = torch.zeros_like(parameter)
    try:
        optimizer = make_optimizer([(PROBE_NAME, parameter)])
        optimizer.step()
        storages = distinct_storages(list(optimizer.state.values()), torch.device("cpu"))
    except Exception:  # noqa: BLE001 - whatever an optimizer's own code raises
        return None
    large = [size for _, size in storages if size >= PROBE_SIZE]  # not the number of steps
    return sum(large) / parameter.numel()
