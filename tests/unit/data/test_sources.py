import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import reasoning_gym
from jsonargparse import ArgumentParser
from pyarrow import parquet
from rlplug_rewards.reasoning_gym import ReasoningGymSource

from rlplug.data.sources import FileSource, PromptRow, PromptSource, read_rows
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


def write_parquet(path: Path, records: list[Any]) -> str:
    parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return str(path)


def error_of(source: PromptSource) -> str:
    with pytest.raises(ConfigError) as caught:
        list(source.rows())
    return str(caught.value)


@pytest.mark.parametrize(("write", "name"), [(write_jsonl, "train.jsonl"), (write_parquet, "train.parquet")])
def test_file_rows(tmp_path, write, name):
    rows = list(FileSource(write(tmp_path / name, RECORDS)).rows())
    assert rows == [
        PromptRow(f"{name}:1", "1 + 1 =", "2", {"level": 1}),
        PromptRow(f"{name}:2", "2 + 3 =", "5", {"level": 2}),
        PromptRow(f"{name}:3", "4 + 4 =", "8", {"level": 3}),
    ]


@pytest.mark.parametrize(("write", "name"), [(write_jsonl, "train.jsonl"), (write_parquet, "train.parquet")])
def test_file_keys_and_limit(tmp_path, write, name):
    records = [{"question": record["prompt"], "solution": record["answer"]} for record in RECORDS]
    source = FileSource(write(tmp_path / name, records), prompt_key="question", answer_key="solution", limit=2)
    assert [(row.prompt, row.answer) for row in source.rows()] == [("1 + 1 =", "2"), ("2 + 3 =", "5")]


def test_columns_template_and_system_prompt(tmp_path):
    """Alone catches a template that reads its values again, and a column that is lost or keeps its old name."""
    record = {"question": "{x} + 1", "solution": "2", "difficulty": 3, "prompt": "kept"}
    options = {
        "columns": {"solution": "answer", "difficulty": "level"},
        "template": "{{Level}} {level}: {question}\n=",
        "system_prompt": "Be brief.",
    }
    file = write_jsonl(tmp_path / "a.jsonl", [record])
    (row,) = FileSource(file, **options).rows()
    assert row.prompt == [CHAT[0], {"role": "user", "content": "{Level} 3: {x} + 1\n="}]
    assert (row.answer, row.metadata) == ("2", {"question": "{x} + 1", "level": 3, "prompt": "kept"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"template": "{qestion}"},
            "has no field 'qestion'; .* Did you mean 'question'\\? If all .*, correct the template;",
        ),
        ({"columns": {"qestion": "prompt"}}, "has no field 'qestion'; .*, correct columns;"),
        ({"columns": {"question": "messages"}}, "has a column 'messages', and columns gives another one that name"),
        ({"template": "{messages}"}, "'messages' is .*, and template takes text, a number or a list"),
        ({"template": "{gap}"}, "'gap' is nan, and template takes text, a number or a list"),
        ({"template": "{question:letters}"}, "puts letters in front of its items: give a list of at most 26"),
        ({"template": "{many:letters}"}, "give a list of at most 26"),
        ({"answer_key": "judge.thruth"}, "its fields are judge.truth, judge.style. Did you mean 'judge.truth'"),
        ({"answer_key": "judge.truth.text"}, "no field 'judge.truth.text'; its fields are judge.truth"),
        ({"columns": {"judge.truth": "question"}}, "has a column 'question', and columns gives another one that name"),
        ({"prompt_key": "messages", "system_prompt": "x"}, "has its own system message"),
        ({"template": "{question"}, "template '{question': expected '}'"),
        ({"template": "{question:>5}"}, "something other than a name"),
        ({"template": "none"}, "names no column"),
        ({"template": "{question}", "prompt_key": "question"}, "drop one of them"),
        ({"columns": {"a": "c", "b": "c"}}, "two columns one name"),
    ],
)
def test_columns_and_templates_that_do_not_fit_are_refused(tmp_path, options, message):
    judge = {"truth": "2", "style": "rule"}
    record = {"question": "1 + 1", "messages": CHAT, "judge": judge, "many": [*range(27)], "gap": float("nan")}
    file = write_jsonl(tmp_path / "a.jsonl", [record])
    with pytest.raises(ConfigError, match=message):
        list(FileSource(file, **options).rows())


