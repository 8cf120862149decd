"""The plugins of this repository whose mutants ``task_kit_mutants`` makes, with their kits."""

from __future__ import annotations

from typing import Final

from benchmarks.task_kit_checks import Subject
from benchmarks.task_kit_environments import ENVIRONMENTS
from benchmarks.task_kit_rewards import REWARDS
from benchmarks.task_kit_sources import SOURCES

SUBJECTS: Final[dict[str, list[Subject]]] = {"reward": REWARDS, "environment": ENVIRONMENTS, "source": SOURCES}
"""Subjects by kind."""
