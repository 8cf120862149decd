"""A prompt that cannot be used ends the start with one message that names it, within a deadline."""

from __future__ import annotations

import json
import time

import pytest
from hostile import SURROGATE, deep
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split
from unit.data.prompt_cases import USER_MESSAGE, ListSource, build_tokenizer

from rlplug.data import chat_template, tokenizing
from rlplug.data.datamodule import PromptDataModule
from rlplug.data.prompt_encoder import PromptRules
from rlplug.data.sources import FileSource, PromptRow, PromptSource
from rlplug.errors import ConfigError

LOOP = "".join(f"{{% for {name} in range(4000) %}}" for name in "ab") + "{% endfor %}" * 2
"""Runs for seconds: its thread is left behind, and should not slow the tests that follow."""


def load(source, tokenizer=None, max_context=100, **options):
    data = PromptDataModule(source, **options)
    data.load("fit", PromptRules(tokenizer or build_tokenizer(), (), max_context, 4))
    return data


LINES = {
    "surrogate": json.dumps({"prompt": SURROGATE}),
    "surrogate in a message": json.dumps({"prompt": [{"role": "user", "content": SURROGATE}]}),
    "surrogate in a role": json.dumps({"prompt": [{"role": SURROGATE, "content": "a"}]}),
    "surrogate in the answer": json.dumps({"prompt": "a", "answer": SURROGATE}),
    "surrogate in metadata": json.dumps({"prompt": "a", "tests": [{"in": SURROGATE}]}),
    "deep metadata": json.dumps({"prompt": "a", "tests": deep(200)}),
    "deeper than the parser": '{"prompt": "a", "tests": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "deep prompt": json.dumps({"prompt": deep(300)}),
    "digits": '{"prompt": "a", "answer": ' + "9" * 5000 + "}",
    "bytes": b'{"prompt": "\xff\xfe"}',
    "number": '{"prompt": 5}',
    "huge message": json.dumps({"prompt": {"text": "x" * 10_000_000}}),
    "cut": '{"prompt": "a',
    "nul": b"\0\0\0\0",
    "10 MB": json.dumps({"prompt": "word " * 2_000_000}),
    "empty": json.dumps({"prompt": ""}),
}


@pytest.mark.parametrize("line", LINES.values(), ids=list(LINES))
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'{"prompt": "good"}\n' + (line if isinstance(line, bytes) else line.encode()))
    began = time.perf_counter()
    with pytest.raises(ConfigError, match=r"train\.jsonl:2") as raised:
        load(FileSource(str(path)))
    assert len(str(raised.value)) < 1500
    str(raised.value).encode()
    assert time.perf_counter() - began < 20


TEMPLATES = {
    "loops": (LOOP, "took longer than 0.3 s"),
    "divides": ("{{ 1 // 0 }}", "ZeroDivisionError"),
    "undefined": ("{{ messages.x.y }}", "refuses"),
    "adds text": ("{{ 'a' + 1 }}", "TypeError"),
    "breaks": ("{% for %}", "refuses"),
    "recurses": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "grows": ("{% for i in range(2000) %}{{ messages[0].content }}{{ 'x' * 1000 }}{% endfor %}", "characters for"),
    "reaches out": ("{{ messages.__class__.__mro__ }}", "refuses"),
}


@pytest.mark.parametrize(("template", "message"), TEMPLATES.values(), ids=list(TEMPLATES))
def test_a_bad_template_names_the_prompt(template, message, monkeypatch):
    monkeypatch.setattr(chat_template, "RENDER_S", 0.3 if template is LOOP else chat_template.RENDER_S)
    with pytest.raises(ConfigError, match="chat template") as raised:
        load(ListSource([USER_MESSAGE], [USER_MESSAGE]), build_tokenizer(template))
    assert message in str(raised.value)
    assert "'p0'" in str(raised.value)


class Failing(PromptSource):
    def __init__(self, *rows):
        self.given = rows

    def rows(self):
        yield PromptRow("first", "a", None, {})
        for row in self.given:
            if isinstance(row, BaseException):
                raise row
            yield row


@pytest.mark.parametrize(
    "row", [KeyError("x"), RuntimeError(), None, "text", PromptRow(1, "a", None, {}), PromptRow("b", b"a", None, {})]
)
def test_a_source_that_fails_is_named(row):
    with pytest.raises(ConfigError, match=r"data\.train: "):
        load(Failing(row))


def test_a_tokenizer_that_fails_names_the_prompt():
    class Failing:
        name_or_path, chat_template = "odd", None

        def __call__(self, texts, **_):
            if any("bad" in text for text in texts):
                raise TypeError("no such text")
            return {"input_ids": [[1]] * len(texts)}

    with pytest.raises(ConfigError, match=r"'odd' failed .TypeError: no such text.* the prompt 'p1' of 3 char"):
        load(ListSource("good", "bad"), Failing())


def test_a_regex_of_a_tokenizer_that_gives_up_names_the_prompt():
    """Catches a panic of Rust, which is no ``Exception`` and ended the start in a traceback."""
    tokenizer = build_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = Split(Regex("(a+)+(?!a)b(?=c)"), "isolated")
    with pytest.raises(ConfigError, match=r"retry-limit.*prompt 'a'"):
        tokenizing.tokenize_all(["a"], ["a" * 40], tokenizer, False, 100)


def test_a_long_text_of_few_tokens_is_tokenised_whole():
    tokenizer = build_tokenizer(wrap="$A")
    ids = tokenizing.tokenize_all(["a"], ["x" * 5000], tokenizer, False, 10)
    assert len(ids[0]) > 10
