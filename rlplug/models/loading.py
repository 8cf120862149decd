"""Loading of weights into a model that was built on the meta device and sharded.

No rank holds the whole model: it reads its own shard of each tensor of the safetensors files, or draws one transformer
block at a time and keeps its shard.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from rlplug.distributed.fsdp_units import transformer_blocks
from rlplug.distributed.mesh import local_part, local_slices
from rlplug.errors import ConfigError
from rlplug.interfaces.optimization import Effect
from rlplug.interfaces.trainer import ModelConfig
from rlplug.models import attention
from rlplug.models.hf_files import pretrained, read, read_config, read_generation_config
from rlplug.weight_sync.hf_names import adapters_of, hf_weights

NOISE: Final = ("drop", "jitter", "noise")  # in the names of options: attention_dropout, router_jitter_noise, ...
NOTHING: Final = -99.0  # in a buffer whose values are to be computed
IMPLEMENTATIONS: Final = (attention.NAME, "flash_attention_2", "flash_attention_3")  # keep sequences of a row apart


def empty_model(config: ModelConfig, key: str = "model.policy") -> PreTrainedModel:
    """Build a model on the meta device: float32, in training mode, without dropout; messages have its ``key``.

    Raises:
        ConfigError: The model has no readable configuration, transformers cannot build it, or packing would break it.
    """
    model = model_of(trainable_config(config, key), config.path, key, config.attn_implementation)
    model.generation_config = read_generation_config(config.path) or model.generation_config
    return model.train()  # type: ignore[no-any-return]


def model_of(model_config: Any, path: str, key: str, attn_implementation: str = attention.NAME) -> Any:
    """Build the model of a configuration on the meta device, in float32; with its own attention if it has no choice."""
    known: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model_config), None)
    if known is not None and attn_implementation == attention.NAME:
        tables = [each for each in vars(sys.modules[known.__module__]).values() if isinstance(each, dict)]
        if any("eager" in table for table in tables) or not known._can_set_attn_implementation():  # a table: GIT
            attn_implementation = "eager"  # where it leaks, the check at the start sees it
    options = {"dtype": torch.float32, "attn_implementation": attn_implementation}
    with torch.device("meta"):
        made = read(path, key, "model", pretrained, AutoModelForCausalLM.from_config, model_config, **options)
    return made.to("meta")  # DiffLlama draws some weights on the CPU, whatever the device


def trainable_config(config: ModelConfig, key: str) -> Any:
    """Return a model's configuration without dropout, by which logprobs would not be those of the engine."""
    model_config = set_noise(read_config(config.path, key), 0.0)
    if getattr(model_config, "quantization_config", None) is not None:
        raise ConfigError(
            f"{key}.path {config.path!r} holds quantised weights, which cannot be trained: give the folder of the "
            "unquantised model."
        )
    if type(model_config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        if config.attn_implementation not in IMPLEMENTATIONS:
            raise ConfigError(
                f"{key}.attn_implementation is {config.attn_implementation!r}, with which packed sequences can attend "
                f"to each other: give one of {', '.join(IMPLEMENTATIONS)}."
            )
    elif hasattr(model_config, "vision_config"):
        raise ConfigError(
            f"{key}.path {config.path!r} is a vision-language model, {type(model_config).__name__}: rlplug trains on "
            "text alone, without a path for images. Give a text model."
        )
    return model_config


def set_noise(config: Any, value: float) -> Any:
    """Give the options of dropout and other noise another value, where they are not 0, and return the configuration."""
    for owner in (config, config.get_text_config()):
        for option, own in vars(owner).items():
            if type(own) in (int, float) and own and any(word in option for word in NOISE):
                setattr(owner, option, type(own)(value))
    return config


def load_model(config: ModelConfig, key: str = "model.policy") -> PreTrainedModel:
    """Build a model on the CPU, unsharded, with its weights; see :func:`empty_model` and :func:`load_weights`."""
    model = empty_model(config, key)
    to_empty_on(model, torch.device("cpu"))
    model.tie_weights()  # to_empty_on made a new parameter of each, so the tie was lost
    load_weights(model, config, key)
    return model


def to_empty_on(model: nn.Module, device: torch.device) -> None:
    """Allocate tensors of the meta device on ``device``, with undefined values, and move all others there."""
    move: Any = model._apply  # as ``to_empty`` and ``to`` do
    move(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device))


@torch.no_grad()
def load_weights(model: nn.Module, config: ModelConfig, key: str = "model.policy", prefix: str = "") -> Effect:
    """Load all parameters and buffers but low-rank adapters, as float32, this rank's shards alone; return the effect.

    ``model`` is one of :func:`empty_model` with memory, or a submodule whose names have ``prefix`` in the whole.

    Raises:
        ConfigError: The weights cannot be read, have other shapes, or leave part of the model without a value.
    """
    template = empty_model(config, key)
    saved = model.state_dict(keep_vars=True)
    buffers = {prefix + name: buffer for name, buffer in model.named_buffers() if name not in saved}
    adapters = adapters_of(model)
    weights: dict[str, Tensor] = {
        prefix + (name if adapters is None else adapters.plain_names[name]): parameter
        for name, parameter in model.named_parameters()
        if adapters is None or name in adapters.plain_names
    }
    weights |= {prefix + name: buffer for name, buffer in model.named_buffers() if name in saved}
    _copy_all(buffers, rebuilt_buffers(template, buffers))
    if config.init == "random":
        _copy_all(weights, _drawn_weights(template, next(iter(weights.values())).device, config.seed))
        return Effect(f"weights drawn with seed {config.seed}, block by block")
    from rlplug.models.weight_files import stream, weight_files, whole_weights

    files = read(config.path, key, "weights", weight_files, config.path)
    if weights.keys() <= files.keys() and not get_model_conversion_mapping(template, add_legacy=False):
        read(config.path, key, "weights", stream, weights, files)
        count, others = len(set(files.values())), sorted(files.keys() - template.state_dict().keys())
        unused = f"; {len(others)} in them are none of the model, first {others[0]}" if others else ""
        return Effect(f"weights streamed from {count} safetensors file{'s' * (count > 1)}{unused}")
    _copy_all(weights, whole_weights(config, key, weights).items())
    return Effect("weights loaded whole on every rank: transformers converts the names of this checkpoint")


