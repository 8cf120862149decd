"""What NVML says of a step's GPUs, with a double of it; what the update computes, against torch's counter of FLOPs."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from nvml_double import CODES, NVML, UUID
from packaging.version import Version
from rlplug_watch.gpu import use as use_module
from rlplug_watch.gpu.mfu import TokenCounts, UpdateCost, peak_flops
from rlplug_watch.gpu.nvml import MOST_FAILURES, GPUSampler
from rlplug_watch.gpu.use import GPUUse
from tiny_families import tiny
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

MODEL = AutoModelForCausalLM.from_config(tiny("llama"))
Start = Callable[..., GPUUse]


def wait_for(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Begin a training on the double's GPU; ``others`` are the rows of other ranks."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUID[4:]))
    monkeypatch.setattr(use_module, "GPUSampler", partial(GPUSampler, interval_s=0.001))
    monkeypatch.setattr(use_module, "empty_model", lambda policy: MODEL)
    monkeypatch.setattr(use_module, "rank_zero_info", warnings.warn)
    begun = []

    def begin(nvml: NVML | None, *others: list[float], gpu: str = "NVIDIA H200", **config: Any) -> GPUUse:
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: gpu)
        policy = SimpleNamespace(path="model", dtype="bfloat16")
        parts = {"policy": policy, "critic": None, "lora": None, "batch": SimpleNamespace(num_epochs=1)} | config
        strategy = SimpleNamespace(
            root_device=torch.device("cuda", 0),
            global_rank=3,
            gather_arrays=lambda array: np.concatenate([array, *(np.array([row]) for row in others)]),
        )
        use = GPUUse()
        begun.append(use)
        use.on_train_start(None, SimpleNamespace(strategy=strategy, config=SimpleNamespace(**parts)))
        return use

    yield begin
    for use in begun:
        use.close()


def sampled(use: GPUUse) -> dict[str, float]:
    """Return the metrics of a step after a sample."""
    sampler = use._sampler
    assert sampler is not None
    wait_for(lambda: bool(sampler.problem or sampler._samples["memory_gib"]))
    return use.after_update({"time/update": 2.0}) or {}


def test_metrics_are_of_all_ranks(start: Start) -> None:
    """It catches one rank's values that are given as all ranks', and samples of the step before."""
    nvml = NVML()
    use = start(nvml, [0.4, 30.0, 100.0, 2.0, 1.0, 0, 0, 0, 0, 0])
    found = sampled(use)
    expected = {"gpu/busy_share": 0.6, "gpu/busy_share_min": 0.4, "gpu/memory_gib": 30.0, "gpu/power_w": 200.0}
    assert found == pytest.approx(expected)
    nvml.busy = 100
    wait_for(lambda: bool(use._sampler and 1.0 in use._sampler._samples["busy_share"]))
    use.on_train_batch_start(None, None, None, 0)  # type: ignore[arg-type]
    assert sampled(use)["gpu/busy_share"] == pytest.approx(0.7)
    use.close()
    use.close()
    assert nvml.open == 0


def test_what_one_rank_lacks_is_absent(start: Start) -> None:
    """It catches a mean over some ranks, and a zero in place of what is not known."""
    nan = float("nan")
    assert sampled(start(NVML(), [0.4, nan, nan, 2.0, 1.0, 0, 0, 0, 0, 0])).keys() == {
        *("gpu/busy_share", "gpu/busy_share_min")
    }


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        ({"nvmlInit": "LibraryNotFound"}, "code 12"),
        ({"nvmlInit": "DriverNotLoaded"}, "code 9"),
        ({"nvmlInit": "LibRmVersionMismatch"}, "code 18"),
        ({"nvmlDeviceGetHandleByUUID": "NotFound"}, "code 6"),  # as of a part of a GPU (MIG)
        ({"nvmlDeviceGetMemoryInfo": "Unknown"}, "code 999"),
    ],
)
def test_a_gpu_that_cannot_be_read_is_said_once(start: Start, fails: dict[str, str], words: str) -> None:
    nvml = NVML(**fails)
    with pytest.warns(UserWarning, match=rf"rank 3: gpu/\.\.\. is not measured: NVML says .*{words}"):
        use = start(nvml)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [use.after_update({}) for _ in range(3)] == [{}, {}, {}]
    assert nvml.open == 0


def test_without_the_package_it_says_what_to_install(start: Start) -> None:
    with pytest.warns(UserWarning, match=r"^gpu/\.\.\. is not measured: pip install 'rlplug-watch\[gpu\]'\.$"):
        use = start(None)
    assert use.after_update({}) == {}


def test_what_a_gpu_does_not_have_is_left_out(start: Start) -> None:
    with pytest.warns(UserWarning, match="rank 3: gpu/busy_share: NVML has none for this GPU"):
        use = start(NVML(nvmlDeviceGetUtilizationRates="NotSupported"))
    assert sampled(use) == {"gpu/memory_gib": 10.0, "gpu/power_w": 300.0}


@pytest.mark.parametrize(
    ("errors", "ends"),
    [
        (["", "Unknown", "Unknown"], False),  # the first call is that of the start
        (["", *["Unknown"] * MOST_FAILURES], True),
        (["", "GpuIsLost"], True),
    ],
)
def test_failures_end_the_samples_when_they_stay(start: Start, errors: list[str], ends: bool) -> None:
    """It catches samples that end at a hiccup, and a lost GPU whose last values are repeated, or are zeros."""
    use = start(NVML(nvmlDeviceGetMemoryInfo=errors))
    if not ends:
        assert sampled(use)["gpu/memory_gib"] == 10.0
        return
    with pytest.warns(UserWarning, match="rank 3: gpu/... is not measured any more: NVML says NVML Error with code"):
        assert sampled(use) == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert use.after_update({}) == {}


def test_a_run_without_gpus_measures_nothing() -> None:
    use, strategy = GPUUse(), SimpleNamespace(root_device=torch.device("cpu"))
    use.on_train_start(None, SimpleNamespace(strategy=strategy))  # type: ignore[arg-type]
    assert use.after_update({}) is None


def test_the_double_has_the_errors_of_the_library() -> None:
    """It catches names and codes that pynvml does not have."""
    real = pytest.importorskip("pynvml")
    for name, code in CODES.items():
        assert type(real.NVMLError(code)) is getattr(real, f"NVMLError_{name}")
    for name in vars(NVML):
        assert not name.startswith("nvml") or callable(getattr(real, name))


# ---- MFU ------------------------------------------------------------------------------------------------------------


def sample(prompt: int, completion: int) -> Any:
    mask = np.arange(prompt + completion) >= prompt
    return SimpleNamespace(
        token_ids=np.zeros(prompt + completion), response_mask=mask, prompt=SimpleNamespace(token_ids=(0,) * prompt)
    )


# Mamba 2 in torch repeats groups for each head, and mixes chunks with each other; windows hide no scores from attention
AS_COUNTED: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_groups": 8, "mamba_chunk_size": 128},
    "nemotron_h": {"n_groups": 8, "chunk_size": 128},
    "gemma2": {"layer_types": ["full_attention"] * 2},
}
# transformers 5.8 multiplies states element by element, which torch does not count, or in other chunks; 5.19 does not
SINCE_5_19 = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.19"), reason="transformers before 5.19 computes states otherwise"
)
STATES = ["qwen3_next", "qwen3_5_text", "bamba", "nemotron_h"]
COUNTED = [
    *("llama", "gpt2", "qwen3_moe", "deepseek_v3", "lfm2", "jamba", "gemma2"),
    *(pytest.param(family, marks=SINCE_5_19) for family in STATES),
]


@pytest.mark.parametrize("family", COUNTED)
def test_flops_are_those_that_torch_counts(family: str) -> None:
    """Catches layers with a state, gates, experts or latent attention that are counted as Llama's."""
    length, options = 256, {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(tiny(family, **AS_COUNTED.get(family, {})), **options)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:  # of the backward pass it counts no groups
        model(torch.arange(length)[None] % 32, use_cache=False)
    # eager attention computes the scores that the causal mask hides too: twice as many
    counts = TokenCounts(tokens=length, trained=length, pairs=2 * length**2)
    assert UpdateCost.of(model).flops(counts) == pytest.approx(3 * counter.get_total_flops(), rel=0.02)


def test_shared_prompts_are_computed_once() -> None:
    counts = TokenCounts.of([sample(10, 6)] * 4)
    assert counts == TokenCounts(64, 24, 4 * 16**2, 40, 4 * 10**2)
    once = counts.without_shared(30 / 64)
    assert once.tokens == 10 + 4 * 6
    assert once.pairs == 10**2 + 4 * (16**2 - 10**2)
    assert TokenCounts.of([]).without_shared(0.0).tokens == 0


def test_mfu_is_of_all_ranks(start: Start) -> None:
    """It catches FLOPs of one rank over the peak of all, and epochs and shared tokens that are forgotten."""
    counts = TokenCounts.of([sample(10, 6)] * 2)
    use = start(NVML(), [0.4, 1.0, 1.0, 4.0, 989.5e12, *counts.as_row()], batch=SimpleNamespace(num_epochs=3))
    use.after_rollout(SimpleNamespace(samples=[sample(10, 6)] * 2))  # type: ignore[arg-type]
    found = use.after_update({"time/update": 2.0, "batch/shared_tokens": 30 / 64}) or {}
    all_ranks = TokenCounts.of([sample(10, 6)] * 4).without_shared(30 / 64)
    assert found["throughput/mfu"] == pytest.approx(3 * UpdateCost.of(MODEL).flops(all_ranks) / (4.0 * 2 * 989.5e12))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpu": "NVIDIA Thing 9"}, "the peak of NVIDIA Thing 9 is not known"),
        ({"critic": object()}, "a critic trains too"),
        ({"policy": SimpleNamespace(path="model", dtype="float32")}, "the policy computes in float32"),
    ],
)
def test_mfu_that_is_not_known_is_said_once(start: Start, options: dict[str, Any], words: str) -> None:
    with pytest.warns(UserWarning, match=rf"^throughput/mfu is not given: {words}\.$"):
        use = start(NVML(), **options)
    use.after_rollout(SimpleNamespace(samples=[sample(10, 6)]))  # type: ignore[arg-type]
    assert "throughput/mfu" not in sampled(use)


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H200", 989.5),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA GH200 480GB", 989.5),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA A10G", None),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA GB200", 2500.0),
        ("Tesla T4", None),
    ],
)
def test_peaks_by_name(name: str, teraflops: float | None) -> None:
    """It catches the peak of a GPU whose name begins as another's."""
    assert peak_flops(name) == (None if teraflops is None else teraflops * 1e12)
