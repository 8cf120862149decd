"""Memory that is given back and taken again: the contract's ``SleepConfig`` and ``ExecutorMemoryType``."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, Final

from trtllm_double.contract import CONTRACT, RESTORE_MODES

_MEMBERS: Final = {
    "spec_resource_manager": "SPEC_RESOURCES",
    "executor_extra": "EXTRA_RESOURCES",
    "model": "MODEL_ENGINE_MAIN",
    "draft_model": "MODEL_ENGINE_DRAFT",
    "model_weights": "MODEL_WEIGHTS_MAIN",
    "draft_model_weights": "MODEL_WEIGHTS_DRAFT",
}
"""Members that are not called as their value: ``tensorrt_llm/_torch/virtual_memory.py``; the contract has values."""

ExecutorMemoryType: Any = enum.StrEnum(  # type: ignore[misc]
    "ExecutorMemoryType", [(_MEMBERS.get(value, value.upper()), value) for value in CONTRACT["ExecutorMemoryType"]]
)

WEIGHT_TAGS: Final = frozenset({ExecutorMemoryType("model"), ExecutorMemoryType("model_weights")})
KV_CACHE: Final = ExecutorMemoryType("kv_cache")


class SleepConfig:
    """How each kind of memory comes back: contract ``SleepConfig.restore_modes``. What it does not name is kept."""

    def __init__(self, *, restore_modes: Mapping[Any, str] | None = None) -> None:
        self.restore_modes = {ExecutorMemoryType(tag): str(mode) for tag, mode in (restore_modes or {}).items()}
        for tag, mode in self.restore_modes.items():
            if mode not in RESTORE_MODES:
                raise ValueError(f"SleepConfig: restore mode {mode!r} of {tag.value!r} is none of {RESTORE_MODES}")

    def mode(self, tag: Any) -> str:
        """Return how the memory of a tag comes back."""
        return self.restore_modes.get(tag, "PINNED")


class Memory:
    """Which kinds of memory are released. Raises RuntimeError where the real engine would fault or ignore the call."""

    def __init__(self, sleep_config: SleepConfig | None) -> None:
        self._config = sleep_config
        self.released: set[Any] = set()

    def release(self, tags: Sequence[Any]) -> dict[Any, str]:
        """Release, and return the restore mode of each tag."""
        config, members = self._check(tags)
        if again := members & self.released:
            raise RuntimeError(f"release: {sorted(again)} are released already")
        self.released |= members
        return {tag: config.mode(tag) for tag in members}

    def resume(self, tags: Sequence[Any]) -> None:
        """Take memory again."""
        _, members = self._check(tags)
        if unknown := members - self.released:
            raise RuntimeError(f"resume: {sorted(unknown)} are not released")
        self.released -= members

    def _check(self, tags: Sequence[Any]) -> tuple[SleepConfig, set[Any]]:
        if self._config is None:
            raise RuntimeError("Sleep feature is not enabled: AsyncLLM got no sleep_config")
        if isinstance(tags, str) or not tags:
            raise TypeError(f"tags must be a list of ExecutorMemoryType or its values, and are {tags!r}")
        values = CONTRACT["ExecutorMemoryType"]
        if unknown := [tag for tag in tags if tag not in values]:
            raise ValueError(f"unknown memory tags {unknown}: valid are {values}")
        return self._config, {ExecutorMemoryType(tag) for tag in tags}
