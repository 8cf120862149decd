"""Reward that calls a Python function, named by its import path."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from rlplug.errors import ConfigError, did_you_mean
from rlplug.interfaces.reward import Reward
from rlplug.types import RewardError, Sample
from rlplug.types.ranges import Count, check_ranges

FIELDS: Final[dict[str, Callable[[Sample], Any]]] = {
    "prompt": lambda sample: sample.prompt.text,
    "completion": lambda sample: sample.completion,
    "answer": lambda sample: sample.prompt.answer,
    "metadata": lambda sample: sample.prompt.metadata,
    "sample": lambda sample: sample,
}
"""Getters of the arguments that a function may take, by parameter name."""


class FunctionReward(Reward):
    """Reward that scores each sample with a function of your own, sync or ``async``.

    The function gets the arguments that its parameters name: ``prompt`` (text), ``completion`` (text), ``answer``,
    ``metadata``, ``sample``. A function whose only parameter has another name gets the sample. Other parameters keep
    their defaults. A run whose prompts have no answer is refused where the function takes one; write ``answer=None``
    where it can do without. It returns a number, or a ``RewardError`` when it cannot score the sample.

    Args:
        function: Import path of the function, such as ``my_package.rewards.score``; from Python, any callable.
        weight: Factor of this reward in the sum that trains.
        name: Key in metrics (``reward/<name>``); the function's name by default.
        max_calls: Most calls at once, unless ``async``.

    Raises:
        ConfigError: The function has a parameter that is neither one of these nor has a default.
    """

    def __init__(
        self,
        function: Callable[..., float],
        weight: float = 1.0,
        name: str | None = None,
        max_calls: Count | None = None,
    ) -> None:
        super().__init__(weight, name or _name_of(function))
        self.max_calls = max_calls
        check_ranges(self, "FunctionReward")
        self.function = function
        self._fields = _fields_of(function)
        self.needs_answer = "answer" in (self._fields or ()) and not _accepts_none(function, "answer")

    def score(self, samples: Sequence[Sample]) -> list[float | RewardError] | Awaitable[list[float | RewardError]]:
        results = [self._call(sample) for sample in samples]
        return _awaited(results) if any(inspect.isawaitable(result) for result in results) else results

    def _call(self, sample: Sample) -> Any:
        if self._fields is None:
            return self.function(sample)
        return self.function(**{field: FIELDS[field](sample) for field in self._fields})


async def _awaited(results: Sequence[Awaitable[float | RewardError]]) -> list[float | RewardError]:
    # not asyncio.gather: a SystemExit in a task of its own would end the runner's event loop
    return [await result for result in results]


def _name_of(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    # a metric cannot have a lambda's own name, "<lambda>"
    return str(getattr(function, "__name__", type(function).__name__.lower())).strip("<>")


def _fields_of(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """Return the names of the fields that ``function`` takes as keywords, or ``None`` when it takes the sample."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"FunctionReward.function is {function!r}, whose parameters cannot be read ({error}): "
            "give a Python function, or wrap it in one."
        ) from error
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    fields = tuple(FIELDS) if takes_all else tuple(p.name for p in parameters if p.name in FIELDS)
    unfilled = [p for p in parameters if p.name not in fields and _must_be_filled(p)]
    if len(unfilled) == 1 and not fields and unfilled[0].kind is not inspect.Parameter.KEYWORD_ONLY:
        return None
    if unfilled:
        from rlplug.interfaces.checks.reward_problems import explain_parameter

        raise ConfigError(explain_parameter(_name_of(function), unfilled[0].name, FIELDS))
    if not fields:
        raise ConfigError(
            f"FunctionReward.function is {_name_of(function)}, which takes no field of the sample: "
            f"give it parameters out of {', '.join(FIELDS)}."
        )
    return fields


def _accepts_none(function: Callable[..., Any], name: str) -> bool:
    """Return whether a parameter may be ``None``: by its default, by its annotation, or as one of all keywords."""
    parameter = inspect.signature(function).parameters.get(name)
    if parameter is None or parameter.default is not parameter.empty:
        return True
    return any(word in str(parameter.annotation) for word in ("None", "Optional", "Any"))


def _must_be_filled(parameter: inspect.Parameter) -> bool:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        return False
    # A default hides a misspelled name: the function would run without the value.
    return parameter.default is parameter.empty or bool(did_you_mean(parameter.name, FIELDS))
