"""Training in float8: torchao's linear layers in the place of TorchTitan's."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import nn

from rlplug.errors import ConfigError
from rlplug_trainer_titan.library import titan

Float8: TypeAlias = Literal["none", "rowwise", "rowwise_with_gw_hp", "emulated"]

KEY: Final = "model.trainer.init_args.float8"
CAPABILITY: Final = (8, 9)
"""Oldest CUDA devices with products of float8: Ada, and so Hopper."""
MULTIPLE: Final = 16
"""What the inner size of such a product must be a multiple of; in the gradient of a weight it is the row's length."""


def check_float8(float8: Float8, is_compiled: bool, tensor_size: int) -> None:
    """Refuse float8 without torchao, and where it was not made to work.

    Raises:
        ConfigError: The message names the option and the fix.
    """
    if float8 == "none":
        return
    if float8 == "emulated" and is_compiled:
        raise ConfigError(f"{KEY} is emulated, which cannot be compiled: set model.trainer.init_args.compile to false.")
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(f"{KEY} is {float8}, and torchao is not installed: pip install torchao.")
    if tensor_size > 1:
        raise ConfigError(
            f"{KEY} is {float8}, and trainer.strategy.init_args.tensor is {tensor_size}: the two are not supported "
            "together. Set one of them back."
        )


def convert_linears(decoder_config: Any, float8: Float8, is_compiled: bool) -> Any:
    """Return TorchTitan's configuration of a decoder with the linear layers of its blocks in float8.

    The output layer stays as it is, because logprobs come from it. Weights and gradients keep their dtypes: the factors
    of a product are rounded to float8 when they are multiplied, each row with a scale of its own.

    Args:
        decoder_config: The configuration.
        float8: torchao's recipe: ``rowwise``, or ``rowwise_with_gw_hp``, which computes weight gradients in bf16;
            ``emulated`` rounds with one scale for a tensor, and multiplies in the dtype of the pass on any device.
        is_compiled: Whether blocks are compiled.

    Raises:
        ConfigError: The device has no products of float8.
    """
    if float8 == "none":
        return decoder_config
    emulate = float8 == "emulated"
    if not emulate and not (torch.cuda.is_available() and torch.cuda.get_device_capability() >= CAPABILITY):
        raise ConfigError(f"{KEY} is {float8}, which needs an NVIDIA GPU of Ada, Hopper or newer: set it to none.")
    converter = titan("components.quantization").Float8LinearConverter
    options = converter.Config(
        recipe_name="rowwise" if emulate else float8,
        filter_fqns=["lm_head"],
        model_compile_enabled=is_compiled,
        emulate=emulate,
    )
    return options.build().convert(decoder_config)


def num_in_float8(modules: Iterable[nn.Module]) -> int:
    """Return how many of ``modules`` are linear layers of float8."""
    return sum(type(module).__name__.endswith("Float8Linear") for module in modules)
