"""Reads answers as a rollout does: each is a completion that can train, or a fault that names the server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final

import torch
from rlplug_engines.servers import PendingRequest, ServerBackend
from rlplug_engines.servers.server_checks import reading

from rlplug.errors import RunError
from rlplug.interfaces import EngineFault, PolicySpec
from rlplug.types import Completion, Request, SamplingParams

POLICY: Final = PolicySpec("folder", torch.float32, (1,), 0, 100, vocab_size=50)
URL: Final = "http://127.0.0.1:1"


def completion_of(backend: ServerBackend, answer: Any) -> Completion:
    """Return the completion of a request for 5 tokens, of which ``answer`` is all that the server says."""
    pending = PendingRequest(Request("r", (1, 2), 0), SamplingParams(5), 5, 7, False, POLICY.vocab_size)
    pending.server = SimpleNamespace(url=URL)  # type: ignore[assignment]
    with reading(URL):
        backend.receive(pending, answer)
    if pending.finish_reason is None:
        raise EngineFault(f"{URL} broke off")
    pending.check()
    with reading(URL):
        return backend.completion(pending)


def check_completion_or_fault(backend: ServerBackend, answer: Any) -> None:
    try:
        completion = completion_of(backend, answer)
    except RunError as error:  # one that is no fault: a finish reason or a version that training has no use for
        assert URL in str(error) or not isinstance(error, EngineFault)  # noqa: PT017 - a completion is as good
        return
    assert all(0 <= token < 50 for token in completion.token_ids)
    assert all(-1e30 <= logprob <= 1e-3 for logprob in completion.logprobs)
    assert len(completion.token_ids) == len(completion.logprobs) <= 5
