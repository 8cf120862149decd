"""Checks of the rows of a prompt source."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar

import pytest

from rlplug.data.sources import PromptRow, PromptSource, check_row
from rlplug.errors import ConfigError, brief, describe
from rlplug.timeouts import Call
from rlplug_devkit.tasks.calls import OneThread, as_list, is_same, same_random_generators
from rlplug_devkit.tasks.refusals import RefusalChecks


class SourceRowChecks(RefusalChecks):
    """Checks of what ``rows`` yields.

    Attributes:
        num_rows: Rows that most checks look at, from the first.
        most_rows: Rows by which a source ends whose rows are all read at a start.
        is_part: Whether it can be a source of a mixture, which names it; a mixture itself cannot.
    """

    deadline_s = 300.0
    """Longest time in seconds to read ``num_rows`` rows, and to read all."""
    num_rows: ClassVar[int] = 200
    most_rows: ClassVar[int] = 1_000_000
    is_part: ClassVar[bool] = True

    def make_source(self) -> PromptSource:
        """Return the source, as a YAML file would make it."""
        raise NotImplementedError(f"{type(self).__name__}.make_source must return the source to test")

    def expected(self) -> Sequence[PromptRow] | None:
        """Return the first rows; without them, any will do."""
        return None

    def _subject(self) -> str:
        return type(self.make_source()).__name__

    def _make(self) -> PromptSource:
        return self.make_source()

    def _prepare(self, made: Any) -> None:
        for _ in islice(made.rows(), self.most_rows):
            pass

    @classmethod
    def _own_thread(cls) -> OneThread:
        """Return the thread in which sources are made and read: a run does both in one, its main thread."""
        if "_thread" not in vars(cls):
            cls._thread = OneThread()  # type: ignore[attr-defined]
        thread: OneThread = cls._thread  # type: ignore[attr-defined]
        return thread

    def _source(self) -> PromptSource:
        """Return a source that was made in the thread that reads it."""
        source: PromptSource = self._own_thread().run(self.make_source)
        return source

    def _calls(self, functions: Sequence[Callable[[], Any]], read: Callable[[Any], Any] = as_list) -> list[Call]:
        """Call one function in the thread of the sources, and several, which stand for ranks, in threads of theirs."""
        if len(functions) != 1:
            return super()._calls(functions, read)
        function, read = self._watched(functions[0]), self._watched(read)
        (call,) = super()._calls([lambda: self._own_thread().run(lambda: read(function()))], lambda value: value)
        if call.kind == "late" and call.error:
            del type(self)._thread  # type: ignore[attr-defined]
        return [call]

    def _rows(self, source: PromptSource) -> tuple[list[PromptRow], str]:
        """Return the first rows, or what went wrong."""
        with self._guard().around("rows"):
            (call,) = self._calls([lambda: islice(source.rows(), self.num_rows)])
        return (call.value, "") if not call.error else ([], call.error)

    def _compared(self, source: PromptSource) -> list[PromptRow]:
        """Return the first rows as a run keeps them; end the check where they cannot be read."""
        with self._guard().around("rows"):
            (call,) = self._calls([lambda: [copy.deepcopy(row) for row in islice(source.rows(), self.num_rows)]])
        rows: list[PromptRow] = [] if call.error else call.value
        if not rows or not all(isinstance(row, PromptRow) for row in rows):
            self._not_compared(f"rows() {call.error or 'yields nothing, or no PromptRow'}")
        return rows

    # ---- each row -------------------------------------------------------------------------------------------------

    def test_rows_can_be_read(self) -> None:
        rows, error = self._rows(self._source())
        type(self)._is_late = "took longer" in error
        assert not error, f"rows() {error}"
        assert rows, "rows() yields nothing: a source has at least one row, and an empty one is a ConfigError."

    def test_rows_are_well_formed(self) -> None:
        rows, error = self._rows(self._source())
        if error:
            self._not_compared(f"rows() {error}")
        for row in rows:
            self._require_well_formed(row)

    def _require_well_formed(self, row: Any) -> None:
        try:
            check_row(row)
        except ConfigError as problem:
            pytest.fail(f"a run refuses a row: {problem}", pytrace=False)
        except Exception as problem:  # noqa: BLE001 - of what it holds
            pytest.fail(
                f"{row.uid}: {describe(problem)}. metadata is a dictionary, and each call of a reward gets a copy of "
                "it and of the answer: give plain data.",
                pytrace=False,
            )
        is_number = not isinstance(row.answer, float) or row.answer == row.answer
        assert is_number, f"{row.uid}: the answer is NaN, as of an empty cell: give None where a task has none."
        assert isinstance(row.metadata, Mapping), f"{row.uid}: the metadata are no dictionary."
        assert all(isinstance(name, str) for name in row.metadata), f"{row.uid}: names in the metadata are texts."
        is_shown = row.uid.strip() and row.uid.isprintable()
        assert is_shown, f"the uid {row.uid!r} cannot be shown: messages and files name it."
        assert row.source == "" or not self.is_part, (
            f"{row.uid}: source is {row.source!r}: a mixture gives it, leave it empty."
        )

    def test_prompts_are_texts_or_messages(self) -> None:
        for row in self._compared(self._source()):
            if isinstance(row.prompt, str):
                assert row.prompt, f"{row.uid}: the prompt is empty."
                continue
            assert row.prompt, f"{row.uid}: the prompt is {row.prompt!r}: give text, or a list of messages."
            for message in row.prompt if isinstance(row.prompt, list) else [None]:
                assert isinstance(message, dict), f"{row.uid}: {message!r} is no message: give role and content."
                assert {"role", "content"} <= message.keys(), f"{row.uid}: a message has {sorted(message)}."
                assert isinstance(message["role"], str), f"{row.uid}: the role {message['role']!r} is no text."
                content = message["content"]
                is_known = content is None or isinstance(content, str | list)
                assert is_known, f"{row.uid}: the content {content!r} is neither text nor a list of parts."

    def test_prompts_are_of_one_form(self) -> None:
        """A run refuses texts beside messages where ``data.chat`` does not say what to do."""
        forms = {type(row.prompt) for row in self._compared(self._source())}
        assert len(forms) == 1, "some prompts are texts and some lists of messages: give all in one form."

    def test_uids_are_unique(self) -> None:
        self._require_unique(row.uid for row in self._compared(self._source()) if isinstance(row.uid, str))

    def _require_unique(self, uids: Iterator[str]) -> None:
        twice = [uid for uid, count in Counter(uids).items() if count > 1]
        assert not twice, f"{len(twice)} uids are of several rows, first {twice[0]!r}: samples are found by their uid."

    def test_rows_are_objects_of_their_own(self) -> None:
        """What a source fills anew for each row would be the last one's in all rows that are kept."""

        def read() -> Any:
            return [(row, copy.deepcopy(row)) for row in islice(self.make_source().rows(), self.num_rows)]

        (call,) = self._calls([read])
        if call.error:
            self._not_compared(f"rows() {call.error}")
        changed = [then.uid for row, then in call.value if not is_same(row, then)]
        assert not changed, f"the row {changed[0]!r} changes while later ones are read: make new objects for each row."
        owners: dict[int, str] = {}
        for row, _ in call.value:
            for part in _parts([row.prompt, row.metadata]):
                other = owners.setdefault(id(part), row.uid)
                assert other == row.uid, (
                    f"the rows {other!r} and {row.uid!r} have one object, {brief(part)}: who edits a message or "
                    "metadata of one changes both. Make new ones for each row."
                )

    def test_rows_are_the_expected_ones(self) -> None:
        expected = self.expected()
        if expected is None:
            pytest.skip("does not apply: expected returns None")
        found = self._compared(self._source())[: len(expected)]
        assert is_same(found, list(expected)), f"the first rows are {found}, and expected is {list(expected)}."

    def test_rows_end(self) -> None:
        """All rows are read at the start, unless ``for_training`` returns rows that are not; each has its own uid."""
        self._skip_after_failure()
        source = self._source()
        uids: list[str] = []
        if type(source).for_training is not PromptSource.for_training:
            pytest.skip("does not apply: for_training is its own")

        def read() -> bool:
            for row in islice(source.rows(), self.most_rows + 1):
                if len(uids) > self.num_rows:
                    self._require_well_formed(row)
                uids.append(row.uid)
            return len(uids) <= self.most_rows

        (call,) = self._calls([read], read=bool)
        type(self)._is_late = not call.value
        assert not call.error, f"after {len(uids)} rows: {call.error}"
        assert call.value, (
            f"rows() has not ended after {self.most_rows} rows, and a run would read on for ever: end, or override "
            "for_training. Where there are more rows, set most_rows."
        )
        self._require_unique(iter(uids))

    def test_rows_are_read_when_they_are_asked_for(self) -> None:
        """A source may have a million rows, and ``--help`` makes it."""
        rows = self._own_thread().run(lambda: self.make_source().rows())
        assert isinstance(rows, Iterator), f"rows() returned {type(rows).__name__}: yield rows, or return iter(...)."

    # ---- what rows depend on --------------------------------------------------------------------------------------

    def test_rows_repeat(self) -> None:
        """A resumed run counts rows, and every rank reads them for itself."""
        source = self._source()
        first, again, other = (self._compared(s) for s in (source, source, self._source()))
        advice = "A resumed run, and another rank, would train on other prompts. Sort what has no order, and seed."
        assert is_same(first, again), f"the same source yields other rows the second time. {advice}"
        assert is_same(first, other), f"a second source with the same options yields other rows. {advice}"

    def test_another_process_reads_the_same_rows(self) -> None:
        """Each rank is a process, with other hashes of texts, and may be on a host with other times of files."""
        self._skip_after_failure()
        here, there = self._read(), self._elsewhere("_read")
        differ = [f"{one} and {other}" for one, other in zip(here, there, strict=False) if one != other]
        assert here == there, (
            f"another process reads other rows: {differ[0] if differ else f'{len(there)} of {len(here)}'}. So would "
            "another rank, and a resumed run: sort sets and files by their names, give open() an encoding, and call no "
            "hash() or id()."
        )

    def _read(self) -> list[str]:
        """Return the first rows as texts."""
        return [as_text(row) for row in self._compared(self._source())]

    def test_readers_do_not_share_their_place(self) -> None:
        """A run counts the rows before it draws from them, and an earlier reader may have stopped anywhere."""
        self._skip_after_failure()
        source = self._source()
        expected = self._compared(source)
        advice = "keep the place in the iterator, not in self."
        (call,) = self._calls([lambda: self._in_turn(source, len(expected))])
        if call.error:
            self._not_compared(f"two iterators of one source, read in turn: rows() {call.error}")
        assert is_same(call.value, [(row, row) for row in expected]), f"two iterators, read in turn, differ: {advice}"

    def _in_turn(self, source: PromptSource, num_rows: int) -> list[Any]:
        next(iter(source.rows()))  # a reader that goes no further
        one, two = source.rows(), source.rows()
        return [(copy.deepcopy(row), copy.deepcopy(next(two, None))) for row in islice(one, num_rows)]

    def test_global_random_generators_are_left_alone(self) -> None:
        with same_random_generators("the source"):
            self._rows(self._source())


def as_text(row: PromptRow) -> str:
    """Return a row as text that is the same in each process, with the names of classes in place of their objects."""
    fields: Sequence[Any] = [row.uid, row.prompt, row.answer, dict(row.metadata)]
    return json.dumps(fields, default=_plain, skipkeys=True)


def _plain(part: Any) -> Any:
    return part.tolist() if hasattr(part, "tolist") else type(part).__qualname__


def _parts(value: Any) -> Iterator[Any]:
    """Yield the lists and dictionaries within a value, at any depth."""
    for each in value.values() if isinstance(value, dict) else value:
        if isinstance(each, dict | list):
            yield each
            yield from _parts(each)
