"""Generates files of prompts that hold something wrong, or are no files that can be read.

python tests/integration/wrong_prompts.py [--share 0.1] [--seed 0] [--match parquet] > report.txt
"""

from __future__ import annotations

import gzip
import json
import os
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from wrong_command_lines import main
from wrong_inputs import UNREADABLE, WrongInput, make_place
from wrong_models import CHAT_TEMPLATE, GOOD, lines, model


def _row(value: Any, key: str = "prompt", at: int = 40) -> bytes:
    """Return right rows of which one has another value."""
    return lines([*GOOD[:at], GOOD[at] | {key: value}, *GOOD[at + 1 :]])


def _line(raw: bytes, at: int = 40) -> bytes:
    """Return right rows of which one is another line."""
    return lines(GOOD[:at]) + raw + b"\n" + lines(GOOD[at + 1 :])


BAD_PROMPTS: Final[dict[str, Any]] = {
    "number": 5,
    "true": True,
    "null": None,
    "block": {"role": "user", "content": "1"},
    "empty text": "",
    "blanks": " \n ",
    "empty list": [],
    "list of text": ["1", "2"],
    "list of null": [None],
    "list in a list": [[{"role": "user", "content": "1"}]],
    "message without a role": [{"content": "1"}],
    "message without content": [{"role": "user"}],
    "message of null content": [{"role": "user", "content": None}],
    "message of a number": [{"role": "user", "content": 5}],
    "message of an unknown role": [{"role": "wizard", "content": "1"}],
    "message of an empty role": [{"role": "", "content": "1"}],
    "message of a null role": [{"role": None, "content": "1"}],
    "message of a number's role": [{"role": 5, "content": "1"}],
    "message from a human": [{"from": "human", "value": "1"}],
    "message of an image": [{"role": "user", "content": [{"type": "image", "image": "x.png"}]}],
    "message of empty parts": [{"role": "user", "content": []}],
    "message of parts without a type": [{"role": "user", "content": [{"text": "1"}]}],
    "message of parts of text without text": [{"role": "user", "content": [{"type": "text"}]}],
    "message of blanks": [{"role": "user", "content": " "}],
    "system alone": [{"role": "system", "content": "1"}],
    "two systems": [{"role": "system", "content": "1"}] * 2 + [{"role": "user", "content": "1"}],
    "system last": [{"role": "user", "content": "1"}, {"role": "system", "content": "2"}],
    "assistant last": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}],
    "assistant alone": [{"role": "assistant", "content": "1"}],
    "tool without a call": [{"role": "tool", "content": "1"}],
    "tool call of text": [{"role": "assistant", "tool_calls": "x"}, {"role": "user", "content": "1"}],
    "tool call without a name": [{"role": "assistant", "tool_calls": [{"x": 1}]}, {"role": "user", "content": "1"}],
    "tool call of bad JSON": [
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
        {"role": "user", "content": "1"},
    ],
    "unknown characters": "abc",
    "emoji": "\U0001f600>",
    "right to left": "\u202e12>",
    "NUL": "1\0>",
    "surrogate": "\ud800>",
    "special token": "<eos>12>",
    "padding token": "<pad>12>",
    "long": "1" * 5_000,
    "megabytes": "1" * 3_000_000,
    "text of JSON": '[{"role": "user", "content": "1"}]',
}
BAD_ANSWERS: Final[dict[str, Any]] = {
    "null": None,
    "number": 5,
    "NaN": float("nan"),
    "infinity": float("inf"),
    "huge number": 10**400,
    "list": [1],
    "block": {"a": 1},
    "empty text": "",
    "true": True,
    "megabytes": "1" * 3_000_000,
    "deep": json.loads("[" * 500 + "]" * 500),
    "surrogate": "\udc80",
}
BAD_LINES: Final[dict[str, bytes]] = {
    "torn": b'{"prompt": "12',
    "trailing comma": b'{"prompt": "1>", "answer": "1",}',
    "Python": b"{'prompt': '1>', 'answer': '1'}",
    "comment": b"# a comment",
    "comment of C": b"// a comment",
    "text": b"hello",
    "quoted JSON": b'"{\\"prompt\\": \\"1>\\"}"',
    "number": b"5",
    "null": b"null",
    "list": b'["1>", "1"]',
    "empty object": b"{}",
    "no prompt": b'{"answer": "1"}',
    "no answer": b'{"prompt": "1>"}',
    "capital key": b'{"Prompt": "1>", "Answer": "1"}',
    "key with a blank": b'{"prompt ": "1>", "answer": "1"}',
    "key twice": b'{"prompt": "1>", "prompt": "2>", "answer": "1"}',
    "NaN key": b'{"prompt": NaN, "answer": "1"}',
    "huge number": b'{"prompt": "1>", "answer": ' + b"9" * 5000 + b"}",
    "deep": b'{"prompt": "1>", "answer": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "bad escape": b'{"prompt": "\\x31", "answer": "1"}',
    "half an escape": b'{"prompt": "\\ud8", "answer": "1"}',
    "latin-1": b'{"prompt": "\xe9>", "answer": "1"}',
    "NULs": b"\0" * 100,
    "a control character": b'{"prompt": "1\x01>", "answer": "1"}',
    "two objects": b'{"prompt": "1>", "answer": "1"}{"prompt": "2>", "answer": "2"}',
    "a BOM": b'\xef\xbb\xbf{"prompt": "1>", "answer": "1"}',
    "a merge mark": b"<<<<<<< HEAD",
    "a form feed": b"\x0c",
    "a line separator": '{"prompt": "1>"\u2028, "answer": "1"}'.encode(),
}
FILES: Final[dict[str, tuple[str, bytes]]] = {
    "torn at the end": ("jsonl", lines(GOOD)[:-9]),
    "without a last newline": ("jsonl", lines(GOOD)[:-1]),
    "BOM": ("jsonl", b"\xef\xbb\xbf" + lines(GOOD)),
    "CRLF": ("jsonl", lines(GOOD).replace(b"\n", b"\r\n")),
    "CR": ("jsonl", lines(GOOD).replace(b"\n", b"\r")),
    "UTF-16": ("jsonl", lines(GOOD).decode().encode("utf-16")),
    "UTF-32": ("jsonl", lines(GOOD).decode().encode("utf-32")),
    "blank lines": ("jsonl", b"\n\n \n\t\n"),
    "gzip": ("jsonl", gzip.compress(lines(GOOD))),
    "gzip by name": ("jsonl.gz", gzip.compress(lines(GOOD))),
    "zip": ("zip", b""),
    "no ending": ("", lines(GOOD)),
    "txt": ("txt", lines(GOOD)),
    "capitals": ("JSONL", lines(GOOD)),
    "pretty JSON": ("jsonl", json.dumps(GOOD, indent=2).encode()),
    "array in JSON Lines": ("jsonl", json.dumps(GOOD).encode()),
    "Git LFS": ("jsonl", b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"),
    "HTML": ("jsonl", b"<!DOCTYPE html>\n<html><body>404</body></html>\n"),
    "one row": ("jsonl", lines(GOOD[:1])),
    "one prompt many times": ("jsonl", lines(GOOD[:1] * 64)),
    "binary": ("jsonl", bytes(range(256)) * 40),
    "JSON of columns": ("json", json.dumps({"prompt": ["1>"], "answer": ["1"]}).encode()),
    "JSON of objects by name": ("json", json.dumps({"a": {"prompt": "1>"}, "b": {"prompt": "2>"}}, indent=1).encode()),
    "JSON under a key": ("json", json.dumps({"data": GOOD}, indent=1).encode()),
    "JSON of a number": ("json", b"5"),
    "JSON of text": ("json", b'"x"'),
    "JSON of lists": ("json", b'[["1>", "1"]]'),
    "JSON of mixed rows": ("json", json.dumps([*GOOD, 5]).encode()),
    "JSON cut": ("json", json.dumps(GOOD).encode()[:-1]),
    "JSON empty array": ("json", b"[]"),
    "JSON BOM": ("json", b"\xef\xbb\xbf" + json.dumps(GOOD).encode()),
    "JSON with more behind": ("json", json.dumps(GOOD).encode() + b"]"),
    "CSV without a header": ("csv", b"123>,123\n321>,123\n"),
    "CSV ragged": ("csv", b"prompt,answer\n123>,123\n321>\n"),
    "CSV too wide": ("csv", b"prompt,answer\n123>,123\n321>,123,9\n"),
    "CSV open quote": ("csv", b'prompt,answer\n"123>,123\n321>,123\n'),
    "CSV quote inside": ("csv", b'prompt,answer\n12"3">,123\n'),
    "CSV semicolons": ("csv", b"prompt;answer\n123>;123\n"),
    "CSV tabs": ("csv", b"prompt\tanswer\n123>\t123\n"),
    "CSV column twice": ("csv", b"prompt,prompt,answer\n1>,2>,1\n"),
    "CSV empty name": ("csv", b"prompt,,answer\n1>,2>,1\n"),
    "CSV header alone": ("csv", b"prompt,answer\n"),
    "CSV blanks in the header": ("csv", b"prompt, answer\n1>,1\n"),
    "CSV NUL": ("csv", b"prompt,answer\n1\0>,1\n"),
    "CSV UTF-16": ("csv", "prompt,answer\n1>,1\n".encode("utf-16")),
    "CSV latin-1": ("csv", b"prompt,answer\n\xe9>,1\n"),
    "CSV BOM": ("csv", b"\xef\xbb\xbfprompt,answer\n1>,1\n"),
    "CSV CR": ("csv", b"prompt,answer\r1>,1\r2>,2\r"),
    "CSV of a long field": ("csv", b"prompt,answer\n" + b"1" * 200_000 + b">,1\n"),
    "CSV mixed types": ("csv", b"prompt,answer\n123,1\nabc,x\n1e5,\n"),
    "CSV empty prompt": ("csv", b"prompt,answer\n1>,1\n,1\n"),
    "TSV with commas": ("tsv", b"prompt,answer\n1>,1\n"),
    "parquet cut": ("parquet", b"PAR1" + b"\0" * 50),
    "parquet of JSON": ("parquet", lines(GOOD)),
}
OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "prompt_key of none": {"prompt_key": "question"},
    "prompt_key that is empty": {"prompt_key": ""},
    "prompt_key inside text": {"prompt_key": "prompt.text"},
    "prompt_key that ends in a dot": {"prompt_key": "prompt."},
    "answer_key of none": {"answer_key": "solution"},
    "answer_key is prompt_key": {"answer_key": "prompt"},
    "limit 0": {"limit": 0},
    "limit -1": {"limit": -1},
    "limit of text": {"limit": "all"},
    "limit of a fraction": {"limit": 0.5},
    "columns of none": {"columns": {"question": "prompt"}},
    "columns onto another": {"columns": {"answer": "prompt"}},
    "columns both to one": {"columns": {"answer": "x", "prompt": "x"}},
    "columns to null": {"columns": {"prompt": None}},
    "columns to empty": {"columns": {"prompt": ""}},
    "template of none": {"template": "{question}>"},
    "template without columns": {"template": "12>"},
    "template open": {"template": "{prompt"},
    "template of numbers": {"template": "{0}"},
    "template empty braces": {"template": "{}"},
    "template conversion": {"template": "{prompt!r}"},
    "template format": {"template": "{prompt:>10}"},
    "template attribute": {"template": "{prompt.__class__}"},
    "template index": {"template": "{prompt[0]}"},
    "template letters of text": {"template": "{prompt:letters}"},
    "template in Jinja": {"template": "{{ prompt }}"},
    "template empty": {"template": ""},
    "template and prompt_key": {"template": "{answer}", "prompt_key": "answer"},
    "system_prompt without a chat template": {"system_prompt": "Sort."},
    "unknown option": {"shuffle": True},
    "path of a pattern": {"path": "*.jsonl"},
    "path of the Hub": {"path": "openai/gsm8k"},
    "path of the network": {"path": "https://example.org/train.jsonl"},
    "path of none": {"path": "nosuch.jsonl"},
    "path near another": {"path": "prompt.jsonl"},
    "path of a folder": {"path": "."},
    "path of a user that is none": {"path": "~nosuchuser/x.jsonl"},
    "path with a NUL": {"path": "a\0.jsonl"},
    "path of a long name": {"path": "x" * 3000 + ".jsonl"},
    "path with blanks": {"path": " prompts.jsonl "},
    "path of a file URL": {"path": "file:///prompts.jsonl"},
}


