"""Options that engines share: values that are refused, the policy's limits, and arguments that pass through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, get_type_hints

import pytest
import torch
from rlplug_engines.colocated import EngineOptions, PassThrough, deciding
from rlplug_engines.colocated.options import deciding_options

from rlplug.errors import ConfigError
from rlplug.interfaces import FP8Weights, PolicySpec

SPEC = PolicySpec("folder", torch.bfloat16, eos_token_ids=(1,), pad_token_id=0, max_context=4096)
IN_FP8 = replace(SPEC, fp8=FP8Weights(("a.weight",), ("lm_head.weight",)))
KNOWN = {"block_size", "swap_space", "model_path", "tp_size", "quantization"}


@dataclass(frozen=True)
class Options(EngineOptions):
    share_key: ClassVar[str] = "memory_share"
    context_key: ClassVar[str] = "max_length"
    positive: ClassVar[Sequence[str]] = ("max_length",)
    batch_sizes_key: ClassVar[str | None] = "graph_sizes"
    pass_through: ClassVar[PassThrough] = PassThrough(
        key="more",
        engine="Engine",
        reserved={"model_path": "model.policy.path names it"},
        own_names={"tp_size": "tensor_parallel_size"},
        weight_formats=("quantization",),
    )
    memory_share: float = 0.5
    kv_cache_dtype: str = "auto"
    dtype: str = deciding("auto")
    max_length: int | None = None
    graph_sizes: list[int] | None = None
    tensor_parallel_size: int = 1
    more: dict[str, Any] = deciding({})


@dataclass(frozen=True)
class OptionsOfAll(Options):
    share_may_be_one: ClassVar[bool] = True


@dataclass(frozen=True)
class SharedOptions(Options):
    requests_key: ClassVar[str] = "max_requests"
    max_requests: int | None = None
    gpu_memory_utilization: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    memory_share: float | None = None  # type: ignore[assignment]
    positive: ClassVar[Sequence[str]] = ("max_length", "max_requests")


def test_shared_names_are_the_engines_own_options() -> None:
    """It catches a shared name that has no effect, or that errors and advice do not know."""
    options = SharedOptions(gpu_memory_utilization=0.7, max_model_len=100, max_num_seqs=7)
    assert (options.share, options.memory_share, options.max_length, options.max_requests) == (0.7, 0.7, 100, 7)
    assert options.advice_keys().memory == "rollout.gpu_memory_utilization from 0.7"
    assert options.advice_keys().requests == "rollout.max_num_seqs"
    assert SharedOptions(max_requests=7).advice_keys().requests == "rollout.max_requests"
    assert SharedOptions().share == 0.5
    assert SharedOptions(max_requests=7, max_num_seqs=7).max_requests == 7
    with pytest.raises(ConfigError, match=r"rollout\.max_num_seqs is 0: give a positive"):
        SharedOptions(max_num_seqs=0)


@pytest.mark.parametrize(
    ("own", "shared"),
    [("memory_share", "gpu_memory_utilization"), ("max_length", "max_model_len"), ("max_requests", "max_num_seqs")],
)
def test_two_values_of_one_option_are_refused(own: str, shared: str) -> None:
    """It catches one of two values that is ignored; 0.5 is the share's default too."""
    values = (0.5, 0.6) if own == "memory_share" else (5, 6)
    with pytest.raises(ConfigError, match=rf"rollout\.{own} is .*rollout\.{shared} .*: remove one"):
        SharedOptions(**dict(zip((own, shared), values, strict=True)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        *({"memory_share": share} for share in (0, -0.1, 1, 1.1)),
        *({"max_length": 0}, {"tensor_parallel_size": -1}),
        *({"graph_sizes": []}, {"graph_sizes": [4, 0]}),
    ],
)
def test_values_that_cannot_be(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match=rf"rollout\.{name} is .*: give (a|positive)"):
        Options(**wrong)


def test_an_engine_may_take_all_of_a_gpu() -> None:
    assert OptionsOfAll(memory_share=1.0).memory_share == 1.0
    with pytest.raises(ConfigError, match=r"memory_share is 1\.1: give a share above 0, up to 1"):
        OptionsOfAll(memory_share=1.1)


def test_types_are_known_where_a_plugin_imports_none_of_their_names() -> None:
    """As jsonargparse asks for them, which else checks no value of an option."""
    assert get_type_hints(EngineOptions, {"ClassVar": ClassVar})["tensor_parallel_size"] is int


def test_context_of_the_policy_is_the_limit() -> None:
    assert [Options(max_length=given).longest(SPEC) for given in (None, 100, 9999)] == [4096, 100, 4096]


def test_dtype_of_the_policy_is_the_default() -> None:
    assert (Options().dtype_name(SPEC), Options().torch_dtype(SPEC)) == ("bfloat16", torch.bfloat16)
    chosen = Options(dtype="float16")
    assert (chosen.dtype_name(SPEC), chosen.torch_dtype(SPEC)) == ("float16", torch.float16)


def test_options_that_decide_numbers_are_marked_where_they_are() -> None:
    """Alone catches a resumed run that goes on with another dtype of the engine, as with another batch of graphs."""
    assert deciding_options(Options()) == ["dtype", "more"]
    assert Options().more is not Options().more


def test_options_that_are_none_are_left_out() -> None:
    assert Options(graph_sizes=[2]).given("graph_sizes", "max_length") == {"graph_sizes": [2]}


def test_other_arguments_pass_through() -> None:
    assert Options(more={"block_size": 32}).passed_arguments(SPEC, KNOWN) == {"block_size": 32}


@pytest.mark.parametrize(
    ("name", "policy", "message"),
    [
        ("blok_size", SPEC, r"rollout\.more\.blok_size is no argument of the installed Engine\. Did you mean 'block_s"),
        ("max_length", SPEC, r"rollout\.more\.max_length: set rollout\.max_length instead"),
        ("tp_size", SPEC, r"rollout\.more\.tp_size: set rollout\.tensor_parallel_size instead"),
        ("model_path", SPEC, r"rollout\.more\.model_path cannot be set: model\.policy\.path names it"),
        ("quantization", IN_FP8, r"rollout\.more\.quantization and model.weight_sync both say what weights are"),
    ],
)
def test_arguments_that_cannot_be_passed(name: str, policy: PolicySpec, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Options(more={name: 3}).passed_arguments(policy, KNOWN)


def test_the_format_of_weights_can_be_passed_where_none_travel_in_fp8() -> None:
    assert Options(more={"quantization": "awq"}).passed_arguments(SPEC, KNOWN) == {"quantization": "awq"}
