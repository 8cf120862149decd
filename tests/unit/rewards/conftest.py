"""One sample, of which a test says only what matters to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlplug.types import Prompt, Sample


@pytest.fixture
def make_sample() -> Callable[..., Sample]:
    def make(completion: str = "4", answer: Any = "4", uid: str = "train.jsonl:0", **metadata: Any) -> Sample:
        return Sample(
            prompt=Prompt(uid=uid, token_ids=(1,), text="What is 2 + 2?", answer=answer, metadata=metadata),
            group=0,
            token_ids=(1, 2),
            response_mask=(False, True),
            rollout_logprobs=(0.0, -1.0),
            completion=completion,
            finish_reason="stop",
            policy_version=0,
        )

    return make
