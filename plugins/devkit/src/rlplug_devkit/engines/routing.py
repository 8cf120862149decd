"""Checks of the experts that an engine says its routers chose: whose they are, and that replaying them helps."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Final

import numpy
import pytest
import torch

from rlplug.interfaces.rollout import EngineFault
from rlplug.models.routers import replay_routers
from rlplug.rollout.routed_experts import RouterRecorder, check_routed_experts
from rlplug.types import NOT_RECORDED, Completion, Request, SamplingParams
from rlplug_devkit.claims import DOES_NOT_APPLY, applies_to
from rlplug_devkit.engines.base import EngineChecks
from rlplug_devkit.engines.bench import Bench, Variant
from rlplug_devkit.reference import ReferencePolicy

LEAST_AGREEMENT: Final = 0.7
"""Share of tokens and layers in which engine and reference must choose the same experts. Round-off changes a few;
experts of other tokens or layers agree in 1 of 28, two of eight experts."""
LEAST_IN_EACH: Final = 0.5
"""The same of each completion, which may have few tokens."""
SAMPLING: Final = SamplingParams(max_new_tokens=8)
OF_THEIR_TOKENS: Final = (
    "Entry t of Completion.routed_experts must be what the routers chose when they read token t of prompt and "
    "completion, by layers with a router in ascending order, with -1 for the last token, which no pass has read."
)


class RoutingChecks(EngineChecks):
    """Checks of ``Completion.routed_experts``. They need a mixture of experts, and so an engine of their own."""

    @applies_to("routed_experts")
    def test_routed_experts_are_of_their_tokens(self, bench: Bench) -> None:
        bench.holding("first", family="routed")
        requests = bench.requests("experts", [2, 20, 200], num_samples=2)
        completions = bench.generate(requests, SAMPLING)
        assert_agree(bench, requests, completions, "first", OF_THEIR_TOKENS)

    @applies_to("routed_experts")
    def test_routed_experts_of_a_continuation_are_of_the_new_weights(self, bench: Bench) -> None:
        """A partial rollout continues a completion after a sync; its prompt is longer than a block of any cache."""
        bench.holding("first", family="routed")
        requests = bench.requests("continued", [200, 20])
        begun = bench.generate(requests, SAMPLING)
        bench.sync("changed")
        longer = [
            Request(f"{request.request_id}/more", (*request.prompt_ids, *completion.token_ids.tolist()), request.seed)
            for request, completion in zip(requests, begun, strict=True)
        ]
        completions = bench.generate(longer, SAMPLING)
        advice = "The prompt was generated before the sync: experts of the former weights must be forgotten with them."
        assert_agree(bench, longer, completions, "changed", advice)

    @applies_to("routed_experts")
    def test_replaying_routed_experts_does_not_raise_the_mismatch(self, bench: Bench) -> None:
        if not bench.capabilities.logprobs:
            pytest.skip(f"{DOES_NOT_APPLY}{bench.engine_name} claims no 'logprobs' to compare")
        bench.holding("first", family="routed")
        requests = bench.requests("replayed", [3, 50], num_samples=4)
        completions = bench.generate(requests, SAMPLING)
        plain, replayed = (mismatch(bench.held_policy, requests, completions, replays) for replays in (False, True))
        most = max(1.1 * plain, bench.tolerances.mean)
        assert replayed <= most, (
            f"with the engine's experts, the reference's logprobs differ from the engine's by {replayed:.3g} nats on "
            f"average, and with its own by {plain:.3g}. {OF_THEIR_TOKENS}"
        )


def assert_agree(
    bench: Bench, requests: Sequence[Request], completions: Sequence[Completion], variant: Variant, advice: str
) -> None:
    """Fail unless completions have experts of a proper form, mostly those that the reference chooses."""
    routers = bench.spec.routers
    assert routers is not None
    same, total = 0, 0
    for request, completion in zip(requests, completions, strict=True):
        num_tokens = len(request.prompt_ids) + len(completion.token_ids)
        try:
            experts = check_routed_experts(bench.engine_name, completion.routed_experts, num_tokens, routers)
        except EngineFault as fault:
            pytest.fail(f"{fault} {OF_THEIR_TOKENS}")
        is_known = experts[:-1, 0, 0] != NOT_RECORDED
        assert is_known[len(request.prompt_ids) :].all(), f"experts of generated tokens are missing. {OF_THEIR_TOKENS}"
        expected = reference_experts(bench.policy(variant), request, completion)
        agrees = (numpy.sort(experts[:-1], -1) == numpy.sort(expected[:-1], -1)).all(-1)[is_known]
        same, total = same + int(agrees.sum()), total + agrees.size
        assert agrees.sum() >= LEAST_IN_EACH * agrees.size, (  # a long prompt must not outweigh the others
            f"of {agrees.size} (token, layer) pairs of {request.request_id}, with {len(request.prompt_ids)} "
            f"tokens of prompt, engine and reference chose the same in {agrees.sum()}: look for padding and rows of "
            f"other requests. {advice}"
        )
    assert same >= LEAST_AGREEMENT * total, (
        f"of {total} (token, layer) pairs, engine and reference chose the same experts in {same}. {advice}"
    )


@torch.no_grad()
def reference_experts(policy: ReferencePolicy, request: Request, completion: Completion) -> Any:
    """Return the experts that the reference chooses for each token, int16 [tokens, L, k]."""
    model = copy.deepcopy(policy.model)
    recorder = RouterRecorder(model)
    model(torch.tensor([[*request.prompt_ids, *completion.token_ids]]), use_cache=False)
    return recorder.take(1)[0].numpy()


@torch.no_grad()
def mismatch(
    policy: ReferencePolicy, requests: Sequence[Request], completions: Sequence[Completion], replays: bool
) -> float:
    """Return the mean difference of the engine's logprobs from the reference's, in nats, with or without replay."""
    model, differences = copy.deepcopy(policy.model), []
    replay = replay_routers(model, "routed_experts")
    for request, completion in zip(requests, completions, strict=True):
        assert completion.routed_experts is not None
        replay.set(torch.from_numpy(completion.routed_experts) if replays else None)
        ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
        logits = model(ids, use_cache=False).logits[0, len(request.prompt_ids) - 1 : -1].double()
        chosen = logits.log_softmax(-1).gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        differences.append((chosen - torch.tensor(completion.logprobs, dtype=torch.float64)).abs())
    return float(torch.cat(differences).mean())
