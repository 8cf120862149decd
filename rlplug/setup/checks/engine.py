"""Checks that the engine can do what the run asks of it, and that the machine has what it needs.

Each raises a ``ConfigError`` that names the key and the fix.
"""

from __future__ import annotations

from collections.abc import Iterable

from lightning.pytorch.utilities import rank_zero_warn

from rlplug.config import RunConfig
from rlplug.distributed.strategy import RLFSDP2Strategy
from rlplug.errors import ConfigError, RunError
from rlplug.interfaces.checks.engines import max_context_of
from rlplug.interfaces.rollout import Placement, PolicySpec, RolloutEngine, require_capability
from rlplug.plugin_manager import plugins
from rlplug.rollout.config import TurnOptions
from rlplug.setup.checks.trainer import check_optimizations
from rlplug.setup.inputs import RunInputs


def check_rollout(config: RunConfig, inputs: RunInputs, engine_is_here: bool = True) -> None:
    """Refuse an engine that cannot do what the run asks of it, and optimizations that do not go together.

    Without ``engine_is_here`` the run is planned for another machine, whose engine may sleep or take FP8.
    """
    check_engine(config, plugins().registry.each("rollouts"), engine_is_here)
    config.engine.check(inputs.spec)
    has_reference = config.algorithm.needs.reference_policy and not config.reference_is_policy
    has_critic = config.critic is not None and not config.critic.share_trunk
    networks = {"policy", *["reference"] * has_reference, *["critic"] * has_critic}
    check_optimizations(config.optimizations, networks)


def check_context(engine: RolloutEngine, policy: PolicySpec, longest_prompt: int, max_new_tokens: int) -> None:
    """Refuse a run whose longest prompt and completion do not fit the engine's context.

    Args:
        engine: Some know their context once they have started, so this is called before and after.
        policy: What the engine is told about the policy, whose own context the prompts fit.
        longest_prompt: Of all prompts, in tokens.
        max_new_tokens: Longest completion, in tokens.

    Raises:
        ConfigError: The message names the keys.
    """
    context = max_context_of(engine, policy)
    if longest_prompt + max_new_tokens > context:
        raise ConfigError(
            f"{type(engine).__name__} generates up to {context} tokens of prompt and completion together, and the "
            f"longest prompt ({longest_prompt}) with model.sampling.max_new_tokens ({max_new_tokens}) has "
            f"{longest_prompt + max_new_tokens}. Raise {engine.context_key or 'its context'}, lower "
            "model.sampling.max_new_tokens, or set data.max_prompt_tokens, with data.too_long: filter."
        )


def check_plugins(strategy: RLFSDP2Strategy) -> None:
    """Raise ``RunError`` where ranks left out different plugins: they would call different hooks. Collective."""
    left_out = strategy.gather([plugins().registry.left_out])
    lines = [line for each in left_out for name, line in each.items() if not all(name in other for other in left_out)]
    if lines:
        raise RunError(f"Only some ranks have a plugin: {lines[0]}")


def check_machine(config: RunConfig, inputs: RunInputs, strategy: RLFSDP2Strategy) -> None:
    """Raise ``ConfigError`` for a machine that lacks what the engine needs, which may be a library or a GPU."""
    config.engine.prepare(inputs.spec, Placement(strategy.root_device, strategy.global_rank, strategy.world_size))


def check_engine(config: RunConfig, engines: Iterable[type], is_here: bool = True) -> None:
    """Refuse an engine that cannot do what the run asks of it.

    Args:
        engines: The registered classes, among which messages name those that can.
        is_here: False for an engine that will run on another machine. Whether it can sleep, or take FP8, may depend on
            the device, and is not known here.
    """
    engine, algorithm = config.engine, config.algorithm
    engine.check_sampling(config.sampling, "model.sampling")
    engine.check_sampling(config.validation.sampling_of(config.sampling), "model.validation.sampling")
    if config.sampling.stop and not engine.capabilities.stop_strings:
        rank_zero_warn(f"{type(engine).__name__} generates on after model.sampling.stop; what follows is cut off.")
    if config.environment is None and config.turns != TurnOptions():
        raise ConfigError("model.turns is set, and model.environment is not: name an environment, or remove it.")
    if config.memory.sleep_between_rollouts is True and is_here:
        require_capability(engine, "sleep", "model.memory.sleep_between_rollouts", engines)
    if algorithm.needs.rollout_logprobs:
        key = f"model.algorithm.init_args.correction ({type(algorithm).__name__})"
        require_capability(engine, "logprobs", key, engines)
    if config.limits.mismatch_gate is not None and not engine.capabilities.logprobs:
        raise ConfigError(
            f"{type(engine).__name__} returns no logprobs, so its mismatch with the trainer cannot be measured. Set "
            "model.limits.mismatch_gate to null to run without that check."
        )
    if config.weight_sync.dtype is not None:
        for capability in ("fp8_refit", "logprobs") if is_here else ("logprobs",):
            require_capability(engine, capability, "model.weight_sync.dtype", engines)
    if config.lora is not None and config.lora.sync == "adapters":
        instead = "Or set model.lora.sync to merged."
        require_capability(engine, "adapters", "model.lora.sync: adapters", engines, instead)
        if config.weight_sync.dtype is not None:
            raise ConfigError(
                "model.lora.sync is adapters, and model.weight_sync.dtype asks for FP8: nobody has tried adapters "
                "beside weights in FP8. Set model.lora.sync to merged, or model.weight_sync.dtype to null."
            )
    if config.router_replay:
        require_capability(engine, "routed_experts", "model.router_replay", engines)
