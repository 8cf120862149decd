"""Which requests an engine takes: the contract's ``SamplingParams``, and the limits of ``AsyncLLM.__init__``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import AutoTokenizer, GenerationConfig

from trtllm_double.arguments import Arguments
from trtllm_double.sampling import SamplingParams


class Admission:
    """Checks prompts and sampling.

    Args:
        arguments: The engine's.
        vocabulary: Number of tokens of the model.
    """

    def __init__(self, arguments: Arguments, vocabulary: int) -> None:
        self._arguments = arguments
        self._vocabulary = vocabulary
        skips = arguments.skip_tokenizer_init
        self.tokenizer = None if skips else AutoTokenizer.from_pretrained(arguments.model)

    def prompt(self, inputs: Sequence[int] | str) -> tuple[int, ...]:
        """Return token ids; ValueError for a text without a tokenizer, or ids that the model lacks."""
        if isinstance(inputs, str):
            if self.tokenizer is None:
                raise ValueError("tokenizer is required to tokenize string prompt")
            return tuple(self.tokenizer.encode(inputs))
        prompt = tuple(inputs)
        if not prompt or not all(type(token) is int and 0 <= token < self._vocabulary for token in prompt):
            raise ValueError(f"inputs must be token ids, ints below {self._vocabulary}: {prompt}")
        return prompt

    def complete(self, params: Any) -> None:
        """Set end tokens that are not given, as ``SamplingParams._setup`` of the sources does.

        That the engine cannot detokenise without a tokenizer is an error here; the real one returns no text.

        Raises:
            TypeError: Not ``SamplingParams``.
            ValueError: A tokenizer is needed, for text or for ``end_id``, and ``skip_tokenizer_init`` is set.
        """
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, and is {type(params).__name__}")
        if self.tokenizer is None and params.detokenize:
            raise ValueError("detokenize=True, the default, and skip_tokenizer_init=True exclude each other")
        if params.end_id is not None:
            return
        if self.tokenizer is None:
            raise ValueError("tokenizer is required to reset end_id if it is None: specify end_id")
        ends = GenerationConfig.from_pretrained(self._arguments.model).eos_token_id
        params.end_id = self.tokenizer.eos_token_id
        more = {*([ends] if isinstance(ends, int) else ends or []), *(params.stop_token_ids or [])} - {params.end_id}
        params.stop_token_ids = sorted(more) or None

    def max_tokens(self, prompt: tuple[int, ...], params: Any) -> int:
        """Return how many tokens a request may get: what it asks for (32 if it does not), or what the context has.

        Raises:
            ValueError: The prompt leaves no room, or is longer than ``max_input_len`` or ``max_num_tokens``.
        """
        limits = self._arguments
        room = limits.max_seq_len - len(prompt)
        if room <= 0:
            raise ValueError(f"the prompt has {len(prompt)} tokens, and max_seq_len={limits.max_seq_len}")
        if limits.max_input_len is not None and len(prompt) > limits.max_input_len:
            raise ValueError(f"the prompt has {len(prompt)} tokens, and max_input_len={limits.max_input_len}")
        if len(prompt) > limits.max_num_tokens and not limits.enable_chunked_prefill:
            raise ValueError(f"the prompt has {len(prompt)} tokens, and max_num_tokens={limits.max_num_tokens}")
        if params.max_tokens is None:
            return room
        if params.max_tokens <= 0:
            raise ValueError(f"max_tokens must be above 0, and is {params.max_tokens}")
        return min(params.max_tokens, room)
