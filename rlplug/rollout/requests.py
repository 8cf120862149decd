"""From prompts to an engine's requests, and from its completions to samples."""

from __future__ import annotations

import random
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from rlplug.types import Completion, Prompt, Request, Sample


def make_requests(prompts: Sequence[Prompt], groups: Sequence[int], num_samples: int, key: str) -> list[Request]:
    """Ask for ``num_samples`` completions of each prompt.

    A request's seed follows from ``key``, which names run and step, from the prompt's group and from the number of
    the sample: it is the same on whichever rank the request runs.
    """
    return [
        Request(
            request_id=f"{key}/{group}/{sample}",
            prompt_ids=prompt.token_ids,
            seed=random.Random(f"{key}/{group}/{sample}").getrandbits(63),
        )
        for prompt, group in zip(prompts, groups, strict=True)
        for sample in range(num_samples)
    ]


def to_samples(
    prompts: Sequence[Prompt],
    groups: Sequence[int],
    completions: Sequence[Completion],
    tokenizer: PreTrainedTokenizerBase,
) -> list[Sample]:
    """Join completions, in the order of :func:`make_requests`, with their prompts. Text is for rewards and logs."""
    if not prompts:
        return []
    num_samples = len(completions) // len(prompts)
    texts = tokenizer.batch_decode([list(c.token_ids) for c in completions], skip_special_tokens=True)
    samples = []
    for index, (completion, text) in enumerate(zip(completions, texts, strict=True)):
        prompt = prompts[index // num_samples]
        num_prompt = len(prompt.token_ids)
        samples.append(
            Sample(
                prompt=prompt,
                group=groups[index // num_samples],
                token_ids=prompt.token_ids + completion.token_ids,
                response_mask=(False,) * num_prompt + (True,) * len(completion.token_ids),
                rollout_logprobs=(0.0,) * num_prompt + completion.logprobs,
                completion=text,
                finish_reason=completion.finish_reason,
                policy_version=completion.policy_version,
            )
        )
    return samples
