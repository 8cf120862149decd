"""Conformance kit of prompt sources: the checks that a source must pass, from general to special."""

from __future__ import annotations

import re
from itertools import islice
from typing import NoReturn

import pytest

from rlplug.data.sources import PromptSource
from rlplug.errors import ConfigError, describe
from rlplug_devkit.tasks.source_plays import SourcePlayChecks
from rlplug_devkit.tasks.training_prompts import KEY


class DataSourceConformance(SourcePlayChecks):
    """Checks of a prompt source. A subclass must override ``make_source``, and may override the rest."""

    def make_broken_source(self) -> PromptSource | None:
        """Return a source of what is not there, such as a wrong path; ``None`` where nothing can be wrong."""
        return None

    # ---- what is not there ----------------------------------------------------------------------------------------

    def test_what_cannot_be_read_is_a_configuration_error(self) -> None:
        for what in ("rows()", "for_training()"):
            try:
                broken = self.make_broken_source()
                if broken is None:
                    pytest.skip("does not apply: make_broken_source returns None")
                if what == "rows()":
                    list(islice(broken.rows(), 1))
                else:
                    broken.for_training(KEY)
            except ConfigError as error:
                problem = _problem_of(str(error), KEY if what == "for_training()" else "")
                if problem:
                    pytest.fail(f"{what} raised {problem}", pytrace=False)
                continue
            except Exception as error:  # noqa: BLE001 - whichever it is, it is the wrong one
                pytest.fail(f"{what} raised {describe(error)}. Raise a ConfigError.", pytrace=False)
            pytest.fail(f"{what} of what is not there raised nothing: raise a ConfigError.", pytrace=False)

    def test_errors_of_rows_are_told_by_the_key(self) -> None:
        """Of a source for training whose rows cannot be read, whatever the reason: a run names the key alone."""
        self._skip_after_failure()
        source = self._source()
        if type(source).for_training is PromptSource.for_training:
            pytest.skip("does not apply: for_training is not its own")

        def unreadable() -> NoReturn:
            raise ConfigError("its rows cannot be read: give others.")

        try:
            object.__setattr__(source, "rows", unreadable)
            self._own_thread().run(lambda: source.for_training(KEY))
        except ConfigError as error:
            problem = _problem_of(str(error), KEY)
            assert not problem, f"where rows() raises a ConfigError, for_training({KEY!r}) raised {problem}"
            return
        except Exception as error:  # noqa: BLE001 - of an object that takes no attribute, or something else
            pytest.skip(f"does not apply: for_training raised {type(error).__name__}")
        pytest.skip("does not apply: for_training calls no rows() of the object")

    # ---- what it changes, and leaves behind -----------------------------------------------------------------------

    def test_readers_leave_nothing_behind(self) -> None:
        """Also those that stop before the end."""
        source = self._source()

        def read_two() -> None:
            with self._guard().around("rows"):
                self._calls([lambda: islice(source.rows(), 2)])

        self._require_nothing_left("a reader", read_two)

    def test_the_process_is_left_as_it_was(self) -> None:
        """Also by a first call, in an earlier check: a change that is made once is there in all later ones."""
        self._rows(self._source())
        self._require_unchanged_process("a source")


def _problem_of(text: str, key: str) -> str:
    if not text.strip():
        return "a ConfigError without a message: say what to write instead."
    if len(text.removeprefix(key).split()) < 2:
        return f"{text!r}: say what is wrong, and what to write instead."
    is_named = re.match(rf"{re.escape(key)}\b", text) is not None
    return "" if not key or is_named else f"{text!r}: begin the message with the key, {key}."
