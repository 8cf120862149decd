"""Generates runs whose files, classes or parts are wrong, by kind, and runs each up to its first step.

``config_mutations`` has wrong values of the configuration; these are right ones that name something wrong.

python tests/integration/wrong_inputs.py [--share 0.1] [--seed 0] [--match model] > report.txt
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from wrong_command_lines import ROOT, main

REWARD: Final = "examples.quickstart.reward.digits_in_place"
SMALL: Final = (
    *("-c", "configs/quickstart.yaml", "--model.policy.path", "tests/model", "--model.num_steps", "1"),
    *("--model.batch.prompts_per_step", "4", "--model.batch.group_size", "4", "--run.report", "false"),
    *("--model.validation.at_start", "false", "--model.validation.every_n_steps", "null"),
)
VALUES: Final[dict[str, Any]] = {
    "list": [1],
    "null": None,
    "text": "nosuch",
    "0": 0,
    "-1": -1,
    "nan": float("nan"),
    "block": {"a": 1},
    "huge": 10**30,
}
"""Values that replace one of a model's ``config.json``."""
UNREADABLE: Final = "/proc/self/mem"
"""A file whose reading fails with an input/output error, for root too."""
CLASSES: Final[dict[str, Any]] = {
    "model.algorithm": {"class_path": "GRPO", "init_args": {"clip_low": 0.1}},
    "model.optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}},
    "model.lr_scheduler": {"class_path": "torch.optim.lr_scheduler.LinearLR", "init_args": {"total_iters": 2}},
    "model.rollout": {"class_path": "HFRollout", "init_args": {"max_batch_size": 3}},
    "model.environment": {"class_path": "ToolEnvironment", "init_args": {"tools": []}},
    "model.rewards": [{"class_path": "FunctionReward", "init_args": {"function": REWARD}}],
    "model.optimizations": [{"class_path": "EntropyChunking", "init_args": {"num_chunks": 2}}],
    "model.critic.optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}},
    "data.train": {"class_path": "FileSource", "init_args": {"path": "examples/quickstart/train.jsonl"}},
    "trainer.strategy": {"class_path": "rlplug.distributed.strategy.RLFSDP2Strategy", "init_args": {"tensor": 1}},
    "trainer.logger": {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "logs"}},
    "trainer.callbacks": [
        {"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": {"monitor": "reward/mean"}}
    ],
}
"""A class for each key that takes one."""
MISSPELT: Final = {
    "class_path": ("clas_path", "classpath", "class_pth"),
    "init_args": ("init_arg", "initargs", "intit_args"),
}
ENDINGS: Final = {
    "exits": "import sys\nsys.exit(0)\n",
    "raises SystemExit": "raise SystemExit('bye')\n",
    "reads arguments": "import argparse\nargparse.ArgumentParser().parse_args(['--no-such'])\n",
}
"""Modules that end the process on import."""
NAMES: Final = ("a/b", "../../x", "a\nb", "a,b", "<b>x</b>", "a b", "a" * 500, "\u202e", "a\tb", "=1+1", "a:b", "..")
"""Names of rewards that would be paths, keys or HTML."""


@dataclass(frozen=True)
class WrongInput:
    """A run with a fault: a ``wrong_command_lines.WrongRun``."""

    kind: str
    fault: str
    named: str
    """What a message must hold, the key or the file; one of several behind ``|``."""
    make: Callable[[], list[str]]
    """Writes files into the current folder, and returns the arguments of ``fit``."""

    @property
    def name(self) -> str:
        return f"{self.kind}: {self.fault}"

    def arguments(self) -> list[str]:
        return ["fit", *SMALL, "--run.dir", "runs", *self.make()]

    def is_named(self, message: str) -> bool:
        return any(name in message for name in self.named.split("|"))


def cases() -> Iterator[WrongInput]:
    """Yield every wrong input."""
    yield from _models()
    yield from _files()
    for key, fault, extra in _unlearnable():
        yield WrongInput("nothing to learn", fault, key, partial(list, extra))
    yield WrongInput("nothing to learn", "blank prompts", "data.train", _blank_prompts)
    for name in NAMES:
        reward = {"class_path": "FunctionReward", "init_args": {"function": REWARD, "name": name}}
        yield WrongInput(
            "name", repr(name[:20]), "init_args.name", partial(list, ["--model.rewards", json.dumps([reward])])
        )
    for key, value in CLASSES.items():
        for right, spellings in MISSPELT.items():
            for wrong in spellings:
                text = json.dumps(value).replace(right, wrong)
                yield WrongInput("misspelt", f"{key} {wrong}", right, partial(list, [f"--{key}", text]))
                yield WrongInput("misspelt", f"{key} {wrong} in a file", right, partial(_config, key, text))
    for fault, text in ENDINGS.items():
        for key, value in (
            ("model.rewards", json.dumps([{"class_path": "FunctionReward", "init_args": {"function": "ends.f"}}])),
            ("model.algorithm", "ends.Algorithm"),
            ("trainer.callbacks", '[{"class_path": "ends.Callback"}]'),
        ):
            yield WrongInput("module", f"{key} {fault}", "ends.py", partial(_module, text, [f"--{key}", value]))
        yield WrongInput("module", f"-p {fault}", "ends.py", partial(_module, text, ["-p", "ends"]))


