"""Conformance kit of prompt sources: the checks that a source must pass, from general to special."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import ClassVar, Final

import pytest

from rlplug.data.sources import PromptRow, PromptSource, check_row
from rlplug.errors import ConfigError
from rlplug_devkit.tasks.calls import NOT_COMPARED, TaskChecks, run_calls, same_random_generators

NUM_STREAMED: Final = 8
"""Rows of a stream whose places are saved and restored."""


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

    def test_a_stream_goes_on_at_its_place(self) -> None:
        """A checkpoint has the place in a streamed source."""
        stream = self.make_source().stream()
        if stream is None:
            pytest.skip("does not apply: stream() returns None")
        stream.begin(None)
        rows = [stream.read() for _ in range(NUM_STREAMED)]
        assert rows == list(islice(self.make_source().rows(), NUM_STREAMED))[: len(rows)] + [None] * rows.count(None), (
            "stream() reads other rows than rows() yields, or in another order."
        )
        for place in range(NUM_STREAMED):
            first, second = self.make_source().stream(), self.make_source().stream()
            assert first is not None, "stream() returned a stream, and then None."
            assert second is not None, "stream() returned a stream, and then None."
            first.begin(None)
            for _ in range(place):
                first.read()
            state = copy.deepcopy(first.state_dict())
            first.read()
            second.load_state_dict(state)
            found = [second.read() for _ in range(NUM_STREAMED - place)]
            assert found == rows[place:], f"a stream with the state after {place} rows goes on elsewhere."
            assert first.state_dict() != state or rows[place] is None, (
                "state_dict() stays the same while rows are read."
            )

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
