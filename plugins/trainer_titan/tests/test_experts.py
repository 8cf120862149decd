"""Parts of a mixture of experts, alone: what they compute in the dtypes of a run."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from rlplug_trainer_titan.decoders import build_decoder
from rlplug_trainer_titan.library import titan
from titan_cases import CONFIGS
from torch import nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

pytestmark = pytest.mark.skipif(find_spec("torchtitan") is None, reason="TorchTitan is not installed")

torch.set_num_threads(1)
CONFIG = CONFIGS["qwen3_moe"]


@pytest.fixture
def mixture() -> Any:
    """The first layer's mixture, with random weights."""
    decoder, _ = build_decoder(CONFIG)
    mixture: Any = decoder.layers["0"].moe.to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in mixture.parameters():
        nn.init.normal_(parameter)
    return mixture


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens float32 [11, D] in the order of their experts, and the number of each expert's, some none."""
    return torch.randn(11, CONFIG.hidden_size), torch.tensor([2, 0, 3, 1, 0, 0, 4, 1])


def test_experts_compute_in_float32(mixture):
    """It catches a cast to bf16, TorchTitan's own, and the weights of gate and up exchanged."""
    experts, (hidden, counts) = mixture.routed_experts.inner_experts, tokens()
    expected = []
    for expert, part in enumerate(hidden.double().split(counts.tolist())):
        gate, up, down = (weight[expert].double() for weight in (experts.w1_EFD, experts.w3_EFD, experts.w2_EDF))
        expected.append((nn.functional.silu(part @ gate.T) * (part @ up.T)) @ down.T)
    torch.testing.assert_close(experts(hidden, counts).double(), torch.cat(expected), rtol=1e-5, atol=1e-3)


def test_experts_in_bf16_are_torchtitans(mixture):
    experts, (hidden, counts) = mixture.routed_experts.inner_experts.bfloat16(), tokens()
    own = titan("models.common.moe").GroupedExperts.forward(experts, hidden.bfloat16(), counts)
    assert torch.equal(experts(hidden.bfloat16(), counts), own)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_routers_choose_as_in_transformers(mixture, dtype):
    """In bf16 it catches logits in float32, which are not rounded and choose other experts for some tokens."""
    router, known = mixture.router.to(dtype), Qwen3MoeTopKRouter(CONFIG).to(dtype)
    known.weight.data.copy_(router.gate.weight)
    hidden = torch.randn(1, 2000, CONFIG.hidden_size, dtype=dtype)
    scores, experts, _ = router(hidden)
    _, expected_scores, expected = known(hidden[0])
    assert scores.dtype == torch.float32
    order, expected_order = experts[0].argsort(-1), expected.argsort(-1)
    assert torch.equal(experts[0].gather(-1, order), expected.gather(-1, expected_order))
    pair = scores[0].gather(-1, order), expected_scores.gather(-1, expected_order).float()
    torch.testing.assert_close(*pair, rtol=0, atol=1e-6 if dtype == torch.float32 else 2**-8)
