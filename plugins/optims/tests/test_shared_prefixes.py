"""Rows that share prefixes have the logprobs and gradients of rows with a prompt each, and cost what is planned."""

from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rlplug_optims import CompileBlocks, FlashAttention4, GradientCheckpointing, SelectiveCheckpointing
from rlplug_optims.shared_prefixes.comparison import compared_row, differences
from rlplug_optims.shared_prefixes.decision import own_attention, require_kernels, why_not
from rlplug_optims.shared_prefixes.layout import Forest, PrefixLayout
from rlplug_optims.shared_prefixes.segments import SegmentAttention
from rlplug_optims.shared_prefixes.tile_lists import Lists, Mask
from rlplug_optims.shared_prefixes.tree import depth_first, tree_row
from transformers import CONFIG_MAPPING

from rlplug.errors import ConfigError
from rlplug.interfaces import ModelConfig
from rlplug.models.attention import packed_attention
from rlplug.models.attention.sequences import Sequences
from rlplug.models.forward import policy_forward
from rlplug.models.packing import pack
from rlplug.training.batch_plan import BatchPlan, BatchSizes
from rlplug.training.step_rows import ROW
from rlplug.types import Prompt, Sample, SamplingParams, StepBatch

LAYOUT = PrefixLayout(on_gpu=False)
PARTS = {
    "checkpointing": GradientCheckpointing,
    "selective": SelectiveCheckpointing,
    "compile": lambda: CompileBlocks(backend="aot_eager"),
}
PROMPT, TURN = (3, 4, 5, 6, 7), (8, 9, 10)
GROUPS = {
    0: [(PROMPT, (11, 12, 13)), (PROMPT, (11, 14)), (PROMPT, (15,)), (PROMPT, ())],
    1: [((5, 6), (*TURN, 7, 8)), ((5, 6), TURN), ((5, 6), (*TURN, 7, 8)), ((5, 6), (*TURN, 9, 3, 4, 11, 12))],
    2: [((9,), ()), ((9,), (10, 11, 12, 13, 14, 15, 16))],
    3: [(PROMPT, (11, 12, 13))],
}
"""Prompt and completion of each row: equal first tokens, a turn that three branches follow, the same row twice, one
that ends where another goes on, a row of one token, and a prompt that another group has too."""


def batch_of(groups):
    samples = [
        Sample(
            prompt=Prompt(uid=str(group), token_ids=prompt, text=""),
            group=group,
            token_ids=prompt + completion,
            response_mask=(False,) * len(prompt) + (True,) * len(completion),
            rollout_logprobs=(0.0,) * len(prompt + completion),
            completion="",
            finish_reason="stop",
            policy_version=0,
            reward=1.0,
        )
        for group, rows in groups.items()
        for prompt, completion in rows
    ]
    return StepBatch.from_samples(samples)


def table_of(batch):
    table = np.zeros(batch.num_sequences, ROW)
    table["group"], table["index"] = batch.per_sequence["group_index"], np.arange(batch.num_sequences)
    table["length"], table["num_tokens"] = batch.lengths, batch.num_tokens
    table["place"], table["shared"] = LAYOUT.places(batch).T
    return table


def gradients_of(model, loss):
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


