"""A name on a Hub that does not answer is refused within seconds; files of a model are data, whatever is in them."""

from __future__ import annotations

import ast
import builtins
import json
import socket
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from rlplug.errors import ConfigError
from rlplug.models import hf_files
from rlplug.models.config import load_tokenizer
from rlplug.models.hf_files import check_folder, hub_is_reachable, read_config, read_generation_config
from rlplug.models.loading import ModelConfig

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hf_files, "HUB_S", 0.5)
    hub_is_reachable.cache_clear()
    yield
    hub_is_reachable.cache_clear()


def test_a_hub_that_cannot_be_reached_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches the retries of the Hub's client: 82 s without a network, and more behind a firewall that drops."""
    with socket.socket() as silent, socket.socket() as closed:
        for listener in (silent, closed):
            listener.bind(("127.0.0.1", 0))
        silent.listen()
        for listener in (silent, closed):  # one that never answers, and one that refuses
            monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
            monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
            hub_is_reachable.cache_clear()
            began = time.monotonic()
            with pytest.raises(ConfigError, match=r"model.policy.path 'acme/model': no folder .* cannot be reached"):
                check_folder("acme/model", "model.policy")
            assert time.monotonic() - began < 5


def test_a_cached_model_needs_no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_files, "try_to_load_from_cache", lambda *_: "/cache/config.json")
    monkeypatch.setattr(hf_files, "hub_is_reachable", lambda: False)
    check_folder("acme/model", "model.policy")
    assert constants.HF_HUB_OFFLINE  # its files are read without asking for each


def test_a_run_that_is_told_to_stay_offline_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hf_files, "hub_is_reachable", lambda: pytest.fail("it was asked"))
    with pytest.raises(ConfigError, match="is not asked, as HF_HUB_OFFLINE says"):
        check_folder("acme/model", "model.policy")


def opened_elsewhere(tree: ast.Module) -> Iterator[int]:
    """Yield the lines with a ``from_pretrained`` or ``from_config`` that is not handed to ``pretrained``."""
    nodes = list(ast.walk(tree))
    calls = [[node.func, *node.args] for node in nodes if isinstance(node, ast.Call)]
    pairs = [pair for parts in calls for pair in pairwise(parts)]
    handed = [given for before, given in pairs if isinstance(before, ast.Name) and before.id == "pretrained"]
    for node in nodes:
        if isinstance(node, ast.Call) and "trust_remote_code=False" in map(ast.unparse, node.keywords):
            handed.append(node.func)
    names = {given.id for given in handed if isinstance(given, ast.Name)}
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id in names for target in targets):
                handed.append(node.value)
    for node in nodes:
        is_call = isinstance(node, ast.Attribute) and node.attr in ("from_pretrained", "from_config")
        if is_call and node not in handed and ast.unparse(node.value) != "GenerationConfig":  # plain values
            yield node.lineno


def test_all_models_are_opened_without_their_code() -> None:
    """Catches a call that asks "run the custom code? [y/N]" on the terminal, which ``yes |`` answers."""
    assert list(opened_elsewhere(ast.parse("m = AutoModel.from_pretrained(p)"))) == [1]
    handed = "make = A.from_config\nread(p, pretrained, make, p)\nA.from_config(p)"
    assert list(opened_elsewhere(ast.parse(handed))) == [3]
    files = [*ROOT.glob("rlplug/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")]
    found = {str(file): list(opened_elsewhere(ast.parse(file.read_text()))) for file in files}
    assert len(files) > 400
    assert {file: lines for file, lines in found.items() if lines} == {}


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_of_a_model_is_not_run_and_nobody_is_asked(
    copied_folder: Callable[[str], Path], file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied_folder("llama")
    (folder / "own.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\nclass Own: pass\n")
    config = json.loads((folder / file).read_text()) | {"model_type": "own", "tokenizer_class": "Own"}
    config["auto_map"] = {"AutoConfig": "own.Own", "AutoTokenizer": ["own.Own", None]}
    (folder / file).write_text(json.dumps(config))
    monkeypatch.setattr(builtins, "input", lambda _: "yes")
    open_it: Any = read_config if file == "config.json" else lambda path, _: load_tokenizer(ModelConfig(path=path))
    said = r"^model\.policy\.path .* needs code of its own \(auto_map\), which is never run"
    with pytest.raises(ConfigError, match=said):
        open_it(str(folder), "model.policy")
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    "text", ["[]", "5", "{", "[" * 100_000, '{"model_type": 5}', '{"model_type": ["llama"]}', '{"model_type": null}',
             '{"model_type": "llama", "num_hidden_layers": "x"}', '{"model_type": "llama", "rope_scaling": 5}']
)  # fmt: skip
def test_a_hostile_configuration_is_one_message(copied_folder: Callable[[str], Path], text: str) -> None:
    folder = copied_folder("llama")
    (folder / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"^model\.policy\.path .* gives no configuration: ."):
        read_config(str(folder), "model.policy")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_bias": None}, "config.json has attention_bias None, which is of no type"),
        ({"rope_parameters": 5}, "config.json has rope_parameters 5, which is of no type"),
        ({"text_config": {"hidden_size": 64}}, "config.json has a text_config beside a model of text: remove it"),
    ],
)
def test_a_value_of_config_json_is_named_without_the_words_of_python(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    """Alone catches a traceback, and transformers' own message about its types, which names no file."""
    config = json.loads((ROOT / "tests" / "model" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ConfigError) as caught:
        read_config(str(tmp_path), "model.policy")
    assert message in str(caught.value)
    assert "<class" not in str(caught.value)


@pytest.mark.parametrize("text", ["null", "[1]", "5"])
def test_a_generation_config_that_is_no_object(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"correct or remove it: (it is no JSON object|.*JSON)"):
        read_generation_config(str(tmp_path))
