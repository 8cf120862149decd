"""What an update computes of a group whose completions share their prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlplug.training.batch_plan import BatchPlan


def sharing_note(batch: BatchPlan, prompt: int, completion: int) -> str:
    """Return the share of tokens that an update computes, of groups with the longest prompt and completions.

    Args:
        batch: Sizes of a run whose completions share prompts.
        prompt: Tokens of the longest prompt.
        completion: ... and of the longest completion.
    """
    whole = batch.group_size * (prompt + completion)
    computed = num_computed(batch, prompt, completion)
    once = "once" if computed == prompt + batch.group_size * completion else "once a pass"
    return (
        f"shared prefixes: of a group of {batch.group_size} with {prompt:,} + {completion:,} tokens, an update "
        f"computes the prompt {once}: {computed:,} tokens in place of {whole:,}, {computed / whole:.0%}"
    )


def num_computed(batch: BatchPlan, prompt: int, completion: int) -> int:
    """Return the tokens that an update computes of a group, which its budget may cut into several passes."""
    if batch.max_rows:
        at_once = batch.max_rows["update"]
    else:
        at_once = (batch.max_tokens["update"] * batch.sequence_size - prompt) // max(completion, 1)
    num_passes = -(-batch.group_size // min(max(at_once, 1), batch.group_size))
    return num_passes * prompt + batch.group_size * completion
