"""What is said of shared prompts is what the passes of a group compute."""

from __future__ import annotations

import pytest
from rlplug_plan.shared_tokens import num_computed, sharing_note

from rlplug.training.batch_plan import BatchPlan, BatchSizes


@pytest.mark.parametrize(
    ("sizes", "computed", "said"),
    [
        ({"max_tokens_per_gpu": 16384}, 256 + 8 * 512, "prompt once: 4,352 tokens in place of 6,144, 71%"),
        ({"max_tokens_per_gpu": 2304}, 2 * 256 + 8 * 512, "once a pass: 4,608 tokens in place of 6,144, 75%"),
        ({"micro_batch_size_per_gpu": 3}, 3 * 256 + 8 * 512, "once a pass: 4,864 tokens in place of 6,144, 79%"),
        ({"max_tokens_per_gpu": 768}, 8 * (256 + 512), "once a pass: 6,144 tokens in place of 6,144, 100%"),
    ],
)
def test_tokens_of_a_group_follow_from_the_budget(sizes: dict[str, int], computed: int, said: str) -> None:
    """Alone catches a group that is said to share more than its passes hold."""
    batch = BatchPlan(BatchSizes(prompts_per_step=4, group_size=8, **sizes), 1, longest=768)
    assert num_computed(batch, 256, 512) == computed
    assert said in sharing_note(batch, 256, 512)
