"""Whatever a server of SGLang answers is a completion that can train, or a fault that names the server."""

from __future__ import annotations

from typing import Any

import torch
from hostile import mutated
from hypothesis import HealthCheck, given, settings
from rlplug_engines.servers import BackendContext
from rlplug_rollout_sglang.options import SGLangOptions
from rlplug_rollout_sglang.server import SGLangBackend
from server_answers import POLICY, check_completion_or_fault, completion_of

BACKEND = SGLangBackend(SGLangOptions(), BackendContext(POLICY, torch.device("cpu"), is_launched=False))
ANSWER: dict[str, Any] = {
    "output_ids": [3, 4, 1],
    "meta_info": {
        "finish_reason": {"type": "stop", "matched": 1},
        "output_token_logprobs": [[-0.5, 3, None], [-1.0, 4, None], [-0.1, 1, None]],
        "weight_version": "7",
        "cached_tokens": 0,
        "num_retractions": 0,
    },
}


def test_a_whole_answer_is_a_completion() -> None:
    assert completion_of(BACKEND, ANSWER).token_ids.tolist() == [3, 4, 1]


@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(answer=mutated(ANSWER))
def test_a_mutated_answer_is_a_completion_or_a_fault(answer: Any) -> None:
    """Generates answers with parts that are missing, null or of other types and sizes."""
    check_completion_or_fault(BACKEND, answer)
