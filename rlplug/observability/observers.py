"""The observers of a run as one: each call is made of all of them, and an error names whose it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

from rlplug.distributed.strategy import RLFSDP2Strategy
from rlplug.errors import ConfigError, RLPlugError, brief
from rlplug.interfaces.checks.calls import PluginCall
from rlplug.interfaces.checks.process_state import watched
from rlplug.interfaces.observer import ObservedRun, ProfiledSteps, RunObserver, StepRecord, Validation
from rlplug.interfaces.rollout import ScrapeTargets
from rlplug.types import Sample

_NONE_YET: Final = object()


class Observers(RunObserver):
    """All observers of a run, in the order in which they see it.

    Args:
        trainers: Callbacks and loggers of the trainer; those that are observers take part.
        given: What plugins' hooks returned.
        strategy: Exchanges errors between ranks.

    Raises:
        RunError: A plugin gave what is no observer.
    """

    def __init__(self, trainers: Iterable[Any], given: Iterable[Any], strategy: RLFSDP2Strategy) -> None:
        self._all: list[RunObserver] = [each for each in trainers if isinstance(each, RunObserver)]
        for each in given:
            if not isinstance(each, RunObserver):
                raise PluginCall(each).violation("be a RunObserver, to observe a run", f"is {brief(each)}")
            self._all.append(each)
        self._strategy = strategy
        self._targets: Any = _NONE_YET

    def begin(self, run: ObservedRun) -> None:
        """Show the run to all.

        Raises:
            ConfigError: An observer of any rank refuses the run.
        """
        problem: str | None = None
        try:
            self._call("begin", run)
        except RLPlugError as error:
            problem = str(error)
        if problems := [each for each in self._strategy.gather([problem]) if each is not None]:
            raise ConfigError(problems[0])

    def engine_started(self, targets: ScrapeTargets | None) -> None:
        """Show the addresses of the engine's servers, when they are new."""
        if targets != self._targets:
            self._targets = targets
            self._call("engine_started", targets)

    def rewards_failed(self, step: int, samples: Sequence[Sample]) -> None:
        self._call("rewards_failed", step, samples)

    def step_ended(self, record: StepRecord) -> None:
        self._call("step_ended", record)

    def validated(self, validation: Validation) -> None:
        self._call("validated", validation)

    def policy_exported(self, folder: Path) -> None:
        self._call("policy_exported", folder)

    def profiled(self, profile: ProfiledSteps) -> list[str]:
        return self._call("profiled", profile)

    def ended(self) -> list[str]:
        return self._call("ended")

    def _call(self, method: str, *arguments: Any) -> list[str]:
        """Call all observers, and return the lines that they returned, if the method has some."""
        lines: list[str] = []
        for observer in self._all:
            call = PluginCall(observer, method)
            with nullcontext() if call.is_of_core else watched(call):
                returned = getattr(observer, method)(*arguments)
                lines += map(str, returned) if method in ("profiled", "ended") else ()
        return lines
