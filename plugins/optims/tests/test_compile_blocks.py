"""One compilation serves all blocks and all lengths, and code that is compiled too often stops the run."""

from __future__ import annotations

import pytest
import torch
from optims_models import assert_same, optimized_results, plain_results, tiny_batch, tiny_model
from rlplug_optims import CompileBlocks
from torch._dynamo.testing import CompileCounterWithBackend
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from rlplug.errors import RunError

pytestmark = pytest.mark.kit

LENGTHS = ([(2, 4), (3, 5)], [(1, 9), (4, 4), (2, 2)], [(4, 9), (1, 2)])


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def test_one_compilation_serves_all_blocks_and_lengths():
    counter = CompileCounterWithBackend("aot_eager")
    model = tiny_model()
    CompileBlocks(backend=counter).before_shard(model)
    optimized_results(model, tiny_batch(LENGTHS[0]))
    assert counter.frame_count == 1
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed, lengths in enumerate(LENGTHS):
            batch = tiny_batch(lengths, seed)
            assert_same(optimized_results(model, batch), plain_results(tiny_model(packed=False), batch))


@pytest.mark.nightly
def test_frozen_embeddings_are_no_second_compilation():
    counter = CompileCounterWithBackend("eager")
    model = tiny_model()
    model.get_input_embeddings().requires_grad_(False)
    CompileBlocks(backend=counter).before_shard(model)
    optimized_results(model, tiny_batch())
    assert counter.frame_count == 1


@pytest.mark.nightly
def test_each_length_by_itself():
    counter = CompileCounterWithBackend("eager")
    model = tiny_model()
    CompileBlocks(dynamic=False, backend=counter).before_shard(model)
    for count, lengths in enumerate(LENGTHS[:2], start=1):
        optimized_results(model, tiny_batch(lengths))
        assert counter.frame_count == count


@pytest.mark.skipif(not torch.cuda.is_available(), reason="on a CPU the compiler leaves searchsorted to torch")
def test_sequences_stay_apart_where_attention_is_padded_and_compiled_for_a_gpu():
    model = tiny_model().cuda()  # float32, so without flash attention
    CompileBlocks().before_shard(model)
    expected = optimized_results(tiny_model().cuda(), tiny_batch())
    assert_same(optimized_results(model, tiny_batch()), expected, rtol=1e-4)


@pytest.mark.nightly
def test_the_real_compiler():
    model = tiny_model()
    CompileBlocks().before_shard(model)
    assert_same(optimized_results(model, tiny_batch()), plain_results(tiny_model(packed=False), tiny_batch()))


def test_compiling_again_and_again_stops_the_run():
    model = tiny_model()
    CompileBlocks(dynamic=False, backend="eager").before_shard(model)
    with torch._dynamo.config.patch(recompile_limit=2):
        for lengths in LENGTHS[:2]:
            optimized_results(model, tiny_batch(lengths))
        with pytest.raises(Exception, match="recompile_limit"):
            optimized_results(model, tiny_batch(LENGTHS[2]))


def test_a_block_that_runs_uncompiled_stops_the_run():
    """Would catch a block that breaks its graph within checkpointing: torch then runs all of it as it is."""

    class Untraced(LlamaDecoderLayer):
        @torch.compiler.disable
        def forward(self, *values, **named):
            return super().forward(*values, **named)

    model = tiny_model()
    for block in model.model.layers:
        block.__class__ = Untraced
    CompileBlocks(backend="eager").before_shard(model)
    with pytest.raises(RunError, match="no part of Untraced"):
        optimized_results(model, tiny_batch())