@pytest.mark.parametrize(("write", "name"), [(write_jsonl, "train.jsonl"), (write_parquet, "train.parquet")])
def test_names_with_dots_are_of_values_inside_columns(tmp_path, write, name):
    """verl's rows, as it writes them; alone catches a nested value that takes its column with it."""
    judge = {"style": "rule", "ground_truth": "42"}
    record = {"data_source": "gsm8k", "prompt": CHAT, "reward_model": judge, "extra_info": {"texts": ["a", "b"]}}
    path = write(tmp_path / name, [record])
    (row,) = FileSource(path, answer_key="reward_model.ground_truth").rows()
    assert (row.prompt, row.answer) == (CHAT, "42")
    assert row.metadata == {key: record[key] for key in ("data_source", "reward_model", "extra_info")}
    columns = {"reward_model.ground_truth": "answer", "extra_info.texts.1": "hint"}
    (row,) = FileSource(path, columns=columns, template="{prompt.1.content} {hint} {extra_info.texts.0}").rows()
    assert (row.prompt, row.answer, row.metadata["hint"]) == ("1 + 1 = b a", "42", "b")
    (row,) = FileSource(path, prompt_key="extra_info.texts.0").rows()
    assert (row.prompt, row.answer) == ("a", None)


def test_a_column_whose_own_name_has_dots_comes_first(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "x.y": "flat", "x": {"y": "nested"}}])
    (row,) = FileSource(path, answer_key="x.y").rows()
    assert (row.answer, row.metadata) == ("flat", {"x": {"y": "nested"}})


@pytest.mark.parametrize(("write", "name"), [(write_jsonl, "train.jsonl"), (write_parquet, "train.parquet")])
def test_lists_in_templates(tmp_path, write, name):
    record = {"prompt": "Which is red?", "choices": ["sky", "blood", "grass"], "answer": 1, "years": [1, 2.5]}
    template = "{prompt}\n{choices:letters}\n{choices}\n{years}"
    (row,) = FileSource(write(tmp_path / name, [record]), template=template).rows()
    lines = ["A. sky", "B. blood", "C. grass", "sky", "blood", "grass"]
    assert row.prompt.splitlines()[:7] == ["Which is red?", *lines]
    assert (row.answer, row.metadata["choices"]) == (1, ["sky", "blood", "grass"])


@pytest.mark.parametrize("answer", [12.0, 1, True, ["Paris", "paris"], {"a": [1]}, None, "12"])
@pytest.mark.parametrize(("write", "name"), [(write_jsonl, "train.jsonl"), (write_parquet, "train.parquet")])
def test_typed_answers_are_kept(tmp_path, write, name, answer):
    (row,) = FileSource(write(tmp_path / name, [{"prompt": "a", "answer": answer}])).rows()
    assert (row.answer, type(row.answer)) == (answer, type(answer))


@pytest.mark.parametrize(("write", "name"), [(write_jsonl, "train.jsonl"), (write_parquet, "train.parquet")])
def test_file_with_messages(tmp_path, write, name):
    (row,) = FileSource(write(tmp_path / name, [{"prompt": CHAT, "answer": "2"}])).rows()
    assert row.prompt == CHAT


def test_parquet_fills_message_keys_with_none(tmp_path):
    # parquet gives both messages the key "name", which only the second has
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi", "name": "Ada"}]
    (row,) = FileSource(write_parquet(tmp_path / "a.parquet", [{"prompt": messages}])).rows()
    assert row.prompt == messages


def test_rows_can_be_read_again(tmp_path):
    source = FileSource(write_jsonl(tmp_path / "a.jsonl", RECORDS))
    assert list(source.rows()) == list(source.rows())


def test_file_below_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_jsonl(tmp_path / "a.jsonl", RECORDS)
    assert len(list(FileSource("~/a.jsonl").rows())) == 3


def test_blank_lines_are_passed_over_and_counted(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b"}')
    assert [row.uid for row in FileSource(str(path)).rows()] == ["a.jsonl:1", "a.jsonl:3"]


def test_a_line_separator_inside_text_is_no_line_end(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a\u2028b"}\n', encoding="utf-8")
    assert [row.prompt for row in FileSource(str(path)).rows()] == ["a\u2028b"]


def test_default_answer_may_be_absent(tmp_path):
    rows = FileSource(write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}, {"prompt": "b", "answer": "c"}])).rows()
    assert [row.answer for row in rows] == [None, "c"]


def test_named_answer_must_be_there(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "solution": "c"}])
    message = error_of(FileSource(path, answer_key="solutoin"))
    assert f"{path}:1 has no field 'solutoin'" in message
    assert "Did you mean 'solution'?" in message
    assert "set answer_key" in message


@pytest.mark.parametrize("name", ["gone.jsonl", "gone.parquet"])
def test_missing_file(tmp_path, name):
    assert error_of(FileSource(str(tmp_path / name))).startswith(
        f"data source path {str(tmp_path / name)!r} is not a file"
    )


