"""vLLM's servers on the CPU pass the checks of every engine."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="`make test-vllm` installs vLLM")

from rlplug_rollout_vllm import VLLMServerRollout

from rlplug.testing import EngineConformance


class TestVLLMServerRollout(EngineConformance):
    def make_engine(self) -> VLLMServerRollout:
        return VLLMServerRollout(max_model_len=2048, kv_cache_gib=0.5)
