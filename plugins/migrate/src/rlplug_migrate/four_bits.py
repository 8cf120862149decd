"""Explains why there is no key for frozen weights in four or eight bits."""

from __future__ import annotations

import re
from typing import Final

_FOUR_BITS: Final = re.compile(
    r"(?:.*\.)?(?:load_in_[48]bit|quantization|quantization_config|quantize|qlora|bnb_\w+|bitsandbytes\w*|nf4|use_4bit)(?:\..*)?$"
)
"""Keys by which other frameworks quantise the frozen weights of a LoRA run."""
_NO_FOUR_BITS: Final = (
    "Frozen weights in 4 or 8 bits (QLoRA) are not built. FSDP2 makes plain parameters of "
    "bitsandbytes' and loses their scales (huggingface/accelerate#3983); torchao's would be sharded, but weight sync, "
    "checkpoints and memory plan read the frozen weights as they are. Use model.lora with model.policy.dtype: bfloat16 "
    "over more GPUs; see docs/lora.md."
)


def explain_four_bits(name: str) -> str | None:
    """Return why there is no such key where it asks for quantised frozen weights, else ``None``."""
    return _NO_FOUR_BITS if _FOUR_BITS.match(name) else None