@pytest.mark.parametrize("name", ["data.txt", "data"])
def test_unknown_suffix(tmp_path, name):
    message = error_of(FileSource(str(tmp_path / name)))
    assert name in message
    assert ".jsonl" in message
    assert ".parquet" in message


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_empty_jsonl(tmp_path, text):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    assert f"data source path {str(path)!r} is empty" in error_of(FileSource(str(path)))


def test_empty_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), path)
    assert f"data source path {str(path)!r} is empty" in error_of(FileSource(str(path)))


def test_malformed_json(tmp_path):
    """File, line and column once each: a parser that is given one line calls each of them line 1."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b",}\n')
    with pytest.raises(json.JSONDecodeError) as parser_error:
        json.loads('{"prompt": "b",}')
    where = f"{path}:2, column {parser_error.value.colno}"
    assert error_of(FileSource(str(path))) == f"{where}, is not JSON: {parser_error.value.msg}. Correct it."


def test_a_line_that_is_not_closed_ends_in_its_own_line(tmp_path):
    """Catches that the end of the line counts as a line of its own, in which the parser then is in column 1."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a"\n{"prompt": "b"}\n')
    assert error_of(FileSource(str(path))).startswith(f"{path}:1, column 15, is not JSON")


def test_line_that_is_no_utf8(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xe9"}\n')
    message = error_of(FileSource(str(path)))
    assert message.startswith(f"{path}:2 is not JSON")
    assert "utf-8" in message


@pytest.mark.parametrize("line", ['["a"]', '"a"', "3", "null"])
def test_line_that_is_no_object(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text(line)
    assert error_of(FileSource(str(path))).startswith(f"{path}:1 is {line}: each line must be an object")


@pytest.mark.parametrize(("write", "name"), [(write_jsonl, "a.jsonl"), (write_parquet, "a.parquet")])
def test_missing_prompt_key(tmp_path, write, name):
    path = write(tmp_path / name, [{"promt": "a", "answer": "b"}])
    message = error_of(FileSource(path))
    assert f"{path}:1 has no field 'prompt'; its fields are promt, answer." in message
    assert "Did you mean 'promt'?" in message
    assert "set prompt_key" in message


@pytest.mark.parametrize("options", [{}, {"template": "{prompt}"}, {"columns": {"prompt": "x"}, "prompt_key": "x"}])
def test_a_name_that_one_row_misspells_is_corrected_there(tmp_path, options):
    """Catches advice to change a rule for all rows, which the rows before would then break."""
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}, {"promt": "b"}, {"prompt": "c"}])
    message = error_of(FileSource(path, **options))
    assert message == (
        f"{path}:2 has no field 'prompt', and the rows before it have one; its fields are promt: correct that row."
    )


def test_empty_object_has_no_fields(tmp_path):
    assert "its fields are none" in error_of(FileSource(write_jsonl(tmp_path / "a.jsonl", [{}])))


@pytest.mark.parametrize("prompt", [None, 3, [], {"role": "user", "content": "a"}])
def test_prompt_that_is_neither_text_nor_messages(tmp_path, prompt):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": prompt}])
    assert error_of(FileSource(path)).startswith(f"{path}:1: 'prompt' is {prompt!r}: give text, or a list of messages")


@pytest.mark.parametrize(
    "message", ["a", {"content": "a"}, {"role": "", "content": "a"}, {"role": "user"}, {"role": "user", "content": 3}]
)
def test_malformed_message(tmp_path, message):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": [message]}])
    assert f"{path}:1: 'prompt' has the message {message!r}" in error_of(FileSource(path))


def test_images_are_refused_by_name(tmp_path):
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What is this?"}]
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": [{"role": "user", "content": parts}]}])
    assert "Content is text or parts of text, since rlplug trains on text alone" in error_of(FileSource(path))


def test_broken_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_text("not parquet at all")
    assert f"data source path {str(path)!r} is no valid parquet: " in error_of(FileSource(str(path)))


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "a.parquet", RECORDS)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert "pip install pyarrow" in error_of(FileSource(path))


def test_limit_below_one():
    with pytest.raises(ConfigError, match=r"Source\.limit is 0: give a number from 1"):
        FileSource("a.jsonl", limit=0)


def test_reasoning_gym_rows():
    options = {"min_terms": 2, "max_terms": 3}
    expected = reasoning_gym.create_dataset("chain_sum", size=5, seed=7, **options)
    rows = list(ReasoningGymSource("chain_sum", size=5, seed=7, config=options).rows())
    assert [row.prompt for row in rows] == [entry["question"] for entry in expected]
    assert [row.answer for row in rows] == [entry["answer"] for entry in expected]
    assert rows[2].metadata == {"task": "chain_sum", "entry": expected[2]}
    assert rows[2].uid == "chain_sum/seed=7:2"
    assert expected.score_answer(rows[2].answer, rows[2].metadata["entry"]) == 1.0


