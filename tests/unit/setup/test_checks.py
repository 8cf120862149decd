"""Runs that cannot give an algorithm what it needs, or configure what it does not use, are refused at start."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from capable_engines import ServesAdapters

from rlplug.config import Limits, MemoryConfig, RunConfig
from rlplug.errors import ConfigError, RunError
from rlplug.interfaces import Algorithm, Effect, EngineCapabilities, Needs, Optimization, PolicySpec, TrainerClaims
from rlplug.models.config import ModelConfig
from rlplug.models.critic import CriticConfig
from rlplug.models.lora.config import LoRAConfig
from rlplug.models.transformers_trainer import TransformersTrainer
from rlplug.rollout.config import PartialRollout
from rlplug.rollout.hf_engine import HFRollout
from rlplug.setup.checks.engine import check_context, check_engine, check_plugins
from rlplug.setup.checks.trainer import check_optimizations, check_trainer
from rlplug.setup.checks.training import check_algorithm, check_streamed_prompts, check_validation
from rlplug.training.batch_plan import BatchPlan, BatchSizes
from rlplug.training.validation.config import ValidationConfig
from rlplug.types import MeshSizes
from rlplug.weight_sync.config import WeightSyncConfig


class Probe(Algorithm):
    def __init__(self, **needs):
        self._needs = Needs(**needs)

    @property
    def needs(self):
        return self._needs

    def advantages(self, batch):
        raise NotImplementedError

    def loss(self, micro_batch, logprobs, entropy, denominators):
        raise NotImplementedError


class Learner(Probe):
    def value_loss(self, micro_batch, values, denominators):
        raise NotImplementedError


class Silent(HFRollout):
    """An engine without logprobs."""

    capabilities = EngineCapabilities(logprobs=False)


class Sleeper(HFRollout):
    capabilities = EngineCapabilities(sleep=True)


class ServesInFP8(ServesAdapters):
    capabilities = EngineCapabilities(adapters=True, fp8_refit=True)


def check(needs, group_size=4, critic=None, reference=None, num_steps=10, name="Learner"):
    plan = BatchPlan(BatchSizes(prompts_per_step=2, group_size=group_size), world_size=1)
    check_algorithm((Probe if name == "Probe" else Learner)(**needs), plan, critic, reference, num_steps)


@pytest.mark.parametrize(
    "run",
    [
        {"needs": {}, "group_size": 1},
        {"needs": {"groups": True}, "group_size": 2},
        {"needs": {"critic": True}, "critic": CriticConfig(warmup_steps=9)},
        {"needs": {"reference_policy": True}},
        {"needs": {"reference_policy": True}, "reference": ModelConfig(path="x")},
    ],
)
def test_what_fits_passes(run):
    check(**run)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ({"needs": {"groups": True}, "group_size": 1}, ["Learner", "model.batch.group_size is 1", "at least 2"]),
        ({"needs": {"critic": True}}, ["Learner needs a critic", "model.critic", "critic: {}"]),
        ({"needs": {}, "critic": CriticConfig()}, ["Learner uses no critic", "remove model.critic", "PPO"]),
        (
            {"needs": {"critic": True}, "critic": CriticConfig(warmup_steps=10)},
            ["model.critic.warmup_steps is 10", "10 steps", "raise model.num_steps"],
        ),
        ({"needs": {}, "reference": ModelConfig(path="x")}, ["model.reference", "kl_coefficient"]),
        ({"needs": {"critic": True}, "critic": CriticConfig(), "name": "Probe"}, ["Probe", "lacks value_loss"]),
    ],
)
def test_what_does_not_fit_names_key_and_fix(run, words):
    with pytest.raises(ConfigError) as error:
        check(**run)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("partial", "words"),
    [
        (None, "generation and update take turns: set model.partial_rollout.asynchronous to true"),
        (PartialRollout(over_provisioning=1.5), "generation and update take turns"),
        (PartialRollout(asynchronous=True, max_staleness=0), "max_staleness is 0.*: set max_staleness to 1 or more"),
    ],
)
def test_a_validation_beside_the_training_needs_generation_beside_it(partial, words):
    config = SimpleNamespace(validation=ValidationConfig(beside_training=True), partial_rollout=partial)
    with pytest.raises(ConfigError, match=f"model.validation.beside_training is true, and .*{words}"):
        check_validation(config)


class Short(HFRollout):
    def __init__(self, context):
        super().__init__()
        self._context = context

    def max_context(self, policy):
        return self._context


def test_prompts_and_completions_fit_the_engines_context():
    """It catches a run that ends in the step which draws the first prompt that is too long."""
    policy = PolicySpec("folder", torch.bfloat16, eos_token_ids=(1,), pad_token_id=0, max_context=100)
    check_context(Short(60), policy, longest_prompt=20, max_new_tokens=40)
    with pytest.raises(ConfigError, match=r"Short generates up to 60 tokens .* prompt \(21\) .* \(40\) has 61"):
        check_context(Short(60), policy, longest_prompt=21, max_new_tokens=40)
    for wrong in (0, 101, 60.0, None, True):
        with pytest.raises(RunError, match=f"Short.max_context in .* up to the policy's .* returned .*{wrong}"):
            check_context(Short(wrong), policy, longest_prompt=20, max_new_tokens=40)


def config_of(engine, needs, sleeps, gate, **options):
    return RunConfig(
        policy=ModelConfig(path="x"),
        algorithm=Probe(**needs),
        optimizer=torch.optim.AdamW,
        rollout=engine,
        memory=MemoryConfig(sleep_between_rollouts=sleeps),
        limits=Limits(mismatch_gate=gate),
        **options,
    )


@pytest.mark.parametrize(
    ("engine", "needs", "sleeps", "gate", "words"),
    [
        (HFRollout(), {}, True, None, ["model.memory.sleep_between_rollouts", "HFRollout", "that can: Sleeper"]),
        (
            Silent(),
            {"rollout_logprobs": True},
            False,
            None,
            ["model.algorithm.init_args.correction (Probe)", "'logprobs'", "Silent", "HFRollout"],
        ),
        (Silent(), {}, False, 0.1, ["Silent returns no logprobs", "model.limits.mismatch_gate to null"]),
    ],
)
def test_an_engine_that_cannot(engine, needs, sleeps, gate, words):
    with pytest.raises(ConfigError) as error:
        check_engine(config_of(engine, needs, sleeps, gate), [HFRollout, Silent, Sleeper])
    assert all(word in str(error.value) for word in words), str(error.value)


def test_an_engine_that_serves_no_adapters_is_refused_with_both_ways_out():
    """So is FP8 beside adapters; merged weights go to every engine."""
    lora = LoRAConfig(sync="adapters")
    words = r"model\.lora\.sync: adapters .*'adapters', which HFRollout lacks.*can: ServesAdapters\. Or .* to merged"
    with pytest.raises(ConfigError, match=words):
        check_engine(config_of(HFRollout(), {}, False, None, lora=lora), [HFRollout, ServesAdapters])
    check_engine(config_of(ServesAdapters(), {}, False, None, lora=lora), [])
    check_engine(config_of(HFRollout(), {}, False, None, lora=LoRAConfig()), [])
    in_fp8 = WeightSyncConfig(dtype="fp8_block")
    with pytest.raises(ConfigError, match=r"model\.lora\.sync is adapters.*FP8.*model\.weight_sync\.dtype to null"):
        check_engine(config_of(ServesInFP8(), {}, False, None, lora=lora, weight_sync=in_fp8), [])


def test_an_engine_that_can():
    check_engine(config_of(Sleeper(), {"rollout_logprobs": True}, True, 0.1), [])
    check_engine(config_of(Silent(), {}, False, None), [])
    check_engine(config_of(HFRollout(), {}, True, 0.1), [], is_here=False)  # elsewhere it may be able to sleep


class Plain(Optimization):
    def effects(self):
        return [Effect("something")]


class Fast(Plain):
    pass


class Jealous(Plain):
    conflicts = {"Fast": "both do the same"}  # noqa: RUF012


def only(network, optimization):
    optimization.applies_to = (network,)
    return optimization


POLICY, BOTH = {"policy"}, {"policy", "critic"}


def test_optimizations_that_go_together():
    check_optimizations([], POLICY)
    check_optimizations([Plain(), Fast()], POLICY)
    check_optimizations([Jealous(), Plain()], POLICY)
    check_optimizations([only("policy", Fast()), only("critic", Jealous())], BOTH)


def test_an_optimization_of_no_model_is_refused():
    """Catches one for the critic alone that would do nothing, without a word, where the critic has no trunk."""
    with pytest.raises(ConfigError, match="has Fast for no model of the run: remove it"):
        check_optimizations([Plain(), only("critic", Fast())], POLICY)


def test_an_optimization_is_enabled_once():
    with pytest.raises(ConfigError, match="has Fast twice"):
        check_optimizations([Fast(), Plain(), Fast()], POLICY)
    check_optimizations([only("policy", Fast()), only("critic", Fast())], BOTH)


@pytest.mark.parametrize("pair", [[Fast, Jealous], [Jealous, Fast]])
def test_a_conflict_names_both_and_the_reason(pair):
    """Whichever of the two declares it, and whichever is listed first."""
    with pytest.raises(ConfigError, match="both do the same") as refused:
        check_optimizations([Plain(), *(optimization() for optimization in pair)], POLICY)
    assert f"{pair[0].__name__} and {pair[1].__name__}" in str(refused.value)


class Modest(TransformersTrainer):
    claims = TrainerClaims(attention=frozenset({"packed"}), optimizations=frozenset({"Fast"}))

    def check(self, config, key, mesh):
        if config.path == "bad":
            raise ConfigError(f"{key} is bad")


class Fast(Optimization):
    def effects(self):
        return [Effect("fast")]


class Other(Fast):
    pass


MODEL = ModelConfig(path="x")
ALONE = MeshSizes(1, 1, 1, 1)


def run_of(trainer, **options):
    return RunConfig(
        **{"policy": MODEL, "optimizer": torch.optim.AdamW, "trainer": trainer, **options}, algorithm=Probe()
    )


@pytest.mark.parametrize(
    ("options", "mesh", "words"),
    [
        ({}, MeshSizes(2, 1, 1, 1), ["trainer.strategy.init_args.replicate is 2", "Modest"]),
        ({}, MeshSizes(1, 1, 2, 1), ["trainer.strategy.init_args.sequence is 2", "Modest"]),
        ({}, MeshSizes(1, 1, 1, 2), ["trainer.strategy.init_args.tensor is 2", "Modest", "remove model.trainer"]),
        ({"critic": CriticConfig()}, ALONE, ["model.critic", "Modest"]),
        ({"optimizations": [Fast(), Other()]}, ALONE, ["has Other", "Modest", "Those that work: Fast"]),
        ({"policy": ModelConfig("x", attn_implementation="flash_attention_2")}, ALONE, ["model.policy", "give packed"]),
        ({"reference": ModelConfig("bad")}, ALONE, ["model.reference is bad"]),
    ],
)
def test_a_run_that_needs_more_than_its_trainer_claims(options, mesh, words):
    with pytest.raises(ConfigError) as error:
        check_trainer(run_of(Modest(), **options), mesh)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_transformers_models_are_trained_with_everything(monkeypatch):
    monkeypatch.setattr(TransformersTrainer, "check", Modest.check)
    options = {"critic": CriticConfig(), "optimizations": [Fast(), Other()], "reference": ModelConfig("x")}
    check_trainer(run_of(None, **options), MeshSizes(2, 2, 2, 2))
    check_trainer(run_of(Modest(), optimizations=[Fast()]), MeshSizes(1, 4, 1, 1))


def test_streamed_prompts_need_a_number_of_steps_and_no_partial_rollout():
    check_streamed_prompts(run_of(None), is_streamed=False)
    check_streamed_prompts(run_of(None, num_steps=3), is_streamed=True)
    with pytest.raises(ConfigError, match=r"set model\.num_steps"):
        check_streamed_prompts(run_of(None), is_streamed=True)
    with pytest.raises(ConfigError, match=r"remove model\.partial_rollout"):
        check_streamed_prompts(
            run_of(None, num_steps=3, partial_rollout=PartialRollout(max_tokens_per_step=9)), is_streamed=True
        )


def test_ranks_that_left_out_different_plugins_are_refused(monkeypatch):
    """Catches a run that hangs: the ranks that have a plugin wait in its collective hook for the others."""
    line = "plugin 'x' of acme-x 1.0 was left out: no y."
    ranks = {"alike": [{"acme-x": line}] * 2, "unlike": [{}, {"acme-x": line}]}
    check_plugins(SimpleNamespace(gather=lambda own: ranks["alike"]))
    with pytest.raises(RunError, match="Only some ranks have a plugin: plugin 'x' of acme-x"):
        check_plugins(SimpleNamespace(gather=lambda own: ranks["unlike"]))
