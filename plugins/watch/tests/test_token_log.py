"""Files of the token log: what is read is what was written, and damage costs the steps that it hits."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from rlplug_watch.page.token_records import all_records, read_record
from rlplug_watch.token_log import files
from rlplug_watch.token_log.files import TokenLogWriter, cut_back, scan, token_files
from rlplug_watch.token_log.pieces import TokenPieces
from rlplug_watch.token_log.step_tokens import COLUMNS, ROW, StepTokens
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlplug.errors import RunError

ROWS = np.array([(0, 0, 4, 3), (0, 1, 4, 0), (2, 5, 9, 2)], ROW)


def step_tokens(step: int, num_columns: int = len(COLUMNS)) -> StepTokens:
    """Five tokens whose numbers are exact in every dtype."""
    names = list(COLUMNS)[:num_columns]
    columns = {name: (np.arange(5) + place + step % 64).astype(COLUMNS[name]) for place, name in enumerate(names)}
    columns["loss/weight"] = np.array([0.5, np.nan, 1e-7, 3, 4], np.float32)
    return StepTokens(step, ROWS, columns, {7: b"\xf0\x9f", 1: b"", 3: "é\0<b>".encode()})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    writer = TokenLogWriter(tmp_path / "tokens", 1 << 30)
    for step in range(1, 6):
        writer.append(step_tokens(step))
    writer.sync()
    return tmp_path / "tokens"


def steps(folder: Path) -> list[int]:
    return [record.step for record in all_records(folder)]


def test_tokens_are_read_as_they_were_written(folder: Path) -> None:
    for record in all_records(folder):
        found, wanted = read_record(record), step_tokens(record.step)
        assert found.step == wanted.step
        assert found.rows.tolist() == wanted.rows.tolist()
        assert found.pieces == wanted.pieces
        assert found.columns.keys() == wanted.columns.keys()
        for name, values in wanted.columns.items():
            assert found.columns[name].dtype == values.dtype
            np.testing.assert_array_equal(found.columns[name], values)
    assert found.find(2, 5) == 2
    assert found.find(2, 4) is None
    assert found.of_row(2)["token_ids"].tolist() == wanted.columns["token_ids"][3:].tolist()
    assert not found.of_row(1)["flags"].size


def test_a_torn_end_costs_the_last_step_and_is_cut_on_resume(folder: Path) -> None:
    (path,) = token_files(folder)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)

    assert steps(folder) == [1, 2, 3, 4]
    assert "are no whole record" in scan(path)[1][0]
    (said,) = cut_back(folder, 4, None)
    assert "are no whole record" in said
    TokenLogWriter(folder, 1 << 30).append(step_tokens(5))
    assert steps(folder) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("offset", [0, 8, 16, 20, 24, 40])
def test_damage_of_a_record_costs_no_other(folder: Path, offset: int) -> None:
    """A byte of the magic, the step, both sizes, the checksum, and the data."""
    (path,) = token_files(folder)
    second = list(all_records(folder))[1]
    data = bytearray(path.read_bytes())
    data[second.start + offset] ^= 0x41
    path.write_bytes(data)

    read, problems = [], []
    for record in all_records(folder):
        try:
            read.append(read_record(record).step)
        except RunError as error:
            problems.append(str(error))
    assert read == [1, 3, 4, 5]
    assert all("is damaged: " in problem for problem in problems)


@pytest.mark.parametrize(
    ("num_bytes", "rest", "message"),
    [(1 << 28, b"", "has other than"), (3 << 28, b"", None), (64, b"\0" * 64, "no safetensors file")],
)
def test_a_record_may_say_anything_of_itself(tmp_path: Path, num_bytes: int, rest: bytes, message: str | None) -> None:
    data = zlib.compress(rest or bytes(1 << 20))
    checksum = files.checksum(1, data, num_bytes)
    path = tmp_path / "step-00000001.tokens"
    path.write_bytes(struct.pack("<8sQIIQ", files.MAGIC, 1, len(data), num_bytes, checksum) + data)

    records, problems = scan(path)
    if message is None:  # more than any step has
        assert not records
        assert problems
    else:
        with pytest.raises(RunError, match=message):
            read_record(records[0])


def test_going_back_removes_later_steps_and_keeps_copies(folder: Path, tmp_path: Path) -> None:
    before = next(folder.iterdir()).read_bytes()
    (tmp_path / "abandoned-1").mkdir()
    assert cut_back(folder, 2, tmp_path / "abandoned-1") == []
    assert steps(folder) == [1, 2]
    (copy,) = token_files(tmp_path / "abandoned-1" / "tokens")
    assert copy.read_bytes() == before
    assert cut_back(folder, 0, None) == []
    assert steps(folder) == []
    assert cut_back(tmp_path / "absent", 0, None) == []


def test_the_oldest_files_go_beyond_the_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "FILE_BYTES", 1000)
    for first in (1, 11):  # the second goes on where the first one ended
        writer = TokenLogWriter(tmp_path / "tokens", 4000)
        for step in range(first, first + 10):
            writer.append(step_tokens(step))
    found = steps(tmp_path / "tokens")
    assert found == list(range(found[0], 21))
    assert 2 < found[0] < 18
    assert sum(path.stat().st_size for path in token_files(tmp_path / "tokens")) < 4000 + 2000


def byte_level() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={piece: number for number, piece in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<\uff5cend\u2581of\u2581it\uff5c>")


def sentencepiece() -> PreTrainedTokenizerFast:
    words = ["<unk>", "\u2581a", "b", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE({w: n for n, w in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


@pytest.mark.parametrize(("tokenizer", "text"), [(byte_level(), " é\n😀<b>\0"), (sentencepiece(), "b😀b")])
def test_pieces_give_every_byte_of_a_text(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    """A character may be spread over tokens, each of which alone would decode to the replacement character."""
    ids = tokenizer(text)["input_ids"]
    pieces = TokenPieces(tokenizer).of(ids)
    assert b"".join(pieces[token_id] for token_id in ids) == text.encode()


def test_special_and_unknown_tokens_have_pieces_too() -> None:
    tokenizer = byte_level()
    end, beyond = tokenizer.eos_token_id, len(tokenizer) + 1000
    assert TokenPieces(tokenizer).of([end, beyond]) == {end: "<\uff5cend\u2581of\u2581it\uff5c>".encode(), beyond: b""}
    assert TokenPieces(sentencepiece()).of([1, 1]) == {1: b" a"}
