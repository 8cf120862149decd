"""Checks of what an author writes down of a plugin's options: their defaults, and which values are refused how."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import pytest

from rlplug_devkit.kit import check_refused
from rlplug_devkit.tasks.calls import TaskChecks, is_same


class RefusalChecks(TaskChecks):
    """Checks of options.

    Attributes:
        defaults: Defaults of the constructor's options that users rely on, by name.
    """

    defaults: ClassVar[Mapping[str, Any]] = {}

    def broken_options(self) -> Sequence[tuple[str, Callable[[], Any]]]:
        """Return makers of plugins with one wrong option or damaged file each, behind what the message has to name.

        That is the option, or the file or row where it is wrong.
        """
        return ()

    def _make(self) -> Any:
        """Return the plugin."""
        raise NotImplementedError

    def _prepare(self, made: Any) -> None:
        """Call what a run calls of a plugin before it trains."""
        raise NotImplementedError

    def test_wrong_options_are_refused(self) -> None:
        """By the constructor or before a run trains, and the message names what is wrong."""
        cases = self.broken_options()
        if not cases:
            pytest.skip("does not apply: broken_options returns none")
        for name, make in cases:
            check_refused(name, self._make_and_prepare, make)

    def _make_and_prepare(self, make: Callable[[], Any]) -> None:
        with self._guard().around("a refusal"):
            self._prepare(make())

    def test_defaults_are_the_documented_ones(self) -> None:
        """A default that changes, changes what users train who never wrote it."""
        if not self.defaults:
            pytest.skip("does not apply: defaults names none")
        parameters = inspect.signature(type(self._make())).parameters
        found = {name: parameters[name].default for name in self.defaults if name in parameters}
        assert is_same(found, dict(self.defaults)), f"defaults are {found}, and documented are {dict(self.defaults)}."
