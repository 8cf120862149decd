"""FP8 weights go again and again into an SGLang whose CUDA graphs were captured before; needs a GPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch

if importlib.util.find_spec("sglang") is None or not torch.cuda.is_available():
    pytest.skip("needs a GPU, and pip install 'rlplug-rollout-sglang[cuda]'", allow_module_level=True)

from rlplug_devkit import BFLOAT16
from rlplug_devkit.engines.fp8 import FP8Checks
from rlplug_rollout_sglang import SGLangRollout


class TestSGLangRolloutWithCUDAGraphs(FP8Checks):
    dtype = torch.bfloat16
    tolerances = BFLOAT16
    seed_is_exact = False

    def make_engine(self) -> SGLangRollout:
        return SGLangRollout(
            context_length=2048, mem_fraction_static=0.1, attention_backend="triton", cuda_graph_batch_sizes=[1, 2, 4]
        )
