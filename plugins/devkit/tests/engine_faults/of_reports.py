"""Faults in what an engine reports of itself: counters, sizes, and experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from engine_faults.faults import Plain, fault
from engine_faults.of_promises import CLAIMS
from rlplug.interfaces import EngineCapabilities, Placement, PolicySpec
from rlplug.types import Completion, Request, SamplingParams


@fault(CLAIMS, "test_counters_begin_anew_with_each_call_of_stats", "begin anew")
class CountsFromItsStart(Plain):
    """Returns counters since its start, as a server's metrics have them."""

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        completions = super().generate(requests, sampling)
        self._since_start = self.__dict__.get("_since_start", 0) + len(completions)
        return completions

    def stats(self) -> dict[str, float]:
        return {"requests": float(self.__dict__.get("_since_start", 0))}


@fault(CLAIMS, "test_counters_are_of_all_rollouts_since_the_last_call", "that of the last one alone")
class CountsItsLastRollout(Plain):
    """Forgets the counters of earlier rollouts of a step."""

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        self._num_tokens, self._seconds = 0, 0.0
        return super().generate(requests, sampling)


@fault(CLAIMS, "test_sizes_are_its_own_options", "max_num_seqs")
class NamesSizesOfItsLibrary(Plain):
    """Names sizes as its library does, and not as its own options."""

    def size_options(self, policy: PolicySpec, requests: int, prompt_tokens: int) -> Mapping[str, Any]:
        return {"max_num_seqs": requests}


@fault(CLAIMS, "test_routed_experts_are_of_their_tokens", "look for padding")
class CountsPaddingAmongExperts(Plain):
    """Returns experts from the first column of a batch on, which is padding where a prompt is shorter."""

    capabilities = EngineCapabilities(routed_experts=True)

    def _generate_batch(self, requests: Sequence[Request], *rest: Any) -> list[Completion]:
        self._lengths = [len(request.prompt_ids) for request in requests]
        return super()._generate_batch(requests, *rest)

    def start(self, policy: PolicySpec, placement: Placement) -> None:
        super().start(policy, placement)
        if self._recorder is not None:
            take = self._recorder.take

            def moved(num_rows: int) -> Tensor:
                longest = max(self._lengths)
                rows = zip(take(num_rows), self._lengths, strict=True)
                return torch.stack([row.roll(longest - length, 0) for row, length in rows])

            vars(self._recorder)["take"] = moved
