"""SGLang beside the trainer passes the checks of every engine, in bfloat16 on a GPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch

if importlib.util.find_spec("sglang") is None or not torch.cuda.is_available():
    pytest.skip("needs a GPU, and pip install 'rlplug-rollout-sglang[cuda]'", allow_module_level=True)

from rlplug_devkit import BFLOAT16, EngineConformance
from rlplug_rollout_sglang import SGLangRollout


class TestSGLangRollout(EngineConformance):
    dtype = torch.bfloat16
    tolerances = BFLOAT16
    seed_is_exact = False

    def make_engine(self) -> SGLangRollout:
        # all of that share is weights and KV cache, so that its first sleep gives back most of what it took
        return SGLangRollout(
            context_length=2048, mem_fraction_static=0.1, disable_cuda_graph=True, attention_backend="triton"
        )
