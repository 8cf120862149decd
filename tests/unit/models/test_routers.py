"""Routers of mixtures of experts: which are known, how scores follow from a choice, and what replaying one does."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_fixtures import IS_BEFORE_5_13
from rlplug_devkit.padded_rows import PaddedRows
from rlplug_optims.fused_logprobs import FusedLogprobs
from rlplug_optims.gradient_checkpointing import GradientCheckpointing
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Qwen3MoeConfig

from rlplug.errors import ConfigError
from rlplug.interfaces.router_replay import RouterShape, named_routers
from rlplug.models.forward import attach_router_replay, policy_forward
from rlplug.models.packing import pack
from rlplug.models.routers import replay_routers, router_shape
from rlplug.rollout.routed_experts import RouterRecorder
from rlplug.training.step_rows import num_routed
from rlplug.types import SamplingParams

KEY = "model.router_replay"
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_hidden_layers": 3,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
DEEPSEEK = {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
SAMPLING = SamplingParams()
SINCE_5_13 = pytest.mark.skipif(IS_BEFORE_5_13, reason="transformers before 5.13 has routers of another form there")


def empty(family, **options):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**SIZES | options))


@pytest.mark.parametrize(
    ("family", "options", "layers", "scores"),
    [
        ("qwen3_moe", {"norm_topk_prob": True}, (0, 1, 2), "softmax_of_chosen"),
        ("qwen3_moe", {"norm_topk_prob": False}, (0, 1, 2), "softmax_of_all"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, (0, 2), "softmax_of_all"),
        ("mixtral", {}, (0, 1, 2), "softmax_of_chosen"),
        ("olmoe", {}, (0, 1, 2), "softmax_of_all"),
        ("gpt_oss", {}, (0, 1, 2), "softmax_of_chosen"),
        pytest.param("granitemoe", {}, (0, 1, 2), "softmax_of_chosen", marks=SINCE_5_13),
        pytest.param("deepseek_v3", DEEPSEEK, (1, 2), None, marks=SINCE_5_13),
    ],
)
def test_routers_and_their_scores_are_found_by_their_form(family, options, layers, scores):
    model = empty(family, **options)
    assert router_shape(model, KEY) == RouterShape(layers, 8, 2)
    found = {vars(router)["score_experts"] for router in replay_routers(model, KEY).routers}
    assert scores is None or {function.__name__ for function in found} == {scores}
    for router in named_routers(model).values():  # what it found reproduces other weights than those of the probe
        real = copy.deepcopy(router).to_empty(device="cpu").float().eval()
        torch.manual_seed(1)
        for tensor in (*real.parameters(), *real.buffers()):
            torch.nn.init.normal_(tensor, std=0.3)
        logits, of_model, experts = real.forward(torch.randn(50, 64))
        torch.testing.assert_close(vars(router)["score_experts"](logits.float(), experts), of_model)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("llama", "LlamaForCausalLM is no mixture of experts"),
        ("hunyuan_v1_moe", "routers of HunYuanMoEV1ForCausalLM have another form"),
        pytest.param(
            "phimoe",
            "PhimoeTopKRouter of PhimoeForCausalLM computes its scores in a way that it does not know",
            marks=SINCE_5_13,
        ),
        ("minimax_m2", "MiniMaxM2TopKRouter of MiniMaxM2ForCausalLM computes its scores"),
        ("llama4_text", "Llama4Router of Llama4ForCausalLM computes its scores"),
    ],
)
def test_other_models_are_refused_by_name(family, message):
    with pytest.raises(ConfigError, match=message):
        replay_routers(empty(family), KEY)


@pytest.mark.skipif(not IS_BEFORE_5_13, reason="transformers has routers of a known form")
@pytest.mark.parametrize(("family", "options"), [("granitemoe", {}), ("deepseek_v3", DEEPSEEK), ("phimoe", {})])
def test_routers_of_another_form_are_refused(family, options):
    """Catches a replay that leaves routers of an older transformers to choose for themselves."""
    with pytest.raises(ConfigError, match=rf"^{KEY} is true, and .*[Rr]emove it"):
        replay_routers(empty(family, **options), KEY)


# ---- forward passes ------------------------------------------------------------------------------------------------


def tiny_model():
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**SIZES, norm_topk_prob=True, initializer_range=0.15)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="packed")


def batch_of(lengths, routed_experts=None):
    generator = torch.Generator().manual_seed(sum(lengths))
    longest = max(lengths)
    real = torch.arange(longest) < torch.tensor(lengths)[:, None]
    ids = torch.randint(2, 64, real.shape, generator=generator) * real
    zeros = torch.zeros(real.shape)
    ones = torch.ones(len(lengths))
    return PaddedRows(
        ids, real, real & (torch.arange(longest) > 0), zeros, ones, ones.bool(), ones.long(), ones.bool(),
        routed_experts=routed_experts,
    )  # fmt: skip


def logprobs(model, batch):
    """Return the logprobs [B, T] of a batch."""
    return batch.grid(policy_forward(model, pack(batch.flat()), SAMPLING, "none").tokens.logprobs)


def own_choice(model, batch):
    """Return the model's own experts of a batch, [N, L, k]."""
    plain = tiny_model()
    plain.load_state_dict(model.state_dict())
    recorder = RouterRecorder(plain)
    with torch.no_grad():
        logprobs(plain, batch.replace(routed_experts=None))
    return recorder.take(1)[0].to(torch.int8)


