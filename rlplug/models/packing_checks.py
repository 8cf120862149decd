"""Checks that a model keeps packed sequences apart and computes the same twice, before it is loaded and afterwards."""

from __future__ import annotations

import math
import traceback
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import torch
from torch import Tensor, nn

from rlplug.distributed.fsdp_units import transformer_blocks
from rlplug.distributed.ranks import lost_rank
from rlplug.errors import ConfigError, describe
from rlplug.interfaces.trainer import ModelConfig
from rlplug.models import attention
from rlplug.models.forward import critic_forward, policy_forward
from rlplug.models.hf_files import read_config
from rlplug.models.loading import model_of, rebuilt_buffers, set_noise, trainable_config
from rlplug.models.packing import PackedMicroBatch, PackedTokens
from rlplug.types import SamplingParams

if TYPE_CHECKING:
    from rlplug.distributed.strategy import RLFSDP2Strategy

LENGTH: Final = 8  # tokens of the first of the two sequences on which a model is tried; the second has one more
WINDOW: Final = 5  # longest window of attention there, so that both sequences are longer
TOLERANCE: Final = 1e-3  # of logits, in their standard deviation: round-off of float32 is 1e-5, leaks are 0.1 and more
LEAKS: Final = "leaks each packed sequence into the next, first in its layer"
CAUSES: Final = "a mask, a state, or noise that a run switches off (set router_jitter_noise to 0 in config.json)"
REMEDY: Final = "Set model.trainer to HybridTrainer for hybrids (Qwen3.5), else to PaddedTrainer; or mend config.json."
ROUNDING: Final = 0.05  # the same in bfloat16, on average over the tokens of a loaded model
CHANGES: Final = "model.optimizations, and packages of kernels, such as causal-conv1d"
PERIOD: Final = 100_003  # random numbers that all weights share: a prime, so that rows of a matrix differ
LARGEST: Final = 1 << 28  # elements of a matrix beyond which its rows overlap in memory


@torch.no_grad()
def check_passes(config: ModelConfig, key: str, edit: Callable[[Any], None] = lambda _: None) -> None:
    """Try a model's first layers, of each kind and as ``edit`` changes them, on two packed sequences on the CPU.

    Raises:
        ConfigError: Two passes in training differ; or the logits of the second sequence change with the first, or are
            not those of it alone with transformers' own attention, in evaluation, whatever noise training has.
    """
    model = _first_layers(trainable_config(config, key), config.path, key)
    plain = _first_layers(set_noise(read_config(config.path, key), 0.5), config.path, key, "eager").eval()
    name = type(model).__name__
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            edit(model)
            _give_values(model, plain)
            first, other, second = (torch.randint(2, 6, (LENGTH + more,)) for more in (0, 0, 1))  # tokens repeat
            logits, again = _logits(model, first, second), _logits(model, first, second)
            beside, engine = _logits(model, other, second), _logits(model.eval(), first, second)
            alone = plain(input_ids=second[None], use_cache=False).logits[0]
        except ConfigError as error:
            raise ConfigError(f"{key}.path: {error}") from error
        except Exception as error:
            frames = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
            layer = type([each for each in [model, *frames] if isinstance(each, nn.Module)][-1]).__name__
            problem = f"a pass of {name} over a packed row raised {describe(error)} in its layer {layer}"
            from rlplug.interfaces.memory_plan import out_of_memory

            fix = REMEDY if out_of_memory(error) is None else "Take a smaller model, or mend its config.json."
            raise ConfigError(f"{key}.path: {problem}. {fix}") from error
    if not torch.isfinite(logits).all():
        raise ConfigError(f"{key}.path: {name} computes logits that are not finite: correct its config.json.")
    for one, two, problem in (
        (logits, again, "computes something else in each training pass, with noise that config.json may switch off"),
        (logits[LENGTH:], beside[LENGTH:], LEAKS),
        (logits, engine, "computes other logits in training than an engine, with what config.json may switch off"),
        (logits[LENGTH:], alone, f"computes other logits of a packed sequence than of it alone, by {CAUSES}"),
    ):
        if not bool((one - two).abs().max() <= TOLERANCE * one.std()):
            layer = f" {_leaking(model, first, other, second)}" if problem is LEAKS else ""
            raise ConfigError(f"{key}.path: {name} {problem}{layer}. {REMEDY}")


