"""Whatever a server of SGLang answers is a completion that can train, or a fault that names the server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from hostile import mutated
from hypothesis import HealthCheck, given, settings
from rlplug_rollout_sglang.options import SGLangOptions
from rlplug_rollout_sglang.server import SGLangBackend

from rlplug.errors import RunError
from rlplug.interfaces import EngineFault, PolicySpec
from rlplug.rollout.servers import BackendContext, PendingRequest
from rlplug.rollout.servers.server_checks import reading
from rlplug.types import Request, SamplingParams

POLICY = PolicySpec("folder", torch.float32, (1,), 0, 100, vocab_size=50)
URL = "http://127.0.0.1:1"
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


def completion_of(answer: Any) -> Any:
    backend = SGLangBackend(SGLangOptions(), BackendContext(POLICY, torch.device("cpu"), is_launched=False))
    pending = PendingRequest(Request("r", (1, 2), 0), SamplingParams(5), 5, 7, False, POLICY.vocab_size)
    pending.server = SimpleNamespace(url=URL)  # type: ignore[assignment]
    with reading(URL):
        backend.receive(pending, answer)
    if pending.finish_reason is None:
        raise EngineFault(f"{URL} broke off")
    pending.check()
    with reading(URL):
        return backend.completion(pending)


def test_a_whole_answer_is_a_completion() -> None:
    assert completion_of(ANSWER).token_ids.tolist() == [3, 4, 1]


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(answer=mutated(ANSWER))
def test_a_mutated_answer_is_a_completion_or_a_fault(answer: Any) -> None:
    """Generates answers with parts that are missing, null or of other types and sizes."""
    try:
        completion = completion_of(answer)
    except RunError as error:  # one that is no fault: a finish reason or a version that training has no use for
        assert URL in str(error) or not isinstance(error, EngineFault)  # noqa: PT017 - a completion is as good
        return
    assert all(0 <= token < 50 for token in completion.token_ids)
    assert all(-1e30 <= logprob <= 1e-3 for logprob in completion.logprobs)
    assert len(completion.token_ids) == len(completion.logprobs) <= 5
