"""The plan of a run: its sizes, steps, optimizations and memory, decided before a weight is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from lightning.pytorch.utilities import rank_zero_warn

from rlplug.interfaces.algorithm import RunInfo
from rlplug.models.hf_files import read_config
from rlplug.models.shape import attention_cost
from rlplug.plugin_manager import plugins
from rlplug.setup.checks.engine import check_context, check_rollout
from rlplug.setup.checks.trainer import check_optimizers, check_trainer
from rlplug.setup.checks.training import check_streamed_prompts, check_training
from rlplug.training.batch_plan import BatchPlan

if TYPE_CHECKING:
    from rlplug.config import RunConfig
    from rlplug.data.datamodule import PromptDataModule
    from rlplug.distributed.strategy import RLFSDP2Strategy
    from rlplug.interfaces.memory_plan import GPU, MemoryDecisions
    from rlplug.interfaces.optimization import Optimization
    from rlplug.setup.inputs import RunInputs
    from rlplug.types import MeshSizes

UNCORRECTED: Final = (
    "model.weight_sync sends weights in FP8, so completions are drawn from a policy that is not quite the trainer's, "
    "and {name} does not correct for that: set its init_args.correction, or watch mismatch/kl."
)


@dataclass(frozen=True)
class RunPlan:
    """A training run as it will be, decided before a weight is loaded."""

    mesh: MeshSizes
    longest: int
    """Tokens of the longest possible prompt and completion."""
    batch: BatchPlan
    total_steps: int
    optimizations: tuple[Optimization, ...]
    """Configured optimizations, without those that the memory plan could leave out."""
    sleeps: bool
    """Whether the engine sleeps between rollouts."""
    memory: MemoryDecisions | None = None
    """What the memory plan of a run on GPUs decided; ``None`` where no plugin plans."""


@dataclass(frozen=True)
class RunParts:
    """What a run is made from, once Lightning has set up its data and its strategy."""

    config: RunConfig
    inputs: RunInputs
    data: PromptDataModule
    strategy: RLFSDP2Strategy
    plan: RunPlan | None
    """``None`` for a run that does not train."""


def plan_run(
    config: RunConfig,
    inputs: RunInputs,
    data: PromptDataModule,
    strategy: RLFSDP2Strategy,
    world_size: int,
    gpu: GPU | None,
) -> RunPlan:
    """Check all that can be checked before anything is loaded, and decide sizes and memory.

    Of ``strategy`` only options are read: it need not be set up. ``gpu`` is the fullest of the run; without one, memory
    is not planned.

    Raises:
        ConfigError: The message names the key and the fix.
    """
    check_rollout(config, inputs, engine_is_here=gpu is None or gpu.is_here)
    check_context(config.engine, inputs.spec, data.longest_prompt, config.sampling.max_new_tokens)
    mesh = strategy.mesh_sizes(world_size)
    check_trainer(config, mesh)
    longest = data.train_stream.longest_prompt + config.sampling.max_new_tokens
    text_config = read_config(config.policy.path, "model.policy").get_text_config()
    make = plugins().hook.rlplug_make_row_layout
    layout = make(config=config, mesh=mesh, on_gpu=gpu is not None) if config.batch.share_prefixes else None
    cost = attention_cost(text_config)
    critic, ranks = config.critic, (mesh.world_size, mesh.data_size, mesh.sequence)
    budgets = (None, None) if critic is None else (critic.max_tokens_per_gpu, critic.max_tokens_per_gpu_forward)
    batch = BatchPlan(config.batch, *ranks, longest, cost, layout, budgets)
    num_prompts = data.train_stream.num_prompts
    check_streamed_prompts(config, num_prompts is None)
    total_steps = config.num_steps or max(1, (num_prompts or 0) // batch.prompts_per_step)
    hook = plugins().hook.rlplug_make_tokenizer
    check_training(config, batch, total_steps, longest, mesh.sequence, inputs.tokenizer, hook, bool(data.val_prompts))
    in_fp8, algorithm, max_new_tokens = inputs.spec.fp8 is not None, config.algorithm, config.sampling.max_new_tokens
    algorithm.setup(RunInfo(batch.num_completions, batch.group_size, max_new_tokens, in_fp8, config.seed))
    if in_fp8 and not algorithm.needs.rollout_logprobs:
        rank_zero_warn(UNCORRECTED.format(name=type(algorithm).__name__))
    sleeps = config.memory.sleep_between_rollouts is True
    plan = RunPlan(mesh, longest, batch, total_steps, tuple(config.optimizations), sleeps)
    if gpu is None:
        return plan
    memory: MemoryDecisions | None = plugins().hook.rlplug_plan_memory(
        config=config, spec=inputs.spec, batch=batch, strategy=strategy, mesh=mesh, longest=longest, gpu=gpu
    )
    if memory is None:
        how = plugins().how_to_get("rlplug_plan_memory")
        rank_zero_warn(f"Nothing plans the run's memory, so the engine sleeps if it can. Planning comes with {how}")
        sleeps = config.engine.capabilities.sleep and config.memory.sleep_between_rollouts is not False
        return replace(plan, sleeps=sleeps)
    return replace(plan, memory=memory, sleeps=memory.sleeps, optimizations=memory.kept)


def fullest_gpu(strategy: RLFSDP2Strategy) -> GPU | None:
    """Return the GPU with the least memory to plan with of all ranks, so that they decide alike; ``None`` on CPUs."""
    if strategy.root_device.type != "cuda":
        return None
    from rlplug.interfaces.memory_plan import GPU, total_and_free

    gpus = [GPU(*numbers) for numbers in strategy.gather([total_and_free(strategy.root_device)])]
    return min(gpus, key=lambda gpu: gpu.capacity)


def plan_fit(
    config: RunConfig, inputs: RunInputs, data: PromptDataModule, strategy: RLFSDP2Strategy, world_size: int
) -> RunPlan:
    """Plan a run on the ranks of ``strategy``, which is set up, and refuse or warn when it does not fit.

    Raises:
        ConfigError: The message names the key and the fix.
    """
    check_optimizers(config, strategy.mesh, strategy.root_device)
    plan = plan_run(config, inputs, data, strategy, world_size, fullest_gpu(strategy))
    if plan.memory is not None:
        refuse_shortfall(config, plan.memory)
    return plan


def refuse_shortfall(config: RunConfig, memory: MemoryDecisions) -> None:
    """Stop before anything is loaded when the memory plan does not fit, or warn, as ``model.memory`` says."""
    if memory.shortfall is not None and config.memory.on_shortfall == "stop":
        raise memory.shortfall
    if memory.shortfall is not None:
        rank_zero_warn(str(memory.shortfall))
