"""A value that the plan recommends for a key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Recommendation:
    """A key and the value that it should have, beside the others' values."""

    key: str
    value: Any
    says: str
    """The value in words, and why."""

    @property
    def text(self) -> str:
        return f"{self.key}: {self.says}"