def _leaking(model: Any, first: Tensor, other: Tensor, second: Tensor) -> str:
    """Return the class of the innermost layer that gives something else for the second sequence, and got the same."""
    seen: dict[nn.Module, list[Any]] = defaultdict(list)

    def watch(layer: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        for part in ((*args, *kwargs.values()), output if isinstance(output, tuple) else (output,)):
            seen[layer].append([each[:, LENGTH:] for each in part if isinstance(each, Tensor) and each.dim() == 3])

    for layer in model.modules():
        layer.register_forward_hook(watch, with_kwargs=True)
    _logits(model, first, second), _logits(model, other, second)
    for layer, (got, gave, *_, same, others) in seen.items():
        if all(map(torch.equal, got, same)) and not all(map(torch.allclose, gave, others)):
            return type(layer).__name__
    return type(model).__name__


def check_loaded(key: str, model: Any, strategy: RLFSDP2Strategy) -> None:
    """Try a model as it runs, loaded, optimized, sharded and with kernels, on two packed sequences. Collective.

    Raises:
        ConfigError: What it computes of the second sequence changes with the first or without it, or nothing trains it.
    """
    config = getattr(model, "trunk", model).config.get_text_config()
    ids = torch.randint(2, config.vocab_size, (3, 2 * LENGTH), generator=torch.Generator().manual_seed(0))
    values, tolerance, nothing = [], ROUNDING, cast(Any, None)
    where = f"{config.model_type} as it runs on {strategy.root_device}"
    trains = any(parameter.requires_grad for parameter in model.parameters())
    for places in ([0, 2], [1, 2], [2]):
        row = _row(*ids[places]).part(strategy.sequence_rank, strategy.sequence_size, strategy.sequence_group)
        micro_batch = PackedMicroBatch(nothing, row.to(strategy.root_device))  # models read the row alone
        with torch.set_grad_enabled(trains and places == [2]):
            if hasattr(model, "trunk"):
                values.append(critic_forward(model, micro_batch)[-2 * LENGTH :])
                continue
            output = policy_forward(model, micro_batch, SamplingParams(), "none")
        values.append(output.tokens.logprobs[-2 * LENGTH :])
        tolerance = TOLERANCE if output.hidden.dtype == torch.float32 else ROUNDING
    if strategy.any_rank(not all(each.isfinite().all() for each in values)):
        raise ConfigError(f"{key}: {where} computes logprobs that are not finite. Copy the model's weights again.")
    leaks, differs = ((values[0] - other).abs().mean() for other in values[1:])
    allowed = tolerance * values[2].std()  # of other neighbours, and twice as much of another length of the row
    if strategy.any_rank(not bool(torch.maximum(leaks, differs / 2) <= allowed)):
        raise ConfigError(
            f"{key}: {where} changes a packed sequence by {leaks:.2g} with its neighbour and by {differs:.2g} without "
            f"one; round-off is below {allowed:.2g}. Remove what changes its layers: {CHANGES}."
        )
    if trains:
        try:
            torch.autograd.backward(values[2].mean())
        except Exception as error:  # of a kernel, which the forward pass does not meet
            if isinstance(error, torch.OutOfMemoryError) or lost_rank(error) is not None:
                raise
            raise ConfigError(f"{key}: {where} has no backward pass, by {CHANGES}: {describe(error)}") from error
        model.zero_grad()


def _first_layers(config: Any, path: str, key: str, attention: str = attention.NAME) -> Any:
    """Return an empty model with short windows, and without the layers that are like those before them."""
    text = config.get_text_config()
    for option, value in vars(text).items():
        is_length = any(word in option for word in ("window", "chunk", "index_topk")) and "inference" not in option
        if is_length and type(value) is int and WINDOW < value < getattr(text, "max_position_embeddings", math.inf):
            setattr(text, option, WINDOW)
    model = model_of(config, path, key, attention)
    blocks = transformer_blocks(model)
    kinds = [_kind(block, index, text) for index, block in enumerate(blocks)]
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and list(module) == blocks:
            del module[1 + max(map(kinds.index, kinds)) :]
    model.set_output_embeddings(nn.Linear(model.get_output_embeddings().in_features, LENGTH, False, "meta"))
    return model.train()


def _kind(block: nn.Module, index: int, config: Any) -> Any:
    """Return what tells a layer from others: its type, modules and options; of numbers, whether they are 0."""
    options = ((name, type(each), *option) for name, each in block.named_modules() for option in vars(each).items())
    known = (option for option in options if isinstance(option[-1], str | float | int | None))
    types = (getattr(config, "layer_types", None) or ())[index : index + 1]
    return [*types, *((*o[:-1], o[-1] if isinstance(o[-1], str) else bool(o[-1])) for o in known)]


def _give_values(model: Any, plain: Any) -> None:
    """Give parameters of both random values, which lie over others in memory, and buffers of no weight their own."""
    saved = {name for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    for each in (model, plain):
        list(rebuilt_buffers(each, {name: buffer for name, buffer in each.named_buffers() if name not in saved}))
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
    plain.load_state_dict(model.state_dict(), assign=True)


def _logits(model: Any, *sequences: Tensor) -> Tensor:
    """Return the logits of a packed row, [N, V]."""
    row = _row(*sequences)
    kept = row.predicting.repeat(2)  # twice, since some models compute all, whatever they are asked for
    logits: Tensor = model(**row.model_inputs(), logits_to_keep=kept).logits[0]
    if len(logits) < len(kept):
        raise ConfigError(f"{type(model).__name__} does not know logits_to_keep. {REMEDY}")
    return logits[: len(kept) // 2]


def _row(*sequences: Tensor) -> PackedTokens:
    lengths = [len(ids) for ids in sequences]
    ids, positions = torch.cat(sequences), torch.cat([torch.arange(length) for length in lengths])
    every, borders = torch.arange(len(ids)), torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    return PackedTokens(ids[None], positions[None], borders, max(lengths), every, ids, every, len(ids))


def check_long_sequences(config: Any, implementation: str, key: str, longest: int, sequence_size: int) -> None:
    """Raise an error for settings that would silently give wrong results with long sequences.

    Raises:
        ConfigError: Ranks share rows, whose parts rlplug's own attention alone exchanges; or a sequence can be so long
            that LongRoPE (arXiv 2402.13753) would take its long factors for all sequences of a pass.
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
