"""Hugging Face datasets from folders: what is read, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from rlplug_data.hf_datasets import HFDatasetSource
from rlplug_devkit import DataSourceConformance

from rlplug.data.sources import PromptRow, PromptSource, read_rows
from rlplug.errors import ConfigError

RECORDS = [
    {"prompt": "1 + 1 =", "answer": "2", "level": 1},
    {"prompt": "2 + 3 =", "answer": "5", "level": 2},
    {"prompt": "4 + 4 =", "answer": "8", "level": 3},
]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1 ="}]


def write_jsonl(path: Path, records: list[Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def error_of(source: PromptSource) -> str:
    with pytest.raises(ConfigError) as caught:
        list(source.rows())
    return str(caught.value)


class TestSavedDataset(DataSourceConformance):
    @pytest.fixture(autouse=True)
    def saved(self, tmp_path: Path) -> None:
        self.folder = str(tmp_path / "saved")
        datasets.Dataset.from_list(RECORDS * 3).save_to_disk(self.folder)

    def _subject(self) -> str:
        return "HFDatasetSource"

    def make_source(self) -> PromptSource:
        return HFDatasetSource(self.folder)

    def make_broken_source(self) -> PromptSource:
        return HFDatasetSource(self.folder, split="no-such-split")


def test_limit_below_one():
    with pytest.raises(ConfigError, match=r"Source\.limit is 0: give a number from 1"):
        HFDatasetSource("org/data", limit=0)


def test_columns_template_and_system_prompt(tmp_path):
    datasets.Dataset.from_list([{"question": "1 + 1", "solution": "2", "level": 3}]).save_to_disk(tmp_path / "sums")
    options = {"columns": {"solution": "answer"}, "template": "{question} =", "system_prompt": "Be brief."}
    (row,) = HFDatasetSource(str(tmp_path / "sums"), **options).rows()
    assert row.prompt == [CHAT[0], {"role": "user", "content": "1 + 1 ="}]
    assert (row.answer, row.metadata) == ("2", {"question": "1 + 1", "level": 3})


def test_saved_dataset(tmp_path):
    datasets.Dataset.from_list(RECORDS).save_to_disk(tmp_path / "sums")
    rows = list(HFDatasetSource(str(tmp_path / "sums")).rows())
    assert rows[0] == PromptRow("sums/train:0", "1 + 1 =", "2", {"level": 1})
    assert [row.answer for row in rows] == ["2", "5", "8"]


def test_saved_dataset_with_messages_and_limit(tmp_path):
    datasets.Dataset.from_list([{"prompt": CHAT, "answer": "2"}] * 3).save_to_disk(tmp_path / "sums")
    rows = list(HFDatasetSource(str(tmp_path / "sums"), limit=2).rows())
    assert [row.prompt for row in rows] == [CHAT, CHAT]


def test_saved_dictionary_of_splits(tmp_path):
    splits = {"train": datasets.Dataset.from_list(RECORDS), "test": datasets.Dataset.from_list(RECORDS[:1])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "sums")
    assert [row.uid for row in HFDatasetSource(str(tmp_path / "sums"), split="test").rows()] == ["sums/test:0"]
    message = error_of(HFDatasetSource(str(tmp_path / "sums"), split="tets"))
    assert "has no split 'tets', only train, test. Did you mean 'test'?" in message


def test_saved_dataset_has_one_split_and_no_configurations(tmp_path):
    datasets.Dataset.from_list(RECORDS, split="test").save_to_disk(tmp_path / "sums")
    assert "has no split 'train', only test" in error_of(HFDatasetSource(str(tmp_path / "sums")))
    message = error_of(HFDatasetSource(str(tmp_path / "sums"), name="main", split="test"))
    assert "leave out name (now 'main')" in message


def test_folder_of_data_files(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "sums").mkdir()
    write_jsonl(tmp_path / "sums" / "train.jsonl", RECORDS)
    write_jsonl(tmp_path / "sums" / "test.jsonl", RECORDS[:1])
    assert len(list(HFDatasetSource(str(tmp_path / "sums")).rows())) == 3
    assert [row.uid for row in HFDatasetSource(str(tmp_path / "sums"), split="test").rows()] == ["sums/test:0"]
    message = error_of(HFDatasetSource(str(tmp_path / "sums"), split="validation"))
    assert "split 'validation' cannot be loaded by datasets" in message


def test_dataset_that_does_not_exist(tmp_path):
    message = error_of(HFDatasetSource(str(tmp_path / "gone")))
    assert f"path {str(tmp_path / 'gone')!r}" in message
    assert "cannot be loaded" in message


def test_empty_dataset(tmp_path):
    """Newer versions of datasets refuse to load it, older ones load no rows."""
    datasets.Dataset.from_dict({"prompt": []}).save_to_disk(tmp_path / "sums")
    with pytest.raises(ConfigError, match=r"^data\.train: .*(cannot be loaded by datasets|has no prompts: give it)"):
        read_rows("data.train", HFDatasetSource(str(tmp_path / "sums")))


def test_cause_of_a_failed_build_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "sums").mkdir()
    (tmp_path / "sums" / "train.jsonl").write_text("no json")
    message = error_of(HFDatasetSource(str(tmp_path / "sums")))
    assert "An error occurred while generating the dataset (" in message
    assert "JSON parse error" in message


def test_dataset_without_the_prompt_column(tmp_path):
    datasets.Dataset.from_list(RECORDS).save_to_disk(tmp_path / "sums")
    message = error_of(HFDatasetSource(str(tmp_path / "sums"), prompt_key="question"))
    assert "sums/train:0 has no field 'question'; its fields are prompt, answer, level." in message
