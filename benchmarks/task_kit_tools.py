"""Tools of the environments whose mutants ``task_kit_mutants`` makes: one that draws, and one that waits."""

from __future__ import annotations

import random
import time


def draw(most: int) -> int:
    """Draw a number.

    Args:
        most: The largest that may come.
    """
    return random.randint(0, most)


def wait(seconds: float) -> str:
    """Wait for some time.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "waited"
