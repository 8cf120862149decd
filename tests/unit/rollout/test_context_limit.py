"""The engine's context limits completions, and refuses prompts that fill it."""

from __future__ import annotations

import pytest
import torch

from rlplug.errors import RunError
from rlplug.interfaces import PolicySpec
from rlplug.rollout.context_limit import max_completion_tokens
from rlplug.types import Request

SPEC = PolicySpec("folder", torch.bfloat16, eos_token_ids=(1, 7), pad_token_id=0, max_context=4096)


def test_request_beyond_the_context_is_refused_by_name() -> None:
    request = Request("0/1/2", tuple(range(100)), seed=1)
    assert max_completion_tokens(request, SPEC, 101, "max_model_len") == 1
    with pytest.raises(RunError, match=r"request 0/1/2: its prompt has 100 tokens.*raise rollout\.max_model_len"):
        max_completion_tokens(request, SPEC, 100, "max_model_len")
    with pytest.raises(RunError, match=r"shorten it"):
        max_completion_tokens(Request("a", tuple(range(5000)), seed=1), SPEC, 4096, "max_model_len")
