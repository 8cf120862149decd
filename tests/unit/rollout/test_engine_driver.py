"""The driver after faults: engines start anew, take the weights again, and are asked for what is missing."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from capable_engines import ServesAdapters
from rollout_generators import generator_of
from transformers import AutoModelForCausalLM

from rlplug.distributed.offload import Offload
from rlplug.errors import RunError
from rlplug.interfaces import EngineCapabilities, EngineFault, Placement
from rlplug.models.config import ModelConfig, load_spec, load_tokenizer
from rlplug.models.loading import empty_model, load_weights, to_empty_on
from rlplug.models.lora.adapters import adapter_weights, add_adapters, load_adapters
from rlplug.models.lora.config import LoRAConfig
from rlplug.plugin_manager import plugins
from rlplug.rollout import engine_driver as driver_module
from rlplug.rollout.engine_driver import EngineDriver, RankAgreement, SyncedPolicy
from rlplug.rollout.hf_engine import HFRollout
from rlplug.rollout.source import RolloutRequest
from rlplug.types import Prompt, SamplingParams
from rlplug.weight_sync import buckets as buckets_module
from rlplug.weight_sync.buckets import policy_buckets
from rlplug.weight_sync.config import WeightSyncConfig
from rlplug.weight_sync.fp8_layers import choose_fp8_weights
from rlplug.weight_sync.hf_names import adapters_of

CPU = torch.device("cpu")
PROMPTS = [Prompt(uid=str(index), token_ids=(3, 4 + index), text="") for index in range(4)]


class FaultyRollout(HFRollout):
    """Fails at the calls of its list, such as ``("generate", 1)``: the first one, after one completion."""

    capabilities = EngineCapabilities(sleep=True)

    def __init__(self, faults=(), together=1):
        super().__init__()
        self.faults, self.together = set(faults), together
        self.calls: list[str] = []
        self.asked: list[list[str]] = []

    @property
    def ranks_per_engine(self):
        return self.together

    def note(self, call):
        self.calls.append(call)
        if (call, self.calls.count(call)) in self.faults:
            raise EngineFault(f"{call} failed.")

    def start(self, policy, placement):
        self.note("start")
        super().start(policy, placement)

    def update_weights(self, buckets, version):
        self.note("sync")
        return super().update_weights(buckets, version)

    def generate(self, requests, sampling):
        self.asked.append([request.request_id for request in requests])
        try:
            self.note("generate")
        except EngineFault as problem:
            raise EngineFault(str(problem), super().generate(requests[:1], sampling)) from None
        return super().generate(requests, sampling)

    def sleep(self):
        self.note("sleep")

    def wake(self, part):
        self.note(f"wake {part}")

    def close(self):
        self.calls.append("close")
        super().close()


@pytest.fixture
def make_driver(model_folder):
    folder = str(model_folder("qwen2"))
    config = ModelConfig(path=folder, dtype="float32")
    tokenizer = load_tokenizer(config)
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def make(
        engine,
        sleeps=False,
        max_restarts=2,
        any_rank=bool,
        rank=0,
        world_size=1,
        fp8=None,
        policy=policy,
        adapters=None,
    ):
        spec = replace(load_spec(config, tokenizer), fp8=fp8, adapters=adapters)
        return EngineDriver(
            engine=engine,
            policy=SyncedPolicy(spec, partial(policy_buckets, policy, spec, 1 << 14), plugins().hook),
            placement=Placement(CPU, rank, world_size),
            offload=Offload(),
            sleeps=sleeps,
            max_restarts=max_restarts,
            agreement=RankAgreement(any_rank),
        )

    make.policy, make.config = policy, config
    return make


def generate(driver, version=1):
    """Return what identifies the samples; their logprobs depend on the batch in the last bit."""
    samples = generator_of(driver).generate(
        RolloutRequest(PROMPTS, 2, SamplingParams(max_new_tokens=3), "0/1", version)
    )
    return [(sample.group, sample.token_ids.tolist(), sample.policy_version) for sample in samples]


@pytest.mark.filterwarnings("ignore:.*restarts")
def test_weights_are_sent_in_the_sync_alone_unless_the_engine_restarts(make_driver):
    """It catches a rollout that sends them again, and an engine that starts again and generates without them."""
    engine = FaultyRollout(faults=[("generate", 2)])
    driver = make_driver(engine)
    driver.sync_weights(1)
    driver.sync_weights(1)
    assert engine.calls == ["start", "sync"]
    expected = generate(driver)
    assert engine.calls[2:] == ["generate"]
    assert generate(driver) == expected
    assert engine.calls[3:] == ["generate", "close", "start", "sync", "generate"]


@pytest.mark.filterwarnings("ignore:.*restarts")
def test_restarts_of_sync_and_generation_are_those_of_one_rollout(make_driver):
    """It catches an engine that may fail twice as often as ``max_engine_restarts`` says."""
    driver = make_driver(FaultyRollout(faults=[("sync", 1), ("generate", 1), ("generate", 2)]))
    driver.sync_weights(1)
    with pytest.raises(RunError, match="failed again after 2 restarts in one rollout: generate failed"):
        generate(driver)


def test_weights_that_fp8_cannot_hold_leave_the_engine_with_its_former_ones(make_driver):
    """Nothing of the sync was sent: the engine still has the weights of the last one, and says so."""
    fp8 = choose_fp8_weights(make_driver.policy, WeightSyncConfig(dtype="fp8_block"))
    engine = FaultyRollout()
    driver = make_driver(engine, fp8=fp8)
    former = generate(driver, version=1)
    weight = make_driver.policy.model.layers[1].mlp.up_proj.weight
    weight.data[3, 3] = torch.nan
    with pytest.raises(RunError, match=r"model\.layers\.1\.mlp\.up_proj\.weight contains NaN or inf"):
        generate(driver, version=2)
    assert engine.calls == ["start", "sync", "generate"]
    weight.data[3, 3] = 0.0
    assert generate(driver, version=1) == former
    assert engine.calls == ["start", "sync", "generate", "generate"]


class ServesAndFails(ServesAdapters):
    """Notes what each sync brings, and fails in the one of ``fails_at``."""

    capabilities = replace(ServesAdapters.capabilities, sleep=True)

    def __init__(self, fails_at):
        super().__init__()
        self.fails_at = fails_at
        self.brought = []

    def update_weights(self, buckets, version):
        if version == self.fails_at and self.brought[-1] != "fault":
            self.brought.append("fault")
            raise EngineFault("the sync failed.")
        report = super().update_weights(buckets, version)
        self.brought.append(report.num_tensors)
        return report

    def sleep(self):
        pass

    def wake(self, part):
        pass


@pytest.mark.filterwarnings("ignore:ServesAndFails restarts")
@pytest.mark.parametrize("sleeps", [False, True])
def test_an_engine_that_serves_adapters_gets_frozen_weights_after_each_start(make_driver, sleeps):
    """Its samples are those of an engine that gets merged weights, whose adapters change with each version."""
    lora = LoRAConfig(rank=3, alpha=40)
    policy = empty_model(make_driver.config)
    add_adapters(policy, lora, torch.float32)
    to_empty_on(policy, CPU)
    policy.tie_weights()
    load_weights(policy, make_driver.config)
    load_adapters(policy, lora)
    adapters = adapter_weights(make_driver.config, lora)
    engine = ServesAndFails(fails_at=3)
    serving = make_driver(engine, sleeps, policy=policy, adapters=adapters)
    merging = make_driver(HFRollout(), policy=policy)
    found = []
    for version in (1, 2, 3, 4):
        with torch.no_grad():
            for update in adapters_of(policy).updates.values():
                update.up.weight.normal_(generator=torch.Generator().manual_seed(version))
        found.append(generate(serving, version))
        assert found[-1] == generate(merging, version)
    assert len({repr([tokens for _, tokens, _ in samples]) for samples in found}) == 4
    alone = 2 * len(adapters.modules)
    whole = alone + len(list(make_driver.policy.parameters()))
    assert engine.brought == [whole, alone, "fault", whole, alone]


@pytest.mark.filterwarnings("ignore:FaultyRollout restarts")
def test_finished_completions_are_kept_and_the_rest_is_asked_again(make_driver):
    expected = generate(make_driver(HFRollout()))
    engine = FaultyRollout({("generate", 1)})
    driver = make_driver(engine)
    assert generate(driver) == expected
    assert engine.calls == ["start", "sync", "generate", "close", "start", "sync", "generate"]
    assert engine.asked[1] == engine.asked[0][1:]
    assert driver.pop_metrics()["rollout/restarts"] == 1


@pytest.mark.filterwarnings("ignore:FaultyRollout restarts")
@pytest.mark.parametrize("call", ["wake weights", "sync", "wake kv_cache", "generate"])
def test_every_call_of_a_rollout_may_fail(make_driver, call):
    expected = generate(make_driver(HFRollout()))
    engine = FaultyRollout({(call, 1)})
    assert generate(make_driver(engine, sleeps=True)) == expected
    again = ["close", "start", "sleep", "wake weights", "sync", "wake kv_cache", "generate", "sleep"]
    assert engine.calls[-len(again) :] == again


def test_buckets_are_taken_though_the_engine_failed(make_driver, monkeypatch):
    """Each is a collective operation, in which other ranks wait."""
    taken = []

    def watched(*arguments):
        taken.append("begin")
        yield from weight_buckets(*arguments)
        taken.append("end")

    weight_buckets = buckets_module.weight_buckets
    monkeypatch.setattr(buckets_module, "weight_buckets", watched)
    with pytest.warns(UserWarning, match="restarts, and 8 requests are sent again: sync failed"):
        generate(make_driver(FaultyRollout({("sync", 1)})))
    assert taken == ["begin", "end"] * 2


def test_fault_of_another_rank_restarts_this_one_too(make_driver):
    flags = iter([True, False, False])  # a rollout's fault, the start after it, and the next rollout
    engine = FaultyRollout()
    with warnings.catch_warnings(action="error"):  # the other rank says what happened
        generate(make_driver(engine, any_rank=lambda mine: mine or next(flags)))
    assert engine.calls == ["start", "sync", "generate", "close", "start", "sync"]  # it had them all


@pytest.mark.filterwarnings("ignore:FaultyRollout restarts")
@pytest.mark.parametrize("is_own", [True, False])
def test_a_restart_that_fails_is_tried_again(make_driver, is_own):
    """As when another server is lost while the engine joins those that are left; on this rank, or on another one."""
    flags = iter([False, not is_own, False, False, False])  # rollout, start, rollout, start, rollout
    engine = FaultyRollout({("generate", 1), ("start", 2)} if is_own else {("generate", 1)})
    driver = make_driver(engine, any_rank=lambda mine: next(flags) or mine)
    generate(driver)
    assert engine.calls.count("start") == 3
    assert driver.pop_metrics()["rollout/restarts"] == 2


@pytest.mark.filterwarnings("ignore:FaultyRollout restarts")
def test_restarts_are_bounded(make_driver):
    engine = FaultyRollout({("generate", number) for number in range(1, 9)})
    with pytest.raises(RunError, match=r"failed again after 2 restarts .* generate failed.*max_engine_restarts"):
        generate(make_driver(engine))
    assert engine.calls.count("start") == 3


def test_fault_of_an_engine_that_cannot_start_again_ends_the_run(make_driver):
    engine = FaultyRollout({("generate", 1)})
    engine.capabilities = EngineCapabilities(sleep=True, restart=False)
    with pytest.raises(RunError, match=r"cannot start again in this process: generate failed\. Resume .* --resume"):
        generate(make_driver(engine))
    assert engine.calls.count("start") == 1


def test_ranks_of_one_engine_divide_its_completions(make_driver):
    """They ask for the same, and keep whole groups each; together they have what two single ranks have."""
    alone = [make_driver(HFRollout(), rank=rank, world_size=4) for rank in range(4)]
    shared = [FaultyRollout(together=2) for _ in range(4)]
    drivers = [make_driver(engine, rank=rank, world_size=4) for rank, engine in enumerate(shared)]
    assert [generate(driver) for driver in drivers] == [generate(driver) for driver in alone]
    assert shared[0].asked == shared[1].asked != shared[2].asked == shared[3].asked


def test_advice_is_printed_once(make_driver, monkeypatch):
    """Its numbers differ from step to step, and each step would print it."""
    printed = []
    monkeypatch.setattr(driver_module, "rank_zero_info", printed.append)
    engine = HFRollout()
    waiting = iter(["448", "1,024"])
    engine.advice = lambda: [f"{next(waiting)} requests waited: raise max_num_seqs from 64"]
    driver = make_driver(engine)
    for _ in range(2):
        generate(driver)
        driver.pop_metrics()
    assert printed == ["HFRollout: 448 requests waited: raise max_num_seqs from 64"]


def test_metrics_are_of_all_rollouts_since_they_were_asked_for(make_driver):
    """A step has several rollouts where it draws prompts again: those of its last one alone may be 0."""
    driver = make_driver(HFRollout())
    num_tokens = sum(len(ids) for _ in range(2) for _, ids, _ in generate(driver)) - 2 * 2 * sum(
        len(prompt.token_ids) for prompt in PROMPTS
    )
    assert driver.pop_metrics()["rollout/num_tokens"] == num_tokens
    assert driver.pop_metrics() == {}
