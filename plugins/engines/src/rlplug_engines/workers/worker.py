"""``Worker``: the part of an engine that its author writes, and that runs in the child process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from rlplug.interfaces.rollout import PolicySpec
from rlplug.interfaces.weight_sync import Bucket
from rlplug.token_arrays import TokenFloats, TokenIds
from rlplug.types import Request, SamplingParams

Answer: TypeAlias = tuple[Sequence[int] | TokenIds, Sequence[float] | TokenFloats]
"""Tokens of a completion and their logprobs. A completion that ends with an end token includes it."""


class Worker(ABC):
    """Model and sampler in a process of their own, which may change whatever it likes of that process.

    All calls come from one thread at a time. What a call raises ends in the trainer as an ``EngineFault`` with its
    message, after which the core starts the engine again.

    Args:
        policy: What to build; the weights come with :meth:`load`.
        device: Device to build it on.
        options: Those that the engine was made with, by name.
    """

    @abstractmethod
    def __init__(self, policy: PolicySpec, device: torch.device, **options: Any) -> None: ...

    @abstractmethod
    def load(self, bucket: Bucket) -> None:
        """Copy tensors to where the model reads them; their memory is valid until the call returns.

        Names, shapes and dtypes were checked before; a sync that is refused halfway is followed by a complete one.
        """

    def finish_sync(self) -> None:  # noqa: B027 - overriding is optional
        """Drop what was computed with the former weights, such as a prefix cache. All weights of a sync are loaded."""

    @abstractmethod
    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> Sequence[Answer]:
        """Return an answer to each request, in their order.

        Args:
            requests: At most ``max_batch_size``, each with a prompt that fits. ``request.limit(sampling)`` is its own
                longest completion, which the context never exceeds, and ``request.seed`` its seed.
            sampling: How to sample; its ``max_new_tokens`` is the longest of the requests' limits.
        """