@pytest.mark.parametrize("family", ["llama", "llama_tied", "qwen3", "gemma2", "gemma3", "mistral", "gpt2"])
def test_logprobs_and_gradients_are_those_of_whole_rows(family, model_folder, load_policy):
    """Windows of mistral, gemma2 and gemma3 are shorter than the longest row; gemma2 has a soft cap."""
    policy, batch = load_policy(model_folder(family)).train(), batch_of(GROUPS)
    weights = torch.randn(int(batch.num_tokens.sum()), generator=torch.Generator().manual_seed(7))
    plain, shared = pack(batch), LAYOUT.pack(batch, 0, 1, None)
    assert shared.packed.input_ids.shape[1] == 38 < plain.packed.input_ids.shape[1] == 72
    results = []
    for micro_batch in (plain, shared):
        output = policy_forward(policy, micro_batch, SamplingParams(temperature=0.8), "gradient")
        loss = (output.tokens.logprobs * weights).sum() + (output.entropy * weights**2).sum()
        results.append((output, gradients_of(policy, loss)))
    (expected, gradients), (found, ours) = results
    torch.testing.assert_close(found.tokens.logprobs, expected.tokens.logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.entropy, expected.entropy, rtol=0, atol=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-5 * gradient.abs().max().item())


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_share_a_row_predict_each_token_once(size):
    batch = batch_of(GROUPS)
    whole = LAYOUT.pack(batch, 0, 1, None).packed
    parts = [LAYOUT.pack(batch, rank, size, None).packed for rank in range(size)]
    ids = torch.cat([part.input_ids[0] for part in parts])
    assert torch.equal(ids[: whole.input_ids.shape[1]], whole.input_ids[0])
    assert torch.cat([part.slots for part in parts]).sort().values.tolist() == list(range(whole.num_trained))
    for part, first in zip(parts, itertools.count(step=len(ids) // size)):
        assert torch.equal(part.predicting + first, whole.predicting[part.slots])
        assert torch.equal(part.targets, whole.targets[part.slots])


def test_little_that_is_shared_is_packed_end_to_end():
    batch = batch_of({0: [((3,), (4,) * 12), ((3,), (5,) * 12)]})
    packed = LAYOUT.pack(batch, 0, 1, None).packed
    assert packed.shared is None
    assert packed.cu_seqlens.tolist() == [0, 13, 26]
    assert LAYOUT.num_tokens(table_of(batch), [[0, 1]]) == 26


@pytest.mark.parametrize("options", [{}, {"window": 3}, {"softcap": 2.0}, {"sinks": True}, {"scale": 0.3}])
@pytest.mark.parametrize("most_pairs", [1, 1 << 24])
def test_each_segment_attends_as_its_sequences_do(most_pairs, options, monkeypatch):
    monkeypatch.setattr("rlplug_optims.shared_prefixes.segments.MOST_PAIRS", most_pairs)
    batch = batch_of(GROUPS)
    sequences, trains = (np.split(batch.per_token[name], batch.ends[1:-1]) for name in ("input_ids", "response_mask"))
    row = tree_row(sequences, trains, depth_first(sequences, batch.per_sequence["group_index"]))
    generator = torch.Generator().manual_seed(1)
    states = [torch.randn(heads, len(row.ids), 8, generator=generator) for heads in (4, 2, 2)]
    sinks = torch.randn(4, generator=generator) if options.get("sinks") else None
    plain = {"sliding_window": options.get("window"), "softcap": options.get("softcap"), "s_aux": sinks}
    segments = row.segments()
    paths = [segment.path for segment in segments]
    given_to_layer = Sequences(torch.tensor([0, len(row.ids)]), 12, **options | {"sinks": sinks})
    output = SegmentAttention(row).attend(*states, given_to_layer)
    module = SimpleNamespace(is_causal=True)
    for segment, path in zip(segments, paths, strict=True):
        alone = [part[None, :, path] for part in states]
        expected, _ = packed_attention(module, *alone, None, scaling=options.get("scale"), **plain)
        own = expected[0, len(path) - (segment.stop - segment.start) :].transpose(0, 1)
        torch.testing.assert_close(output[:, segment.start : segment.stop], own)


rows_of_groups = st.lists(
    st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=7), min_size=1, max_size=5), min_size=1, max_size=4
)