def _prompts(suffix: str, raw: bytes) -> list[str]:
    path = Path(f"prompts.{suffix}" if suffix else "prompts")
    if suffix == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("prompts.jsonl", lines(GOOD))
    else:
        path.write_bytes(raw)
    return ["--train", str(path)]


def _place(fault: str) -> list[str]:
    """Make a place of prompts that is no plain file that can be read."""
    path = Path("prompts.jsonl")
    make_place(path, fault)
    if fault == "loop of links":
        os.symlink("prompts.jsonl", path)
    elif fault == "device":
        os.symlink("/dev/zero", path)
    elif fault == "sparse":
        with path.open("wb") as file:
            file.truncate(200 << 20)
    elif fault == "socket":
        import socket

        socket.socket(socket.AF_UNIX).bind(str(path))
    elif fault == "unreadable":
        os.symlink(UNREADABLE, path)
    return ["--train", str(path)]


def _options(options: dict[str, Any], key: str = "data.train") -> list[str]:
    Path("prompts.jsonl").write_bytes(lines(GOOD))
    source = {"class_path": "FileSource", "init_args": {"path": "prompts.jsonl"} | options}
    return [f"--{key}", json.dumps(source)]


def _chat(value: Any) -> list[str]:
    """Give one row another prompt, beside a model with a chat template."""
    arguments = [*model({"chat_template.jinja": CHAT_TEMPLATE.encode()}), *_prompts("jsonl", _row(value))]
    return [*arguments, "--data.chat", "true", "--data.val", "null"]


