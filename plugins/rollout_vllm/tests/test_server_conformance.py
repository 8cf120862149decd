"""vLLM's servers pass the checks of every engine: on a CPU in float32, on two GPUs in bfloat16."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm", reason="`make test-vllm` installs vLLM")

from rlplug_devkit import BFLOAT16, FLOAT32, EngineConformance
from rlplug_devkit.kit import marked
from rlplug_rollout_vllm import VLLMServerRollout

NUM_GPUS = torch.cuda.device_count()
ON_GPUS = {"gpus": [NUM_GPUS - 1], "gpu_memory_utilization": 0.1, "enforce_eager": True} if NUM_GPUS else {}
"""The trainer has the first GPU, the server the last."""


@pytest.mark.kit
@pytest.mark.skipif(NUM_GPUS == 1, reason="a server needs a GPU that the trainer does not use")
class TestVLLMServerRollout(EngineConformance):
    dtype = torch.bfloat16 if NUM_GPUS else torch.float32
    tolerances = BFLOAT16 if NUM_GPUS else FLOAT32
    seed_is_exact = not NUM_GPUS

    def make_engine(self) -> VLLMServerRollout:
        return VLLMServerRollout(max_model_len=2048, kv_cache_gib=0.5, **ON_GPUS)

    # the server that it starts gets the arguments of VLLMRollout, which has this check on each push
    test_stop_strings_end_completions = marked(EngineConformance.test_stop_strings_end_completions, pytest.mark.nightly)
