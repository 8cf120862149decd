"""The observers of a run as one: each call is made of all of them, and an error names whose it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
            for observer in self._each("begin"):
                observer.begin(run)
        except RLPlugError as error:
            problem = str(error)
        if problems := [each for each in self._strategy.gather([problem]) if each is not None]:
            raise ConfigError(problems[0])

    def engine_started(self, targets: ScrapeTargets | None) -> None:
        """Show the addresses of the engine's servers, when they are new."""
        if targets != self._targets:
            self._targets = targets
            for observer in self._each("engine_started"):
                observer.engine_started(targets)

    def rewards_failed(self, step: int, samples: Sequence[Sample]) -> None:
        for observer in self._each("rewards_failed"):
            observer.rewards_failed(step, samples)

    def step_ended(self, record: StepRecord) -> None:
        for observer in self._each("step_ended"):
            observer.step_ended(record)

    def validated(self, validation: Validation) -> None:
        for observer in self._each("validated"):
            observer.validated(validation)

    def policy_exported(self, folder: Path) -> None:
        for observer in self._each("policy_exported"):
            observer.policy_exported(folder)

    def profiled(self, profile: ProfiledSteps) -> list[str]:
        lines: list[str] = []
        for observer in self._each("profiled"):
            lines += [str(line) for line in observer.profiled(profile)]
        return lines

    def ended(self) -> list[str]:
        lines: list[str] = []
        for observer in self._each("ended"):
            lines += [str(line) for line in observer.ended()]
        return lines

    def _each(self, method: str) -> Iterator[RunObserver]:
        for observer in self._all:
            call = PluginCall(observer, method)
            if call.is_of_core:
                yield observer
            else:
                with watched(call):
                    yield observer
