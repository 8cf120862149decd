"""Requests at once, tokens of prompts in a pass, and graphs, from the completions that an engine gets in a step."""

from __future__ import annotations

from typing import Any, Final

from rlplug_plan.inputs import MemoryInputs
from rlplug_plan.recommendation import Recommendation
from rlplug_plan.resize import ENGINE_OPTIONS

LEAST_PROMPT_TOKENS: Final = 2048
MOST_PROMPT_TOKENS: Final = 8192
"""Tokens of prompts in one pass of an engine. A rule, not a measurement: vLLM's guide on optimization gives 2,048 for
latency and some 8,000 and more for throughput, SGLang's on tuning names 2,048 to 8,192, and TensorRT-LLM takes 8,192
by default. What is longer takes memory that the plan does not count."""


def requests_at_once(facts: MemoryInputs) -> int:
    """Return the completions of a step that one engine generates at once: all, or those that its cache holds."""
    assert facts.engine is not None
    held = facts.engine.kv_cache // max(1, facts.sizes.longest * facts.engine.kv_bytes_per_token)
    return max(1, min(held, facts.completions))


def prompt_tokens(facts: MemoryInputs) -> int:
    """Return the tokens of a pass over prompts: all of a step, each once, as a power of two within the rule."""
    prompts = -(-facts.completions // facts.group_size)
    tokens = prompts * (facts.sizes.longest - facts.sizes.max_new_tokens)
    return min(MOST_PROMPT_TOKENS, max(LEAST_PROMPT_TOKENS, 1 << max(0, tokens - 1).bit_length()))


def engine_sizes(facts: MemoryInputs) -> list[Recommendation]:
    """Return what to change of the engine's options for these sizes, under its own names; the first says why."""
    if facts.engine is None or not facts.completions:
        return []
    requests, tokens, completions = requests_at_once(facts), prompt_tokens(facts), facts.completions
    found = facts.size_options(requests, tokens)
    held, bound = f"all {completions} completions", ""
    if requests < completions:
        held, bound = f"{requests} of the {completions} completions", ", as many as its cache holds at full length"
    why = (
        f"{held} that an engine gets in a step run at once{bound}; a pass takes {tokens:,} tokens of prompts, by a "
        f"rule ({LEAST_PROMPT_TOKENS:,} to {MOST_PROMPT_TOKENS:,})"
    )
    return [
        Recommendation(f"{ENGINE_OPTIONS}.{name}", value, "; ".join([_short(value), *([why] if index == 0 else [])]))
        for index, (name, value) in enumerate(found.items())
    ]


def _short(value: Any) -> str:
    return f"{len(value)} sizes up to {max(value)}" if isinstance(value, list) and value else str(value)
