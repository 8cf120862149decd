"""A run without a model or data: a folder with a configuration, a tokenizer and a prompt, and the values assumed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from rlplug.data.sources import PromptRow, PromptSource
from rlplug.errors import ConfigError
from rlplug_plan.shapes import TakenShape, shape_of

PROMPT_TOKENS: Final = 1024
GPU_GIB: Final = 80.0
WORD: Final = "a"
END: Final = "<end>"
CHAT_TEMPLATE: Final = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
ASSUMED: Final[Mapping[str, Any]] = {
    "trainer.devices": 8,
    "model.rollout": {"class_path": "VLLMRollout"},
    "model.sampling.max_new_tokens": 4096,
    "model.batch.prompts_per_step": 128,
    "model.batch.group_size": 8,
    "model.rewards": [{"class_path": "FunctionReward", "init_args": {"function": "rlplug_plan.stand_ins.no_reward"}}],
}
"""Values of a run that names none, by key."""
UNSAID: Final = frozenset({"model.rewards"})
"""Those of them that take no memory."""
YOUR_MODEL: Final = "path/to/model"
YOUR_PROMPTS: Final = "train.jsonl"
YOUR_REWARD: Final = "my_reward.score"


def no_reward(completion: str) -> float:
    """Return 0: the reward of a run that is planned and does not run."""
    return 0.0


class OnePrompt(PromptSource):
    """A prompt in place of a run's data.

    Args:
        num_tokens: Its length for the stand-in's tokenizer.
    """

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def rows(self) -> Iterator[PromptRow]:
        yield PromptRow(uid="prompt", prompt=" ".join([WORD] * self.num_tokens), answer=WORD, metadata={})


@dataclass(frozen=True)
class StandIn:
    """A run that can be planned.

    Attributes:
        arguments: Of ``rlplug fit``.
        notes: What was assumed, a line each.
        policy: What ``model.policy.path`` is to be when it runs.
        has_no_reward: Whether the run names no reward.
        given: What the user's files have for the other keys that stand-ins replace, by key; ``None`` for nothing.
    """

    arguments: list[str]
    notes: list[str]
    policy: str
    has_no_reward: bool
    given: Mapping[str, Any]

    def header(self, path: Path) -> str:
        """Return the comment above a file of the run: what its user has to put in place."""
        yours = [f"{YOUR_PROMPTS}, a prompt (and an answer) a line"] * (self.given["data.train"] is None)
        yours += [f"{YOUR_REWARD}, a function in a file of that name"] * self.has_no_reward
        yours += [f"{YOUR_MODEL}, a model of this shape"] * (self.policy == YOUR_MODEL)
        give = [f"Yours to give: {'; '.join(yours)}."] if yours else []
        lines = ["Written by rlplug plan.", *self.notes, *give, f"rlplug fit -c {path}"]
        return "".join(f"# {line}\n" for line in lines)


def make_stand_in(
    folder: Path, size: str | None, model: str | None, prompt_tokens: int, arguments: Sequence[str], gpu: str
) -> StandIn:
    """Write what a run needs that has no model and no data, and return its arguments.

    Args:
        folder: An empty folder.
        size: A model's size, such as 7B, ...
        model: ... or a ``config.json``, or a folder that has one.
        prompt_tokens: Length of each prompt.
        arguments: What the user has set besides, which goes before what is assumed.
        gpu: What is assumed of the GPUs; empty where they are known.

    Raises:
        ConfigError: There is no such configuration, or ``size`` is none.
    """
    from rlplug.cli.configuration.config_files import check_config_files
    from rlplug.cli.configuration.short_forms import write_out_arguments

    taken = shape_of(size) if size is not None else _shape_of_file(Path(str(model)))
    _write_model(folder / "model", taken.config)
    written, contents = write_out_arguments(arguments), check_config_files(["fit", *arguments])
    assumed = {key: value for key, value in ASSUMED.items() if not _is_given(key, written, contents)}
    (folder / "assumed.yaml").write_text(yaml.safe_dump(nested(assumed)))
    values = [f"{key} {_said(value)}" for key, value in assumed.items() if key not in UNSAID]
    values += [gpu] * bool(gpu)
    train, val = (_prompt(num_tokens) for num_tokens in (prompt_tokens, max(1, prompt_tokens - 1)))
    stands = {"model.policy.path": str(folder / "model"), "data.train": train, "data.val": val}
    stands |= {"model.policy.chat_template_kwargs": "{}", "data.max_prompt_tokens": "null"}  # of the real ones
    return StandIn(
        arguments=["--config", str(folder / "assumed.yaml"), *written, *(f"--{key}={stands[key]}" for key in stands)],
        notes=[
            f"model: {taken.says}",
            f"assumed: prompts of {prompt_tokens:,} tokens (--prompt-tokens){''.join(f'; {each}' for each in values)}",
        ],
        policy=taken.path or YOUR_MODEL,
        has_no_reward="model.rewards" in assumed,
        given={key: last(contents, key) for key in stands if key != "model.policy.path"},
    )


def _shape_of_file(path: Path) -> TakenShape:
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--model {path}: {file} cannot be read as JSON: {error}. Give a model's config.json."
        ) from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise ConfigError(f"--model {path}: {file} has no model_type: give a model's config.json.")
    return TakenShape(config, f"the shape in {file}", str(file.parent))


def _write_model(folder: Path, config: Mapping[str, Any]) -> None:
    """Write a model's configuration, and a tokenizer that knows one word."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.WordLevel({END: 0, WORD: 1}, unk_token=WORD))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    options = {"eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(options))


def _prompt(num_tokens: int) -> str:
    return json.dumps({"class_path": "rlplug_plan.stand_ins.OnePrompt", "init_args": {"num_tokens": num_tokens}})


def _is_given(key: str, arguments: Sequence[str], contents: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a key is in a file or among the arguments, which have no short forms."""
    if any(argument == f"--{key}" or argument.startswith((f"--{key}=", f"--{key}+")) for argument in arguments):
        return True
    return last(contents, key) is not None


def last(contents: Sequence[Mapping[str, Any]], key: str) -> Any:
    """Return the value of a key in the last of some files that has it; ``None`` where none does."""
    return next((found for each in reversed(contents) if (found := at(each, key)) is not None), None)


def at(content: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key in nested mappings; ``None`` where it is not."""
    found: Any = content
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def nested(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by key as nested dictionaries."""
    result: dict[str, Any] = {}
    for key, value in keys.items():
        *folders, last = key.split(".")
        inside = result
        for part in folders:
            inside = inside.setdefault(part, {})
        inside[last] = value
    return result


def _said(value: Any) -> str:
    return str(value["class_path"] if isinstance(value, Mapping) else value)
