"""What weights a sync brings, known before it begins."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def policy_shapes(path: str) -> dict[str, torch.Size]:
    """Return the shapes of the weights that a sync brings, by name: those of the policy in transformers."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    return {name: parameter.shape for name, parameter in model.named_parameters()}
