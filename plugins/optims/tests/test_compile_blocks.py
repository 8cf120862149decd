"""One compilation serves all blocks and all lengths, and code that is compiled too often stops the run."""

from __future__ import annotations

import pytest
import torch
from optims_models import assert_same, optimized_results, plain_results, tiny_batch, tiny_model
from rlplug_optims import CompileBlocks
from torch._dynamo.testing import CompileCounterWithBackend

LENGTHS = ([(2, 4), (3, 5)], [(1, 9), (4, 4), (2, 2)], [(3, 3), (5, 6), (1, 1), (2, 8)], [(4, 9), (1, 2)])


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def test_blocks_and_lengths_share_what_is_compiled():
    """A length or two as they are, then any: not once for each of four blocks and four batches."""
    counter = CompileCounterWithBackend("aot_eager")
    model = tiny_model()
    CompileBlocks(backend=counter).before_shard(model)
    compilations = []
    for seed, lengths in enumerate(LENGTHS):
        batch = tiny_batch(lengths, seed)
        assert_same(optimized_results(model, batch), plain_results(tiny_model(packed=False), batch))
        compilations.append(counter.frame_count)
    assert compilations[0] == 1
    assert compilations[-1] == compilations[-2] <= 3


def test_any_length_from_the_start():
    counter = CompileCounterWithBackend("aot_eager")
    model = tiny_model()
    CompileBlocks(dynamic=True, backend=counter).before_shard(model)
    optimized_results(model, tiny_batch(LENGTHS[0]))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed, lengths in enumerate(LENGTHS):
            batch = tiny_batch(lengths, seed)
            assert_same(optimized_results(model, batch), plain_results(tiny_model(packed=False), batch))


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
