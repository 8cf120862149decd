"""Costs of hooks: seconds and calls of each plugin's implementations, by hook and by the phase of the step.

What an implementation returns is checked here too, and that it leaves the process's state as it was: nowhere else is it
known whose it is.

On a GPU these are seconds of the host: kernels that a hook starts run later, and count where somebody waits for them.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypedDict

from rlplug.interfaces.checks.calls import PluginCall
from rlplug.interfaces.checks.hooks import CHECKS

if TYPE_CHECKING:
    from rlplug.interfaces.checks.process_state import ProcessState

OUTSIDE: Final = "between phases"
"""Phase of calls at the start of a run, and after the last phase of a step."""


class HookCost(TypedDict):
    """Cost of one plugin's implementation of a hook in one phase."""

    plugin: str
    hook: str
    """Name of the hook without ``rlplug_``."""
    phase: str
    calls: int
    seconds: float
    """Wall time. Of a wrapper, without what it wraps."""


class HookCosts:
    """Counter of what hooks cost, which checks them; ``benchmarks/seam_checks.py`` measures what that takes."""

    def __init__(self) -> None:
        self._phase = OUTSIDE
        self._totals: dict[tuple[str, str, str], list[float]] = {}
        """Calls and seconds, by plugin, hook and phase."""

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count calls in the body of the ``with`` statement under ``phase``."""
        self._phase = phase
        try:
            yield
        finally:
            self._phase = OUTSIDE

    def timed(
        self, plugin: str, hook: str, function: Callable[..., Any], is_wrapper: bool, is_checked: bool
    ) -> Callable[..., Any]:
        """Return a function that does what ``function`` does and counts what it costs.

        Args:
            plugin: Name of the plugin.
            hook: Name of the hook, without ``rlplug_``.
            function: The plugin's implementation of the hook.
            is_wrapper: Whether it returns a generator, whose parts before and after its ``yield`` are counted.
            is_checked: Whether to check what it returns, and that it leaves the process's state as it was.
        """
        add = functools.partial(self._add, plugin, hook)
        accept = functools.partial(_accepted, PluginCall(function)) if is_checked else None

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            if is_wrapper:
                return _TimedGenerator(function(*args), add, accept)
            before = None if accept is None else _process_state()
            began = time.perf_counter()
            try:
                result = function(*args)
            finally:
                add(time.perf_counter() - began)
            return result if accept is None else accept(before, None, result)

        return call

    def _add(self, plugin: str, hook: str, seconds: float, calls: int = 1) -> None:
        total = self._totals.setdefault((plugin, hook, self._phase), [0, 0.0])
        total[0] += calls
        total[1] += seconds

    def rows(self) -> list[HookCost]:
        """Return all costs, the largest first."""
        rows = [
            HookCost(plugin=plugin, hook=hook, phase=phase, calls=int(calls), seconds=seconds)
            for (plugin, hook, phase), (calls, seconds) in self._totals.items()
        ]
        return sorted(rows, key=lambda row: -row["seconds"])


def _process_state() -> ProcessState | None:
    if "torch" not in sys.modules:  # an unknown key is explained before: the import takes seconds
        return None
    from rlplug.interfaces.checks.process_state import ProcessState

    return ProcessState.now()


def _accepted(call: PluginCall, before: ProcessState | None, inner: Any, result: Any) -> Any:
    """Return what counts as the result of a plugin's implementation of a hook; ``inner``, what a wrapper's yield gave.

    Raises:
        RunError: The result is not what the hook asks for, or the process's state has changed.
    """
    if before is not None:
        before.require_unchanged(call)
    check = CHECKS.get(call.part.__name__)
    return result if check is None else check(call, inner, result)


class _TimedGenerator:
    """Generator of a wrapper, as far as pluggy uses it."""

    def __init__(self, generator: Any, add: Callable[..., None], accept: Callable[..., Any] | None) -> None:
        self._generator = generator
        self._add = add
        self._accept = accept
        self._before = None if accept is None else _process_state()

    @property
    def gi_code(self) -> Any:  # pluggy names it when the wrapper yields twice or never
        return self._generator.gi_code

    def __next__(self) -> Any:
        return self._measured(self._generator.__next__, 1)

    def send(self, value: Any) -> Any:
        return self._last_part(functools.partial(self._generator.send, value), value)

    def throw(self, error: BaseException) -> Any:
        return self._last_part(functools.partial(self._generator.throw, error), None)

    def _last_part(self, part: Callable[[], Any], inner: Any) -> Any:
        try:
            return self._measured(part, 0)
        except StopIteration as end:
            result = end.value
        raise StopIteration(result if self._accept is None else self._accept(self._before, inner, result))

    def close(self) -> None:
        self._generator.close()

    def _measured(self, part: Callable[[], Any], calls: int) -> Any:
        began = time.perf_counter()
        try:
            return part()
        finally:
            self._add(time.perf_counter() - began, calls)
