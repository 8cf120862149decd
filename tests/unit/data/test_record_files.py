"""Files by their endings: CSV and JSON arrays as pandas and people write them, and messages for what cannot be read."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pandas
import pytest

from rlplug.data.record_files import read_records
from rlplug.data.sources import FileSource
from rlplug.errors import ConfigError

RECORDS = [
    {"prompt": 'Say "a, b"\nand c', "answer": 12, "share": 0.5, "code": "007"},
    {"prompt": "1 + 1 =", "answer": 2, "share": None, "code": "12"},
]


def records_of(path: Path, text: str | bytes) -> list[tuple[int, Any]]:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return list(read_records(path))


def error_of(path: Path, text: str | bytes) -> str:
    with pytest.raises(ConfigError) as caught:
        records_of(path, text)
    return str(caught.value)


@pytest.mark.parametrize(("name", "delimiter"), [("a.csv", ","), ("a.tsv", "\t"), ("a.CSV", ",")])
def test_csv_as_pandas_writes_it(tmp_path: Path, name: str, delimiter: str) -> None:
    """Alone catches numbers that become text, text that becomes numbers, and a gap that becomes NaN or ''."""
    pandas.DataFrame(RECORDS).to_csv(tmp_path / name, sep=delimiter, index=False)
    assert list(read_records(tmp_path / name)) == [(2, RECORDS[0]), (4, RECORDS[1])]
    rows = list(FileSource(str(tmp_path / name)).rows())
    assert [(row.uid, row.prompt, row.answer) for row in rows] == [
        (f"{name}:2", RECORDS[0]["prompt"], 12),
        (f"{name}:4", "1 + 1 =", 2),
    ]


@pytest.mark.parametrize(
    ("fields", "values"),
    [
        (["12", "-3", "0"], [12, -3, 0]),
        (["12.0", "", "0.5"], [12.0, None, 0.5]),
        (["12", "NaN", "0.5"], [12, None, 0.5]),
        (["12", "NaN", "x"], ["12", "NaN", "x"]),
        (["1.50", "2"], ["1.50", "2"]),
        (["007", "8"], ["007", "8"]),
        (["1e5", "2"], ["1e5", "2"]),
        (["inf", "2"], ["inf", "2"]),
        (["-0", "2"], ["-0", "2"]),
        (["9" * 30, "2"], ["9" * 30, "2"]),
        (["\u0663", "2"], ["\u0663", "2"]),
        (["1_0", "2"], ["1_0", "2"]),
        (["True", "False"], ["True", "False"]),
        (["", ""], [None, None]),
        (["x", ""], ["x", None]),
    ],
)
def test_a_csv_column_is_of_numbers_where_that_loses_nothing(tmp_path: Path, fields: list[str], values: list) -> None:
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["a", "b"], *([field, "x"] for field in fields)])
    found = [record["a"] for _, record in read_records(tmp_path / "a.csv")]
    assert [(value, type(value)) for value in found] == [(value, type(value)) for value in values]


def test_csv_with_a_byte_order_mark_blank_lines_and_a_long_field(tmp_path: Path) -> None:
    text = "\ufeffprompt,answer\r\n" + "x" * 200_000 + ",a\r\n\r\ny,b\r\n"
    assert [(line, record["answer"]) for line, record in records_of(tmp_path / "a.csv", text)] == [(2, "a"), (4, "b")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n1,2,3\n", ":3 has 3 fields, and the first line names 2: correct that row"),
        ('a,b\n"x\ny",2\n1\n', ":4 has 1 fields"),
        ("a,a\n1,2\n", ":1 has two columns 'a'"),
        ('a,b\n1,2\n"1,2\n', ":3 is not CSV: unexpected end of data"),
        ('a,b\n"1"x,2\n', ":2 is not CSV"),
        (b"a,b\n1,\xe9\n", ":2 is not UTF-8"),
    ],
)
def test_csv_that_cannot_be_read(tmp_path: Path, text: str | bytes, message: str) -> None:
    assert error_of(tmp_path / "a.csv", text).startswith(f"{tmp_path / 'a.csv'}{message}")


@pytest.mark.parametrize("name", ["a.json", "a.JSON"])
@pytest.mark.parametrize("options", [{}, {"indent": 2}])
def test_json_arrays(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    assert records_of(tmp_path / name, json.dumps(RECORDS, **options)) == [*enumerate(RECORDS, start=1)]


@pytest.mark.parametrize("name", ["a.json", "a.JSONL", "a.Jsonl", "a.ndjson"])
def test_an_object_a_line_under_other_endings(tmp_path: Path, name: str) -> None:
    text = "\ufeff" + "\n".join(json.dumps(record) for record in RECORDS)
    assert records_of(tmp_path / name, text) == [*enumerate(RECORDS, start=1)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[\n {"a": 1},\n {"a": }\n]', "{path}:3, column 8, is not JSON"),
        ('[{"a": 1}, 3]', "{path}:2 is 3: each row must be an object"),
        ('"text"', "data source path '{path}' is \"text\": give an array of objects"),
        ('{\n "data": []\n}', "data source path '{path}' is one JSON object over several lines"),
        ("[" * 100_000, "{path} is JSON of too many levels"),
        (b'["\xe9"]', "{path} is not JSON"),
        (
            '{"a": 1}\n{"b": {"a": 2, "c": 3, "a": 4}}',
            "{path}:2 is not JSON that can be read: the key 'a' is there twice",
        ),
    ],
)
def test_json_that_cannot_be_read(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = tmp_path / "a.json"
    assert error_of(path, text).startswith(message.format(path=path))


@pytest.mark.parametrize("name", ["a.json", "a.csv"])
@pytest.mark.parametrize("text", ["", "\n"])
def test_empty_files(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match="is empty: give a file with at least one prompt"):
        list(FileSource(str(tmp_path / name)).rows())
