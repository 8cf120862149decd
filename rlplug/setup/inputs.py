"""Facts about policy and environment that a run reads before a weight is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from rlplug.data.prompt_encoder import PromptRules
from rlplug.models.config import load_spec, load_tokenizer
from rlplug.plugin_manager import plugins
from rlplug.weight_sync.manifest import meta_model

if TYPE_CHECKING:
    from rlplug.config import RunConfig
    from rlplug.interfaces.reward import Reward
    from rlplug.interfaces.rollout import PolicySpec


@dataclass(frozen=True)
class RunInputs:
    """Facts about policy and environment that are known before a weight is loaded."""

    tokenizer: PreTrainedTokenizerBase
    spec: PolicySpec
    tools: Sequence[Mapping[str, Any]]
    """JSON schemas of the functions that the policy may call in its environment."""
    notes: Sequence[str] = ()
    """What a person should know of the environment."""
    rewards: Sequence[Reward] = ()

    def prompt_rules(self, max_new_tokens: int) -> PromptRules:
        """Return the rules that prompts must keep beside completions of up to ``max_new_tokens``."""
        limits = self.spec.max_context, max_new_tokens
        return PromptRules(self.tokenizer, self.tools, *limits, self.rewards, self.spec.vocab_size)


def read_inputs(config: RunConfig) -> RunInputs:
    """Read the policy's files, without its weights, and ask an environment for its tools.

    Raises:
        ConfigError: The files are missing or contradict each other.
    """
    tokenizer = load_tokenizer(config.policy, make=plugins().hook.rlplug_make_tokenizer)
    if config.policy.chat_template_kwargs:
        from rlplug.data.chat_template import set_chat_template_kwargs

        set_chat_template_kwargs(tokenizer, config.policy.chat_template_kwargs)
    spec = load_spec(config.policy, tokenizer, config.sampling.stop)
    if config.weight_sync.dtype is not None:
        from rlplug.weight_sync.fp8_layers import choose_fp8_weights

        spec = replace(spec, fp8=choose_fp8_weights(meta_model(spec.path), config.weight_sync))
    if config.lora is not None and config.lora.sync == "adapters":
        from rlplug.models.lora.adapters import adapter_weights

        spec = replace(spec, adapters=adapter_weights(config.policy, config.lora))
    if config.router_replay:
        from rlplug.models.routers import router_shape

        spec = replace(spec, routers=router_shape(meta_model(spec.path), "model.router_replay"))
    tools: Sequence[Mapping[str, Any]] = ()
    notes: Sequence[str] = ()
    if config.environment is not None:
        from rlplug.rollout.turns.environment_calls import ask_environment

        tools, notes = ask_environment(config.environment)
    return RunInputs(tokenizer, spec, tools, notes, config.rewards)
