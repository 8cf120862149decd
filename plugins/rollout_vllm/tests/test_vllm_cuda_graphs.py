"""FP8 weights go again and again into a vLLM whose CUDA graphs were captured before; needs a GPU.

A module of its own: vLLM with sleep runs once in a process, and the conformance tests start one without graphs.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm", reason="`make test-vllm` installs vLLM")
if not torch.cuda.is_available():
    pytest.skip("CUDA graphs need a GPU", allow_module_level=True)

from rlplug_devkit import BFLOAT16
from rlplug_devkit.engines.fp8 import FP8Checks
from rlplug_rollout_vllm import VLLMRollout


class TestVLLMRolloutWithCUDAGraphs(FP8Checks):
    dtype = torch.bfloat16
    tolerances = BFLOAT16
    seed_is_exact = False

    def make_engine(self) -> VLLMRollout:
        return VLLMRollout(
            max_model_len=2048, kv_cache_gib=0.5, gpu_memory_utilization=0.1, cudagraph_capture_sizes=[1, 2, 4]
        )
