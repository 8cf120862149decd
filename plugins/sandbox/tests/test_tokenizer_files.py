"""Tokenizers: each attack is refused before the trainer reads its files, and tokenizers of models pass."""

from __future__ import annotations

import base64
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from rlplug_sandbox import tokenizer_files, tokenizer_reader
from rlplug_sandbox.tokenizer_files import require_bounded

from rlplug.errors import ConfigError
from rlplug.interfaces.trainer import ModelConfig
from rlplug.models.config import load_tokenizer
from rlplug.plugin_manager import plugins

MODEL = Path(__file__).parents[3] / "tests/model"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODEL, tmp_path / "model"))


def change(folder: Path, file: str = "tokenizer.json", **parts: Any) -> None:
    found = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(found | parts))


def steps(name: str, step: dict[str, Any], count: int) -> dict[str, Any]:
    return {"type": "Sequence", name: [step] * count}


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def byte_level(**options: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False, **options}


def charsmap(longest: str) -> str:
    return base64.b64encode((1024).to_bytes(4, "little") + bytes(1024) + longest.encode() + b"\0").decode()


PIECE = {"Sequence": {"id": "A", "type_id": 0}}
TWICE = replace({"String": "a"}, "aa")
TEMPLATE = {"type": "TemplateProcessing", "single": [PIECE], "pair": [PIECE, PIECE], "special_tokens": {}}
ENDS = {"</s>": {"id": "</s>", "ids": [1] * 1000, "tokens": ["</s>"] * 1000}}
GROWING: dict[str, tuple[dict[str, Any], str]] = {
    "doubles a letter": ({"normalizer": steps("normalizers", TWICE, 20)}, "a text 1.05e+06 times"),
    "writes at every place": ({"normalizer": replace({"Regex": "x*"}, "b" * 1000)}, "a text 1e+03 times"),
    "begins with a page": ({"normalizer": {"type": "Prepend", "prepend": "b" * 1000}}, "a text 1e+03 times"),
    "has a table": ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap("b" * 1000)}}, "a text"),
    "writes bytes as letters": ({"pre_tokenizer": steps("pretokenizers", byte_level(), 12)}, "a text 4.1e+03 times"),
    "repeats tokens": ({"post_processor": TEMPLATE | {"single": [PIECE] * 1000}}, "a list of tokens 1e+03 times"),
    "ends with many": ({"post_processor": TEMPLATE | {"special_tokens": ENDS}}, "a list of tokens 1e+03 times"),
    "decodes to more": ({"decoder": steps("decoders", TWICE, 20)}, "a token's text 1.05e+06 times"),
}


@pytest.mark.parametrize(("parts", "message"), GROWING.values(), ids=list(GROWING))
def test_what_grows_without_bound_is_refused(folder: Path, parts: dict[str, Any], message: str) -> None:
    """Catches texts of which a few characters fill the memory, in a thread that no deadline ends."""
    change(folder, **parts)
    reason = tokenizer_reader.refusal(str(folder / "tokenizer.json"), [])
    assert f"it may make {message}" in reason
    assert reason.endswith("as long, and none does more than 512 times")


KNOWN: dict[str, dict[str, Any]] = {
    "T5": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Precompiled", "precompiled_charsmap": charsmap("x" * 18)},
                replace({"Regex": " {2,}"}, " "),
            ],
        },
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    },
    "Llama 2": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace({"String": " "}, "▁")],
        },
        "decoder": {"type": "Sequence", "decoders": [replace({"String": "▁"}, " "), {"type": "Fuse"}]},
    },
    "Qwen 2": {
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": steps("pretokenizers", byte_level(), 1),
        "decoder": byte_level(),
    },
}


@pytest.mark.parametrize("parts", KNOWN.values(), ids=list(KNOWN))
def test_steps_of_known_models_pass(folder: Path, parts: dict[str, Any]) -> None:
    change(folder, **parts)
    assert tokenizer_reader.refusal(str(folder / "tokenizer.json"), []) == ""


def test_other_files_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, config = str(folder / "tokenizer.json"), folder / "tokenizer_config.json"
    change(folder, config.name, added_tokens_decoder={str(1 << 40): {"content": "x"}})
    assert "adds a token with the id 1099511627776" in tokenizer_reader.refusal(file, [str(config)])
    change(folder, config.name, added_tokens_decoder={}, fast_tokenizer_files=["tokenizer.4.0.0.json"])
    assert "remove the key" in tokenizer_reader.refusal(file, [str(config)])
    os.truncate(config, 33 << 20)
    assert "has 33 MiB, and none has more than 32" in tokenizer_reader.refusal(file, [str(config)])
    monkeypatch.setattr(tokenizer_reader, "MOST_ADDED", 1)
    assert "added tokens, and none has more than 1" in tokenizer_reader.refusal(file, [])


def test_time_and_memory_are_limited(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a process without limits: neither attack grows, and each holds the trainer's for minutes."""
    monkeypatch.setattr(tokenizer_files, "CPU_S", 2)
    change(folder, normalizer=steps("normalizers", {"type": "Lowercase"}, 100_000))
    with pytest.raises(ValueError, match="reading it takes longer than 2 s"):
        require_bounded(str(folder))
    os.truncate(folder / "tokenizer.json", 5 << 30)  # zeros, which take no room on the disk
    with pytest.raises(ValueError, match=r"memory"):
        require_bounded(str(folder))


def test_a_run_reads_so(folder: Path) -> None:
    """Catches a hook that is not called, and a regex that gives up being refused for texts that nobody asks for."""
    make = plugins().hook.rlplug_make_tokenizer
    regex = {"type": "Split", "pattern": {"Regex": "(a+)+(?!a)b(?=c)"}, "behavior": "Isolated", "invert": False}
    change(folder, pre_tokenizer=regex)
    assert load_tokenizer(ModelConfig(path=str(folder)), make=make)("hi")["input_ids"]
    require_bounded.cache_clear()
    change(folder, pre_tokenizer=None, normalizer=steps("normalizers", TWICE, 20))
    with pytest.raises(ConfigError, match=r"gives no tokenizer: it may make a text 1.05e\+06 times as long"):
        load_tokenizer(ModelConfig(path=str(folder)), make=make)


def test_padding_of_the_file_is_not_used(folder: Path) -> None:
    """Catches a release of transformers that pads each text to the length that the file names."""
    padding = {"strategy": {"Fixed": 100_000}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    change(folder, padding=padding | {"pad_type_id": 0, "pad_token": "x"})
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)), make=plugins().hook.rlplug_make_tokenizer)
    assert len(tokenizer(["hi"], add_special_tokens=False)["input_ids"][0]) < 10
