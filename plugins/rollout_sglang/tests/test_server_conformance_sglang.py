"""SGLang's servers pass the checks of every engine: on two GPUs, or beside the trainer's tensors on one."""

from __future__ import annotations

import importlib.util

import pytest
import torch

if importlib.util.find_spec("sglang") is None or not torch.cuda.is_available():
    pytest.skip("SGLang needs a GPU, and an environment of its own", allow_module_level=True)

from rlplug_devkit import BFLOAT16, EngineConformance
from rlplug_rollout_sglang.server import SGLangServerRollout


@pytest.mark.filterwarnings("ignore:rollout.gpus has 0")
class TestSGLangServerRollout(EngineConformance):
    dtype = torch.bfloat16
    tolerances = BFLOAT16
    seed_is_exact = False

    def make_engine(self) -> SGLangServerRollout:
        gpu = torch.cuda.device_count() - 1
        return SGLangServerRollout(
            gpus=[gpu],
            context_length=2048,
            mem_fraction_static=0.2,
            max_total_tokens=32768,
            disable_cuda_graph=True,
            attention_backend="triton",
        )
