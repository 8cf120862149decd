"""The conformance kit on TensorRT-LLM itself: a test module, which :mod:`rlplug_rollout_trtllm.smoke` runs."""

from __future__ import annotations

import os

import torch
from rlplug_devkit import BFLOAT16, EngineConformance

from rlplug_rollout_trtllm.colocated import TRTLLMRollout
from rlplug_rollout_trtllm.smoke import MODEL_VARIABLE


class TestTRTLLMRollout(EngineConformance):
    dtype = torch.bfloat16
    tolerances = BFLOAT16
    seed_is_exact = False
    model_folder = os.environ.get(MODEL_VARIABLE) or None
    weight_change = 0.1 if model_folder else 1.0

    def make_engine(self) -> TRTLLMRollout:
        return TRTLLMRollout(free_gpu_memory_fraction=0.2, context_length=2048, disable_cuda_graph=True)
