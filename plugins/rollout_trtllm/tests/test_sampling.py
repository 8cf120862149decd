"""Requests as sampling parameters, outputs as completions, and buckets as payloads; every trap is checked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import on_double  # noqa: F401 - it makes the double importable
import pytest
import torch
from rlplug_engines.colocated import EngineLoop, RunningRequest
from rlplug_rollout_trtllm.colocated import merged, serialised
from rlplug_rollout_trtllm.options import TRTLLMOptions
from rlplug_rollout_trtllm.sampling import SAMPLING_EXTRA, Output, TRTLLMRequests
from rlplug_rollout_trtllm.surface import SYMBOLS

from rlplug.errors import RunError
from rlplug.interfaces import PolicySpec
from rlplug.types import Completion, Request, SamplingParams

SPEC = PolicySpec("folder", torch.bfloat16, eos_token_ids=(1, 7, 9), pad_token_id=0, max_context=100)
REQUEST = Request("step/0", (5, 6), seed=(1 << 64) + 3)
GREEDY = SamplingParams(temperature=0.0)
LOOP = EngineLoop("TensorRT-LLM")
SAMPLINGS = [SamplingParams(), GREEDY, SamplingParams(temperature=0.7, top_p=0.9, top_k=20)]


def arguments(sampling: SamplingParams, policy: PolicySpec = SPEC, room: int = 50) -> dict[str, Any]:
    return tracker(policy).arguments(RunningRequest(0, REQUEST, sampling, room, False, 0.0))


def tracker(policy: PolicySpec = SPEC) -> TRTLLMRequests:
    requests = TRTLLMRequests(LOOP, [], policy, 100, TRTLLMOptions().stats(), 1.0)
    requests.version = 3
    return requests


def completion(output: Output) -> Completion:
    return tracker().completion(RunningRequest(0, REQUEST, GREEDY, 50, False, 0.0), output)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_nothing_that_decides_on_a_token_is_left_to_a_default(sampling: SamplingParams) -> None:
    made = arguments(sampling)
    assert set(made) == set(SYMBOLS["tensorrt_llm"]["SamplingParams"])
    assert all(made[name] is not None for name in ("temperature", "top_p", "top_k", "max_tokens", "end_id", "seed"))


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_engine_takes_them(sampling: SamplingParams) -> None:
    from tensorrt_llm import SamplingParams as EngineSampling

    made = arguments(sampling)
    taken = EngineSampling(**made)
    assert {name: getattr(taken, name) for name in made} == made


def test_extra_options_reach_the_engine_beside_rlplugs_own() -> None:
    made = arguments(SamplingParams(extra={"min_p": 0.1}))
    assert made == arguments(SamplingParams()) | {"min_p": 0.1}
    assert not (made.keys() - {"min_p"}) & SAMPLING_EXTRA


def test_sampling_from_all_tokens_is_not_greedy() -> None:
    made = arguments(SamplingParams())
    assert (made["temperature"], made["top_p"], made["top_k"]) == (1.0, 1.0, 0)
    assert made["logprobs_mode"] == "processed"


def test_greedy_is_asked_for_with_untempered_logprobs() -> None:
    made = arguments(GREEDY)
    assert made["top_k"] == 1
    assert made["logprobs_mode"] == "raw"


def test_every_end_token_ends_and_is_kept() -> None:
    made = arguments(GREEDY)
    assert (made["end_id"], made["stop_token_ids"]) == (1, [7, 9])
    assert made["include_stop_str_in_output"] is True
    assert made["ignore_eos"] is False


def test_a_model_without_end_tokens_has_one_that_is_never_sampled() -> None:
    policy = PolicySpec("folder", torch.bfloat16, eos_token_ids=(), pad_token_id=0, max_context=100)
    made = arguments(GREEDY, policy)
    assert (made["end_id"], made["stop_token_ids"]) == (-1, None)


def test_seeds_fit_into_63_bits() -> None:
    assert arguments(GREEDY)["seed"] == 3


# ---- outputs --------------------------------------------------------------------------------------------------------


def logprob(value: float) -> SimpleNamespace:
    return SimpleNamespace(logprob=value, rank=1)


def result(token_ids: list[int], logprobs: list[dict[int, Any]], reason: str = "length") -> SimpleNamespace:
    return SimpleNamespace(
        outputs=[SimpleNamespace(token_ids=token_ids, logprobs=logprobs, finish_reason=reason, stop_reason=None)]
    )


def test_logprobs_are_looked_up_by_token() -> None:
    likeliest_first = {3: logprob(-0.1), 4: logprob(-2.5)}
    assert Output.of(result([4], [likeliest_first])) == Output((4,), (-2.5,), "length")


def test_a_logprob_of_another_token_is_refused() -> None:
    with pytest.raises(RunError, match="without that of the sampled token 4"):
        Output.of(result([4], [{3: logprob(-0.1)}]))


def test_a_token_without_logprob_is_refused() -> None:
    with pytest.raises(RunError, match="2 tokens and 1 logprobs"):
        Output.of(result([4, 5], [{4: logprob(-0.1)}]))


def test_a_cancelled_request_has_what_is_whole() -> None:
    output = Output.of(result([4, 5], [{4: logprob(-0.1)}], "cancelled"))
    made = completion(output)
    assert made == Completion("step/0", (4,), (-0.1,), "abort", 3)


def test_a_last_possible_token_that_ends_is_a_stop() -> None:
    assert completion(Output((4, 7), (-1.0, -1.0), "length")).finish_reason == "stop"
    assert completion(Output((4, 5), (-1.0, -1.0), "length")).finish_reason == "length"


def test_a_stop_without_its_end_token_is_refused() -> None:
    with pytest.raises(RunError, match="left its end token out"):
        completion(Output((4,), (-1.0,), "stop"))


def test_other_ends_are_refused() -> None:
    with pytest.raises(RunError, match="finish reason 'timeout'"):
        completion(Output((4,), (-1.0,), "timeout"))


# ---- weights --------------------------------------------------------------------------------------------------------


def test_the_payload_is_what_workers_read() -> None:
    from trtllm_double import wire

    bucket = [("odd", torch.arange(7, dtype=torch.bfloat16)), ("scalar", torch.tensor(2.5))]
    items = wire.decode(serialised(bucket, wire.reduce_tensor))
    assert [name for name, _ in items] == ["odd", "scalar"]
    assert all(len(arguments) > 6 for _, (_, arguments) in items)


def test_payloads_of_several_gpus_become_one() -> None:
    assert merged([{"GPU-0": "a"}, {"GPU-1": "b"}]) == {"GPU-0": "a", "GPU-1": "b"}


def test_two_ranks_on_one_gpu_are_refused() -> None:
    with pytest.raises(RunError, match="the same GPU, GPU-0"):
        merged([{"GPU-0": "a"}, {"GPU-0": "b"}])
