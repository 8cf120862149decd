"""What an engine's scheduler suggests to set, by how its requests wait, and how they fill its memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rlplug_engines.colocated.stats import EngineStats

FULL: Final = 0.9
"""Share of the KV cache in use above which requests that wait do so for room in it; SGLang's tuning guide calls that
good utilisation."""
WORTH: Final = 1.25
"""Times the requests that ran at once that the KV cache must have room for, before more slots are worth an option: it
was at most 72% full."""
IDLE: Final = 0.1
"""Share of the KV cache in use below which most of it serves nothing."""
OFTEN: Final = 0.2
"""Share of the observations in which something happens that a rollout's first steps always have: prompts wait for their
turn, and a batch is at its largest."""
LEAST_OBSERVATIONS: Final = 10
"""Fewest observations of which shares are taken."""
RECENT: Final = 3
"""Rollouts in a row that leave the KV cache idle: one alone may be a validation, or the first of short completions."""
LARGE_PASS: Final = 8192
"""Tokens of a forward pass up to which vLLM's guide to optimization advises a larger one for throughput."""
LARGER_PASS: Final = 16384
"""What vLLM takes on GPUs of 70 GiB and more by itself, and SGLang at most for a prompt's part."""
GRAPH_STEP: Final = 16
"""Distance of the large batch sizes with CUDA graphs in vLLM and SGLang."""


@dataclass(frozen=True)
class AdviceKeys:
    """Options that advice names, as the engine's user writes them; of those that are empty the engine has none."""

    memory: str = "rollout.gpu_memory_utilization (or kv_cache_gib)"
    """Makes the KV cache larger."""
    idle_memory: str = ""
    """Makes it smaller, where that leaves memory of a GPU to something else."""
    requests: str = "rollout.max_num_seqs"
    """Says how many requests run at once."""
    prefill: str = "rollout.max_num_batched_tokens"
    """Says how many tokens a forward pass has."""
    admission: str = ""
    """Lets requests start earlier that wait beside room in the KV cache, with its value."""
    graphs: str = ""
    """Says how large batches with a CUDA graph are."""
    api_processes: str = ""
    """Says how many processes of a server answer requests."""

    def of_servers(self) -> AdviceKeys:
        """Return the same options of servers that run already; their values are not known."""
        named = {
            name: key.partition(" from ")[0].replace("rollout.", "the servers' ") for name, key in asdict(self).items()
        }
        return AdviceKeys(**named)


def suggest(stats: EngineStats) -> list[str]:
    """Return what to set, by what was observed since counters were drained; nothing of a scheduler that does well."""
    return [*_scheduler(stats), *_graphs(stats)] if stats.observes_scheduler else [*_unobserved(stats)]


def _unobserved(stats: EngineStats) -> Iterator[str]:
    """Yield advice about an engine that does not say what its scheduler does: what it was given is known."""
    slots, handed = stats.max_num_seqs // stats.copies, math.ceil(stats.handed_over / stats.copies)
    if 0 < slots < handed:
        yield (
            f"the engine had {handed} requests at once, and runs {slots}: raise {stats.keys.requests} from {slots} to "
            f"{handed}, as far as its KV cache holds them, of which it says nothing."
        )


def _scheduler(stats: EngineStats) -> Iterator[str]:
    """Yield advice about what held requests back the most, or about memory that none of them needed."""
    keys, full = stats.keys, f"KV cache {stats.kv_cache_use:.0%} full"
    tokens, slots = stats.kv_cache_tokens // stats.copies, stats.max_num_seqs // stats.copies
    if stats.preemptions:
        fitted = min(stats.fitted or stats.running, int(FULL * stats.max_num_seqs)) // stats.copies
        yield (
            f"{full}, {stats.preemptions} preemptions, each of which computes a request anew: raise {keys.memory}, or "
            f"lower {keys.requests} from {slots} to {max(fitted, 1)}."
        )
    elif stats.waited_for_cache:
        needed = math.ceil(tokens * (1 + stats.waited_for_cache / max(stats.fitted, 1)))
        yield (
            f"{full}, {stats.waited_for_cache} requests waited for room among {tokens:,} tokens: raise {keys.memory}; "
            f"{needed:,} tokens hold them all."
        )
    elif stats.waited_for_slots and stats.kv_cache_use * WORTH < FULL:
        fits = int(stats.max_num_seqs * FULL / max(stats.kv_cache_use, 1e-3))
        wanted = min(fits, stats.max_num_seqs + stats.waited_for_slots)
        yield (
            f"{full}, 0 preemptions, {stats.waited_for_slots} requests waited: raise {keys.requests} from {slots} to "
            f"{math.ceil(wanted / stats.copies)}."
        )
    elif stats.observations >= LEAST_OBSERVATIONS:
        yield from _prefill(stats) if stats.waits_for_prefill > OFTEN else _idle(stats)


def _prefill(stats: EngineStats) -> Iterator[str]:
    keys, budget = stats.keys, stats.max_num_batched_tokens
    ways = []
    if keys.prefill and 0 < budget <= LARGE_PASS:
        ways.append(f"raise {keys.prefill} from {budget} to {LARGER_PASS}")
    if keys.admission:
        ways.append(f"set {keys.admission}")
    if ways:
        yield (
            f"KV cache {stats.kv_cache_use:.0%} full, fewer than {stats.max_num_seqs} requests ran, and in "
            f"{stats.waits_for_prefill:.0%} of the time up to {stats.waiting} waited for their prompts' turn: "
            f"{', or '.join(ways)}."
        )


def _idle(stats: EngineStats) -> Iterator[str]:
    key, use = stats.keys.idle_memory, max(stats.recent_use)
    if key and len(stats.recent_use) == RECENT and use < IDLE and not stats.waited_for_slots:
        tokens = stats.kv_cache_tokens // stats.copies
        times = int(FULL / max(use, 1e-3))
        yield (
            f"KV cache at most {use:.1%} full, and no request waited for it: {math.ceil(2 * use * tokens):,} of its "
            f"{tokens:,} tokens are twice what was used. Lower {key}, or let a step have up to {times} times as many "
            "completions (model.batch.prompts_per_step)."
        )


def _graphs(stats: EngineStats) -> Iterator[str]:
    key, largest = stats.keys.graphs, math.ceil(stats.running / stats.copies)
    if key and stats.observations >= LEAST_OBSERVATIONS and stats.beyond_graphs > OFTEN:
        size = math.ceil(largest / GRAPH_STEP) * GRAPH_STEP
        yield (
            f"in {stats.beyond_graphs:.0%} of the time more than {stats.largest_graph} requests ran, the largest batch "
            f"with a CUDA graph, and up to {largest}: raise {key} to {size}."
        )
