"""The reward of the calculator example: is the last number of the last turn the answer?"""

import re

from rlplug.types import Sample


def answers(sample: Sample) -> float:
    """Return 1 when the policy itself, and not only the tool, says the answer at the end."""
    said = sample.last_turn
    numbers = re.findall(r"-?\d+", said)
    return float(bool(numbers) and numbers[-1] == sample.prompt.answer)
