"""Memory of a pass over tokens: the tensors that blocks keep for the backward pass, and the output layer's.

Counts are elements per token, in the pass's dtype, of blocks in the shape of Llama: the tensors that autograd saves,
each once, and float32 ones twice. Measured against benchmarks/results/2026-11-21-update-on-h200.
"""

from __future__ import annotations

from typing import Final

from rlplug.interfaces.memory import ActivationTraits
from rlplug_plan.model_shape import ModelShape

FLOAT32: Final = 4
LOGITS_UPDATE_BYTES: Final = 15
"""Bytes a logit where all exist in an update: float32 logits and exponentials, their gradients, and what gathers."""
LOGITS_FORWARD_BYTES: Final = 8
"""The same in a forward-only pass: float32 logits, and their exponentials."""
LOSS_BYTES: Final = 66
"""Bytes a trainable token in an update: its numbers in the micro-batch, what GRPO's loss keeps for the backward pass,
and what it says of single tokens. Counted with a KL penalty; 58 without."""
BLOCKS_ON_DEVICE: Final = 2
"""Blocks whose activations are on the GPU while the others' are on the host."""


def block_elements(shape: ModelShape, traits: ActivationTraits) -> int:
    """Return the elements that one block keeps: inputs and outputs of norms, attention and the MLP."""
    hidden, (query, key, mlp) = shape.hidden, shape.widths
    if traits.fused_pointwise or traits.fused_norms:
        # a norm keeps its input and its result; the MLP keeps gate, up projection and their product
        norms = 2 * hidden + 2 * hidden // shape.token_parts + (query + key if shape.has_qk_norms else 0)
        return norms + shape.mixing + (3 if traits.fused_pointwise else 4) * mlp
    # a norm keeps a float32 copy, its cast and its result; the MLP keeps the activated gate besides
    return 8 * hidden + (4 * (query + key) if shape.has_qk_norms else 0) + shape.mixing + 4 * mlp


def kept_elements(shape: ModelShape, traits: ActivationTraits) -> int:
    """Return what all blocks keep, and what a block that is recomputed takes for as long as that lasts."""
    whole, (query, key, mlp) = block_elements(shape, traits), shape.widths
    block_input = shape.hidden // shape.token_parts
    num_on_device = min(shape.num_blocks, BLOCKS_ON_DEVICE) if traits.activations_on_host else shape.num_blocks
    if traits.recompute == "all":
        num_recomputed = -(-num_on_device // traits.recompute_every)
        return num_recomputed * block_input + (num_on_device - num_recomputed) * whole + whole
    if traits.recompute == "all_but_attention":
        return num_on_device * (block_input + query) + whole
    if traits.recompute == "all_but_half_of_products":  # queries, values, gate and the block's last product stay
        kept = block_input + shape.hidden + 2 * query + key + mlp
        return num_on_device * kept + whole
    if traits.recompute == "all_but_products":
        whole = block_input + 2 * shape.hidden + 2 * query + 2 * key + 2 * mlp
    return num_on_device * whole


def block_temporaries(shape: ModelShape) -> int:
    """Return what is on the GPU for a moment while a block runs, forward or backward, besides what is kept."""
    return 3 * shape.widths.mlp + 4 * shape.hidden


def output_layer(shape: ModelShape, traits: ActivationTraits, num_scored: int, itemsize: int, is_update: bool) -> int:
    """Return the bytes of the output layer's logits and gradients.

    Args:
        shape: Shape of the model.
        traits: Activation traits of its passes.
        num_scored: Tokens of the pass whose logprobs are wanted; 0 for a critic.
        itemsize: Bytes of an element in the pass's dtype.
        is_update: Whether a backward pass follows.
    """
    if not num_scored:
        return 0
    if traits.logits_chunk is None:
        return num_scored * shape.vocab * (LOGITS_UPDATE_BYTES if is_update else LOGITS_FORWARD_BYTES)
    logits = traits.logits_chunk * shape.vocab * itemsize
    if not is_update:
        return logits
    if traits.keeps_logits:
        logits += -(-num_scored // traits.logits_chunk) * traits.logits_chunk * shape.vocab * itemsize
    else:
        logits *= 2  # of a chunk, and their gradient
    # the weight's gradient is summed in float32 and then cast: both exist at once
    return logits + shape.vocab * shape.hidden * (FLOAT32 + itemsize)