def _parquet(fault: str) -> list[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables: dict[str, Callable[[], Any]] = {
        "no rows": lambda: pa.table({"prompt": pa.array([], pa.string()), "answer": pa.array([], pa.string())}),
        "no columns": lambda: pa.table({}),
        "another column": lambda: pa.table({"text": ["1>"], "answer": ["1"]}),
        "bytes": lambda: pa.table({"prompt": [b"1>"], "answer": ["1"]}),
        "numbers": lambda: pa.table({"prompt": [1], "answer": [1]}),
        "nulls": lambda: pa.table({"prompt": ["1>", None], "answer": ["1", "2"]}),
        "times": lambda: pa.table({"prompt": pa.array([0], pa.timestamp("s")), "answer": ["1"]}),
        "decimals": lambda: pa.table({"prompt": ["1>"], "answer": pa.array([1], pa.decimal128(5, 2))}),
        "structs": lambda: pa.table({"prompt": [{"role": "user", "content": "1"}], "answer": ["1"]}),
        "messages of no role": lambda: pa.table({"prompt": [[{"content": "1"}]], "answer": ["1"]}),
    }
    pq.write_table(tables[fault](), "prompts.parquet")
    return ["--train", "prompts.parquet"]


def cases() -> Iterator[WrongInput]:
    """Yield every wrong file of prompts."""
    for fault, value in BAD_PROMPTS.items():
        yield WrongInput("prompts", f"prompt of {fault}", "prompts.jsonl:41", partial(_prompts, "jsonl", _row(value)))
        yield WrongInput("prompts", f"prompt of {fault}, chat template", "prompts.jsonl:41", partial(_chat, value))
    for fault, value in BAD_ANSWERS.items():
        raw = _row(value, "answer")
        yield WrongInput("prompts", f"answer of {fault}", "prompts.jsonl:41", partial(_prompts, "jsonl", raw))
    for fault, line in BAD_LINES.items():
        for at in (0, 40):
            make = partial(_prompts, "jsonl", _line(line, at))
            yield WrongInput("prompts", f"line {at + 1} of {fault}", f"prompts.jsonl:{at + 1}", make)
    for fault, (suffix, raw) in FILES.items():
        yield WrongInput("prompts", fault, f"prompts.{suffix}".rstrip("."), partial(_prompts, suffix, raw))
    for fault in ("folder", "fifo", "dangling link", "loop of links", "device", "sparse", "socket", "unreadable"):
        yield WrongInput("prompts", f"({fault})", "prompts.jsonl", partial(_place, fault))
    for fault, options in OPTIONS.items():
        for key in ("data.train", "data.val"):
            yield WrongInput(
                "source", f"{key} {fault}", f"{key}|prompts.jsonl|data source", partial(_options, options, key)
            )
    for fault in ("no rows", "no columns", "another column", "bytes", "numbers", "nulls", "times", "decimals"):
        yield WrongInput("prompts", f"parquet of {fault}", "prompts.parquet", partial(_parquet, fault))
    for fault in ("structs", "messages of no role"):
        yield WrongInput("prompts", f"parquet of {fault}", "prompts.parquet", partial(_parquet, fault))


if __name__ == "__main__":
    main(lambda _: cases(), (), "start_run")
