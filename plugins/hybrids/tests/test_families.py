"""Packed rows of tiny models of each family equal each row alone, with transformers' own attention and no packing."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from hybrid_models import FAMILIES, HAS_WRAPPERS, HYBRIDS, REFUSED, VOCAB, build, write
from rlplug_hybrids import HybridTrainer
from rlplug_hybrids.borders import keep_apart
from rlplug_hybrids.layers import stateful_layers
from rlplug_hybrids.trainer import refuse_lost_adapters
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlplug.errors import ConfigError
from rlplug.interfaces import ModelConfig
from rlplug.models.lora.adapters import add_adapters
from rlplug.models.lora.config import LoRAConfig
from rlplug.models.transformers_trainer import TRANSFORMERS
from rlplug.types import MeshSizes

LENGTHS = [5, 11, 1, 7]
ONE = MeshSizes(1, 1, 1, 1)
GRADIENTS = 5e-5
"""Round-off adds up in gradients: with weights in float64, Qwen3.5-MoE's 3.8e-5 became 6e-7."""
PUSHED = ("qwen3_next", "qwen3_5_text", "nemotron_h", "jamba", "lfm2", "gpt_oss")
"""A family of each kind of layer, and of each way in which borders reach it; a night tries all."""


def each(families: Any) -> list[Any]:
    return [pytest.param(f, marks=() if f in PUSHED else pytest.mark.nightly) for f in sorted(families)]


def row_of(ids: list[Tensor]) -> dict[str, Any]:
    lengths = [len(sequence) for sequence in ids]
    borders = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return {
        "input_ids": torch.cat(ids)[None],
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "use_cache": False,
        "cu_seq_lens_q": borders,
        "cu_seq_lens_k": borders,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


def sequences(seed: int = 1, lengths: list[int] = LENGTHS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (length,), generator=generator) for length in lengths]


def alone(model: Any, ids: list[Tensor]) -> Tensor:
    """Return the log-probabilities of sequences computed one by one with transformers' attention, end to end."""
    model.set_attn_implementation("eager")
    found = torch.cat([model(input_ids=i[None], use_cache=False).logits.log_softmax(-1) for i in ids], dim=1)
    model.set_attn_implementation("packed")
    return found


def packed(model: Any, ids: list[Tensor]) -> Tensor:
    return model(**row_of(ids)).logits.log_softmax(-1)


def loss(logprobs: Tensor, ids: list[Tensor]) -> Tensor:
    """Return a loss that reads every position, with a weight of its own."""
    targets = torch.cat([i.roll(-1) for i in ids])
    weights = torch.linspace(-1, 1, len(targets))
    return -(weights * logprobs[0].gather(1, targets[:, None])[:, 0]).sum()


def gradients(model: Any) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def largest_relative_error(ours: dict[str, Tensor], oracle: dict[str, Tensor]) -> float:
    assert ours.keys() == oracle.keys()
    # an expert's gradient can be 0 but for rounding, so small norms are measured against the model's
    scale = 1e-2 * torch.stack([g.norm() for g in oracle.values()]).norm()
    return max(float((ours[name] - g).norm() / max(g.norm(), scale)) for name, g in oracle.items())


@pytest.mark.parametrize("family", each(FAMILIES.keys() - REFUSED.keys()))
def test_a_packed_row_equals_its_sequences_alone(family: str) -> None:
    """Catches a layer that mixes sequences, or whose gradients do, and borders that are stale when it is recomputed."""
    model, ids, others = build(family), sequences(1), sequences(2)
    oracle = alone(model, ids)
    loss(oracle, ids).backward()
    expected = gradients(model)
    keep_apart(model)
    embedded: list[Tensor] = []
    hook = model.get_input_embeddings().register_forward_hook(lambda _m, _a, output: embedded.append(output))
    logprobs = packed(model, ids)
    hook.remove()
    assert (logprobs - oracle).abs().max() < 1e-5
    loss(logprobs, ids).backward(retain_graph=True)
    assert largest_relative_error(gradients(model), expected) < GRADIENTS
    (reached,) = torch.autograd.grad(logprobs[:, 5:16].square().sum(), embedded[0])
    assert reached[:, :5].abs().max() == 0
    assert reached[:, 16:].abs().max() == 0
    assert reached[:, 5:16].abs().min(dim=-1).values.max() > 0
    with torch.no_grad():
        beside = packed(model, [ids[0], *others[1:3], ids[3]])
    assert (beside - logprobs)[:, [*range(5), *range(17, 24)]].abs().max() < 1e-6
    for block in max((m for m in model.modules() if isinstance(m, torch.nn.ModuleList)), key=len):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    kept = loss(packed(model, ids), ids)
    packed(model, sequences(2, [9, 3]))  # another row passes before the first one's backward pass
    kept.backward()
    assert largest_relative_error(gradients(model), expected) < GRADIENTS


@pytest.mark.parametrize("family", each(HYBRIDS))
def test_the_default_trainer_refuses_and_says_what_to_do(family: str, tmp_path) -> None:
    """Catches a hybrid that the core lets pass, and a refusal that names neither its layer nor the remedy."""
    config = ModelConfig(str(write(family, tmp_path)), dtype="float32")
    with pytest.raises(ConfigError, match=r"^model\.policy\.path: .*\w+(For|LM).*HybridTrainer") as refused:
        TRANSFORMERS.check(config, "model.policy", ONE)
    layers = r"GatedDelta|DeltaAttention|Mamba|Mixer|Conv|Recurrent|LightningAttention|NGram"
    assert re.search(layers, str(refused.value)), refused.value


@pytest.mark.parametrize("family", each(HYBRIDS))
def test_a_start_lets_a_family_pass_or_names_the_reason(family: str, tmp_path) -> None:
    """Catches a check at start that is not of the layers as they run, and a remedy that was refused just now."""
    config = ModelConfig(str(write(family, tmp_path)), dtype="float32")
    if family not in REFUSED:
        HybridTrainer().check(config, "model.policy", ONE)
        return
    reason = rf"^model\.policy\.path: .*{REFUSED[family][0]}.* Set model\.trainer to PaddedTrainer\.$"
    with pytest.raises(ConfigError, match=reason):
        HybridTrainer().check(config, "model.policy", ONE)


@pytest.mark.parametrize(("family", "target", "is_lost"), [("jamba", "dt_proj", True), ("lfm2", "out_proj", False)])
def test_an_adapter_is_refused_where_a_layer_reads_the_weight(
    family: str, target: str, is_lost: bool, tmp_path
) -> None:
    """Catches adapters that train and change nothing, because the layer never calls the module that has them."""
    config = ModelConfig(str(write(family, tmp_path)), dtype="float32")
    network = HybridTrainer().empty_network(config, "model.policy")
    add_adapters(network, LoRAConfig(rank=2, targets=[target]), torch.float32)
    if not is_lost:
        refuse_lost_adapters(network, stateful_layers(network))
        return
    if not HAS_WRAPPERS:
        pytest.skip("this transformers calls dt_proj as others")
    with pytest.raises(ConfigError, match=r"targets has dt_proj, whose weight JambaMambaMixer reads itself"):
        refuse_lost_adapters(network, stateful_layers(network))