@torch.no_grad()
def stored_weights(
    config: ModelConfig, key: str, shapes: Mapping[str, torch.Size], device: torch.device
) -> Iterator[tuple[str, Any]]:
    """Yield weights one after another under their checkpoint names, for a trainer with models of its own.

    Each is something whose slices are tensors: of a weight in a file nothing else is read, to the CPU, in the file's
    dtype. Random weights are drawn whole on ``device``, one transformer block at a time. ``shapes`` names those wanted.

    Raises:
        ConfigError: A weight is missing, cannot be read, or has another shape.
    """
    if config.init == "random":
        template = empty_model(config, key)
        of_parameters = hf_weights(template)
        for name, drawn in _drawn_weights(template, device, config.seed):
            found = of_parameters.get(name, ())  # none for a buffer
            yield from ((weight.name, weight.of(drawn)) for weight in found if weight.name in shapes)
        return
    from rlplug.models.weight_files import sliced_weights

    yield from sliced_weights(config, key, shapes)


def copy_part(target: Tensor, whole: Tensor) -> None:
    """Copy this rank's shard of ``whole`` into ``target``."""
    local_part(target).copy_(whole[local_slices(target)])


def _copy_all(targets: Mapping[str, Tensor], values: Iterable[tuple[str, Tensor]]) -> None:
    """Copy the values that ``targets`` names; ``values`` may have more, such as tied weights or those of the head."""
    missing = set(targets)
    for name, value in values:
        if name in missing:
            copy_part(targets[name], value)
            missing.remove(name)
    assert not missing, missing


def _drawn_weights(template: PreTrainedModel, device: torch.device, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield random weights as transformers initialises the model, one transformer block or other module at a time.

    Every rank draws all of them, so values depend neither on the number of ranks nor on the mesh. They do depend on
    the kind of device, since a GPU has a generator of its own.
    """
    blocks, saved = set(transformer_blocks(template)), template.state_dict().keys()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would move the generators of all GPUs
        if device.type == "cuda":
            torch.cuda.default_generators[device.index].manual_seed(seed)
        for name, module in _children_first(template, stop_at=blocks):
            is_block = module in blocks
            module.to_empty(device=device, recurse=is_block)
            for tensor in (*module.parameters(is_block), *module.buffers(is_block)):
                tensor.detach().copy_(torch.tensor(NOTHING))
            for inner_name, inner in _children_first(module, name) if is_block else [(name, module)]:
                _owner(template, inner_name)._init_weights(inner)
            drawn = [*module.named_parameters(name, is_block), *module.named_buffers(name, is_block)]
            if missing := [each for each, tensor in drawn if each in saved and _is_missing(tensor)]:
                raise ConfigError(f"transformers draws no values for {missing[0]}: set the model's init to pretrained.")
            yield from drawn
            module.to_empty(device="meta", recurse=is_block)


def _children_first(
    module: nn.Module, name: str = "", stop_at: Iterable[nn.Module] = ()
) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules with their names in transformers' order of initialisation, without the children of ``stop_at``."""
    if module not in stop_at:
        for child_name, child in module.named_children():
            yield from _children_first(child, f"{name}.{child_name}".lstrip("."), stop_at)
    yield name, module


def rebuilt_buffers(template: PreTrainedModel, buffers: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield buffers that no checkpoint holds, such as RoPE's frequencies, computed as ``from_pretrained`` does."""
    for owner_name in dict.fromkeys(name.rpartition(".")[0] for name in buffers):
        module = template.get_submodule(owner_name)
        own = [name for name in buffers if name.rpartition(".")[0] == owner_name]
        for name in own:
            memory = torch.full(buffers[name].shape, NOTHING).to(buffers[name].dtype)
            module.register_buffer(name.rpartition(".")[2], memory, persistent=False)
        _owner(template, owner_name)._init_weights(module)
        while missing := [name for name in own if _is_missing(template.get_buffer(name))]:
            if not owner_name:
                raise ConfigError(f"no file holds {missing[0]}, and transformers cannot compute it: use another model.")
            owner_name = owner_name.rpartition(".")[0]  # the whole of Falcon-H1 computes those of its layers
            _owner(template, owner_name)._init_weights(template.get_submodule(owner_name))
        yield from ((name, template.get_buffer(name)) for name in own)


def _is_missing(buffer: Tensor) -> bool:
    return buffer.numel() > 0 and bool((buffer == NOTHING).all())


def _owner(template: PreTrainedModel, name: str) -> PreTrainedModel:
    """Return the innermost transformers model around a module, whose ``_init_weights`` initialises it."""
    module: Any = template.get_submodule(name)
    while not isinstance(module, PreTrainedModel):
        name = name.rpartition(".")[0]
        module = template.get_submodule(name)
    return module
