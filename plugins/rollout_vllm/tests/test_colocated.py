"""``VLLMRollout`` on the CPU: faults, deadlines, failing starts, and what it leaves alone in the trainer's process."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("vllm", reason="`make test-vllm` installs vLLM")

from rlplug_rollout_vllm import VLLMRollout
from transformers import AutoModelForCausalLM

from rlplug.errors import ConfigError, RunError
from rlplug.interfaces import EngineFault, Placement, PolicySpec
from rlplug.rollout.buckets import weight_buckets
from rlplug.testing.models import ENDS, MAX_CONTEXT, PAD, make_model_folder
from rlplug.types import Request, SamplingParams

PLACEMENT = Placement(torch.device("cpu"), rank=0, world_size=1)
REQUESTS = [Request(f"0/{index}", (3, 4 + index), seed=index) for index in range(4)]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> PolicySpec:
    folder = tmp_path_factory.mktemp("model") / "llama"
    make_model_folder("llama", folder)
    return PolicySpec(str(folder), torch.float32, ENDS, PAD, MAX_CONTEXT)


@pytest.fixture(scope="module")
def trainer_group() -> Iterator[None]:
    """The trainer's own process group, as Lightning makes one on a single device too."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def engine(spec: PolicySpec, trainer_group: None) -> Iterator[VLLMRollout]:
    engine = VLLMRollout(kv_cache_gib=0.25)
    engine.start(spec, PLACEMENT)
    yield engine
    engine.close()


def sync(engine: VLLMRollout, spec: PolicySpec) -> None:
    policy = AutoModelForCausalLM.from_pretrained(spec.path, dtype=torch.float32)
    engine.update_weights(weight_buckets(policy, torch.float32, 1 << 14), version=1)


def test_engine_that_raises_is_a_fault_that_keeps_what_is_done(engine, spec, monkeypatch):
    sync(engine, spec)
    step, outputs = engine._engine.step, []

    def failing():
        outputs.extend(output for output in step() if output.finished)
        if len(outputs) >= 2:
            raise RuntimeError("the engine core died")
        return outputs[-1:] if outputs else []

    monkeypatch.setattr(engine._engine, "step", failing)
    requests = [*REQUESTS[:3], Request("long", (3, 4), seed=9)]
    with pytest.raises(EngineFault, match="RuntimeError: the engine core died") as fault:
        engine.generate(requests, SamplingParams(max_new_tokens=200))
    assert {completion.request_id for completion in fault.value.completions} <= {r.request_id for r in requests}
    monkeypatch.undo()
    engine.close()
    engine.start(spec, PLACEMENT)
    sync(engine, spec)
    assert len(engine.generate(REQUESTS, SamplingParams(4))) == 4


def test_deadline_is_a_fault(engine, spec, monkeypatch):
    sync(engine, spec)
    monkeypatch.setattr(engine, "generate_deadline_s", 0.05)
    with pytest.raises(EngineFault, match=r"0 of 1 completions.*generate_deadline_s 0\.05"):
        engine.generate([Request("endless", (3,), seed=1)], SamplingParams(max_new_tokens=2000, temperature=0.001))
    engine.close()
    engine.start(spec, PLACEMENT)


def test_trainer_is_left_as_it_was(engine, spec):
    assert dist.is_initialized()
    assert dist.get_world_size() == 1
    assert not {"RANK", "LOCAL_RANK", "VLLM_ENABLE_V1_MULTIPROCESSING"} & os.environ.keys()
    assert torch.get_default_dtype() == torch.float32
    dist.barrier()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"engine_args": {"blok_size": 32}}, ConfigError, r"blok_size is no argument .* Did you mean 'block_size'"),
        ({"tensor_parallel_size": 2}, ConfigError, r"tensor_parallel_size is 2, and the trainer has 1 ranks"),
        ({"kv_cache_gib": 1e-4}, RunError, r"vLLM did not start: ValueError: No available memory"),
    ],
)
def test_start_that_fails_says_why(engine, spec, options, error, message):
    with pytest.raises(error, match=message):
        VLLMRollout(**options).start(spec, PLACEMENT)
