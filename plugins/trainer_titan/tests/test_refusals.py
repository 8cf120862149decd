"""What TorchTitan cannot do here is refused by name before anything is loaded, with the fix."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from typing import Any

import pytest
import rlplug_trainer_titan.float8 as float8
import rlplug_trainer_titan.library as library
import rlplug_trainer_titan.trainer as trainer_module
import torch
from rlplug_algos.grpo import GRPO
from rlplug_optims import ActivationOffload, CompileBlocks, FusedLogprobs, GradientCheckpointing, Liger
from rlplug_trainer_titan import TorchTitan
from titan_cases import CONFIGS, SIZES
from transformers import LlamaConfig, MixtralConfig, Qwen3Config

from rlplug.config import RunConfig
from rlplug.errors import ConfigError
from rlplug.interfaces import ModelConfig
from rlplug.models.critic import CriticConfig
from rlplug.setup.checks.trainer import check_trainer
from rlplug.types import MeshSizes

pytestmark = pytest.mark.skipif(find_spec("torchtitan") is None, reason="TorchTitan is not installed")

ONE = MeshSizes(1, 1, 1, 1)
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
OPTIONS = [
    ({"pipeline": 2}, "init_args.pipeline is 2", "Set it to 1."),
    ({"context": 2}, "init_args.context is 2", "Set it to 1."),
    ({"expert": 0}, "init_args.expert is 0", "at least 1"),
    ({"expert": 2}, "init_args.expert is 2, and model.policy.path", "has no experts: set it to 1."),
    ({"spmd_backend": "spmd_types"}, "needs torch 2.14 or newer", "Set it to partial_dtensor."),
    ({"spmd_backend": "full_dtensor"}, "is 'full_dtensor', which is not supported", "Set it to partial_dtensor."),
]
RUNS: list[tuple[dict[str, Any], MeshSizes, str, str]] = [
    ({}, MeshSizes(1, 1, 2, 1), "init_args.sequence is 2", "set it to 1"),
    ({"optimizations": [Liger()]}, ONE, "Liger, which does not work", "remove it"),
    ({"optimizations": [ActivationOffload()]}, ONE, "ActivationOffload, which does not work", "remove it"),
    ({"attn_implementation": "flash_attention_2"}, ONE, "attn_implementation is 'flash_attention_2'", "give packed"),
]
MODELS = [
    (MixtralConfig(**SIZES), 1, "of type llama, qwen3, qwen3_moe here, and this is 'mixtral'", "Remove model.trainer"),
    (CONFIGS["qwen3_moe"], 2, "loses gradients where it splits each expert", "init_args.expert to 2"),
    (LlamaConfig(**SIZES, attention_bias=True), 1, "attention_bias is set", "Remove model.trainer"),
    (LlamaConfig(**SIZES, mlp_bias=True), 1, "mlp_bias is set", "Remove model.trainer"),
    (LlamaConfig(**SIZES, hidden_act="gelu"), 1, "hidden_act is 'gelu'", "Remove model.trainer"),
    (LlamaConfig(**SIZES, rope_parameters=YARN), 1, "rotary embeddings is 'yarn'", "Remove model.trainer"),
    (Qwen3Config(**SIZES, rope_parameters=YARN), 1, "rotary embeddings is 'yarn'", "Remove model.trainer"),
    (Qwen3Config(**SIZES, use_sliding_window=True), 1, "use_sliding_window is set", "Remove model.trainer"),
    (CONFIGS["llama"], 4, "tensor is 4, which does not divide num_key_value_heads, 2", "give a divisor"),
]


EXPERTS = [
    (3, MeshSizes(1, 3, 1, 1), "expert is 3, which does not divide num_experts, 8,", "give a divisor"),
    (4, MeshSizes(1, 2, 1, 1), "expert is 4, which does not divide the 2 ranks", "or change trainer.devices"),
    (8, MeshSizes(1, 2, 1, 2), "4 ranks that hold a copy of the model, 2 of the shard axis times 2", "give a divisor"),
]


def refusal(folder: Any, trainer: TorchTitan, mesh: MeshSizes = ONE, **options: Any) -> str:
    options = dict(options)
    policy = ModelConfig(str(folder), dtype="float32", attn_implementation=options.pop("attn_implementation", "packed"))
    config = RunConfig(policy=policy, algorithm=GRPO(), optimizer=torch.optim.SGD, trainer=trainer, **options)
    with pytest.raises(ConfigError) as refused:
        check_trainer(config, mesh)
    return str(refused.value)


@pytest.fixture
def folder(tmp_path):
    CONFIGS["llama"].save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("options", "problem", "fix"), OPTIONS)
def test_options(folder, options, problem, fix):
    message = refusal(folder, TorchTitan(**options))
    assert problem in message
    assert fix in message


@pytest.mark.parametrize(("options", "mesh", "problem", "fix"), RUNS)
def test_runs(folder, options, mesh, problem, fix):
    message = refusal(folder, TorchTitan(), mesh, **options)
    assert problem in message
    assert fix in message
    assert "or remove model.trainer" in message or "give packed" in message


@pytest.mark.parametrize(
    ("options", "optimization", "key"),
    [
        ({"compile": True}, CompileBlocks(), "init_args.compile compiles"),
        ({"activation_checkpoint": "full"}, GradientCheckpointing(), "init_args.activation_checkpoint decides"),
    ],
)
def test_the_same_change_twice(folder, options, optimization, key):
    message = refusal(folder, TorchTitan(**options), optimizations=[optimization])
    assert type(optimization).__name__ in message
    assert key in message
    assert "remove one of the two" in message


def test_blocks_of_experts_are_neither_compiled_nor_recomputed(tmp_path):
    family = next(name for name in CONFIGS if "moe" in name)
    CONFIGS[family].save_pretrained(tmp_path)
    trainer = TorchTitan()
    network = trainer.empty_network(ModelConfig(str(tmp_path)), "model.policy")
    GradientCheckpointing().before_shard(network)
    with pytest.raises(ConfigError, match="Remove CompileBlocks, GradientCheckpointing and SelectiveCheckpointing"):
        trainer.split(network, None)


def test_float8(folder, monkeypatch):
    """It needs torchao, a device that multiplies it, and blocks that are not split."""
    config = ModelConfig(str(folder), dtype="float32")
    monkeypatch.setattr(float8.importlib.util, "find_spec", lambda name: None)
    assert "pip install torchao" in refusal(folder, TorchTitan(float8="rowwise"))
    monkeypatch.setattr(float8.importlib.util, "find_spec", lambda name: name)
    message = refusal(folder, TorchTitan(float8="rowwise"), MeshSizes(1, 1, 1, 2))
    assert "float8 is rowwise, and trainer.strategy.init_args.tensor is 2" in message
    assert "set model.trainer.init_args.compile to false" in refusal(
        folder, TorchTitan(float8="emulated", compile=True)
    )
    trainer = TorchTitan(float8="rowwise")
    trainer.check(config, "model.policy", ONE)
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="needs an NVIDIA GPU of Ada, Hopper or newer: set it to none"):
        trainer.empty_network(config, "model.policy")


@pytest.mark.parametrize(("config", "tensor", "problem", "fix"), MODELS)
def test_models(tmp_path, config, tensor, problem, fix):
    copy.deepcopy(config).save_pretrained(tmp_path)
    message = refusal(tmp_path, TorchTitan(), MeshSizes(1, 1, 1, tensor))
    assert problem in message
    assert fix in message


def test_other_models_of_the_run_are_checked_too(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    Qwen3Config(**SIZES, use_sliding_window=True).save_pretrained(other)
    model = ModelConfig(str(other))
    assert "model.reference.path" in refusal(folder, TorchTitan(), reference=model)
    assert "model.critic.trunk.path" in refusal(folder, TorchTitan(), critic=CriticConfig(trunk=model))


@pytest.mark.parametrize(("expert", "mesh", "problem", "fix"), EXPERTS)
def test_ranks_of_experts(tmp_path, expert, mesh, problem, fix):
    copy.deepcopy(CONFIGS["qwen3_moe"]).save_pretrained(tmp_path)
    message = refusal(tmp_path, TorchTitan(expert=expert), mesh)
    assert problem in message
    assert fix in message


@pytest.mark.parametrize(
    ("options", "fix"),
    [({"compile": True}, "Set it to false."), ({"activation_checkpoint": "full"}, "Set it to none.")],
)
def test_mixtures_of_experts_with_other_options(tmp_path, options, fix):
    copy.deepcopy(CONFIGS["qwen3_moe"]).save_pretrained(tmp_path)
    message = refusal(tmp_path, TorchTitan(**options))
    assert "is a mixture of experts: the two are not supported together yet" in message
    assert fix in message


def test_expert_parallelism_on_an_older_torch(folder, monkeypatch):
    monkeypatch.setattr(trainer_module, "version", lambda name: "2.12.1")
    message = refusal(folder, TorchTitan(expert=2))
    assert "expert is 2, and TorchTitan's expert parallelism needs torch 2.13 or newer; this is 2.12.1" in message
    assert "Set it to 1" in message


def test_a_reference_policy_is_checked_too(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("reference")
    MixtralConfig(**SIZES).save_pretrained(other)
    assert "model.reference.path" in refusal(folder, TorchTitan(), reference=ModelConfig(str(other)))


@pytest.mark.parametrize(
    ("found", "problem"), [("0.2.2", "torchtitan 0.2.2 is installed"), (None, "torchtitan is not installed")]
)
def test_other_versions(folder, monkeypatch, found, problem):
    def version(name):
        if found is None:
            raise library.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(library, "version", version)
    message = refusal(folder, TorchTitan())
    assert problem in message
    assert "pip install --no-deps 'torchtitan==0.3.*'" in message


def test_spmd_types_on_a_newer_torch(folder, monkeypatch):
    monkeypatch.setattr(trainer_module, "version", lambda name: "2.14.0")
    assert "'spmd_types', which is not supported yet" in refusal(folder, TorchTitan(spmd_backend="spmd_types"))


def test_what_works_is_not_refused(folder):
    policy = ModelConfig(str(folder), dtype="float32")
    config = RunConfig(
        policy,
        GRPO(),
        torch.optim.SGD,
        trainer=TorchTitan(),
        optimizations=[FusedLogprobs()],
        reference=policy,
        critic=CriticConfig(),
    )
    check_trainer(config, MeshSizes(1, 2, 1, 2))


@pytest.mark.parametrize(("expert", "mesh"), [(1, MeshSizes(1, 3, 1, 1)), (4, MeshSizes(1, 2, 1, 2))])
def test_mixtures_of_experts_are_not_refused(tmp_path, expert, mesh):
    copy.deepcopy(CONFIGS["qwen3_moe"]).save_pretrained(tmp_path)
    policy = ModelConfig(str(tmp_path), dtype="float32")
    check_trainer(RunConfig(policy, GRPO(), torch.optim.SGD, trainer=TorchTitan(expert=expert)), mesh)
