"""Low-rank adapters that a vLLM engine of this process serves: how they get into its layers, without a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, get_args

import torch
from torch import Tensor, nn

from rlplug.errors import ConfigError, RunError
from rlplug.interfaces import AdapterWeights, Bucket, TensorInfo

NOWHERE: Final = "/in/memory"
"""Path of adapters that have no file: vLLM wants one, and reads it only for an adapter that it does not hold."""


def lora_arguments(adapters: AdapterWeights) -> dict[str, Any]:
    """Return the arguments of ``EngineArgs`` with which an engine serves ``adapters``, one version at a time.

    Raises:
        ConfigError: vLLM serves no adapters of this rank.
    """
    from vllm.config.lora import MaxLoRARanks

    ranks = [rank for rank in get_args(MaxLoRARanks) if rank >= adapters.rank]
    if not ranks:
        raise ConfigError(
            f"model.lora.rank is {adapters.rank}, and the installed vLLM serves adapters of a rank up to "
            f"{max(get_args(MaxLoRARanks))}: lower it, or set model.lora.sync to merged."
        )
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": min(ranks),
        # else vLLM would also compute an adapter of the output layer, which is always zero
        "lora_target_modules": sorted({module.rpartition(".")[2] for module in adapters.modules}),
    }


class ServedAdapters:
    """The adapters of one engine, of which it holds the newest version alone.

    Every version has a new id and name: vLLM computes with it by its id, and its prefix cache tells versions apart by
    their names.

    Args:
        adapters: Rank, scale and layers of the adapters.
        engine: vLLM's ``LLMEngine``, started with :func:`lora_arguments`.
        model: Its model.
    """

    def __init__(self, adapters: AdapterWeights, engine: Any, model: Any) -> None:
        self._adapters = adapters
        self._lora_config = engine.vllm_config.lora_config
        self._model, self._manager = model, model.lora_manager
        self._number = 1  # that of the adapter with which vLLM warms up, whose metadata must not be taken for ours
        self._sent_names = {name for module in adapters.modules for name in AdapterWeights.names(module)}
        self.has_frozen = False
        """Whether a sync has brought the frozen weights and adapters."""

    def expected(self, weights: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """Return the tensors of the next sync, where ``weights`` are the frozen ones."""
        adapters = self._adapters.tensors(weights)
        return adapters if self.has_frozen else {**weights, **adapters}

    @property
    def request(self) -> Any:
        """What a request of vLLM names to be computed with the newest version."""
        from vllm.lora.request import LoRARequest

        return LoRARequest(f"policy-{self._number}", self._number, NOWHERE)

    def without(self, buckets: Iterable[Bucket], received: dict[str, Tensor]) -> Iterator[Bucket]:
        """Yield what of each bucket is no adapter, and put copies of the adapters' tensors into ``received``."""
        for bucket in buckets:
            received |= {name: tensor.clone() for name, tensor in bucket if name in self._sent_names}
            if others := [(name, tensor) for name, tensor in bucket if name not in self._sent_names]:
                yield others

    @torch.no_grad()
    def replace(self, tensors: dict[str, Tensor]) -> None:
        """Compute with ``tensors`` from now on, by their names in a sync; the version before is forgotten.

        Raises:
            RunError: vLLM's model has no layer for one of them.
        """
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        adapters, number = self._adapters, self._number + 1
        new = LoRAModel.from_lora_tensors(
            number,
            tensors,
            PEFTHelper(r=adapters.rank, lora_alpha=adapters.alpha, target_modules=[]),
            device=str(next(iter(tensors.values())).device),
            dtype=self._lora_config.lora_dtype,
            weights_mapper=_mapper(self._model),
        )
        for old in self._manager.list_adapters():
            self._manager.remove_adapter(old)
        self._manager.add_adapter(new)  # it joins those of fused layers
        if unknown := sorted(new.loras.keys() - self._manager.modules.keys()):
            self._manager.remove_adapter(number)
            raise RunError(
                f"vLLM's {type(self._model).__name__} has no layer for the adapter of {unknown[0]}: leave it out of "
                "model.lora.targets, or set model.lora.sync to merged."
            )
        self._manager.activate_adapter(number)
        self._number, self.has_frozen = number, True


@contextmanager
def plain_layers(model: nn.Module) -> Iterator[None]:
    """Have the layers of a model without vLLM's wrappers for adapters, so that weights have their usual names."""
    from vllm.lora.layers import BaseLayerWithLoRA

    wrapped: list[tuple[nn.Module, str, Any]] = [
        (parent, name, child)
        for parent in list(model.modules())
        if not isinstance(parent, BaseLayerWithLoRA)
        for name, child in parent.named_children()
        if isinstance(child, BaseLayerWithLoRA)
    ]
    for parent, name, child in wrapped:
        setattr(parent, name, child.base_layer)
    try:
        yield
    finally:
        for parent, name, child in wrapped:
            setattr(parent, name, child)


def _mapper(model: Any) -> Any:
    """Return what turns checkpoint names into vLLM's, without the joining of fused layers."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return None
    # its name in vLLM 0.32, and in 0.26
    return mapper.get_rename_mapper() if hasattr(mapper, "get_rename_mapper") else mapper.get_unstacked_mapper()
