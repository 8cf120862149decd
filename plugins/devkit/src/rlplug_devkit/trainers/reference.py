"""Reference for trainers: transformers' model, one sequence at a time, with eager attention and no packing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlplug.interfaces.trainer import ModelConfig
from rlplug.models.hf_files import pretrained
from rlplug.models.loading import load_model
from rlplug.weight_sync.hf_names import hf_views, hf_weights
from rlplug_devkit.trainers.cases import LEARNING_RATE, LENGTHS, LONG_LENGTHS, SAMPLING, loss_weights, rows


@dataclass(frozen=True)
class Reference:
    """What transformers says of a folder's model."""

    architecture: str
    """Name of the class of transformers."""
    weights: dict[str, Tensor]
    """Weights of the folder's safetensors file, by name."""
    logprobs: Tensor
    """float32 [B, T], of :func:`~rlplug_devkit.trainers.cases.rows`"""
    long_logprobs: Tensor
    """The same of rows of :data:`~rlplug_devkit.trainers.cases.LONG_LENGTHS`."""
    gradients: dict[str, Tensor]
    """Gradients of the sum of weighted logprobs, by the weights' names in the file."""

    @property
    def stepped(self) -> dict[str, Tensor]:
        """Weights after one step of SGD."""
        return {name: weight - LEARNING_RATE * self.gradients[name] for name, weight in self.weights.items()}

    @property
    def gradient_norm(self) -> float:
        """2-norm of all gradients together."""
        return float(torch.stack([gradient.double().norm() for gradient in self.gradients.values()]).norm())


def reference_of(folder: Path) -> Reference:
    """Compute logprobs and gradients of the model in ``folder``."""
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = pretrained(AutoModelForCausalLM.from_pretrained, folder, **options)
    logprobs = reference_logprobs(model)
    with torch.no_grad():
        long_logprobs = reference_logprobs(model, LONG_LENGTHS)
    (loss_weights(logprobs.shape) * logprobs).sum().backward()  # type: ignore[no-untyped-call]
    of_parameters = hf_weights(model)
    gradients = {
        weight.name: weight.of(parameter.grad)
        for name, parameter in model.named_parameters()
        for weight in of_parameters[name]
    }
    saved = load_file(folder / "model.safetensors")  # and buffers, such as a router's corrections, which no sync sends
    weights = {name: saved[name] for name in gradients}
    return Reference(type(model).__name__, weights, logprobs.detach(), long_logprobs, gradients)


def reference_logprobs(model: Any, lengths: Sequence[tuple[int, int]] = LENGTHS) -> Tensor:
    """Return logprobs of the rows, float32 [B, T], 0 where nothing trains."""
    batch = rows(lengths=lengths)
    logprobs = torch.zeros(batch.input_ids.shape)
    for row, ids in enumerate(batch.input_ids):
        length = int(batch.attention_mask[row].sum())
        scores = (model(ids[None, :length], use_cache=False).logits[0, :-1] / SAMPLING.temperature).log_softmax(-1)
        chosen = scores.gather(-1, ids[1:length, None])[:, 0]
        logprobs[row, 1:length] = chosen * batch.response_mask[row, 1:length]
    return logprobs


def drawn_weights(folder: Path, seed: int) -> dict[str, Tensor]:
    """Return the weights that ``TransformersTrainer`` draws with ``seed``, by their names in a checkpoint."""
    return hf_views(load_model(ModelConfig(str(folder), init="random", dtype="float32", seed=seed)))
