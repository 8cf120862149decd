"""Generates models whose files hold something wrong: configurations, templates, tokenizers and weights.

``wrong_inputs`` has one other value of each key of ``config.json``; these are combinations, and files that are torn.

python tests/integration/wrong_models.py [--share 0.1] [--seed 0] [--match weights] > report.txt
"""

from __future__ import annotations

import io
import json
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import yaml
from wrong_command_lines import ROOT, main
from wrong_inputs import WrongInput, make_place

GOOD: Final = [{"prompt": f"{n:03}>", "answer": "".join(sorted(f"{n:03}"))} for n in range(100, 164)]
CHAT_TEMPLATE: Final = "{% for m in messages %}{{ m['content'] }}{% endfor %}>"
CONFIG: Final[dict[str, Any]] = json.loads((ROOT / "tests" / "model" / "config.json").read_text())
TABLES: Final[dict[str, dict[str, Any]]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
"""Wrong values by kind."""


def lines(rows: list[Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


TOKENIZERS: Final[dict[str, Callable[[dict[str, Any]], Any]]] = {
    "no model": lambda own: {key: value for key, value in own.items() if key != "model"},
    "model of null": lambda own: own | {"model": None},
    "model of none": lambda own: own | {"model": own["model"] | {"type": "NoSuch"}},
    "empty vocabulary": lambda own: own | {"model": own["model"] | {"vocab": {}}},
    "vocabulary of a list": lambda own: own | {"model": own["model"] | {"vocab": ["0", "1"]}},
    "ids of text": lambda own: own | {"model": own["model"] | {"vocab": {"0": "2"}}},
    "ids negative": lambda own: own | {"model": own["model"] | {"vocab": {"0": -2}}},
    "ids huge": lambda own: own | {"model": own["model"] | {"vocab": own["model"]["vocab"] | {"a": 2_000_000_000}}},
    "ids beyond the model": lambda own: own | {"model": own["model"] | {"vocab": own["model"]["vocab"] | {"a": 13}}},
    "an id twice": lambda own: own | {"model": own["model"] | {"vocab": own["model"]["vocab"] | {"9": 10}}},
    "unknown token of none": lambda own: own | {"model": own["model"] | {"unk_token": "<nosuch>"}},
    "splitter of none": lambda own: own | {"pre_tokenizer": {"type": "NoSuch"}},
    "bad expression": lambda own: own | {"pre_tokenizer": own["pre_tokenizer"] | {"pattern": {"Regex": "(("}}},
    "no splitter": lambda own: own | {"pre_tokenizer": None},
    "normalizer that removes all": lambda own: (
        own | {"normalizer": {"type": "Replace", "pattern": {"Regex": "."}, "content": ""}}
    ),
    "decoder of none": lambda own: own | {"decoder": {"type": "NoSuch"}},
    "no decoder": lambda own: own | {"decoder": None},
    "truncation": lambda own: (
        own | {"truncation": {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}}
    ),
    "padding": lambda own: (
        own
        | {
            "padding": {
                "strategy": {"Fixed": 20},
                "direction": "Left",
                "pad_to_multiple_of": None,
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "<pad>",
            }
        }
    ),
    "version of none": lambda own: own | {"version": "9.9"},
    "list": lambda own: [own],
    "added tokens of text": lambda own: own | {"added_tokens": "x"},
    "no added tokens": lambda own: own | {"added_tokens": []},
}


def model(files: dict[str, bytes], *arguments: str) -> list[str]:
    """Make a model's folder of which some files hold something else; ``b""`` removes a chat template."""
    folder = Path("wrong-model")
    shutil.copytree(ROOT / "tests" / "model", folder)
    for name, raw in files.items():
        (folder / name).write_bytes(raw)
    return ["--model.policy.path", str(folder), *arguments]


def _config(change: dict[str, Any]) -> list[str]:
    return model({"config.json": json.dumps(CONFIG | change).encode()})


def _tokenizer(change: Callable[[dict[str, Any]], Any]) -> list[str]:
    own = json.loads((ROOT / "tests" / "model" / "tokenizer.json").read_text())
    return model({"tokenizer.json": json.dumps(change(own)).encode()})


def _tokenizer_config(change: dict[str, Any]) -> list[str]:
    own = json.loads((ROOT / "tests" / "model" / "tokenizer_config.json").read_text())
    return model({"tokenizer_config.json": json.dumps(own | change).encode()})


def _template(template: Any) -> list[str]:
    chat = [{"prompt": [{"role": "user", "content": row["prompt"][:3]}], "answer": row["answer"]} for row in GOOD]
    Path("prompts.jsonl").write_bytes(lines(chat))
    return [*_tokenizer_config({"chat_template": template}), "--train", "prompts.jsonl", "--data.val", "null"]


def weights() -> dict[str, Any]:
    """Return right weights of the tests' model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    made: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(ROOT / "tests" / "model"))
    return {name: tensor.clone() for name, tensor in made.state_dict().items()}


def _first(state: dict[str, Any], value: float) -> dict[str, Any]:
    name = "model.layers.0.self_attn.q_proj.weight"
    changed = state[name].clone()
    changed[0, 0] = value
    return state | {name: changed}


WEIGHTS: Final[dict[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "right": lambda state: state,
    "none": lambda state: {},
    "NaN": lambda state: _first(state, float("nan")),
    "infinity": lambda state: _first(state, float("inf")),
    "all NaN": lambda state: {name: tensor * float("nan") for name, tensor in state.items()},
    "all 0": lambda state: {name: tensor * 0 for name, tensor in state.items()},
    "huge": lambda state: {name: tensor * 1e30 for name, tensor in state.items()},
    "one is missing": lambda state: {name: state[name] for name in list(state)[1:]},
    "the head is missing": lambda state: {name: tensor for name, tensor in state.items() if "lm_head" not in name},
    "one more": lambda state: state | {"model.layers.2.mlp.up_proj.weight": state["model.norm.weight"].clone()},
    "another prefix": lambda state: {f"module.{name}": tensor for name, tensor in state.items()},
    "without a prefix": lambda state: {name.removeprefix("model."): tensor for name, tensor in state.items()},
    "another shape": lambda state: state | {"model.norm.weight": state["model.norm.weight"][:-1].clone()},
    "transposed": lambda state: {
        name: tensor.T.contiguous() if tensor.dim() == 2 else tensor for name, tensor in state.items()
    },
    "of no dimension": lambda state: state | {"model.norm.weight": state["model.norm.weight"][0].clone()},
    "empty": lambda state: state | {"model.norm.weight": state["model.norm.weight"][:0].clone()},
    "whole numbers": lambda state: {name: (tensor * 100).long() for name, tensor in state.items()},
    "booleans": lambda state: {name: tensor > 0 for name, tensor in state.items()},
    "double": lambda state: {name: tensor.double() for name, tensor in state.items()},
    "more of the vocabulary": lambda state: (
        state | {name: state[name].repeat(2, 1) for name in ("lm_head.weight", "model.embed_tokens.weight")}
    ),
}
RAW_WEIGHTS: Final[dict[str, Callable[[bytes], bytes]]] = {
    "cut": lambda raw: raw[: len(raw) // 2],
    "cut in the header": lambda raw: raw[:20],
    "one byte": lambda raw: raw[:1],
    "without the last byte": lambda raw: raw[:-1],
    "one byte more": lambda raw: raw + b"\0",
    "huge header": lambda raw: struct.pack("<Q", 1 << 62) + raw[8:],
    "header of 0": lambda raw: struct.pack("<Q", 0) + raw[8:],
    "header of text": lambda raw: raw[:8] + b"x" * (len(raw) - 8),
    "NULs": lambda raw: bytes(len(raw)),
    "Git LFS": lambda raw: b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
    "zip": lambda raw: _zipped(raw),
    "HTML": lambda raw: b"<html>404</html>",
}
INDICES: Final[dict[str, Any]] = {
    "no weight_map": {"metadata": {}},
    "weight_map of a list": {"weight_map": ["model.safetensors"]},
    "weight_map of null": {"weight_map": None},
    "empty weight_map": {"weight_map": {}},
    "shard that is missing": "model-00002-of-00002.safetensors",
    "shard of a number": 5,
    "shard of null": None,
    "shard outside": "../outside.safetensors",
    "shard of an absolute path": "/etc/passwd",
    "shard that is a folder": ".",
    "shard of another format": "config.json",
    "shard of a pickle": "pytorch_model.bin",
    "shard that lacks the weight": "other.safetensors",
}


def _zipped(raw: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("data.pkl", raw[:100])
    return buffer.getvalue()


def _saved(state: dict[str, Any]) -> bytes:
    from safetensors.torch import save

    return save(state)


def _weights(change: Callable[[dict[str, Any]], dict[str, Any]]) -> list[str]:
    return model({"model.safetensors": _saved(change(weights()))}, "--model.policy.init", "pretrained")


def _raw_weights(change: Callable[[bytes], bytes]) -> list[str]:
    return model({"model.safetensors": change(_saved(weights()))}, "--model.policy.init", "pretrained")


def _index(fault: Any) -> list[str]:
    state = weights()
    if not isinstance(fault, dict):
        fault = {"metadata": {}, "weight_map": dict.fromkeys(state, "one.safetensors") | {"model.norm.weight": fault}}
    files = {"model.safetensors.index.json": json.dumps(fault).encode(), "one.safetensors": _saved(state)}
    files |= {"other.safetensors": _saved({"x": state["model.norm.weight"]}), "pytorch_model.bin": b"\x80\x02."}
    return model(files, "--model.policy.init", "pretrained")


def _weight_place(fault: str) -> list[str]:
    arguments = model({}, "--model.policy.init", "pretrained")
    path = Path("wrong-model/model.safetensors")
    make_place(path, fault)
    if fault == "pickle alone":
        Path("wrong-model/pytorch_model.bin").write_bytes(b"\x80\x02.")
    elif fault == "adapters alone":
        Path("wrong-model/adapter_model.safetensors").write_bytes(b"")
    elif fault == "GGUF alone":
        Path("wrong-model/model.gguf").write_bytes(b"GGUF")
    return arguments


def _model_place(file: str, fault: str) -> list[str]:
    arguments = model({})
    path = Path("wrong-model") / file
    right = path.read_bytes() if path.exists() else b"{}"
    path.unlink(missing_ok=True)
    make_place(path, fault)
    if fault == "UTF-16":
        path.write_bytes(right.decode().encode("utf-16"))
    elif fault == "BOM":
        path.write_bytes(b"\xef\xbb\xbf" + right)
    elif fault == "NULs":
        path.write_bytes(b"\0" * 100)
    elif fault == "deep":
        path.write_bytes(b"[" * 200_000)
    elif fault == "megabytes":
        path.write_bytes(b'{"x": "' + b"x" * (50 << 20) + b'"}')
    elif fault == "Git LFS":
        path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    return arguments


def cases() -> Iterator[WrongInput]:
    """Yield every wrong model."""
    yield from _of_models()
    yield from _of_weights()


def _of_models() -> Iterator[WrongInput]:
    for fault, change in TABLES["config"].items():
        yield WrongInput("config", fault, "wrong-model|model.policy.path|max_new_tokens", partial(_config, change))
    for fault, generation in TABLES["generation"].items():
        raw = json.dumps(generation).encode()
        yield WrongInput("generation", fault, "wrong-model", partial(model, {"generation_config.json": raw}))
    for fault, template in TABLES["template"].items():
        yield WrongInput("template", fault, "wrong-model|template|data.train", partial(_template, template))
    for fault, change in TABLES["tokenizer config"].items():
        yield WrongInput("tokenizer config", fault, "wrong-model", partial(_tokenizer_config, change))
    for fault, make in TOKENIZERS.items():
        yield WrongInput("tokenizer", fault, "wrong-model|tokenizer", partial(_tokenizer, make))
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        for fault in ("missing", "folder", "fifo", "dangling link", "BOM", "NULs", "deep", "megabytes", "Git LFS"):
            yield WrongInput("model file", f"{file} ({fault})", "wrong-model", partial(_model_place, file, fault))


def _of_weights() -> Iterator[WrongInput]:
    for fault, of_state in WEIGHTS.items():
        yield WrongInput("weights", fault, "wrong-model", partial(_weights, of_state))
    for fault, of_bytes in RAW_WEIGHTS.items():
        yield WrongInput("weights", fault, "wrong-model", partial(_raw_weights, of_bytes))
    for fault, index in INDICES.items():
        yield WrongInput("weights", f"index: {fault}", "wrong-model", partial(_index, index))
    for fault in ("missing", "folder", "fifo", "dangling link", "pickle alone", "adapters alone", "GGUF alone"):
        yield WrongInput("weights", f"({fault})", "wrong-model", partial(_weight_place, fault))


if __name__ == "__main__":
    main(lambda _: cases(), (), "start_run")
