"""Whatever a server of vLLM answers is a completion that can train, or a fault that names the server."""

from __future__ import annotations

from typing import Any

from hostile import mutated
from hypothesis import HealthCheck, given, settings
from rlplug_rollout_vllm.server import VLLMBackend
from server_answers import check_completion_or_fault, completion_of

BACKEND = VLLMBackend.__new__(VLLMBackend)  # its constructor wants vLLM, which reading an answer does not need
ANSWER: dict[str, Any] = {
    "choices": [
        {
            "token_ids": [3, 4, 1],
            "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1.0}, {"logprob": -0.1}]},
            "finish_reason": "stop",
        }
    ]
}


def test_a_whole_answer_is_a_completion() -> None:
    assert completion_of(BACKEND, ANSWER).token_ids.tolist() == [3, 4, 1]


@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(answer=mutated(ANSWER))
def test_a_mutated_answer_is_a_completion_or_a_fault(answer: Any) -> None:
    """Generates answers with parts that are missing, null or of other types and sizes."""
    check_completion_or_fault(BACKEND, answer)
