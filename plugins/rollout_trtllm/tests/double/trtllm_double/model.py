"""The model behind the double: a small one of transformers, on the CPU, with a cache of prompts."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trtllm_double.arguments import Arguments
from trtllm_double.sampling import Array


def build(arguments: Arguments) -> Any:
    """Return the model. The random generators of the process stay as they are: the real engine has its own."""
    config = AutoConfig.from_pretrained(arguments.model, **arguments.config_overrides)
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=arguments.dtype)
    return model.eval().requires_grad_(False)


class Forward:
    """The model's logits, a token at a time.

    Args:
        model: What :func:`build` returned.
        reuses_blocks: ``KvCacheConfig.enable_block_reuse``: what was calculated for a prompt serves equal prompts,
            whatever the weights are, until :meth:`reset_prefix_cache` (contract ``rpc``).
    """

    def __init__(self, model: Any, reuses_blocks: bool) -> None:
        self._model = model
        self._reuses_blocks = reuses_blocks
        self._prefixes: dict[tuple[int, ...], tuple[Array, Any]] = {}

    def first(self, prompt: tuple[int, ...]) -> tuple[Array, Any]:
        """Return the logits, float64 [V], after a prompt, and a KV cache that :meth:`following` copies."""
        if prompt in self._prefixes:
            return self._prefixes[prompt]
        result = self._forward(list(prompt), None)
        if self._reuses_blocks:
            self._prefixes[prompt] = result
        return result

    def following(self, token: int, cache: Any, is_shared: bool) -> tuple[Array, Any]:
        """Return the logits after one more token, and its KV cache."""
        return self._forward([token], copy.deepcopy(cache) if is_shared else cache)

    @torch.no_grad()
    def _forward(self, tokens: list[int], cache: Any) -> tuple[Array, Any]:
        output = self._model(torch.tensor([tokens]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        return output.logits[0, -1].double().numpy(), output.past_key_values

    def reset_prefix_cache(self) -> None:
        """Forget what was calculated for prompts."""
        self._prefixes.clear()