@given(rows_of_groups, st.integers(0, 2**32 - 1))
def test_what_is_planned_is_what_rows_compute(groups, seed):
    """It catches a budget that a pass exceeds, and costs of subsets whose rows are not neighbours in their tree."""
    batch = batch_of({group: [(tuple(row[:1]), tuple(row[1:])) for row in rows] for group, rows in enumerate(groups)})
    table, rng = table_of(batch), np.random.default_rng(seed)
    rows = np.flatnonzero(rng.random(batch.num_sequences) < 0.7)
    rows = rng.permutation(rows if len(rows) else np.array([0]))
    picked = batch.select(rows)
    sequences = np.split(picked.per_token["input_ids"], picked.ends[1:-1])
    forest, found = Forest(table), {}
    for group in forest.groups(rows.tolist()):
        bundle = forest.bundle(group)
        own = [sequences[rows.tolist().index(row)].tolist() for row in group]
        prefixes = {tuple(row[:end]) for row in own for end in range(1, len(row) + 1)}
        if bundle.tokens < table["length"][group].sum():
            assert bundle.tokens == max(len(prefixes), int(table["num_tokens"][group].sum()))
            assert bundle.pairs == sum(2 * len(prefix) - 1 for prefix in prefixes)
        found[int(table["group"][group[0]])] = group
    assert sorted(row for group in found.values() for row in group) == sorted(rows.tolist())
    assert LAYOUT.pack(picked, 0, 1, None).packed.input_ids.shape[1] == LAYOUT.num_tokens(table, [rows.tolist()])


@given(rows_of_groups, st.integers(8, 20), st.integers(1, 4))
def test_passes_have_each_row_once_within_the_budget(groups, budget, num_ranks):
    batch = batch_of({group: [(tuple(row[:1]), tuple(row[1:])) for row in rows] for group, rows in enumerate(groups)})
    table, rows = table_of(batch), list(range(batch.num_sequences))
    sizes = BatchSizes(prompts_per_step=4 * num_ranks, group_size=1, max_tokens_per_gpu=budget)
    plan = BatchPlan(sizes, num_ranks, longest=7, quadratic_cost=0.01, layout=LAYOUT)
    passes = plan.passes(rows, batch.lengths.tolist(), table=table)
    real = [each.indices for rank in passes for each in rank if not each.is_filler]
    assert sorted(row for part in real for row in part) == rows
    assert all(LAYOUT.num_tokens(table, [part]) <= budget for part in real)


def test_rows_that_share_too_little_count_in_full():
    """It catches a pass planned with 39 tokens that has 40: of its two rows one token in twenty is shared."""
    ends = [range(100 * row, 100 * row + 4) for row in range(1, 5)]
    middles = [range(10, 25), range(30, 45), *2 * [range(50, 65)]]
    batch = batch_of({0: [((3,), (*middle, *end)) for middle, end in zip(middles, ends, strict=True)]})
    plan = BatchPlan(BatchSizes(prompts_per_step=4, group_size=1, max_tokens_per_gpu=39), 1, layout=LAYOUT)
    (passes,) = plan.passes(range(4), batch.lengths.tolist(), table=table_of(batch))
    rows = [each.indices for each in passes]
    assert max(LAYOUT.num_tokens(table_of(batch), [part]) for part in rows) <= 39, rows


def test_groups_are_cut_where_ranks_would_wait():
    """Five groups on four ranks: with halves of groups none waits for one that has two groups."""
    prompt = tuple(range(3, 13))
    batch = batch_of({group: [(prompt, (13 + row, 14, 15, 16, 17, 18)) for row in range(8)] for group in range(5)})
    table, rows = table_of(batch), list(range(40))
    sizes = BatchSizes(prompts_per_step=4, group_size=6, max_tokens_per_gpu=200)
    for num_ranks, most in ((1, 5 * 58), (4, 102)):
        plan = BatchPlan(sizes, num_ranks, longest=16, layout=LAYOUT)
        passes = plan.passes(rows, batch.lengths.tolist(), table=table)
        tokens = [LAYOUT.num_tokens(table, [each.indices for each in rank]) for rank in passes]
        assert max(tokens) <= most, tokens


