"""LoRA: what trains, what an engine and a checkpoint get, and what is refused. peft is the reference.

Runs on two ranks are in tests/integration/test_two_processes.py.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from rlplug_plan.run_inputs import num_adapter_parameters
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rlplug.errors import ConfigError
from rlplug.interfaces import AdapterWeights, FP8Weights, PolicySpec, TensorInfo
from rlplug.interfaces.trainer import ModelConfig
from rlplug.models.forward import attach_router_replay
from rlplug.models.lm_head import lm_head_of
from rlplug.models.loading import empty_model, load_weights, to_empty_on
from rlplug.models.lora.adapters import (
    InitialPolicy,
    adapter_weights,
    add_adapters,
    load_adapters,
)
from rlplug.models.lora.config import LoRAConfig
from rlplug.models.lora.files import export_adapter
from rlplug.training.trainer_record import adapter_record, check_records
from rlplug.weight_sync.buckets import policy_buckets, weight_buckets
from rlplug.weight_sync.hf_names import adapters_of
from rlplug.weight_sync.manifest import expected_tensors

LORA = LoRAConfig(rank=3, alpha=7)
TOKENS = torch.tensor([[5, 9, 3, 7, 11]])


def adapted(folder, lora=LORA, dtype="float32"):
    """Return a policy with adapters, unsharded, and a description of them."""
    config = ModelConfig(path=str(folder), dtype=dtype)
    policy = empty_model(config)
    effect = add_adapters(policy, lora, config.torch_dtype)
    to_empty_on(policy, torch.device("cpu"))
    policy.tie_weights()
    load_weights(policy, config)
    load_adapters(policy, lora)
    return policy, effect.description


def trained(folder, lora=LORA):
    """Return the policy after B took values, as training gives them."""
    policy, _ = adapted(folder, lora)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for update in adapters_of(policy).updates.values():
            update.up.weight.normal_(std=0.3, generator=generator)
    return policy


@torch.no_grad()
def logits(model):
    return model(input_ids=TOKENS, attention_mask=torch.ones_like(TOKENS)).logits


def plain(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


@pytest.fixture(scope="module")
def folder(model_folder):
    return model_folder("llama_tied")


def test_only_adapters_train_and_start_as_the_model(folder):
    policy, description = adapted(folder)
    assert {name.split(".")[-3] for name, p in policy.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}
    policy.set_attn_implementation("eager")
    assert torch.equal(logits(policy), logits(plain(folder)))
    number = num_adapter_parameters(ModelConfig(path=str(folder)), LORA)
    assert number == sum(p.numel() for p in policy.parameters() if p.requires_grad)
    assert description.startswith("LoRA of rank 3 on 14 modules: ")


def test_what_is_frozen_is_kept_in_the_dtype_of_passes(folder):
    policy, _ = adapted(folder, dtype="bfloat16")
    dtypes = {parameter.requires_grad: parameter.dtype for parameter in policy.parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}


@pytest.mark.parametrize("family", ["llama_tied", "qwen2"])
def test_sync_and_export_merge_as_peft_does(family, model_folder, tmp_path):
    folder = model_folder(family)
    policy = trained(folder)
    before = {name: parameter.clone() for name, parameter in policy.named_parameters()}
    export_adapter(policy, LORA, ModelConfig(path=str(folder)), tmp_path / "adapter", rank=0)
    sent = dict(pair for bucket in weight_buckets(policy, torch.float32, 1 << 14) for pair in bucket)
    reference = PeftModel.from_pretrained(plain(folder), tmp_path / "adapter")
    policy.set_attn_implementation("eager")
    torch.testing.assert_close(logits(policy), logits(reference))
    merged = reference.merge_and_unload()
    assert sent.keys() == {name for name, _ in merged.named_parameters()}
    for name, parameter in merged.named_parameters():
        torch.testing.assert_close(sent[name], parameter.detach(), rtol=0, atol=1e-6)
    fp8 = FP8Weights(quantized=tuple(name for name in sent if "mlp" in name), kept=())
    in_fp8, expected = (
        dict(pair for bucket in weight_buckets(model, torch.bfloat16, 1 << 14, fp8) for pair in bucket)
        for model in (policy, merged)
    )
    assert in_fp8.keys() == expected.keys()
    scales = [name for name in expected if name.endswith("_scale_inv")]
    assert len(scales) == len(fp8.quantized)
    for name in scales:
        torch.testing.assert_close(in_fp8[name], expected[name], rtol=1e-5, atol=0)
    assert all(torch.equal(before[name], parameter) for name, parameter in policy.named_parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama_tied", "qwen2"])
def test_an_engine_gets_the_frozen_weights_once_and_then_adapters_alone(family, dtype, model_folder):
    """What it gets is what the policy computes with; nothing shares memory with the policy, which goes on training."""
    folder = model_folder(family)
    policy = trained(folder)
    adapters = adapter_weights(ModelConfig(path=str(folder)), LORA)
    spec = PolicySpec(str(folder), dtype, (1,), 0, 64, adapters=adapters)
    first, later = (
        dict(pair for bucket in policy_buckets(policy, spec, 1 << 12, has_frozen=has) for pair in bucket)
        for has in (False, True)
    )
    weights = expected_tensors(plain(folder), spec)
    expected = adapters.tensors(weights)
    for sent, infos in ((first, {**weights, **expected}), (later, expected)):
        assert {name: TensorInfo(tensor.shape, tensor.dtype) for name, tensor in sent.items()} == infos
    assert 0 < len(later) < len(first)
    frozen, merged = (
        dict(pair for bucket in weight_buckets(policy, torch.float32, 1 << 30, merges=merges) for pair in bucket)
        for merges in (False, True)
    )
    assert all(torch.equal(first[name], weight.to(dtype)) for name, weight in frozen.items())
    for module in adapters.modules:
        down, up = (later[name].float() for name in AdapterWeights.names(module))
        updated = frozen[f"{module}.weight"] + adapters.alpha / adapters.rank * up @ down
        tolerance = {"rtol": 0, "atol": 1e-6 if dtype == torch.float32 else 0.05}
        torch.testing.assert_close(updated, merged[f"{module}.weight"], **tolerance)
    own = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters()}
    assert not own & {tensor.untyped_storage().data_ptr() for tensor in first.values()}


def test_reference_is_the_policy_without_adapters(folder):
    policy = trained(folder)
    policy.set_attn_implementation("eager")
    with_adapters = logits(policy)
    assert torch.equal(logits(InitialPolicy(policy, is_base=True)), logits(plain(folder)))
    assert torch.equal(logits(policy), with_adapters)  # on again
    with pytest.raises(ValueError, match="input_ids"):
        InitialPolicy(policy, is_base=True)(no_such_argument=1)
    assert torch.equal(logits(policy), with_adapters)
    assert not list(InitialPolicy(policy, is_base=True).parameters())


def test_reference_of_a_run_that_starts_from_an_adapter_has_it(folder):
    """Alone catches a KL penalty towards the base model, which pulls out what the adapter had learned."""
    policy = trained(folder)
    first = logits(policy)
    reference = InitialPolicy(policy, is_base=False)
    for update in adapters_of(policy).updates.values():
        update.up.weight.data.add_(0.1)
    learned = logits(policy)
    assert torch.equal(logits(reference), first)
    assert torch.equal(logits(policy), learned)
    assert not torch.equal(learned, first)


def test_reference_has_the_fused_lm_head_and_replays_no_experts(folder):
    """It catches logits that nobody planned memory for, and experts of the policy's last micro-batch."""
    policy, replayed = trained(folder), []
    attach_router_replay(policy, SimpleNamespace(set=replayed.append))
    reference = InitialPolicy(policy, is_base=True)
    assert lm_head_of(reference) is lm_head_of(policy)
    logits(reference)
    assert replayed == [None]


