"""Offload: what is offloaded is gone and comes back bit for bit, and the driver offloads it while it is not needed."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from rlplug_optims.state_offload import CHUNK_BYTES, OffloadedTensors, StateOffload, distinct_storages
from rollout_generators import generator_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rlplug.distributed.fsdp_units import transformer_blocks
from rlplug.distributed.offload import Offload
from rlplug.interfaces.rollout import EngineCapabilities, Placement
from rlplug.models.config import ModelConfig, load_spec, load_tokenizer
from rlplug.plugin_manager import plugins
from rlplug.rollout.engine_driver import EngineDriver, SyncedPolicy
from rlplug.rollout.hf_engine import HFRollout
from rlplug.rollout.source import RolloutRequest
from rlplug.types import GIB, Prompt, SamplingParams
from rlplug.weight_sync.buckets import policy_buckets

CPU = torch.device("cpu")


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def make_sharded(process_group, model_folder, load_policy):
    """Make sharded copies of one model, with passes in bf16, and an optimizer for each."""
    mesh = init_device_mesh("cpu", (1,))

    def make():
        model = load_policy(model_folder("qwen2"))
        precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for unit in [*transformer_blocks(model), model]:
            fully_shard(unit, mesh=mesh, reshard_after_forward=True, mp_policy=precision)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    return make


def train(model, optimizer, step: int) -> None:
    tokens = torch.arange(8).reshape(2, 4) + step
    model(input_ids=tokens).logits.float().logsumexp(-1).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def values(tree) -> list[torch.Tensor]:
    """Return copies of the tensors of a list, unsharded."""
    return [(each.full_tensor() if isinstance(each, DTensor) else each).detach().clone() for each in tree]


def state_of(optimizer) -> list[torch.Tensor]:
    return [tensor for state in optimizer.state.values() for tensor in state.values()]


def resident(tensors) -> int:
    """Return the bytes that the tensors of a list, or their shards, have on the device."""
    plain = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    return sum(each.untyped_storage().nbytes() for each in plain)


# ---- lots ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_bytes", [64, 512, CHUNK_BYTES])
def test_a_lot_is_gone_and_comes_back(chunk_bytes):
    """Storages that are smaller and larger than a chunk of host memory, and border on its end."""
    tensors = [torch.randn(size) for size in (3, 16, 1, 200, 0)]
    expected = values(tensors)
    offloaded = OffloadedTensors(lambda: tensors, CPU, chunk_bytes=chunk_bytes)
    for _ in range(2):
        offloaded.offload()
        offloaded.offload()  # changes nothing
        assert resident(tensors) == 0
        assert offloaded.num_bytes == 220 * 4
        offloaded.start_restore()
        offloaded.finish_restore()
        assert offloaded.num_bytes == 0
        assert all(torch.equal(tensor, value) for tensor, value in zip(tensors, expected, strict=True))
        tensors[1].add_(1)  # the next offload copies the new values
        expected[1].add_(1)


def test_views_of_one_storage_are_copied_once_and_stay_views():
    whole = torch.arange(12.0)
    part = whole[4:8].view(2, 2)
    offloaded = OffloadedTensors(lambda: {"whole": whole, "nested": [{"part": part}]}, CPU)
    offloaded.offload()
    assert offloaded.num_bytes == 48
    offloaded.start_restore()
    offloaded.finish_restore()
    whole[4] = 100
    assert part.tolist() == [[100, 5], [6, 7]]


def test_an_offload_during_a_restore_and_tensors_that_change():
    tensors = [torch.ones(4)]
    offloaded = OffloadedTensors(lambda: tensors, CPU)
    offloaded.offload()
    offloaded.start_restore()
    tensors.append(torch.full((3,), 2.0))  # such as the state of an optimizer that steps for the first time
    offloaded.offload()
    assert offloaded.num_bytes == 28
    offloaded.start_restore()
    offloaded.finish_restore()
    assert [tensor.tolist() for tensor in tensors] == [[1.0] * 4, [2.0] * 3]


def test_a_frozen_lot_is_copied_once():
    tensor = torch.ones(4)
    offloaded = OffloadedTensors(lambda: [tensor], CPU, is_frozen=True)
    for _ in range(2):
        offloaded.offload()
        assert offloaded.num_bytes == 16
        offloaded.start_restore()
        offloaded.finish_restore()
        assert tensor.tolist() == [1.0] * 4
        tensor.fill_(7)  # nobody does this to what is frozen; it shows which copy comes back


def test_storages_of_another_device_and_of_wrapped_tensors(make_sharded):
    model, _ = make_sharded()
    found = distinct_storages([torch.ones(2, device="meta"), list(model.parameters()), "text", None], CPU)
    expected = {id(parameter): parameter.to_local().untyped_storage() for parameter in model.parameters()}
    assert sorted(storage.data_ptr() for storage, _ in found) == sorted(s.data_ptr() for s in expected.values())
    assert sum(size for _, size in found) == sum(storage.nbytes() for storage in expected.values())


# ---- a trainer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["none", "optimizer", "optimizer_and_weights"])
def test_a_sharded_model_that_was_offloaded_trains_as_one_that_was_not(make_sharded, mode):
    (plain, plain_optimizer), (model, optimizer), (reference, _) = make_sharded(), make_sharded(), make_sharded()
    reference.requires_grad_(False)
    tokens = torch.arange(8).reshape(2, 4)
    with torch.no_grad():
        expected_logits = reference(input_ids=tokens).logits.clone()
    offload = Offload() if mode == "none" else StateOffload(mode, CPU, [model], [reference], [optimizer])
    num_bytes = resident(model.parameters())
    for step in range(4):
        num_state = resident(state_of(optimizer))
        offload.before_engine_wakes()
        left = resident(state_of(optimizer))
        assert left == (num_state if mode == "none" else 0)
        offload.before_generation()
        left = [resident(network.parameters()) for network in (model, reference)]
        assert left == ([0, 0] if mode == "optimizer_and_weights" else [num_bytes, num_bytes])
        offload.after_generation()
        with offload.reference_on_device(), torch.no_grad():
            assert torch.equal(reference(input_ids=tokens).logits, expected_logits)
        offload.before_update()
        train(model, optimizer, step)
        train(plain, plain_optimizer, step)
        for mine, other in zip(values(model.parameters()), values(plain.parameters()), strict=True):
            assert torch.equal(mine, other)
        for mine, other in zip(values(state_of(optimizer)), values(state_of(plain_optimizer)), strict=True):
            assert torch.equal(mine, other)


def test_the_first_optimizer_step_waits_and_a_step_that_is_given_up_restores(make_sharded, monkeypatch):
    model, optimizer = make_sharded()
    offload = StateOffload("optimizer", CPU, [model], [], [optimizer])
    train(model, optimizer, 0)
    expected = values(state_of(optimizer))
    finished = []
    original = OffloadedTensors.finish_restore
    monkeypatch.setattr(
        OffloadedTensors, "finish_restore", lambda tensors: (finished.append(tensors._is_restoring), original(tensors))
    )

    offload.before_engine_wakes()
    finished.clear()
    offload.before_update()
    assert not any(finished)
    train(model, optimizer, 1)
    assert finished == [True]
    assert not torch.equal(values(state_of(optimizer))[1], expected[1])  # it has stepped

    expected = values(state_of(optimizer))
    offload.before_engine_wakes()
    offload.after_step()
    assert all(torch.equal(mine, other) for mine, other in zip(values(state_of(optimizer)), expected, strict=True))


def test_metrics(make_sharded):
    model, optimizer = make_sharded()
    offload = StateOffload("optimizer_and_weights", CPU, [model], [], [optimizer])
    train(model, optimizer, 0)
    num_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    num_steps = len(list(model.parameters()))  # AdamW counts for each parameter, in float32
    offload.before_engine_wakes()
    offload.before_generation()
    offload.after_generation()
    metrics = offload.pop_metrics()
    assert metrics["offload/gib"] * GIB == 3 * num_bytes + 4 * num_steps
    assert metrics["offload/seconds"] > 0
    assert offload.pop_metrics() == {"offload/seconds": 0, "offload/gib": 0}


# ---- with an engine --------------------------------------------------------------------------------------------------


class Sleeper(HFRollout):
    """An engine that sleeps, and notes at each of its calls what the trainer has on the device."""

    capabilities = EngineCapabilities(sleep=True)

    def __init__(self, model, optimizer, reference) -> None:
        super().__init__()
        self.trainer = (model, optimizer, reference)
        self.calls: list[tuple[str, str]] = []

    def note(self, call: str) -> None:
        model, optimizer, reference = self.trainer
        parts = {"weights": model.parameters(), "optimizer": state_of(optimizer), "reference": reference.parameters()}
        self.calls.append((call, " ".join(name for name, tensors in parts.items() if resident(tensors))))

    def sleep(self):
        self.note("sleep")

    def wake(self, part):
        self.note(f"wake {part}")

    def update_weights(self, buckets, version):
        self.note("sync")
        return super().update_weights(buckets, version)

    def generate(self, requests, sampling):
        self.note("generate")
        return super().generate(requests, sampling)


@pytest.mark.parametrize("sleeps", [False, True])
def test_the_order_of_engine_and_trainer(make_sharded, model_folder, sleeps):
    (model, optimizer), (reference, _) = make_sharded(), make_sharded()
    train(model, optimizer, 0)
    config = ModelConfig(path=str(model_folder("qwen2")), dtype="float32")
    tokenizer = load_tokenizer(config)
    engine = Sleeper(model, optimizer, reference)
    offload = StateOffload("optimizer_and_weights", CPU, [model], [reference], [optimizer])
    spec = load_spec(config, tokenizer)
    driver = EngineDriver(
        engine=engine,
        policy=SyncedPolicy(spec, lambda: policy_buckets(model, spec, 1 << 14), plugins().hook),
        placement=Placement(CPU, rank=0, world_size=1),
        offload=offload,
        sleeps=sleeps,
        max_restarts=0,
    )

    def complete():
        engine.calls.clear()
        prompts = [Prompt(uid="a", token_ids=(3, 4), text="")]
        (sample,) = generator_of(driver).generate(
            RolloutRequest(prompts, 1, SamplingParams(max_new_tokens=3), "0/1", policy_version=1)
        )
        engine.note("after")
        return sample

    first = complete()
    sleeping = [("wake weights", "weights"), ("sync", "weights"), ("wake kv_cache", "")]
    before = sleeping if sleeps else [("sync", "weights")]
    after = [*([("sleep", "")] if sleeps else []), ("after", "weights")]
    assert engine.calls == [*before, ("generate", ""), *after]

    again = complete()  # a refill: an engine that did not sleep has the newest weights
    assert engine.calls == [*(before if sleeps else []), ("generate", ""), *after]
    assert again == first


def test_copies_for_the_oracle_are_no_aliases(make_sharded):
    """``values`` would prove nothing if it returned the tensors themselves."""
    model, _ = make_sharded()
    taken = values(model.parameters())
    kept = copy.deepcopy(taken)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert all(torch.equal(mine, other) for mine, other in zip(taken, kept, strict=True))
