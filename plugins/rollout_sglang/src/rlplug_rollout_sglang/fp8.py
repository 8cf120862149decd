"""What SGLang cannot take in FP8."""

from __future__ import annotations

from typing import Final

from rlplug_engines.fp8_engine_checks import check_fp8_fits
from transformers import AutoConfig

from rlplug.errors import ConfigError
from rlplug.interfaces import PolicySpec
from rlplug.models.hf_files import pretrained

LLAMA_LIKE: Final = ("Llama", "Mistral", "Ministral3", "Phi3", "InternLM3", "TeleFLM")
LOSE_SCALES: Final = frozenset(f"{name}ForCausalLM" for name in LLAMA_LIKE)
"""Models that SGLang (0.5.13 to 0.5.23) loads with ``models/llama.py``. It looks for scales of blocks under
``weight_scale``, has them under ``weight_scale_inv``, and drops what it does not find: weights would be the values of a
sync times the scales of the start."""


def check_fp8(engine: str, policy: PolicySpec, tensor_parallel_size: int) -> None:
    """Refuse a policy that SGLang cannot have in FP8; there is nothing to check of one that travels in its own dtype.

    Raises:
        ConfigError: It names the model or a weight, and what to set.
    """
    if policy.fp8 is None:
        return
    config = pretrained(AutoConfig.from_pretrained, policy.path)
    models = config.architectures or []  # by which SGLang chooses its class
    if lost := LOSE_SCALES.intersection(models):
        raise ConfigError(
            f"{engine} cannot take {', '.join(lost)} in FP8: SGLang's loader of such models drops the scales of "
            "FP8 blocks. Set model.weight_sync.dtype to null, or use VLLMRollout."
        )
    check_fp8_fits(engine, policy, tensor_parallel_size)
