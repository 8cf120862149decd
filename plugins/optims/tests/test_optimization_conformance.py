"""The core's kit of optimizations, over those of this plugin that run on a CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from ranks import run_ranks
from rlplug_devkit import OptimizationConformance
from rlplug_optims import (
    BackwardPrefetch,
    CompileBlocks,
    EntropyCheckpointing,
    EntropyChunking,
    ForwardPrefetch,
    FusedLogprobs,
    GradientCheckpointing,
    SelectiveCheckpointing,
)

from rlplug.interfaces import Optimization


class Optims(OptimizationConformance):
    def run_ranks(self, command: list[str], world_size: int) -> None:
        run_ranks(command, world_size)


class TestOnOneRank(Optims):
    """A sample for every push."""

    models = ("llama",)
    meshes = ("1 rank",)

    def make_optimizations(self) -> Mapping[str, Sequence[Optimization]]:
        return {"fused": [FusedLogprobs(chunk_size=5)]}


@pytest.mark.nightly
class TestOptims(Optims):
    def make_optimizations(self) -> Mapping[str, Sequence[Optimization]]:
        return {
            "fused": [FusedLogprobs(chunk_size=5)],
            "entropy chunks": [EntropyChunking(chunk_size=5)],
            "entropy checkpoint": [EntropyCheckpointing()],
            "forward prefetch": [ForwardPrefetch(depth=2)],
            "backward prefetch": [BackwardPrefetch()],
            "all that fit": [
                FusedLogprobs(chunk_size=7),
                ForwardPrefetch(),
                BackwardPrefetch(depth=3),
            ],
        }


@pytest.mark.nightly
class TestCheckpointing(Optims):
    """They decide what blocks recompute themselves."""

    with_partner = False

    def make_optimizations(self) -> Mapping[str, Sequence[Optimization]]:
        return {
            "gradient": [GradientCheckpointing()],
            "selective": [SelectiveCheckpointing()],
        }


class Compiled(Optims):
    models = ("llama", "tied_llama")  # two kinds of layers double the graphs of fixed lengths, and torch keeps 8


@pytest.mark.nightly
class TestCompiled(Compiled):
    def make_optimizations(self) -> Mapping[str, Sequence[Optimization]]:
        return {"compiled": [CompileBlocks(dynamic=False, backend="aot_eager")]}


@pytest.mark.nightly
class TestCompiledAndRecomputed(Compiled):
    with_partner = False

    def make_optimizations(self) -> Mapping[str, Sequence[Optimization]]:
        return {"both": [CompileBlocks(dynamic=False, backend="eager"), GradientCheckpointing(every_n_blocks=2)]}