def other_choice(num_tokens):
    generator = torch.Generator().manual_seed(0)
    return torch.rand(num_tokens, 3, 8, generator=generator).topk(2).indices.to(torch.int8)


def replaying():
    model = tiny_model()
    replay = replay_routers(model, KEY)
    attach_router_replay(model, replay)
    return model, replay


LENGTHS = [5, 9, 3]


def test_a_models_own_choice_replayed_changes_no_bit_and_nothing_said_changes_nothing():
    model, replay = replaying()
    batch = batch_of(LENGTHS)
    own = own_choice(model, batch)
    results = []
    for experts in (None, own, own.flip(-1), torch.full_like(own, -1)):
        model.zero_grad()
        values = logprobs(model, batch.replace(routed_experts=experts))
        values.sum().backward()
        results.append((values.detach(), [parameter.grad.clone() for parameter in model.parameters()]))
        assert experts is None or replay.num_differing() == 0
    (plain, gradients), *others = results
    for values, their_gradients in others:
        assert torch.equal(values, plain)
        assert all(torch.equal(one, other) for one, other in zip(gradients, their_gradients, strict=True))


def test_the_given_experts_are_used_and_scored_by_the_live_router():
    """An independent calculation of the first layer's block, with other experts than its router would take."""
    model, replay = replaying()
    batch = batch_of([7])
    given = other_choice(7)
    given[3] = -1
    seen = {}
    block = model.model.layers[0].mlp
    block.register_forward_hook(lambda _, inputs, output: seen.update(hidden=inputs[0][0], output=output[0]))
    logprobs(model, batch.replace(routed_experts=given)).sum().backward()
    own = own_choice(model, batch)
    expected = []
    for token, hidden in enumerate(seen["hidden"]):
        experts = own[token, 0] if token == 3 else given[token, 0]
        logits = block.gate.weight @ hidden
        scores = torch.softmax(logits[experts.long()], dim=0)
        gate_up = [block.experts.gate_up_proj[expert] @ hidden for expert in experts.long()]
        hidden_of = [torch.nn.functional.silu(both[:32]) * both[32:] for both in gate_up]
        down = [
            block.experts.down_proj[expert] @ inner for expert, inner in zip(experts.long(), hidden_of, strict=True)
        ]
        expected.append(sum(score * part for score, part in zip(scores, down, strict=True)))
    torch.testing.assert_close(seen["output"], torch.stack(expected))
    assert all(router.weight.grad.abs().sum() > 0 for router in replay.routers)
    num_other = (given[:, 0].sort(-1).values != own[:, 0].sort(-1).values).any(-1)[[0, 1, 2, 4, 5, 6]].sum()
    assert vars(replay.routers[0])["num_differing"] == num_other > 0


@settings(max_examples=15)
@given(order=st.permutations(range(4)), cuts=st.sets(st.integers(1, 3)), data=st.data())
def test_each_token_keeps_its_experts_in_every_split(order, cuts, data):
    """Experts name their token, so that any shift, swap of rows or lost filling shows."""
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=4, max_size=4))
    names = torch.arange(sum(lengths) * 6, dtype=torch.int16).view(-1, 3, 2)
    batch = batch_of(lengths, names)
    starts = [0, *itertools.accumulate(lengths)]
    bounds = [0, *sorted(cuts), 4]
    for size in (1, 2, 3):
        for start, end in itertools.pairwise(bounds):
            rows = order[start:end]
            parts = [pack(batch.flat().select(rows), rank, size).packed for rank in range(size)]
            row = torch.cat([part.routed_experts for part in parts])
            expected = torch.cat([names[starts[index] : starts[index + 1]] for index in rows])
            assert torch.equal(row[: len(expected)], expected)
            assert (row[len(expected) :] == -1).all()
            assert all(part.routed_experts.shape[0] == part.input_ids.shape[1] for part in parts)


def test_pairs_without_known_experts_do_not_count():
    experts = other_choice(sum(LENGTHS))
    experts[[4, 13, 16]] = -1  # the last token of each sequence
    batch = batch_of(LENGTHS, experts)
    assert num_routed(batch.flat()).tolist() == [(length - 1) * 3 for length in LENGTHS]
    assert not num_routed(batch.replace(routed_experts=None).flat()).any()


@pytest.mark.parametrize("kinds", [(), ("checkpoint",), ("fused",), ("checkpoint", "fused")])
def test_replay_is_the_same_in_splits_recomputed_and_fused(kinds):
    """Recomputation that replays nothing, or the experts of another micro-batch, gives other gradients."""
    batch = batch_of(LENGTHS, other_choice(sum(LENGTHS)))
    makers = {"checkpoint": GradientCheckpointing, "fused": FusedLogprobs}
    reference, _ = replaying()
    model, replay = replaying()
    for kind in kinds:
        optimization = makers[kind]()
        optimization.before_shard(model)
        optimization.after_shard(model)
    plain = logprobs(reference, batch)
    plain.sum().backward()
    counts = []
    for rows in ([1], [2, 0]):
        values = logprobs(model, batch.select(rows))
        counts.append(int(replay.num_differing()))
        values.sum().backward()
        torch.testing.assert_close(values, plain[rows, : values.shape[1]].detach(), rtol=0, atol=2e-5)
    for one, other in zip(reference.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)
    own = own_choice(model, batch)
    assert sum(counts) > 0.5 * own.shape[0] * own.shape[1]