def test_a_run_starts_from_an_adapter(folder, tmp_path):
    policy = trained(folder)
    export_adapter(policy, LORA, ModelConfig(path=str(folder)), tmp_path, rank=0)
    again, _ = adapted(folder, LoRAConfig(rank=3, alpha=7, path=str(tmp_path)))
    assert torch.equal(logits(again), logits(policy))


def test_adapters_that_do_not_fit_are_refused(folder, tmp_path):
    export_adapter(trained(folder), LORA, ModelConfig(path=str(folder)), tmp_path, rank=0)
    weights, options = load_file(tmp_path / "adapter_model.safetensors"), tmp_path / "adapter_config.json"
    written = json.loads(options.read_text())

    def refused(problem, **changes):
        with pytest.raises(ConfigError, match=problem):
            adapted(folder, LoRAConfig(**{"rank": 3, "alpha": 7, "path": str(tmp_path)} | changes))

    refused("is no folder of an adapter", path=str(tmp_path / "nowhere"))
    refused(r"^model\.lora\.rank is 4, and .* has 3", rank=4)
    refused(r"^model\.lora\.alpha is 8, and .* has 7", alpha=8)
    refused(r"only one of them has .*: set model\.lora\.targets", targets=["q_proj"])
    options.write_text(json.dumps(written | {"use_dora": True}))
    refused("was trained with use_dora of peft")
    options.write_text(json.dumps(written))
    name = sorted(weights)[0]
    save_file(weights | {name: weights[name] * torch.nan}, tmp_path / "adapter_model.safetensors")
    refused(f"{name} is not finite")


@pytest.mark.parametrize(
    ("targets", "problem"),
    [
        (["no_such_layer"], "no_such_layer"),
        (["lm_head"], "names the output layer"),
        (["embed_tokens"], "which is Embedding"),
        ([], "is empty"),
        ("q_proj", "give all-linear, or a list"),
    ],
)
def test_targets_that_cannot_be_adapted(targets, problem, model_folder):
    with pytest.raises(ConfigError, match=rf"^model\.lora\.targets .*{problem}"):
        adapted(model_folder("llama"), LoRAConfig(targets=targets))


def test_checkpoints_of_other_adapters_are_refused(folder, tmp_path):
    def record_of(lora, seed=0):
        policy, _ = adapted(folder, lora)
        if seed:
            with torch.no_grad():
                policy.model.norm.weight.add_(0.1)
        return adapter_record(policy, lambda sums: sums)

    own, fewer, other = record_of(LORA), record_of(LoRAConfig(rank=3, targets=["q_proj"])), record_of(LORA, seed=1)
    for saved, now, problem in (
        (own, own, None),
        (None, None, None),
        (None, own, r"trained all of the policy"),
        (own, None, r"trained adapters alone"),
        (own, fewer, r"has adapters of .* parameters, and model\.lora makes"),
        (own, other, r"adapters of another base model"),
    ):
        state = {"rlplug": {"adapters": saved}}
        trainer = type("TransformersTrainer", (), {})()
        if problem is None:
            check_records(trainer, now, tmp_path, state)
            continue
        with pytest.raises(ConfigError, match=problem):
            check_records(trainer, now, tmp_path, state)