def test_reasoning_gym_seeds_one_apart_overlap():
    # the docstring warns of this; should reasoning-gym change it, the warning can go
    first, second = (list(ReasoningGymSource("chain_sum", size=5, seed=seed).rows()) for seed in (0, 1))
    assert [row.prompt for row in first[1:]] == [row.prompt for row in second[:-1]]


def test_reasoning_gym_instruction():
    (plain,) = ReasoningGymSource("chain_sum", size=1).rows()
    (asked,) = ReasoningGymSource("chain_sum", size=1, instruction="Answer with a number.").rows()
    assert asked.prompt == f"{plain.prompt}\nAnswer with a number."


def test_unknown_reasoning_gym_task():
    message = error_of(ReasoningGymSource("chain_sums"))
    assert "'chain_sums' is not a reasoning-gym task. Did you mean 'chain_sum'?" in message
    assert "word_sorting" in message


def test_unknown_reasoning_gym_option():
    message = error_of(ReasoningGymSource("chain_sum", config={"max_term": 3}))
    assert "no option 'max_term'. Did you mean 'max_terms'?" in message
    assert "Its options are allow_negation, max_digits, max_terms, min_digits, min_terms." in message


@pytest.mark.parametrize("config", [{"min_terms": 5, "max_terms": 2}, {"min_terms": "two"}])
def test_refused_reasoning_gym_option(config):
    assert "is refused" in error_of(ReasoningGymSource("chain_sum", config=config))


@pytest.mark.parametrize("option", ["size", "seed"])
def test_reasoning_gym_size_and_seed_stand_beside_config(option):
    assert f"has {option!r}: write it beside config" in error_of(ReasoningGymSource("chain_sum", config={option: 3}))


def test_reasoning_gym_size_below_one():
    with pytest.raises(ConfigError, match=r"ReasoningGymSource\.size is 0: give a number from 1"):
        ReasoningGymSource("chain_sum", size=0)


def test_without_reasoning_gym(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    assert "pip install 'rlplug-rewards[reasoning]'" in error_of(ReasoningGymSource("chain_sum"))


def test_sources_from_yaml(tmp_path):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(PromptSource, "source")
    parser.add_argument("--config", action="config")
    (tmp_path / "a.yaml").write_text(
        "source:\n  class_path: ReasoningGymSource\n  init_args: {task: chain_sum, size: 2, config: {min_terms: 3}}\n"
    )
    source = parser.instantiate(parser.parse_args(["--config", str(tmp_path / "a.yaml")])).source
    assert isinstance(source, ReasoningGymSource)
    assert (source.task, source.size, source.config) == ("chain_sum", 2, {"min_terms": 3})


def test_tool_calls_null_content_and_parts_of_text_are_messages(tmp_path):
    """As OpenAI's API and transformers write them: text parts are joined, and arguments become an object."""
    call = {"type": "function", "id": "1", "function": {"name": "add", "arguments": {"a": 1}}}
    as_text = call | {"function": call["function"] | {"arguments": '{"a": 1}'}}
    parts = [{"type": "text", "text": "Add "}, {"type": "text", "text": "1."}]
    prompt = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [as_text]},
        {"role": "tool", "content": "1", "tool_call_id": "1", "name": None},
    ]
    (row,) = FileSource(write_jsonl(tmp_path / "a.jsonl", [{"prompt": prompt, "answer": "1"}])).rows()
    assert row.prompt == [
        {"role": "user", "content": "Add 1."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "1"},
    ]


@pytest.mark.parametrize("calls", [None, [], "add", [4]])
def test_null_content_needs_tool_calls(tmp_path, calls):
    prompt = [{"role": "assistant", "content": None, "tool_calls": calls}]
    assert "may be null beside tool_calls" in error_of(
        FileSource(write_jsonl(tmp_path / "a.jsonl", [{"prompt": prompt}]))
    )


def test_rows_of_one_object_keep_their_own_fields():
    """Alone catches that every sample gets the last row's metadata, of a source that fills one dictionary again."""

    class OneDictionary(PromptSource):
        def rows(self) -> Iterator[PromptRow]:
            fields: dict[str, Any] = {}
            messages = [{"role": "user", "content": ""}]
            for index in range(3):
                fields["index"], messages[0]["content"] = index, f"{index}?"
                yield PromptRow(f"one:{index}", messages, fields, fields)

    rows = read_rows("data.train", OneDictionary())
    assert [(row.prompt[0]["content"], row.answer["index"], row.metadata["index"]) for row in rows] == [
        ("0?", 0, 0),
        ("1?", 1, 1),
        ("2?", 2, 2),
    ]