@given(st.integers(0, 2**32 - 1), st.sampled_from([0, 40, 200]), st.sampled_from([(64, 64), (128, 64), (32, 128)]))
def test_lists_of_tiles_hold_what_tokens_see(seed, window, sizes):
    rng = np.random.default_rng(seed)
    prompt = rng.integers(1, 9, size=rng.integers(1, 300)).astype(np.int32)
    ends = [rng.integers(1, 9, size=rng.integers(1, 90)).astype(np.int32) for _ in range(4)]
    sequences = [np.concatenate([prompt, end]) for end in ends]
    trains = [np.arange(len(each)) >= len(prompt) for each in sequences]
    row = tree_row(sequences, trains, depth_first(sequences, [0, 0, 1, 1]))
    mask = Mask(torch.from_numpy(row.ends), torch.from_numpy(row.positions), window)
    seen = seen_by(mask)
    for segment in row.segments():
        last = segment.path if window == 0 else segment.path[-window:]
        assert torch.equal(seen[segment.stop - 1].nonzero()[:, 0], torch.from_numpy(np.sort(last)))
    whole, part = mask.tiles(*sizes)
    shape = [count * size for count, size in zip(part.shape, sizes, strict=True)]
    filled = torch.zeros(shape, dtype=torch.bool)
    filled[: len(seen), : len(seen)] = seen
    pairs = filled.view(-1, sizes[0], part.shape[1], sizes[1]).transpose(1, 2).flatten(2)
    assert (pairs.any(dim=2) <= part).all()
    assert (whole <= pairs.all(dim=2) & part).all()
    for each in ((whole, part), (whole.T, part.T)):
        lists = Lists.of(*each)
        assert lists.tiles.is_contiguous()
        assert lists.num_tiles.is_contiguous()
        for expected, counts in zip(each, lists.num_tiles, strict=True):
            is_listed = torch.arange(expected.shape[1]) < counts[:, None]
            assert torch.equal(torch.zeros_like(expected).scatter(1, lists.tiles.long(), is_listed), expected)


def seen_by(mask):
    """bool [N, N]: which query sees which key"""
    tokens = torch.arange(len(mask.ends))
    seen = (tokens <= tokens[:, None]) & (tokens[:, None] < mask.ends)
    return seen & (mask.positions[:, None] - mask.positions < mask.window) if mask.window else seen


class Dense:
    """What the kernels compute, for a CPU, on which they do not run. ``roll`` is a fault."""

    def __init__(self, roll=0):
        self.roll = roll

    def forward(self, query, key, value, sinks, mask, scale, softcap):
        key, value = (
            each.roll(self.roll, dims=1).repeat_interleave(len(query) // len(key), 0) for each in (key, value)
        )
        logits = (query @ key.mT * scale).masked_fill(~seen_by(mask), -torch.inf)
        return (logits.softmax(-1) @ value).transpose(0, 1).contiguous().transpose(0, 1), logits.logsumexp(-1).float()

    def backward(self, d_output, query, key, value, output, lse, mask, scale, softcap):
        leaves = [each.detach().requires_grad_() for each in (query, key, value)]
        autograd = torch._C.DispatchKey.AutogradFunctionality
        with torch._C._SetExcludeDispatchKeyGuard(autograd, False), torch.enable_grad():
            found, found_lse = self.forward(*leaves, None, mask, scale, softcap)
            gradients = torch.autograd.grad(found, leaves, d_output)
        torch.testing.assert_close((found, found_lse), (output, lse))  # those of the forward pass arrive
        laid = [each.transpose(0, 1).contiguous().transpose(0, 1) for each in gradients]
        return *laid, (d_output * output).sum(-1).float()


@pytest.fixture
def dense(monkeypatch):
    kernels = Dense()
    monkeypatch.setitem(sys.modules, "rlplug_optims.shared_prefixes.launch", kernels)
    return kernels


@pytest.mark.parametrize("names", [[], ["checkpointing"], ["selective"], ["compile"], ["checkpointing", "compile"]])
def test_its_operator_is_checkpointed_and_compiled_as_any(names, model_folder, load_policy, dense):
    """It catches a gradient that the operator's own backward pass loses or gets wrong."""
    policy, batch = load_policy(model_folder("llama")), batch_of(GROUPS)
    results = []
    for layout in (LAYOUT, PrefixLayout(on_gpu=True)):
        output = policy_forward(policy, layout.pack(batch, 0, 1, None), SamplingParams(), "gradient")
        results.append((output.tokens.logprobs, gradients_of(policy, output.tokens.logprobs.sum())))
        for name in names if layout is LAYOUT else []:
            PARTS[name]().before_shard(policy)
    (expected, gradients), (found, ours) = results
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-5 * gradient.abs().max().item())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels run on GPUs")
@pytest.mark.parametrize("heads", [(8, 2, 64), (16, 8, 128), (9, 3, 64), (8, 4, 256)])
def test_kernels_in_bfloat16_are_torchs_attention(heads):
    names = ("num_attention_heads", "num_key_value_heads", "head_dim")
    found = differences(SimpleNamespace(**dict(zip(names, heads, strict=True))))
    assert max(found.values()) < 0.005, found


