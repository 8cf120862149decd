"""FlashAttention-4 on a GPU: the same loss and gradients. Elsewhere: what it refuses, and its operators over torch's
attention in the place of its kernels.

What needs a GPU runs with ``pytest plugins/optims/tests/test_flash_attention.py`` on a machine that has one, and
flash-attn-4.
"""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from optims_models import CONFIGS, assert_same, optimized_results, plain_results, tiny_batch, tiny_model
from rlplug_optims import CompileBlocks, FlashAttention4, GradientCheckpointing, SelectiveCheckpointing, flash_attention
from rlplug_optims.flash_attention import flash_attention_4
from transformers import AutoModelForCausalLM

from rlplug.errors import ConfigError
from rlplug.models import attention
from rlplug.models.attention.sequences import Sequences
from rlplug.models.forward import policy_forward
from rlplug.models.packing import pack
from rlplug.types import SamplingParams

BORDERS = [0, 5, 6, 17]
"""Of the sequences in a row."""


class Kernels:
    """Stands where FlashAttention-4's kernels are, with their signatures: one sequence and head after another."""

    @staticmethod
    def _flash_attn_fwd(query, key, value, *, return_lse, **how):
        assert return_lse
        output, lse = query.new_empty(query.shape), query.new_empty(query.shape[1], query.shape[0])
        for rows, head, shared, scores, _ in scored(query, key, **how):
            output[rows, head] = scores.softmax(-1) @ value[rows, shared]
            lse[head, rows] = scores.logsumexp(-1)
        return output, lse, None  # newer versions return more

    @staticmethod
    def _flash_attn_bwd(query, key, value, output, d_output, lse, *, dq, dk, dv, **how):
        assert d_output.is_contiguous()
        for gradient in (dq, dk, dv):
            gradient.zero_()
        for rows, head, shared, scores, scale in scored(query, key, **how):
            weights = (scores - lse[head, rows, None]).exp()
            pulls = d_output[rows, head] @ value[rows, shared].T
            means = (d_output[rows, head] * output[rows, head]).sum(-1, keepdim=True)
            d_scores = weights * (pulls - means) * scale
            dq[rows, head] = d_scores @ key[rows, shared]
            dk[rows, shared] += d_scores.T @ query[rows, head]
            dv[rows, shared] += weights.T @ d_output[rows, head]


def scored(query, key, *, softmax_scale, causal, window_size_left, window_size_right, cu_seqlens_q, **others):
    """Yield a sequence's tokens, a head of queries and its key-value head, their masked scores, and the scale."""
    assert (causal, window_size_right) == ((True, None) if window_size_left is None else (False, 0))
    assert others["cu_seqlens_k"] is cu_seqlens_q
    assert others["max_seqlen_q"] == others["max_seqlen_k"] == int(cu_seqlens_q.diff().max())
    scale = softmax_scale or query.shape[-1] ** -0.5
    for start, end in itertools.pairwise(cu_seqlens_q.tolist()):
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)
        seen = (distance >= 0) & (distance <= (end if window_size_left is None else window_size_left))
        for head in range(query.shape[1]):
            shared, rows = head * key.shape[1] // query.shape[1], slice(start, end)
            scores = query[rows, head] @ key[rows, shared].T * scale
            yield rows, head, shared, scores.masked_fill(~seen, -torch.inf), scale


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.setattr(flash_attention, "_kernels", lambda: Kernels)


def row(dtype=torch.float32, num_heads=4):
    """Return queries, keys and values whose heads lie before the tokens in memory, as in a transformers model."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(heads, BORDERS[-1], 8, generator=generator, dtype=dtype).requires_grad_()
        for heads in (num_heads, 2, 2)
    ]


def results(attention_of, leaves, **how):
    sequences = Sequences(torch.tensor(BORDERS, dtype=torch.int32), 11, **how)
    output = attention_of(*(leaf.transpose(0, 1) for leaf in leaves), sequences)
    weights = torch.arange(output.numel()).view(output.shape).cos()
    return [output, *torch.autograd.grad((output * weights).sum(), leaves)]


def padded(query, key, value, sequences):
    """Compute what the CPU computes for packed rows."""
    states = (query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1))
    return attention._padded(*states, sequences).transpose(0, 1)


@pytest.mark.parametrize("how", [{}, {"scale": 0.2}, {"window": 3}, {"window": 1}], ids=str)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_operators_are_attention(kernels, how, is_compiled):
    torch._dynamo.reset()
    attend = torch.compile(flash_attention_4, backend="aot_eager") if is_compiled else flash_attention_4
    for result, expected in zip(results(attend, row(), **how), results(padded, row(), **how), strict=True):
        torch.testing.assert_close(result, expected)


def test_operators_obey_their_contracts(kernels):
    """Shapes and strides of results under the compiler are those that the kernels give."""
    leaves = [leaf.transpose(0, 1) for leaf in row()]
    borders = torch.tensor(BORDERS, dtype=torch.int32)
    arguments = (*leaves, borders, 11, None, 0)
    torch.library.opcheck(flash_attention.OPERATOR, arguments)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_model_gives_the_same_loss_and_gradients(kernels, family, monkeypatch):
    """As on a GPU, but for what computes there: rows are turned to the kernels' layout, and back."""
    monkeypatch.setattr(attention, "uses_flash", lambda *_: True)
    model = tiny_model(family)
    model.set_attn_implementation(flash_attention.NAME)
    assert_same(optimized_results(model, tiny_batch()), plain_results(tiny_model(family, packed=False), tiny_batch()))


