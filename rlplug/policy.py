"""The policy: its configuration, how it is loaded and run, and how it leaves as a plain Hugging Face folder."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerBase

from rlplug.errors import ConfigError
from rlplug.interfaces.rollout import PolicySpec
from rlplug.ops.logprobs import entropy, scaled_logits, token_logprobs, truncate_logits
from rlplug.plugin_manager import plugins
from rlplug.types import Batch, SamplingParams

EntropyMode: TypeAlias = Literal["none", "value", "gradient"]
"""What a forward pass computes of the entropy."""


@dataclass
class PolicyConfig:
    """The model that is trained.

    Args:
        path: Hugging Face folder or hub name, with configuration, tokenizer and (for ``pretrained``) safetensors.
        init: ``pretrained`` loads the weights; ``random`` draws new ones from the configuration, seeded by ``seed``.
        dtype: Of the weights in forward and backward passes and in the engine. The optimizer always works on
            float32 weights, and gradients are reduced in float32.
        attn_implementation: One of transformers' attention implementations.
        gradient_checkpointing: Recompute activations in the backward pass: less memory, about a third more time.
        seed: For ``init: random``.
    """

    path: str
    init: Literal["pretrained", "random"] = "pretrained"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    attn_implementation: str = "sdpa"
    gradient_checkpointing: bool = False
    seed: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


@dataclass(frozen=True)
class PolicyOutput:
    """What one forward pass says of the tokens of a batch; 0 where ``response_mask`` is false, however rows are cut."""

    logprobs: Tensor
    """float32 [B, T]: under the tempered distribution, which is what trains"""
    entropy: Tensor
    """float32 [B, T], in nats; 0 when it was not asked for"""
    sampled_logprobs: Tensor
    """float32 [B, T], no gradient: under the distribution that was sampled, top-k and top-p included"""
    hidden: Tensor
    """[B, K, D], in the policy's dtype: what the output layer read to predict the last K tokens"""