def test_the_comparison_before_a_run_sees_a_wrong_kernel(dense):
    row = compared_row()
    assert (len(row.ids), len(row.segments())) == (828, 2 * 4)
    config = SimpleNamespace(num_attention_heads=[2, 4], num_key_value_heads=2, head_dim=16)
    assert max(differences(config, "cpu").values()) < 0.01
    dense.roll = 1
    assert min(differences(config, "cpu").values()) > 0.1


def test_a_gpu_on_which_the_kernels_differ_is_refused(monkeypatch):
    found = {"output": 0.001, "gradient of keys": float("nan")}
    monkeypatch.setattr("rlplug_optims.shared_prefixes.comparison.differences", lambda config: found)
    with pytest.raises(ConfigError, match=r"gradient of keys .* nan .*set model\.batch\.share_prefixes: false"):
        require_kernels(SimpleNamespace())


def run(**options):
    plain = {"model_trainer": SimpleNamespace(claims=SimpleNamespace(shared_prefixes=True)), "critic": None}
    plain |= {"policy": SimpleNamespace(attn_implementation="packed"), "reference": None, "router_replay": False}
    return SimpleNamespace(**plain | {"optimizations": []} | options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, None),
        ({"model_trainer": SimpleNamespace(claims=SimpleNamespace(shared_prefixes=False))}, "model.trainer"),
        ({"reference": SimpleNamespace(attn_implementation="flash_attention_2")}, "attn_implementation: packed"),
        ({"router_replay": True}, "model.router_replay"),
        ({"optimizations": [FlashAttention4()]}, "FlashAttention4"),
    ],
)
def test_what_cannot_share_says_why(options, reason, monkeypatch):
    monkeypatch.setattr("rlplug_optims.shared_prefixes.decision.find_spec", lambda name: True)
    found = why_not(run(**options), SimpleNamespace(head_dim=64), on_gpu=True)
    assert found is None if reason is None else reason in found


def test_a_model_with_an_attention_of_its_own_shares_no_prefixes(tmp_path):
    """Catches models that compute whole rows, as GPT-J did, so that their runs ended at the mismatch gate."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 32}
    kinds = {"gpt_neo": sizes | {"attention_types": [[["global"], 1]]}, "gpt2": sizes}
    for kind, options in kinds.items():
        CONFIG_MAPPING[kind](**options).save_pretrained(tmp_path / kind)
    neo, gpt2 = (ModelConfig(str(tmp_path / kind)) for kind in kinds)
    assert own_attention(run(policy=gpt2, reference=gpt2)) is None
    assert "model.policy computes its own attention" in own_attention(run(policy=neo))
    assert "model.reference computes its own attention" in own_attention(run(policy=gpt2, reference=neo))


def test_wide_heads_share_no_prefixes_on_a_gpu():
    """Catches the widths of Gemma 4's layers: two options before transformers 5.15, then an option of each layer."""
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 512}
    assert "wider than 256" in why_not(run(), CONFIG_MAPPING["gemma4_text"](**layers, head_dim=256), on_gpu=True)
    assert "wider than 256" in why_not(run(), SimpleNamespace(head_dim=512), on_gpu=True)
    assert "wider than 256" in why_not(run(), SimpleNamespace(hidden_size=2048, num_attention_heads=4), on_gpu=True)
    assert why_not(run(), SimpleNamespace(head_dim=512), on_gpu=False) is None
