"""Prompt source of verifiers environments."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Final, Literal

from rlplug.data.sources import PromptRow, PromptSource
from rlplug.errors import ConfigError
from rlplug_envs.processes import EnvironmentFailure, EnvironmentHost, host_settings

EXAMPLES_PER_REQUEST: Final = 1000


class VerifiersSource(PromptSource):
    """Prompts from the data set of an environment of the package verifiers, for ``VerifiersEnvironment``.

    Prompts are the environment's chat messages, with its system prompt. The row's metadata has ``environment`` and the
    whole ``example``, which the environment needs. Rows are named ``reverse-text/train:17``, where 17 is the index,
    counted from 0.

    Args:
        environment: Name for ``verifiers.load_environment``, such as ``reverse-text`` for an installed module
            ``reverse_text``.
        arguments: Arguments of the environment's ``load_environment``.
        split: Data set of the environment: ``train``, or ``eval`` for evaluation.
        limit: Read only this many examples from the start; by default all.
        start_timeout_s: Longest time for loading the environment, in seconds.
    """

    def __init__(
        self,
        environment: str,
        arguments: dict[str, Any] | None = None,
        split: Literal["train", "eval"] = "train",
        limit: int | None = None,
        start_timeout_s: float = 600.0,
    ) -> None:
        if limit is not None and limit < 1:
            raise ConfigError(f"VerifiersSource.limit is {limit}: give at least 1, or null to read all examples.")
        self.environment = environment
        self.split = split
        self.limit = limit
        self._settings = host_settings("VerifiersSource", environment, arguments, True, start_timeout_s, 60.0)

    def rows(self) -> Iterator[PromptRow]:
        host = EnvironmentHost(self._settings)
        try:
            host.wait_ready()
            for index, fields in enumerate(itertools.islice(self._examples(host), self.limit)):
                example = fields["example"]
                yield PromptRow(
                    uid=f"{self.environment}/{self.split}:{index}",
                    prompt=fields["messages"],
                    answer=example.get("answer"),
                    metadata={"environment": self.environment, "example": example},
                )
        except EnvironmentFailure as error:
            raise ConfigError(f"environment {self.environment!r}: {error}.") from error
        finally:
            host.close()

    def _examples(self, host: EnvironmentHost) -> Iterator[dict[str, Any]]:
        for start in itertools.count(0, EXAMPLES_PER_REQUEST):
            count = EXAMPLES_PER_REQUEST if self.limit is None else min(EXAMPLES_PER_REQUEST, self.limit - start)
            request = {"do": "examples", "split": self.split, "start": start, "count": count}
            examples = host.request(request).result()
            yield from examples
            if len(examples) < EXAMPLES_PER_REQUEST:
                return
