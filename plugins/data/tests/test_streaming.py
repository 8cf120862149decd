"""Streamed data sets: every prompt of a pass once, exact resume at every place, and data that changed."""

from __future__ import annotations

import io
import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from rlplug_data.hf_datasets import HFDatasetSource
from rlplug_data.mixture import MixtureSource, WeightedSource
from rlplug_data.streaming import RowStream, StreamedRows
from rlplug_devkit import DataSourceConformance
from unit.data.prompt_cases import ListSource, set_up, setup_error

from rlplug.data.datamodule import PromptDataModule
from rlplug.data.sources import PromptRow, PromptSource
from rlplug.errors import ConfigError, RunError

SHARDS = (7, 5, 1)
LETTERS = "abcdefghijklm"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def write(folder: Path, letters: str = LETTERS, long: str = "") -> Path:
    """Write a JSONL file for each shard, a row for each letter; those of ``long`` are 9 tokens long."""
    folder.mkdir(exist_ok=True)
    rows = iter(letters)
    for shard, size in enumerate(SHARDS):
        lines = [
            {"prompt": letter * (9 if letter in long else 1)} for _, letter in zip(range(size), rows, strict=False)
        ]
        (folder / f"train-{shard}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def make(folder: Path, shuffle: bool = True, buffer: int = 4, **options: Any) -> PromptDataModule:
    source = HFDatasetSource(str(folder), streaming=True, shuffle_buffer=buffer, **options)
    return PromptDataModule(source, shuffle=shuffle, seed=3, max_prompt_tokens=5, too_long="filter")


def texts(data: PromptDataModule, count: int) -> str:
    return "".join(prompt.text for prompt in data.train_stream.take(count))


KIT_FOLDER = tempfile.TemporaryDirectory()


class TestStreamedSource(DataSourceConformance):
    @pytest.fixture(autouse=True)
    def cache(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", Path(KIT_FOLDER.name) / "cache")

    def make_source(self) -> HFDatasetSource:
        return HFDatasetSource(str(write(Path(KIT_FOLDER.name) / "letters")), streaming=True)

    def make_broken_source(self) -> HFDatasetSource:
        return HFDatasetSource(str(Path(KIT_FOLDER.name) / "gone"), streaming=True)


def test_a_pass_has_each_prompt_once_and_orders_differ(tmp_path: Path) -> None:
    folder = write(tmp_path / "letters")
    assert texts(set_up(make(folder, shuffle=False)), 16) == LETTERS + "abc"
    assert texts(set_up(make(folder, limit=6, shuffle=False)), 8) == "abcdefab"
    stream = set_up(make(folder))
    passes = [texts(stream, len(LETTERS)) for _ in range(4)]
    assert [sorted(each) for each in passes] == [list(LETTERS)] * 4
    assert len(set(passes)) == 4
    assert texts(set_up(make(folder)), 52) == "".join(passes)
    uids = [prompt.uid for prompt in set_up(make(folder)).train_stream.take(13)]
    assert len(set(uids)) == 13


@pytest.mark.kit
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_stream_resumes_exactly_at_every_place(tmp_path: Path, shuffle: bool) -> None:
    """Alone catches rows that a shuffle buffer loses, and a place that is off by one at the end of a file or pass."""
    folder = write(tmp_path / "letters", long="ck")
    whole = texts(set_up(make(folder, shuffle)), 40)
    assert Counter(whole[:33]) == {letter: 3 for letter in LETTERS if letter not in "ck"}
    first = set_up(make(folder, shuffle))
    for taken in range(28):
        saved = io.BytesIO()
        torch.save(first.state_dict(), saved)
        saved.seek(0)
        second = set_up(make(folder, shuffle))
        texts(second, 5)
        second.load_state_dict(torch.load(saved, weights_only=True))
        assert texts(second, 12) == whole[taken : taken + 12], taken
        assert texts(first, 1) == whole[taken]
    assert first.train_stream.metrics() == second.train_stream.metrics() | first.train_stream.metrics()
    assert first.train_stream.metrics()["data/epoch"] == 2


def test_data_that_changed_are_refused_and_change_nothing(tmp_path: Path) -> None:
    first = set_up(make(write(tmp_path / "letters"), shuffle=False))
    texts(first, 9)
    state = first.state_dict()
    other = set_up(make(write(tmp_path / "letters", "abcdefghXYZlm"), shuffle=False))
    texts(other, 3)
    with pytest.raises(ConfigError, match="first rows, or their text"):
        other.load_state_dict(state)
    assert texts(other, 3) == "def"
    with pytest.raises(ConfigError, match="shuffle_buffer"):
        set_up(make(write(tmp_path / "letters"), buffer=5)).load_state_dict(state)


def test_data_that_changed_behind_the_head_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlplug_data.streaming.HEAD", 2)
    first = set_up(make(write(tmp_path / "letters"), shuffle=False))
    texts(first, 9)
    state = first.state_dict()
    other = set_up(make(write(tmp_path / "letters", "abcdefghXYZlm"), shuffle=False))
    texts(other, 3)
    with pytest.raises(ConfigError, match=r"other prompts at its place \(token_ids"):
        other.load_state_dict(state)
    assert texts(other, 3) == "def"


def test_a_mixture_of_a_stream_and_a_list_resumes_exactly(tmp_path: Path) -> None:
    def made() -> PromptDataModule:
        stream = HFDatasetSource(str(write(tmp_path / "letters")), streaming=True, shuffle_buffer=4)
        parts = {"s": WeightedSource(stream, 2), "l": WeightedSource(ListSource(*"XYZ"))}
        return set_up(PromptDataModule(MixtureSource(parts), seed=3))

    whole, first, second = texts(made(), 60), made(), made()
    assert Counter(letter in "XYZ" for letter in whole) == {True: 20, False: 40}
    assert texts(first, 29) == whole[:29]
    second.load_state_dict(first.state_dict())
    assert texts(second, 31) == whole[29:]
    assert second.train_stream.num_prompts is None
    assert second.train_stream.metrics()["source/s/epoch"] == 3


class WrapsAfterItsEnd(RowStream):
    """With the ``None`` it goes back to its beginning by itself."""

    shuffle_buffer = 2

    def __init__(self, count: int) -> None:
        self.count, self.place = count, 0

    def begin(self, order: torch.Generator | None) -> None:
        self.place = 0

    def read(self) -> PromptRow | None:
        if self.place == self.count:
            self.place = 0
            return None
        self.place += 1
        return PromptRow(f"p{self.place}", LETTERS[self.place - 1], None, {})

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.place = state["place"]


@pytest.mark.parametrize("count", [3, 4])
def test_nothing_is_read_between_the_end_of_a_pass_and_the_next(count: int) -> None:
    """Alone catches passes that are not counted, and so have one order for ever, where a stream begins by itself."""

    class Source(PromptSource):
        def rows(self) -> Iterator[PromptRow]:
            raise AssertionError("it streams")

        def for_training(self, key: str, name: str = "") -> StreamedRows:
            return StreamedRows(WrapsAfterItsEnd(count), key, name)

    stream = set_up(PromptDataModule(Source(), shuffle=False)).train_stream
    drawn = []
    for _ in range(2 * count + 1):
        drawn += [(prompt.text, stream.metrics()["data/epoch"]) for prompt in stream.take(1)]
    assert drawn == [(letter, epoch) for epoch in range(2) for letter in LETTERS[:count]] + [("a", 2)]


def test_what_cannot_be_streamed_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "letters", long=LETTERS)
    with pytest.raises(RunError, match="no prompt that is short enough"):
        texts(set_up(make(folder)), 1)
    assert "no field 'question'" in setup_error(make(folder, prompt_key="question"))
    (folder / "train-1.jsonl").write_text("no json\n")
    with pytest.raises((RunError, ConfigError), match="cannot be"):
        texts(set_up(make(folder, shuffle=False)), 13)
    datasets.Dataset.from_list([{"prompt": "a"}]).save_to_disk(tmp_path / "saved")
    assert "leave out streaming" in setup_error(make(tmp_path / "saved"))
