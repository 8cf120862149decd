"""Lines of ``samples.jsonl``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from rlplug.distributed.durable_files import RowFile
from rlplug.observability.sample_records import sample_record, with_turns, write_records


class Numbers:
    """Tokenizer whose texts are the tokens' numbers."""

    def batch_decode(self, rows: list[list[int]], skip_special_tokens: bool) -> list[str]:
        return [" ".join(map(str, row)) for row in rows]


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


def test_turns_say_who_spoke(make_sample) -> None:
    """Catches an answer of the environment that reads as the policy's, in samples, tables and reports."""
    sample = make_sample("guess 3 higher 4", "4")
    start = len(sample.prompt.token_ids)
    mask = [False] * start + [True, True, False, False, True]
    sample = dataclasses.replace(
        sample,
        token_ids=[*sample.prompt.token_ids, 1, 2, 3, 4, 5],
        response_mask=mask,
        rollout_logprobs=[0.0] * len(mask),
    )
    told = with_turns(sample, Numbers())
    assert told.turns == (("policy", "1 2"), ("environment", "3 4"), ("policy", "5"))
    assert told.transcript == "policy: 1 2\nenvironment: 3 4\npolicy: 5"
    assert sample_record(told, 1, "train")["turns"][1] == {"role": "environment", "text": "3 4"}


def test_a_single_turn_is_its_completion(make_sample) -> None:
    """Catches labels, and a second copy of the text, where nobody but the policy spoke."""
    sample = make_sample("four")
    assert with_turns(sample, Numbers()) is sample
    assert sample.transcript == "four"
    assert "turns" not in sample_record(sample, 1, "train")
