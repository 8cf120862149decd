"""Inputs of the memory plan, read from a configured run without loading a weight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from rlplug.config import RunConfig
from rlplug.distributed.strategy import RLFSDP2Strategy
from rlplug.errors import PluginError
from rlplug.interfaces.memory import ActivationTraits, EngineMemory, EngineMemoryRequest
from rlplug.interfaces.memory_plan import GPU
from rlplug.interfaces.optimization import Network, Optimization
from rlplug.interfaces.plain_values import json_problem
from rlplug.interfaces.rollout import PolicySpec
from rlplug.interfaces.trainer import ModelConfig
from rlplug.interfaces.weight_sync import FP8Weights
from rlplug.models.critic.network import empty_critic
from rlplug.models.hf_files import read_config
from rlplug.models.loading import empty_model
from rlplug.models.lora.config import LoRAConfig
from rlplug.plugin_manager import plugins
from rlplug.training.batch_plan import BatchPlan
from rlplug.types import MeshSizes
from rlplug.weight_sync.manifest import policy_weights
from rlplug_plan.decisions import Decisions, decide
from rlplug_plan.inputs import MemoryInputs, ModelInputs, Possible, Sizes
from rlplug_plan.model_shape import ModelShape
from rlplug_plan.own_engine import engine_side
from rlplug_plan.tensor_bytes import storage_sizes

MakeOptimizer = Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer]
ADAM_BYTES: Final = 8.0
NO_TRAITS: Final = ActivationTraits()
ADDABLE: Final = frozenset({"FusedLogprobs", "SelectiveCheckpointing", "GradientCheckpointing", "ActivationOffload"})
PROBE_SIZE: Final = 256
PROBE_NAME: Final = "model.layers.0.mlp.up_proj.weight"


@dataclass(frozen=True)
class PlannedRun:
    """A configured run, and the ranks on which it is to run."""

    config: RunConfig
    spec: PolicySpec
    batch: BatchPlan
    strategy: RLFSDP2Strategy
    """Only its options are read: it need not be set up."""
    mesh: MeshSizes
    longest: int
    """Tokens of the longest possible prompt and completion."""

    def decide(self, gpu: GPU) -> Decisions:
        """Plan for ``gpu``."""
        return decide(self.config.optimizations, self.config.memory.sleep_between_rollouts, self.inputs(gpu))

    def inputs(self, gpu: GPU) -> Callable[[Sequence[Optimization]], MemoryInputs]:
        """Return the function from optimizations to the plan's inputs, of an engine that stays awake."""
        config, batch = self.config, self.batch
        shapes = self._shapes()
        state = optimizer_state_bytes(config.optimizer)
        states: dict[Network, float] = {"policy": ADAM_BYTES if state is None else state, "reference": 0.0}
        if "critic" in shapes:
            assert config.critic is not None
            critic_state = optimizer_state_bytes(config.critic.make_optimizer)
            states["critic"] = ADAM_BYTES if critic_state is None else critic_state
        engine = self._engine_memory(gpu, shapes["policy"])
        engine_gpus = config.engine.ranks_per_engine
        adapters = None
        if config.lora is not None:
            adapters = num_adapter_parameters(config.policy, config.lora)

        of_rewards = [reward.device_bytes() for reward in config.rewards]

        def inputs_with(optimizations: Sequence[Optimization]) -> MemoryInputs:
            models = {}
            for name, shape in shapes.items():
                traits = traits_of(name, optimizations, config.model_trainer.plan_memory(ActivationTraits()))
                own = adapters if name == "policy" else None
                models[name] = ModelInputs(shape, traits, states[name], own, self.mesh.tensor)
            facts = MemoryInputs(
                gpu=gpu,
                policy=models["policy"],
                reference=models.get("reference"),
                critic=models.get("critic"),
                sizes=self._sizes(),
                mesh=self.mesh,
                itemsize=config.policy.torch_dtype.itemsize,
                reshard_after_forward=self.strategy.reshard_after_forward,
                sync_every_micro_batch=self.strategy.sync_every_micro_batch,
                offload=config.memory.offload,
                engine=engine,
                # a class may know whether it can sleep on this machine alone
                engine_can_sleep=engine is not None
                and engine.can_sleep
                and (config.engine.capabilities.sleep or not gpu.is_here),
                bucket_bytes=config.weight_sync.bucket_mib << 20,
                completions=self._completions * engine_gpus,
                group_size=batch.group_size,
                size_options=self._size_options,
                has_value_head=config.critic is not None and config.critic.share_trunk,
                logprobs_every_step=not batch.is_on_policy or config.on_policy_pass is not None,
                rewards_kept=sum(size for size, stays in of_rewards if stays),
                rewards_brought=sum(size for size, stays in of_rewards if not stays),
                assumes_state=state is None,
                engine_gpus=engine_gpus,
                possible=possible_changes(config, batch),
            )
            return self._with_own_engine(facts) if engine is not None and engine.own_gpus else facts

        return inputs_with

    def _with_own_engine(self, facts: MemoryInputs) -> MemoryInputs:
        """Return the run without its engine, and that beside it, as the GPUs that the engine has see it."""
        assert facts.engine is not None
        options = getattr(self.config.engine, "options", None)
        size, share = getattr(options, "tensor_parallel_size", 1), getattr(options, facts.engine.share_key, None)
        side = engine_side(replace(facts, engine_gpus=size, completions=self.batch.num_completions), share)
        return replace(facts, engine=None, engine_can_sleep=False, own_engine=side)

    def _size_options(self, requests: int, prompt_tokens: int) -> Mapping[str, Any]:
        """Return what the engine would change of its options.

        Raises:
            PluginError: It returned something else.
        """
        engine = self.config.engine
        found: Any = engine.size_options(self.spec, requests, prompt_tokens)
        problem = json_problem(dict(found)) if isinstance(found, Mapping) else f"a {type(found).__name__}"
        if problem is not None:
            raise PluginError(
                f"{type(engine).__name__}.size_options returned {problem}: return options by name, as plain values."
            )
        return dict(found)

    def _shapes(self) -> dict[Network, ModelShape]:
        """Return the shapes of the run's models; a critic that shares the policy's trunk is next to nothing."""
        config, critic = self.config, self.config.critic
        shapes: dict[Network, ModelShape] = {"policy": ModelShape.of(empty_model(config.policy))}
        if config.algorithm.needs.reference_policy and not config.reference_is_policy:
            reference = config.reference or config.policy
            shapes["reference"] = ModelShape.of(empty_model(reference, "model.reference"))
        if critic is not None and not critic.share_trunk:
            shapes["critic"] = ModelShape.of(empty_critic(critic, config.policy))
        return shapes

    @property
    def _completions(self) -> int:
        """Completions of one rank in a step."""
        return self.batch.num_completions // self.mesh.world_size

    def _sizes(self) -> Sizes:
        batch, given, critic = self.batch, self.config.batch, self.config.critic
        return Sizes(
            update_rows=batch.mini_batch_size,
            forward_rows=batch.num_completions,
            longest=self.longest,
            max_new_tokens=self.config.sampling.max_new_tokens,
            max_tokens={kind: size for kind, size in batch.max_tokens.items() if kind in ("update", "forward")},
            update_is_set=given.max_tokens_per_gpu is not None,
            forward_is_set=given.max_tokens_per_gpu_forward is not None,
            micro_batch_size=given.micro_batch_size_per_gpu,
            micro_batch_size_forward=given.micro_batch_size_per_gpu_forward,
            critic_tokens=None if critic is None else critic.max_tokens_per_gpu,
            critic_tokens_forward=None if critic is None else critic.max_tokens_per_gpu_forward,
            sequence_size=batch.sequence_size,
            data_size=batch.data_size,
        )

    def _engine_memory(self, gpu: GPU, shape: ModelShape) -> EngineMemory | None:
        request = EngineMemoryRequest(
            device_bytes=gpu.total,
            parameters=shape.parameters,
            kv_bytes_per_token=shape.kv_elements * self.spec.dtype.itemsize,
            completions=self._completions,
            longest=self.longest,
            vocab_size=shape.vocab,
            fp8_parameters=0 if self.spec.fp8 is None else num_fp8_parameters(self.spec),
        )
        return self.config.engine.plan_memory(self.spec, request)


