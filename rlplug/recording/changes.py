"""What a resumed run does otherwise than the run that wrote its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

_OF_OPTIMIZERS: Final = (
    "model.optimizer.",
    "model.lr_scheduler",
    "model.critic.optimizer.",
    "model.critic.lr_scheduler",
)
_MOST_LINES: Final = 20


@dataclass(frozen=True)
class Changes:
    """Keys whose values differ between the configuration of a checkpoint and that of the run that resumes from it."""

    values: Mapping[str, tuple[Any, Any]]
    """Former and new value by key; ``None`` where a key is not set."""

    @property
    def has_optimizer_options(self) -> bool:
        """Whether the optimizers or their schedules have other options."""
        return any(key.startswith(_OF_OPTIMIZERS) for key in self.values)

    @property
    def lines(self) -> list[str]:
        """Lines that say what differs; none where nothing does."""
        shown = [f"  {key}: {_short(old)} -> {_short(new)}" for key, (old, new) in self.values.items()]
        if len(shown) > _MOST_LINES:
            shown = [*shown[:_MOST_LINES], f"  and {len(shown) - _MOST_LINES} more"]
        return ["changed since the checkpoint:", *shown] if shown else []


def _short(value: Any) -> str:
    text = "not set" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