def load_tokenizer(config: PolicyConfig, key: str = "model.policy") -> PreTrainedTokenizerBase:
    """Load the tokenizer; padding, which masks always hide, uses the end token when the tokenizer has none."""
    _check_folder(config, key)
    tokenizer: PreTrainedTokenizerBase = _read(
        config, "tokenizer", plugins().hook.rlplug_make_tokenizer, path=config.path, key=key
    )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def require_same_tokens(config: PolicyConfig, key: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a model beside the policy that reads token ids otherwise.

    Raises:
        ConfigError: Its tokenizer maps text to other ids than ``tokenizer``, the policy's.
    """
    if load_tokenizer(config, key).get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"{key}.path {config.path!r} has another tokenizer than model.policy.path, and would read the policy's "
            "tokens as other text: use a model of the same family."
        )


def load_spec(config: PolicyConfig, tokenizer: PreTrainedTokenizerBase) -> PolicySpec:
    """Read what engine and data need to know of the policy, without its weights.

    Raises:
        ConfigError: The model has fewer embeddings than the tokenizer has ids, or neither names an end token.
    """
    model_config = _model_config(config)
    text_config = model_config.get_text_config()
    largest = max(tokenizer.get_vocab().values())
    if largest >= text_config.vocab_size:
        raise ConfigError(
            f"model.policy.path {config.path!r}: the tokenizer has ids up to {largest}, and the model embeds only "
            f"{text_config.vocab_size}. They are from different models: use the tokenizer files of this one."
        )
    named: list[Any] = [tokenizer.eos_token_id]
    for owner in (text_config, _generation_config(config)):
        end = getattr(owner, "eos_token_id", None)
        named += end if isinstance(end, list) else [end]
    ends = {int(end) for end in named if end is not None}
    if not ends:
        raise ConfigError(
            f"model.policy.path {config.path!r}: neither tokenizer nor configuration names an end token, so no "
            "completion could stop. Set eos_token in tokenizer_config.json."
        )
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(ends)
    return PolicySpec(
        path=config.path,
        dtype=config.torch_dtype,
        eos_token_ids=tuple(sorted(ends)),
        pad_token_id=int(pad),
        max_context=int(getattr(text_config, "max_position_embeddings", 1 << 20)),
    )


def load_model(config: PolicyConfig, key: str = "model.policy") -> nn.Module:
    """Build a model with float32 weights and without dropout.

    Dropout would make the trainer's logprobs differ from the engine's on the same weights.

    Args:
        config: The model.
        key: Where the configuration names it, for messages.

    Raises:
        ConfigError: The weights cannot be read, or leave part of the model without a value.
    """
    model_config = _model_config(config, key)
    for owner in (model_config, model_config.get_text_config()):
        for option, value in vars(owner).items():
            if isinstance(value, float) and "drop" in option:  # attention_dropout, attn_pdrop, layerdrop, ...
                setattr(owner, option, 0.0)
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": config.attn_implementation}
    model: Any
    if config.init == "random":
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(config.seed)  # torch.manual_seed would move the GPUs' generators too
            model = _read(config, "model", AutoModelForCausalLM.from_config, model_config, key=key, **options)
    else:
        options |= {"config": model_config, "use_safetensors": True, "output_loading_info": True}
        model, info = _read(config, "weights", AutoModelForCausalLM.from_pretrained, config.path, key=key, **options)
        if missing := sorted(info["missing_keys"]):
            raise ConfigError(
                f"{key}.path {config.path!r} has no value for {len(missing)} weights, first {missing[0]!r}: "
                "the folder is incomplete, or its config.json belongs to another model."
            )
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()  # type: ignore[no-any-return]


def policy_forward(model: nn.Module, batch: Batch, sampling: SamplingParams, entropy_mode: EntropyMode) -> PolicyOutput:
    """Run the policy on a right-padded batch.

    No attention mask is passed: under causal attention no real token sees the padding to its right, and without a
    mask attention takes its fastest path. Logits are computed from the first trained position on.
    """
    num_positions = batch.input_ids.shape[1]
    trained = batch.response_mask.any(dim=0).nonzero()
    start = max(1, int(trained[0])) if len(trained) else num_positions
    with _input_of_output_layer(model) as hidden:
        logits = model(input_ids=batch.input_ids, use_cache=False, logits_to_keep=num_positions - start + 1).logits
    logits = scaled_logits(logits[:, :-1], sampling.temperature)  # [B, K, V]: position t - 1 predicts token t
    targets = batch.input_ids[:, start:]

    def aligned(values: Tensor) -> Tensor:
        # what a masked position holds would depend on the split, and far from old_logprobs its ratio overflows
        return torch.nn.functional.pad(values, (start, 0)).masked_fill(~batch.response_mask, 0.0)

    logprobs = aligned(token_logprobs(logits, targets))
    sampled = logprobs.detach()
    if sampling.is_truncated and not sampling.is_greedy:
        with torch.no_grad():
            sampled = aligned(token_logprobs(truncate_logits(logits, sampling, keep=targets), targets))
    entropies = torch.zeros_like(sampled)
    if entropy_mode != "none":
        with torch.set_grad_enabled(entropy_mode == "gradient"):
            entropies = aligned(entropy(logits))
    return PolicyOutput(logprobs, entropies, sampled, hidden[0][:, :-1])


@contextmanager
def _input_of_output_layer(model: Any) -> Iterator[list[Tensor]]:
    """Collect the hidden states that the output layer is given; keeping those of every layer would cost memory."""
    hidden: list[Tensor] = []
    handle = model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0]))
    try:
        yield hidden
    finally:
        handle.remove()


def export_policy(model: Any, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype, folder: Path, rank: int) -> None:
    """Write a folder that ``AutoModelForCausalLM.from_pretrained`` opens. Collective; rank 0 writes."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full: Any = get_model_state_dict(model, options=options)
    weights = {name: tensor.to(dtype) for name, tensor in full.items()}
    if rank == 0:
        model.save_pretrained(folder, state_dict=weights)
        exported = copy.deepcopy(model.config)
        exported.dtype = dtype  # save_pretrained wrote that of the float32 shards
        exported.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _model_config(config: PolicyConfig, key: str = "model.policy") -> Any:
    _check_folder(config, key)
    return _read(config, "configuration", AutoConfig.from_pretrained, config.path, key=key)


def _generation_config(config: PolicyConfig) -> GenerationConfig | None:
    try:
        return GenerationConfig.from_pretrained(config.path)
    except OSError:
        return None  # the file is optional


def _check_folder(config: PolicyConfig, key: str = "model.policy") -> None:
    """Refuse a missing folder at once, rather than ask the hub for a model of that name."""
    is_hub_name = config.path.count("/") <= 1 and not config.path.startswith((".", "/", "~"))
    if not Path(config.path).is_dir() and not is_hub_name:
        raise ConfigError(f"{key}.path: the folder {config.path!r} does not exist.")


def _read(
    config: PolicyConfig,
    what: str,
    function: Callable[..., Any],
    /,
    *args: Any,
    key: str = "model.policy",
    **options: Any,
) -> Any:
    """Call ``function``, and turn what transformers raises over unusable files or options into a ConfigError."""
    try:
        return function(*args, **options)
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError, StrictDataclassError) as error:
        reason = " ".join(line.strip() for line in str(error).strip().splitlines()[:2])
        place = "the folder" if Path(config.path).is_dir() else "no folder has that name, and as a hub name it"
        raise ConfigError(f"{key}.path {config.path!r}: {place} gives no {what}: {reason}") from error