def possible_changes(config: RunConfig, batch: BatchPlan) -> Possible:
    """Return what model, trainer, engine and other parts of the run let a remedy change."""
    claims, text_config = config.model_trainer.claims, read_config(config.policy.path, "model.policy").get_text_config()
    names = {type(optimization).__name__ for optimization in config.optimizations}
    known = ADDABLE if claims.optimizations is None else ADDABLE & claims.optimizations
    addable = known & set(plugins().registry.names("optimizations")) - set(claims.conflicts)
    if getattr(text_config, "final_logit_softcapping", None) is not None:  # logits that the model edits stay whole
        addable -= {"FusedLogprobs"}
    plain_engine = config.environment is None and config.partial_rollout is None
    heads = getattr(text_config, "num_attention_heads", None) or 0
    return Possible(
        heads=heads if isinstance(heads, int) else 0,
        kv_heads=getattr(text_config, "num_key_value_heads", None) or heads,
        axes=claims.axes - ({"tensor"} if "Liger" in names else set()),
        prompts_per_step=batch.prompts_per_step,
        optimizations=addable,
        offload="StateOffload" in plugins().registry.names("classes"),
        lora=claims.lora and config.lora is None,
        adamw_8bit=True,
        larger_engines=plain_engine and hasattr(getattr(config.engine, "options", None), "tensor_parallel_size"),
    )


