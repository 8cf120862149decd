"""How weights under Hugging Face names become those of a vLLM model in this process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from rlplug.interfaces import Bucket

PLAIN_METHODS = frozenset({"NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"})


@torch.no_grad()
def load_weights(model: nn.Module, vllm_config: Any, buckets: Iterable[Bucket]) -> None:
    """Load all weights of a model, bucket by bucket.

    Plain weights, which kernels read as they are loaded, are copied where they are. Others (quantised, re-packed, or
    with something derived from them) go through vLLM's layer-wise reload, which keeps a layer's weights
    until all have come, processes them as at a start, and copies the result to where CUDA graphs read it. That happens
    also when a bucket is refused, so that the model can take another sync.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    load: Any = model.load_weights
    if are_copied_in_place(model, vllm_config.model_config):
        for bucket in buckets:
            load(iter(bucket))
        return
    with set_current_vllm_config(vllm_config):
        initialize_layerwise_reload(model)
        try:
            for bucket in buckets:
                # a layer may wait for weights of the next bucket, and this one is valid until then only
                load((name, tensor.clone()) for name, tensor in bucket)
        finally:
            finalize_layerwise_reload(model, vllm_config.model_config)
            repack(model)


def forget(model: nn.Module) -> None:
    """Drop what vLLM keeps of a model's layers for reloads: it refers to them, so that a closed engine's would stay."""
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

    for module in model.modules():
        LAYERWISE_INFO.pop(module, None)


def are_copied_in_place(model: nn.Module, model_config: Any) -> bool:
    """Return whether the weights of ``model`` are plain: kernels read them as they are loaded."""
    methods = {type(getattr(module, "quant_method", None)).__name__ for module in model.modules()}
    on_gpu = all(parameter.is_cuda for parameter in model.parameters())
    return on_gpu and methods <= PLAIN_METHODS and not model_config.use_mla


def repack(model: nn.Module) -> None:
    """Do after a layer-wise reload what it leaves out on a CPU (vLLM 0.32), where kernels read packed weights."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    embeddings: list[Any] = [m for m in model.modules() if type(m) is VocabParallelEmbedding]
    module: Any
    for module in model.modules():
        # an output layer that reads the embedding's weight is no layer that got weights
        if isinstance(module, ParallelLMHead) and any(
            module.weight.data_ptr() == embedding.weight.data_ptr() for embedding in embeddings
        ):
            module.quant_method.process_weights_after_loading(module)
        # vLLM packs experts' weights only when it makes their kernel, at a start
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None and not any(parameter.is_cuda for parameter in module.parameters()):
            kernel.fused_experts.process_weights_after_loading(module)
