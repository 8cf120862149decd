"""Checks that a model keeps packed sequences apart, and computes the same twice, made before its weights are loaded."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from rlplug.distributed.fsdp_units import transformer_blocks
from rlplug.errors import ConfigError, describe
from rlplug.interfaces.trainer import ModelConfig
from rlplug.models import attention
from rlplug.models.hf_files import read
from rlplug.models.loading import rebuilt_buffers, trainable_config
from rlplug.models.packing import PackedTokens

LENGTHS: Final = (7, 9)
"""Tokens of the two sequences on which a model is tried."""
WINDOW: Final = 5
"""Longest window of attention there, so that both sequences are longer."""
TOLERANCE: Final = 1e-3
"""Largest difference of logits, in their standard deviation, that is round-off of float32; leaks are 0.1 and more."""
PERIOD: Final = 100_003
"""Random numbers that all weights share: a prime, so that rows of a matrix differ."""
LARGEST: Final = 1 << 28
"""Elements of a matrix beyond which its rows overlap in memory."""


@torch.no_grad()
def check_passes(config: ModelConfig, key: str) -> None:
    """Try a model's first layers, those of each kind, on two packed sequences, on the CPU with random weights.

    Weights share memory, so that layers of any size take little of it.

    Args:
        config: Configuration of a model of transformers.
        key: Key of the model in the run's configuration, for messages.

    Raises:
        ConfigError: Two passes in training differ; or the logits of the second sequence change with the first, or are
            not those that the model computes of it alone with transformers' own attention.
    """
    model = _first_layers(trainable_config(config, key), config.path, key)
    name = f"{key}.path: {type(model).__name__}"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        _give_values(model)
        first, other, second = (torch.randint(2, _text_config(model).vocab_size, (LENGTHS[i],)) for i in (0, 0, 1))
        try:
            logits, outputs = _logits(model, [first, second])
            again, changed = _logits(model, [first, second])
            beside, _ = _logits(model, [other, second])
            engine, _ = _logits(model.eval(), [first, second])
            model.set_attn_implementation("eager")
            alone = model(input_ids=second[None], use_cache=False).logits[0]
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error
        except Exception as error:
            raise ConfigError(
                f"{name} cannot be trained: a pass of its first layers over a packed row, on the CPU, raised "
                f"{describe(error)}. Use another model."
            ) from error
    if _differ(logits, again):
        place = next((place for place in outputs if _differ(outputs[place], changed[place])), "the output layer")
        raise ConfigError(
            f"{name} computes something else in each training pass, first in {place}, so that its logprobs are not "
            "those of the engine: switch its noise off in config.json, or use another model."
        )
    if _differ(logits, engine):
        raise ConfigError(
            f"{name} computes other logits in training than an engine does: switch off in config.json what it does in "
            "training alone, or use another model."
        )
    types = set(getattr(_text_config(model), "layer_types", None) or ())
    advice = f"It has layers of type {', '.join(sorted(types))}. " * bool(types) + "Use another model."
    if _differ(logits[LENGTHS[0] :], beside[LENGTHS[0] :]):
        raise ConfigError(
            f"{name} leaks each packed sequence into the next: another first sequence changes the logits of the second. "
            f"The borders of sequences do not reach all of its layers. {advice}"
        )
    if _differ(logits[LENGTHS[0] :], alone):
        raise ConfigError(
            f"{name} computes other logits of a packed sequence than of the sequence alone: it has a mask, positions or "
            f"a state of its own, which a packed row leaves out. {advice}"
        )


def _first_layers(config: Any, path: str, key: str) -> Any:
    """Return an empty model with short windows, and without the layers that are like those before them."""
    text = config.get_text_config()
    for option, value in vars(text).items():
        has_end = type(value) is int and WINDOW < value < getattr(text, "max_position_embeddings", math.inf)
        if has_end and ("window" in option or "chunk" in option):
            setattr(text, option, WINDOW)
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": attention.NAME}
    with torch.device("meta"):
        small: Any = read(path, key, "model", AutoModelForCausalLM.from_config, config, **options)
    blocks = transformer_blocks(small)
    kinds = [_kind(block, index, text) for index, block in enumerate(blocks)]
    needed = 1 + max((kinds.index(kind) for kind in kinds), default=0)
    for module in small.modules():
        if isinstance(module, nn.ModuleList) and list(module) == blocks:
            del module[needed:]
    output = small.get_output_embeddings()
    small.set_output_embeddings(nn.Linear(output.in_features, 2 * WINDOW, bias=False, device="meta"))
    return small.train()


def _text_config(model: Any) -> Any:
    return model.config.get_text_config()


def _kind(block: nn.Module, index: int, config: Any) -> Any:
    """Return what tells a layer from others: its modules, options and type, without sizes and its own index."""
    types = getattr(config, "layer_types", None) or ()
    options = [
        (name, type(module), option, value if isinstance(value, str) else bool(value))
        for name, module in block.named_modules()
        for option, value in vars(module).items()
        if isinstance(value, str | bool | float | None) or (type(value) is int and value != index)
    ]
    return [*types[index : index + 1], *options]


def _give_values(model: Any) -> None:
    """Give each parameter random values that lie over those of others in memory, and computed buffers their own."""
    computed = {name: buffer for name, buffer in model.named_buffers() if name not in model.state_dict()}
    for _ in rebuilt_buffers(model, computed):
        pass
    views = []
    for owner in [tensors for module in model.modules() for tensors in (module._parameters, module._buffers)]:
        for name, tensor in owner.items():
            if tensor is not None and tensor.is_meta:
                strides = [64] * (tensor.dim() - 2) + [tensor.shape[-1], 1][-tensor.dim() :] * bool(tensor.dim())
                if math.prod(tensor.shape[-2:]) > LARGEST:
                    strides[-2] = 64
                views.append((owner, name, tensor, strides))
    most = max(sum(map(math.prod, zip(tensor.shape, strides, strict=True))) for _, _, tensor, strides in views)
    numbers = torch.randn(PERIOD).repeat(2 + most // PERIOD) / _text_config(model).hidden_size ** 0.5
    for index, (owner, name, tensor, strides) in enumerate(views):
        values = numbers.as_strided(tensor.shape, strides, index * 7919 % PERIOD).to(tensor.dtype)
        if tensor.dim() == 1 and name == "weight":  # of a norm
            values = values + 1
        owner[name] = nn.Parameter(values, requires_grad=False) if isinstance(tensor, nn.Parameter) else values


def _logits(model: Any, sequences: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the logits [N, V] of a packed row, and what each module gave, in the order of their ends."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str, output: Any) -> None:
        found = output[0] if isinstance(output, tuple) else output
        if isinstance(found, Tensor):
            outputs[name] = found

    hooks = [
        module.register_forward_hook(lambda module, inputs, output, name=name: keep(name, output))
        for name, module in model.named_modules()
    ]
    ids, lengths = torch.cat(sequences), [len(sequence) for sequence in sequences]
    every, borders = torch.arange(len(ids)), torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in lengths])
    row = PackedTokens(ids[None], positions[None], borders, max(lengths), every, ids, every, len(ids))
    logits = model(**row.model_inputs(), logits_to_keep=every).logits[0]
    for hook in hooks:
        hook.remove()
    return logits, outputs


def _differ(first: Tensor, second: Tensor) -> bool:
    return not bool((first - second).abs().max() <= TOLERANCE * first.float().std())


def check_long_sequences(config: Any, implementation: str, key: str, longest: int, sequence_size: int) -> None:
    """Raise an error for settings that would silently give wrong results with long sequences.

    Args:
        config: Configuration of a text model of transformers.
        implementation: Its ``attn_implementation``.
        key: Key of the model in the run's configuration, for messages.
        longest: Tokens of the longest possible sequence.
        sequence_size: Number of ranks that share a row.

    Raises:
        ConfigError: Ranks share rows and attention is not rlplug's own, the only one that exchanges their parts; or
            sequences can be too long for the short factors of LongRoPE (arXiv 2402.13753), and transformers would then
            use the long ones for all sequences that are packed with such a one.
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
