"""Lines of ``samples.jsonl``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlplug.distributed.durable_files import RowFile
from rlplug.observability.sample_records import write_records


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"a": [1, None]}, {"a": [1, None]}),
        ({1: 2}, {"1": 2}),
        (Path("a"), "a"),
        ({(0, 1): 5}, "{(0, 1): 5}"),
        ([{b"a": 1}], "[{b'a': 1}]"),
    ],
)
def test_an_answer_of_any_type_is_written(tmp_path: Path, answer: Any, expected: Any) -> None:
    """It catches keys that are no JSON keys, such as cells of a grid, which ended the run."""
    file = RowFile(tmp_path / "samples.jsonl")
    write_records(file, [{"step": 1, "answer": answer}, {"step": 2, "answer": "next"}])
    file.sync()
    found = [json.loads(line) for line in file.path.read_text().splitlines()]
    assert found == [{"step": 1, "answer": expected}, {"step": 2, "answer": "next"}]
