"""Conformance kit of prompt sources: the checks that a source must pass, from general to special."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import ClassVar, Final

import pytest

from rlplug.data.prompt_encoder import PromptEncoder, PromptRules
from rlplug.data.prompt_stream import TrainingPrompts
from rlplug.data.sources import PromptRow, PromptSource, check_row
from rlplug.errors import ConfigError
from rlplug_devkit.models import make_tokenizer
from rlplug_devkit.tasks.calls import NOT_COMPARED, TaskChecks, run_calls, same_random_generators

NUM_DRAWN: Final = 8
"""Training prompts that are drawn before and behind a place."""


class DataSourceConformance(TaskChecks):
    """Checks of a prompt source. A subclass must override ``make_source``, and may override the rest.

    Attributes:
        num_rows: Rows that are looked at, from the first.
    """

    deadline_s = 300.0
    """Longest time in seconds to read ``num_rows`` rows."""
    num_rows: ClassVar[int] = 200

    def make_source(self) -> PromptSource:
        """Return the source, as a YAML file would make it."""
        raise NotImplementedError(f"{type(self).__name__}.make_source must return the source to test")

    def make_broken_source(self) -> PromptSource | None:
        """Return a source of what is not there, such as a wrong path; ``None`` where nothing can be wrong."""
        return None

    def _subject(self) -> str:
        return type(self.make_source()).__name__

    def _rows(self, source: PromptSource) -> tuple[list[PromptRow], str]:
        """Return the first rows, or what went wrong."""
        (call,) = run_calls([lambda: islice(source.rows(), self.num_rows)], self.deadline_s)
        return (call.value, "") if not call.error else ([], call.error)

    def _compared(self, source: PromptSource) -> list[PromptRow]:
        rows, error = self._rows(source)
        if error or not rows or not all(isinstance(row, PromptRow) for row in rows):
            pytest.skip(NOT_COMPARED)
        return rows

    def test_rows_can_be_read(self) -> None:
        rows, error = self._rows(self.make_source())
        assert not error, f"rows() raised {error}"
        assert rows, "rows() yields nothing: a source has at least one row, and an empty one is a ConfigError."

    def test_rows_are_well_formed(self) -> None:
        rows, error = self._rows(self.make_source())
        if error:
            pytest.skip(NOT_COMPARED)
        for row in rows:
            try:
                check_row(row)
            except ConfigError as problem:
                pytest.fail(f"a run refuses a row: {problem}", pytrace=False)

    def test_prompts_are_texts_or_messages(self) -> None:
        for row in self._compared(self.make_source()):
            if isinstance(row.prompt, str):
                assert row.prompt, f"{row.uid}: the prompt is empty."
                continue
            for message in row.prompt if isinstance(row.prompt, list) else [None]:
                assert isinstance(message, dict), f"{row.uid}: {message!r} is no message: give role and content."
                assert {"role", "content"} <= message.keys(), f"{row.uid}: a message has {sorted(message)}."

    def test_uids_are_unique(self) -> None:
        counts = Counter(row.uid for row in self._compared(self.make_source()) if isinstance(row.uid, str))
        twice = [uid for uid, count in counts.items() if count > 1]
        assert not twice, f"{len(twice)} uids are of several rows, first {twice[0]!r}: samples are found by their uid."

    def test_rows_repeat(self) -> None:
        """A resumed run counts rows, and every rank reads them for itself."""
        source = self.make_source()
        first, again, other = (copy.deepcopy(self._compared(s)) for s in (source, source, self.make_source()))
        advice = "A resumed run, and another rank, would train on other prompts. Sort what has no order, and seed."
        assert first == again, f"the same source yields other rows the second time. {advice}"
        assert first == other, f"a second source with the same options yields other rows. {advice}"

    def test_readers_do_not_share_their_place(self) -> None:
        """A run counts the rows before it draws from them."""
        source = self.make_source()
        expected = self._compared(source)
        if expected != self._compared(source):
            pytest.skip(NOT_COMPARED)
        one, two = source.rows(), source.rows()
        pairs = list(islice(zip(one, two, strict=False), len(expected)))
        assert pairs == [(row, row) for row in expected], (
            "two iterators of one source, read in turn, do not yield the same rows: keep the place in the iterator, "
            "not in self."
        )

    def test_rows_are_read_when_they_are_asked_for(self) -> None:
        """A source may have a million rows, and ``--help`` makes it."""
        rows = self.make_source().rows()
        assert isinstance(rows, Iterator), f"rows() returned {type(rows).__name__}: yield rows, or return iter(...)."

    def test_global_random_generators_are_left_alone(self) -> None:
        with same_random_generators("the source"):
            self._rows(self.make_source())

    def test_training_prompts_go_on_at_their_place(self) -> None:
        """A checkpoint has the place in the prompts, however the source draws them."""
        if self._compared(self.make_source()) != self._compared(self.make_source()):
            pytest.skip(NOT_COMPARED)
        try:
            expected = self._training_prompts().take(2 * NUM_DRAWN)
        except ConfigError:  # of a row, which another check looks at
            pytest.skip(NOT_COMPARED)
        for place in (0, 1, NUM_DRAWN):
            first, second = self._training_prompts(), self._training_prompts()
            assert first.take(place) == expected[:place], f"a second rank draws other prompts of the first {place}."
            state = copy.deepcopy(first.state_dict())
            second.take(NUM_DRAWN - place)
            second.load_state_dict(state)
            assert second.take(NUM_DRAWN) == expected[place : place + NUM_DRAWN], (
                f"training prompts with the state after {place} of them go on elsewhere."
            )

    def _training_prompts(self) -> TrainingPrompts:
        rows = self.make_source().for_training("data.train")
        tokenizer = make_tokenizer(100)
        tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
        rules = PromptRules(tokenizer, (), max_context=1_000_000, max_new_tokens=1)
        return rows.prompts(PromptEncoder(rules, rows.known, None, None, None, "refuse"), shuffle=True, seed=1)

    def test_what_cannot_be_read_is_a_configuration_error(self) -> None:
        broken = self.make_broken_source()
        if broken is None:
            pytest.skip("does not apply: make_broken_source returns None")
        try:
            list(islice(broken.rows(), 1))
        except ConfigError:
            return
        except Exception as error:  # noqa: BLE001 - whichever it is, it is the wrong one
            pytest.fail(f"rows() raised {type(error).__name__}: {error}. Raise a ConfigError.", pytrace=False)
        pytest.fail("rows() of what is not there raised nothing: raise a ConfigError.", pytrace=False)