def traits_of(
    network: Network, optimizations: Iterable[Optimization], traits: ActivationTraits = NO_TRAITS
) -> ActivationTraits:
    """Return the activation traits of passes over ``network`` with the optimizations that apply to it.

    Args:
        network: The network.
        optimizations: Optimizations of the run.
        traits: Traits without any.
    """
    for optimization in optimizations:
        if network in optimization.applies_to:
            traits = optimization.plan_memory(traits)
    return traits


def num_adapter_parameters(policy: ModelConfig, config: LoRAConfig) -> int:
    """Return the number of parameters that train, without loading a weight."""
    from rlplug.models.lora.adapters import add_adapters

    network = empty_model(policy)
    add_adapters(network, config, policy.torch_dtype)
    return sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)


def num_fp8_parameters(policy: PolicySpec) -> int:
    """Return the number of the policy's parameters that are sent in FP8."""
    weights = policy_weights(policy).values()
    return sum(weight.shape.numel() for weight in weights if weight.dtype == FP8Weights.DTYPE)


def optimizer_state_bytes(make_optimizer: MakeOptimizer) -> float | None:
    """Return the bytes of state per parameter, found by a step on a small matrix; ``None`` when that fails.

    Only sizes are read: some optimizers run on GPUs alone, and what they keep is then assumed to be AdamW's.
    """
    parameter = nn.Parameter(torch.zeros(PROBE_SIZE, PROBE_SIZE))
    parameter.grad = torch.zeros_like(parameter)
    try:
        optimizer = make_optimizer([(PROBE_NAME, parameter)])
        optimizer.step()
        sizes = storage_sizes(list(optimizer.state.values()), torch.device("cpu"))
    except Exception:  # noqa: BLE001 - whatever an optimizer's own code raises
        return None
    large = [size for size in sizes if size >= PROBE_SIZE]  # not the number of steps
    return sum(large) / parameter.numel()
