"""vLLM in this process passes the checks of every engine: on a CPU in float32, on a GPU in bfloat16."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm", reason="`make test-vllm` installs vLLM")

from rlplug_devkit import BFLOAT16, FLOAT32, EngineConformance
from rlplug_rollout_vllm import VLLMRollout

ON_GPU = torch.cuda.is_available()


class TestVLLMRollout(EngineConformance):
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    tolerances = BFLOAT16 if ON_GPU else FLOAT32
    seed_is_exact = not ON_GPU

    def make_engine(self) -> VLLMRollout:
        return VLLMRollout(max_model_len=2048, kv_cache_gib=0.5, gpu_memory_utilization=0.1, enforce_eager=True)
