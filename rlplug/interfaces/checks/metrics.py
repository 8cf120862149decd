"""Metrics of a step: those of plugins must be numbers, under names that nothing else has."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any, Final

import torch

from rlplug.errors import RunError, brief
from rlplug.interfaces.checks.calls import PluginCall

LONGEST_NAME: Final = 200


def read_metrics(call: PluginCall, metrics: Any) -> dict[str, float]:
    """Return the metrics that a plugin gave, as floats; NaN and infinities are numbers.

    Raises:
        RunError: They are no mapping of names to numbers.
    """
    if not isinstance(metrics, Mapping):
        raise call.violation("return metrics as a mapping of names to numbers", f"returned {brief(metrics)}")
    return {_name(call, name): _number(call, name, value) for name, value in metrics.items()}


def _name(call: PluginCall, name: Any) -> str:
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= LONGEST_NAME:
        raise call.violation("name each metric with printable text", f"returned a metric named {brief(name)}")
    return name


def _number(call: PluginCall, name: str, value: Any) -> float:
    is_scalar = isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex()
    if not is_scalar and not isinstance(value, numbers.Real):
        raise call.violation(f"return a number as metric {name!r}", f"returned {brief(value)}")
    return float(value)


class MetricsOfStep(dict[str, float]):
    """The metrics of a step by name, which knows the plugin's call that gave each; ``|=`` adds those of the core."""

    def __init__(self) -> None:
        super().__init__()
        self._givers: dict[str, PluginCall] = {}

    def __ior__(self, metrics: Any) -> MetricsOfStep:  # type: ignore[override,misc]
        for name in self._givers.keys() & dict(metrics).keys():
            raise _taken(self._givers[name], name)
        self.update(metrics)
        return self

    def add(self, call: PluginCall, metrics: Any) -> None:
        """Add the metrics that a plugin's call returned.

        Raises:
            RunError: One is no number, or has a name that the step has already, or gets later.
        """
        found = read_metrics(call, metrics)
        for name in found:
            if name in self:
                raise _taken(call, name)
            self._givers[name] = call
        self.update(found)


def _taken(call: PluginCall, name: str) -> RunError:
    return call.violation("give its metrics names of their own", f"returned {name!r}, which is another metric's name")