def _models() -> Iterator[WrongInput]:
    """Yield models whose ``config.json`` has one other value, as the policy, the reference and the critic's trunk."""
    config = json.loads((ROOT / "tests" / "model" / "config.json").read_text())
    places = {
        "model.policy": [],
        "model.reference": ["--model.algorithm.init_args.kl_coefficient", "0.1"],
        "model.critic.trunk": ["-c", "configs/algo/ppo.yaml"],
    }
    nested = {"rope_parameters": {"rope_type": "nosuch"}}, {"rope_parameters": {"rope_theta": "many"}}
    changes = [{key: value} for key, old in config.items() for value in VALUES.values() if value != old]
    for index, change in enumerate([*changes, *nested, {"model_type": "bert"}, {"model_type": "t5"}]):
        for key in places if index % 5 == 0 else ["model.policy"]:
            text = json.dumps(config | change)
            make = partial(_model, "config.json", text, key, places[key])
            yield WrongInput("model", f"{key} {json.dumps(change)}", key, make)


def _files() -> Iterator[WrongInput]:
    """Yield files of a model and of prompts that hold something else, or cannot be read."""
    texts = {"empty": "", "text": "x", "{}": "{}", "[1]": "[1]", "null": "null", "cut": '{"a": [1,', "unreadable": None}
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        for fault, text in texts.items():
            make = partial(_model, file, text, "model.policy", [])
            yield WrongInput("file", f"{file} {fault}", "wrong-model", make)
    for file in ("model.safetensors", "model.safetensors.index.json"):
        for fault, text in texts.items():
            make = partial(_model, file, text, "model.policy", ["--model.policy.init", "pretrained"])
            yield WrongInput("file", f"{file} {fault}", "wrong-model", make)
    for suffix in ("jsonl", "json", "csv", "tsv", "parquet"):
        for fault, text in texts.items():
            yield WrongInput("file", f"prompts.{suffix} {fault}", f"prompts.{suffix}", partial(_prompts, suffix, text))


def _unlearnable() -> Iterator[tuple[str, str, list[str]]]:
    """Yield the key, the fault and the arguments of runs in which nothing can be learned."""
    for number in (1, 2):
        reward = {"class_path": "FunctionReward", "init_args": {"function": REWARD, "weight": 0.0}}
        rewards = [reward, {"class_path": "MathVerify", "init_args": {"weight": 0}}][:number]
        yield "model.rewards", f"{number} weights of 0", ["--model.rewards", json.dumps(rewards)]
    yield "model.rewards", "no rewards", ["--model.rewards", "[]"]
    for option, value in (("temperature", "0"), ("temperature", "0.001"), ("top_k", "1"), ("top_p", "1e-9")):
        yield f"model.sampling.{option}", f"{option} {value}", [f"--model.sampling.{option}", value]
    yield "model.batch.group_size", "group of 1", ["--model.batch.group_size", "1"]


def _model(file: str, text: str | None, key: str, arguments: list[str]) -> list[str]:
    folder = Path("wrong-model")
    shutil.copytree(ROOT / "tests" / "model", folder)
    _write(folder / file, text)
    return [*arguments, f"--{key}.path", str(folder)]


def _prompts(suffix: str, text: str | None) -> list[str]:
    _write(Path(f"prompts.{suffix}"), text)
    return ["--train", f"prompts.{suffix}"]


def make_place(path: Path, fault: str) -> None:
    """Make a folder, a fifo or a link to nothing where ``fault`` says one of these."""
    if fault == "folder":
        path.mkdir()
    elif fault == "fifo":
        os.mkfifo(path)
    elif fault == "dangling link":
        os.symlink("/nosuch/blobs/4d7a", path)


def _write(path: Path, text: str | None) -> None:
    path.unlink(missing_ok=True)
    os.symlink(UNREADABLE, path) if text is None else path.write_text(text)


def _blank_prompts() -> list[str]:
    return _prompts("jsonl", "".join(json.dumps({"prompt": "  ", "answer": str(n)}) + "\n" for n in range(64)))


def _config(key: str, text: str) -> list[str]:
    for name in reversed(key.split(".")):
        text = f"{{{json.dumps(name)}: {text}}}"
    Path("wrong.yaml").write_text(text)
    return ["-c", "wrong.yaml"]


def _module(text: str, arguments: list[str]) -> list[str]:
    Path("ends.py").write_text(text)
    return arguments


if __name__ == "__main__":
    main(lambda _: cases(), (), "start_run")
