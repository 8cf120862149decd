"""What plugins' hooks return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from rlplug import interfaces
from rlplug.errors import brief
from rlplug.interfaces.checks.calls import PluginCall

if TYPE_CHECKING:
    from rlplug.interfaces import LossOutput, SyncReport
    from rlplug.types import StepBatch


class GivenMetrics(dict[str, float]):
    """Metrics that a plugin's hook returned, with the call that did."""

    def __init__(self, call: PluginCall, metrics: Mapping[str, float]) -> None:
        super().__init__(metrics)
        self.call = call


def _metrics(call: PluginCall, inner: Any, found: Any) -> Any:
    from rlplug.interfaces.checks.metrics import read_metrics

    return found if found is None or isinstance(found, list) else GivenMetrics(call, read_metrics(call, found))


def _rows(call: PluginCall, inner: Any, found: Any) -> StepBatch:
    from rlplug.interfaces.checks.algorithms import check_rows

    if inner is None:  # the wrapper has handled an error of what it wraps
        raise call.violation("return what its yield gives", "returned a batch where the yield raised an error")
    return check_rows(call, found, inner)


def _loss(call: PluginCall, inner: Any, found: Any) -> LossOutput:
    from rlplug.interfaces.checks.algorithms import check_loss

    return check_loss(call, found)


def _report(call: PluginCall, inner: Any, found: Any) -> SyncReport:
    if not isinstance(found, interfaces.SyncReport):
        raise call.violation("return the SyncReport that its yield gives", f"returned {brief(found)}")
    return found


def _made(kind: str, package: str = interfaces.__name__) -> Callable[[PluginCall, Any, Any], Any]:
    """Return the check of a resolver that makes a ``kind``, of a package, or passes on."""

    def check(call: PluginCall, inner: Any, found: Any) -> Any:
        if found is not None and not isinstance(found, getattr(import_module(package), kind)):
            raise call.violation(f"return an instance of {kind}, or None", f"returned {brief(found)}")
        return found

    return check


CHECKS: Final[Mapping[str, Callable[[PluginCall, Any, Any], Any]]] = {
    "rlplug_after_rollout": _metrics,
    "rlplug_after_update": _metrics,
    "rlplug_explain_key": _made("str", "builtins"),
    "rlplug_plan_memory": _made("MemoryDecisions"),
    "rlplug_make_token_log": _made("TokenLog"),
    "rlplug_make_experiment_log": _made("ExperimentLog"),
    "rlplug_make_profiler": _made("Callback", "lightning.pytorch"),
    "rlplug_compute_loss": _loss,
    "rlplug_prepare_batch": _rows,
    "rlplug_sync_weights": _report,
}
"""By hook: from call, what its ``yield`` gave (``None`` without one) and what it returned to what counts as that."""
