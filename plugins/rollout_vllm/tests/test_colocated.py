"""``VLLMRollout`` on the CPU: faults, deadlines, failing starts, and what it leaves alone in the trainer's process."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("vllm", reason="`make test-vllm` installs vLLM")

from rlplug_devkit.models import MAX_CONTEXT, PAD, make_model_folder
from rlplug_rollout_vllm import VLLMRollout
from transformers import AutoModelForCausalLM

from rlplug.errors import ConfigError, RunError
from rlplug.interfaces import EngineFault, Placement, PolicySpec
from rlplug.types import Completion, Request, SamplingParams
from rlplug.weight_sync.buckets import weight_buckets

PLACEMENT = Placement(torch.device("cpu"), rank=0, world_size=1)
LONG = SamplingParams(1500)
REQUESTS = [Request(f"0/{index}", (3, 4 + index), seed=index) for index in range(4)]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> PolicySpec:
    folder = tmp_path_factory.mktemp("model") / "llama"
    make_model_folder("llama", folder)
    no_ends = ()  # how long completions are should not depend on what a CPU's kernels round
    return PolicySpec(str(folder), torch.float32, no_ends, PAD, MAX_CONTEXT)


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


def test_an_engine_looks_at_its_model_in_this_process(engine, monkeypatch):
    from vllm.model_executor.models import registry

    monkeypatch.setattr(registry._LazyRegisteredModel, "_load_modelinfo_from_cache", lambda *_: None)
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda _: pytest.fail("vLLM imports itself a second time"))
    assert registry.ModelRegistry.models["LlamaForCausalLM"].inspect_model_cls().is_text_generation_model


def test_engine_that_raises_is_a_fault_that_keeps_what_is_done(engine, spec, monkeypatch):
    sync(engine, spec)
    step, outputs = engine._engine.step, []

    def failing():
        finished = [output for output in step() if output.finished]
        outputs.extend(finished)
        if len(outputs) >= 2:
            raise RuntimeError("the engine core died")
        return finished

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


def test_sampling_that_vllm_refuses_is_no_fault(engine, spec):
    """A fault would be answered by starting the engine again, until the restarts are used up."""
    sync(engine, spec)
    with pytest.raises(RunError, match=r"vLLM refuses what model\.sampling asks for: temperature must be in"):
        engine.generate(REQUESTS, SamplingParams(4, temperature=2.5))


def test_deadline_is_a_fault(engine, spec, monkeypatch):
    sync(engine, spec)
    monkeypatch.setattr(engine._requests, "deadline_s", 0.05)
    with pytest.raises(EngineFault, match=r"0 of 1 completions.*generate_deadline_s 0\.05"):
        engine.generate([Request("endless", (3,), seed=1)], SamplingParams(2000))
    engine.close()
    engine.start(spec, PLACEMENT)


def test_submitted_requests_run_beside_generate_and_come_back_once(engine, spec):
    sync(engine, spec)
    expected = engine.generate(REQUESTS, SamplingParams(12))
    submitted = [Request(f"s{request.request_id}", request.prompt_ids, request.seed) for request in REQUESTS]
    engine.submit(submitted, SamplingParams(12))
    generated = engine.generate(REQUESTS, SamplingParams(12))
    collected = {completion.request_id: completion for completion in collect_all(engine, len(submitted))}
    assert generated == expected
    assert [collected[r.request_id].token_ids.tolist() for r in submitted] == [c.token_ids.tolist() for c in expected]
    assert engine.collect(0.0) == []


def test_aborted_request_has_the_tokens_and_logprobs_that_it_would_have_had(engine, spec):
    sync(engine, spec)
    long = Request("long", (3,), seed=5)
    engine.submit([long, Request("short", (3,), seed=6)], LONG)
    engine.abort(["short"])
    assert len(engine.collect(0.0)[0].token_ids) == 0, "it was stopped before the engine worked"
    assert engine.collect(0.3) == []
    engine.abort(["long"])
    (partial,) = engine.collect(60.0)
    count = len(partial.token_ids)
    (whole,) = engine.generate([replace(long, max_new_tokens=count + 1)], LONG)
    assert partial.finish_reason == "abort"
    assert 0 < count < len(whole.token_ids)
    assert partial.token_ids.tolist() == whole.token_ids[:count].tolist()
    assert partial.logprobs.tolist() == whole.logprobs[:count].tolist()


def test_deadline_holds_for_a_submitted_request(engine, spec, monkeypatch):
    sync(engine, spec)
    engine.submit([Request("endless", (3,), seed=1)], LONG)
    engine.submit([Request("done", (3,), seed=1)], SamplingParams(2))
    done = engine.collect(60.0)
    monkeypatch.setattr(engine._requests, "deadline_s", 0.05)
    with pytest.raises(EngineFault, match=r"0 of 1 completions.*generate_deadline_s 0\.05"):
        engine.collect(60.0)
    assert [completion.request_id for completion in done] == ["done"]
    engine.close()
    engine.start(spec, PLACEMENT)


def test_new_weights_wait_until_no_request_runs(engine, spec):
    sync(engine, spec)
    engine.submit([Request("running", (3,), seed=1)], LONG)
    assert engine.collect(0.1) == []
    with pytest.raises(EngineFault, match="1 requests that were submitted still run"):
        sync(engine, spec)
    engine.abort(["running"])
    engine.collect(60.0)
    sync(engine, spec)


@pytest.mark.parametrize("options", [{"tensor_parallel_size": 2}, {"enable_prefix_caching": False}])
def test_capabilities_are_those_of_the_options(options):
    capabilities = VLLMRollout(**options).capabilities
    assert capabilities.streaming == (options.get("tensor_parallel_size", 1) == 1)
    assert capabilities.multi_turn == options.get("enable_prefix_caching", True)


def collect_all(engine: VLLMRollout, count: int) -> list[Completion]:
    completions: list[Completion] = []
    for _ in range(60):
        completions += engine.collect(1.0)
        if len(completions) >= count:
            break
    return completions


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
