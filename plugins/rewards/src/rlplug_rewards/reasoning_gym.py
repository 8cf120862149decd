"""``ReasoningGymSource``: tasks that reasoning-gym generates."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from rlplug.data.rows import optional_import
from rlplug.data.sources import PromptRow, PromptSource
from rlplug.errors import ConfigError, did_you_mean
from rlplug.types.ranges import Seed, Steps, check_ranges


class ReasoningGymSource(PromptSource):
    """Verifiable puzzles that reasoning-gym generates, the same ones for the same task, size, seed and options.

    The row's metadata has ``task`` and the whole reasoning-gym ``entry``, which its scorers need.

    Args:
        task: Name of a reasoning-gym data set, such as ``chain_sum``.
        size: Number of puzzles to generate.
        seed: Seed of the first puzzle; puzzle ``i`` has seed + i. Seeds of training and validation must be at least
            ``size`` apart, or both get the same puzzles.
        config: Options of the task, such as ``{min_terms: 2, max_terms: 3}``.
        instruction: Text that follows each question on a line of its own, such as how to mark the final answer.
    """

    def __init__(
        self,
        task: str,
        size: Steps = 1000,
        seed: Seed = 0,
        config: dict[str, Any] | None = None,
        instruction: str | None = None,
    ) -> None:
        self.task = task
        self.size = size
        self.seed = seed
        check_ranges(self)
        self.config = dict(config or {})
        self.instruction = instruction

    def rows(self) -> Iterator[PromptRow]:
        dataset = self._create()
        for index in range(self.size):
            entry = dataset[index]
            question = entry["question"]
            yield PromptRow(
                uid=f"{self.task}/seed={self.seed}:{index}",
                prompt=question if self.instruction is None else f"{question}\n{self.instruction}",
                answer=entry["answer"],
                metadata={"task": self.task, "entry": entry},
            )

    def _create(self) -> Any:
        reasoning_gym = optional_import("reasoning_gym", "'rlplug-rewards[reasoning]'", "ReasoningGymSource")
        registered: Mapping[str, tuple[type, type]] = reasoning_gym.factory.DATASETS
        if self.task not in registered:
            raise ConfigError(
                f"data source task {self.task!r} is not a reasoning-gym task.{did_you_mean(self.task, registered)} "
                f"There are {', '.join(sorted(registered))}."
            )
        options = {field.name for field in dataclasses.fields(registered[self.task][1])} - {"size", "seed"}
        for option in self.config:
            if option in ("size", "seed"):
                raise ConfigError(f"data source config of {self.task!r} has {option!r}: write it beside config.")
            if option not in options:
                raise ConfigError(
                    f"data source config of {self.task!r} has no option {option!r}.{did_you_mean(option, options)} "
                    f"Its options are {', '.join(sorted(options))}."
                )
        try:
            return reasoning_gym.create_dataset(self.task, size=self.size, seed=self.seed, **self.config)
        # the tasks validate their options with assert, or fail while comparing them
        except (AssertionError, AttributeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"data source config of {self.task!r}, {self.config}, is refused: {error}. Correct these options."
            ) from error
