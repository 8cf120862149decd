"""Checks that a model keeps packed sequences apart and computes the same twice, made before its weights are loaded."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from rlplug.distributed.fsdp_units import transformer_blocks
from rlplug.errors import ConfigError, describe
from rlplug.interfaces.trainer import ModelConfig
from rlplug.models import attention
from rlplug.models.hf_files import pretrained, read
from rlplug.models.loading import rebuilt_buffers, trainable_config
from rlplug.models.packing import PackedTokens

LENGTH: Final = 8  # tokens of the first of the two sequences on which a model is tried; the second has one more
WINDOW: Final = 5  # longest window of attention there, so that both sequences are longer
TOLERANCE: Final = 1e-3  # of logits, in their standard deviation: round-off of float32 is 1e-5, leaks are 0.1 and more
PERIOD: Final = 100_003  # random numbers that all weights share: a prime, so that rows of a matrix differ
LARGEST: Final = 1 << 28  # elements of a matrix beyond which its rows overlap in memory


@torch.no_grad()
def check_passes(config: ModelConfig, key: str) -> None:
    """Try a model's first layers, those of each kind, on two packed sequences, on the CPU with random weights.

    Raises:
        ConfigError: Two passes in training differ; or the logits of the second sequence change with the first, or are
            not those that the model computes of it alone with transformers' own attention.
    """
    model = _first_layers(trainable_config(config, key), config.path, key)
    text, name = model.config.get_text_config(), type(model).__name__
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        _give_values(model)
        first, other, second = (torch.randint(2, text.vocab_size, (LENGTH + more,)) for more in (0, 0, 1))
        try:
            logits, again = _logits(model, first, second), _logits(model, first, second)
            beside, engine = _logits(model, other, second), _logits(model.eval(), first, second)
            model.set_attn_implementation("eager")
            alone = model(input_ids=second[None], use_cache=False).logits[0]
        except Exception as error:
            raise ConfigError(f"{key}.path: a pass of {name} over a packed row raised {describe(error)}") from error
    for one, two, problem in (
        (logits, again, "computes something else in each training pass, with noise that config.json may switch off"),
        (logits[LENGTH:], beside[LENGTH:], "leaks each packed sequence into the next: borders do not reach all layers"),
        (logits, engine, "computes other logits in training than an engine, with what config.json may switch off"),
        (
            logits[LENGTH:],
            alone,
            "computes other logits of a packed sequence than of it alone: it has its own mask or state",
        ),
    ):
        if not bool((one - two).abs().max() <= TOLERANCE * one.std()):
            types = ", ".join(sorted(set(getattr(text, "layer_types", None) or ["attention"])))
            raise ConfigError(f"{key}.path: {name} {problem} (layers: {types}). Use another model.")


def _first_layers(config: Any, path: str, key: str) -> Any:
    """Return an empty model with short windows, and without the layers that are like those before them."""
    text = config.get_text_config()
    for option, value in vars(text).items():
        ends = type(value) is int and WINDOW < value < getattr(text, "max_position_embeddings", math.inf)
        if ends and ("window" in option or "chunk" in option):
            setattr(text, option, WINDOW)
    with torch.device("meta"):
        make: Any = AutoModelForCausalLM.from_config
        model = read(path, key, "model", pretrained, make, config, dtype=torch.float32, attn_implementation=attention.NAME)
    blocks = transformer_blocks(model)
    kinds = [_kind(block, index, text) for index, block in enumerate(blocks)]
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and list(module) == blocks:
            del module[1 + max(map(kinds.index, kinds)) :]
    output = model.get_output_embeddings()
    model.set_output_embeddings(nn.Linear(output.in_features, LENGTH, bias=False, device="meta"))
    return model.train()


def _kind(block: nn.Module, index: int, config: Any) -> Any:
    """Return what tells a layer from others: its type, modules and options; of numbers, whether they are 0."""
    options = ((name, type(each), *option) for name, each in block.named_modules() for option in vars(each).items())
    known = (option for option in options if isinstance(option[-1], str | float | int | None))
    types = (getattr(config, "layer_types", None) or ())[index : index + 1]
    return [*types, *((*o[:-1], o[-1] if isinstance(o[-1], str) else bool(o[-1])) for o in known)]


def _give_values(model: Any) -> None:
    """Give each parameter random values that lie over those of others in memory, and computed buffers their own."""
    saved = model.state_dict()
    list(rebuilt_buffers(model, {name: buffer for name, buffer in model.named_buffers() if name not in saved}))
    views = []
    for owner in [tensors for module in model.modules() for tensors in (module._parameters, module._buffers)]:
        for name, tensor in owner.items():
            if tensor is not None and tensor.is_meta:
                strides = [*[64] * (tensor.dim() - 2), *tensor.shape[-1:], 1][-tensor.dim() or 2 :]
                if math.prod(tensor.shape[-2:]) > LARGEST:
                    strides[-2] = 64
                views.append((owner, name, tensor, strides))
    most = max(sum(map(math.prod, zip(tensor.shape, strides, strict=True))) for *_, tensor, strides in views)
    numbers = (torch.randn(PERIOD) / model.config.get_text_config().hidden_size ** 0.5).repeat(2 + most // PERIOD)
    for index, (owner, name, tensor, strides) in enumerate(views):
        values = numbers.as_strided(tensor.shape, strides, index * 7919 % PERIOD).to(tensor.dtype)
        values = values + 1 if tensor.dim() == 1 and name == "weight" else values  # of a norm
        owner[name] = nn.Parameter(values, requires_grad=False) if isinstance(tensor, nn.Parameter) else values


def _logits(model: Any, *sequences: Tensor) -> Tensor:
    """Return the logits of a packed row, [N, V]."""
    ids, positions = torch.cat(sequences), torch.cat([torch.arange(len(ids)) for ids in sequences])
    every, borders = torch.arange(len(ids)), torch.tensor([0, len(sequences[0]), len(ids)], dtype=torch.int32)
    row = PackedTokens(ids[None], positions[None], borders, LENGTH + 1, every, ids, every, len(ids))
    return model(**row.model_inputs(), logits_to_keep=every).logits[0]  # type: ignore[no-any-return]


def check_long_sequences(config: Any, implementation: str, key: str, longest: int, sequence_size: int) -> None:
    """Raise an error for settings that would silently give wrong results with long sequences.

    Raises:
        ConfigError: Ranks share rows and attention is not rlplug's own, which alone exchanges their parts; or sequences
            can be too long for the short factors of LongRoPE (arXiv 2402.13753), in whose place the long ones would
            be taken for all sequences of a row.
    """
    if sequence_size > 1 and implementation != attention.NAME:
        raise ConfigError(
            f"trainer.strategy.init_args.sequence is {sequence_size} and {key}.attn_implementation {implementation!r}, "
            f"which sees only one rank's part of a row: set it to {attention.NAME}."
        )
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope" and longest > rope["original_max_position_embeddings"]:
        raise ConfigError(
            f"{key}: one sequence can have {longest} tokens (longest prompt and sampling.max_new_tokens), and past "
            f"{rope['original_max_position_embeddings']} this model uses other rotary frequencies, for all "
            "sequences of a pass: lower sampling.max_new_tokens or data.max_prompt_tokens."
        )