@pytest.mark.nightly
def test_one_compilation_of_a_block_serves_all_lengths(kernels, monkeypatch):
    """An operator that took the longest length for a constant would be compiled for each."""
    torch._dynamo.reset()
    monkeypatch.setattr(attention, "uses_flash", lambda *_: True)
    model = tiny_model()
    model.set_attn_implementation(flash_attention.NAME)
    CompileBlocks(backend="aot_eager").before_shard(model)
    optimized_results(model, tiny_batch())
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in ([(3, 9), (4, 4)], [(5, 20), (2, 2), (1, 1), (7, 3)]):
            model.zero_grad()
            batch = tiny_batch(lengths)
            assert_same(optimized_results(model, batch), plain_results(tiny_model(packed=False), batch))


@pytest.mark.parametrize(("checkpointing", "times"), [(SelectiveCheckpointing, 1), (GradientCheckpointing, 2)])
def test_selective_checkpointing_keeps_its_results(kernels, checkpointing, times, monkeypatch):
    monkeypatch.setattr(attention, "uses_flash", lambda *_: True)
    calls, forward = [], Kernels._flash_attn_fwd
    monkeypatch.setattr(Kernels, "_flash_attn_fwd", lambda *states, **how: calls.append(0) or forward(*states, **how))
    model = tiny_model()
    model.set_attn_implementation(flash_attention.NAME)
    checkpointing().before_shard(model)
    optimized_results(model, tiny_batch())
    assert len(calls) == times * len(model.model.layers)


def test_a_model_whose_kernels_do_not_support_it_stops(kernels):
    """On a CPU no pass is in half precision on a GPU: nothing else may take the place of the kernels."""
    model = tiny_model()
    model.set_attn_implementation(flash_attention.NAME)
    with pytest.raises(ConfigError, match=r"half precision on a GPU.*model\.policy\.dtype"):
        policy_forward(model, pack(tiny_batch().flat()), SamplingParams(), "none")


def test_refuses_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"needs a Hopper or Blackwell GPU.*remove FlashAttention4"):
        FlashAttention4().before_shard(tiny_model())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with pytest.raises(ConfigError, match=r"packed attention, and attn_implementation is 'eager'"):
        FlashAttention4().before_shard(tiny_model(packed=False))
    with pytest.raises(ConfigError, match=r"the model is none of transformers"):
        FlashAttention4().before_shard(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"cannot be imported.*pip install rlplug-optims\[flash-attention\]"):
        FlashAttention4().before_shard(tiny_model())
    assert FlashAttention4().effects() == []


def test_what_the_kernels_refuse_is_said_of_the_model(monkeypatch, kernels):
    def compare(config):
        raise AssertionError("head_dim must be between 16 and 256")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(flash_attention, "_compare_with_torch", compare)
    model = tiny_model()
    with pytest.raises(ConfigError, match=r"this model's heads \(AssertionError: head_dim must be.*remove FlashAtt"):
        FlashAttention4().before_shard(model)
    assert model.config._attn_implementation == attention.NAME, "a model that is refused stays as it was"


def gpu_model(dtype=torch.bfloat16):
    """Return a model whose heads FlashAttention-4 has kernels for."""
    config = copy.deepcopy(CONFIGS["qwen3"])
    config.update({"head_dim": 64, "hidden_size": 128, "_attn_implementation": attention.NAME})
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).cuda()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlashAttention-4 runs on Hopper and Blackwell GPUs")
@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_same_logprobs_and_gradients(is_compiled):
    pytest.importorskip("flash_attn.cute.interface")

    def passes(change):
        model = gpu_model()
        change(model)
        if is_compiled:
            model.compile()
        packed = pack(tiny_batch([(30, 100), (1, 1), (70, 200)]).flat()).to(torch.device("cuda"))
        logprobs = policy_forward(model, packed, SamplingParams(), "none").tokens.logprobs
        logprobs.sum().backward()
        return [logprobs.detach(), *(parameter.grad for parameter in model.parameters())]

    fast = FlashAttention4()
    for result, expected in zip(passes(fast.before_shard), passes(lambda _: None), strict=True):
        assert float((result - expected).float().norm()) <= 0.05 * float(expected.float().norm())
    assert [effect.description for effect in fast.effects()] == ["FlashAttention-4 computes attention of 4 layers"]
