"""Weight buckets: everything once, in bounded pieces. Sharded models are in tests/unit/test_strategy.py."""

from __future__ import annotations

import pytest
import torch

from rlplug.rollout.buckets import weight_buckets
from rlplug.rollout.requests import make_requests
from rlplug.types import Prompt, SamplingParams

KIB = 1 << 10


@pytest.mark.parametrize("family", ["llama", "llama_tied", "qwen2", "gpt2"])
@pytest.mark.parametrize("max_bytes", [1, 8 * KIB, 40 * KIB, 1 << 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_parameter_once_in_bounded_buckets(family, max_bytes, dtype, model_folder, load_policy):
    policy = load_policy(model_folder(family))
    buckets = list(weight_buckets(policy, dtype, max_bytes))
    sent = [pair for bucket in buckets for pair in bucket]
    expected = policy.state_dict()
    if family != "llama":  # tied: the head is the embedding
        del expected["lm_head.weight"]
    assert [name for name, _ in sent] == list(expected)
    for name, tensor in sent:
        assert tensor.dtype == dtype
        assert not tensor.requires_grad
        assert torch.equal(tensor, expected[name].to(dtype)), name
    sizes = [sum(tensor.nbytes for _, tensor in bucket) for bucket in buckets]
    for bucket, size, following in zip(buckets, sizes, [*buckets[1:], None], strict=True):
        assert size <= max_bytes or len(bucket) == 1
        assert following is None or size + following[0][1].nbytes > max_bytes  # no bucket ends early


@pytest.mark.parametrize("family", ["llama", "llama_tied"])
@pytest.mark.parametrize("max_bytes", [1, 1 << 30])
def test_round_trip_into_the_engine(family, max_bytes, model_folder, load_policy, start_engine):
    policy = load_policy(model_folder(family))
    engine = start_engine(model_folder(family), None)
    report = engine.update_weights(weight_buckets(policy, torch.float32, max_bytes), version=4)
    assert report.num_tensors == len(list(policy.parameters()))
    assert report.num_buckets == (report.num_tensors if max_bytes == 1 else 1)
    request = make_requests([Prompt(uid="p", token_ids=(3, 4), text="")], [0], 1, "run")
    (completion,) = engine.generate(request, SamplingParams(8))
    with torch.no_grad():
        logits = policy(torch.tensor([(3, 4, *completion.token_ids)])).logits[0, 1:-1]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor([completion.token_ids]).T).squeeze(-1)
    assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-5)
    assert completion.policy_version == 4
