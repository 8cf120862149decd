"""verl's prompts and rewards."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Any, Final

from rlplug_migrate.conversion import Draft, Given
from rlplug_migrate.keys import OMIT, Key, none, positive, same

_FUNCTION: Final = ("reward.custom_reward_function", "custom_reward_function")
_MODEL: Final = ("reward.reward_model", "reward_model")
_ANSWER: Final = "reward_model.ground_truth"
"""Field of verl's data sets with the answer."""

KEYS: Final = (
    Key(
        "data.train_files",
        "data",
        "data.train",
        "several files are a mixture, each with weight 1; verl puts them behind one another",
        default="~/data/rlhf/gsm8k/train.parquet",
    ),
    Key("data.val_files", "data", "data.val"),
    Key("data.prompt_key", "data", "data.train.init_args.prompt_key"),
    Key("data.train_max_samples", "data", "data.train.init_args.limit", "takes the first rows; verl may draw them"),
    Key("data.val_max_samples", "data", "data.val.init_args.limit"),
    same("data.shuffle", "data", "data.shuffle"),
    Key("data.seed", "data", "data.seed", read=positive),
    Key("data.filter_overlong_prompts", "data", "data.too_long", read=lambda value: "filter" if value else OMIT),
    Key(
        "data.truncation",
        "data",
        "data.too_long",
        "`error` is refuse; no prompt is cut",
        read=lambda value: OMIT,
    ),
    Key(
        "data.apply_chat_template_kwargs", "data", "model.policy.chat_template_kwargs", read=lambda value: value or OMIT
    ),
    Key("data.apply_chat_template_kwargs.*", "data", "model.policy.chat_template_kwargs"),
    *(Key(f"{name}.path", "data", "model.rewards: FunctionReward") for name in _FUNCTION),
    *(Key(f"{name}.name", "data", "model.rewards: FunctionReward", default="compute_score") for name in _FUNCTION),
    *(Key(f"{name}.enable", "data", "model.rewards: RewardModel") for name in _MODEL),
    *(
        Key(f"{name}.{path}", "data", "model.rewards: RewardModel")
        for name in _MODEL
        for path in ("model_path", "model.path")
    ),
    *none("data", "a reward gets the whole row in metadata", "data.reward_fn_key", "data.return_*"),
    *none(
        "data",
        "sets itself: prompts are tokenized once",
        "data.dataloader_num_workers",
        "data.filter_overlong_prompts_workers",
    ),
    *none("data", "the policy's tokenizer is used", "data.tokenizer"),
    *none("data", "not there: validation goes through all rows", "data.validation_shuffle"),
    *none(
        "data",
        "write a prompt source: a class of yours as data.train",
        "data.custom_cls.*",
        "data.sampler.*",
        "data.datagen.*",
    ),
    *none("data", "not there: text alone", "data.image_*", "data.video_*", "data.audio_*", "data.mm_*"),
    *none("data", "not there", "data.*"),
    *none(
        "data",
        "a reward is a class with options of its own: CodeReward, Judge, RemoteRewardModel",
        "reward.*",
        "reward_model.*",
        "sandbox_fusion.*",
    ),
)


def write_sources(given: Given, draft: Draft) -> None:
    """Write where prompts come from; verl's rows have messages and the answer in ``reward_model``."""
    limit = positive(given["data.train_max_samples"])
    draft.set("data.train", _source(given, given["data.train_files"], limit), "data.train_files")
    if "data.val_files" in given:
        limit = positive(given["data.val_max_samples"])
        draft.set("data.val", _source(given, given["data.val_files"], limit), "data.val_files")
    if kwargs := given.below("data.apply_chat_template_kwargs."):
        draft.settings["model.policy.chat_template_kwargs"] = kwargs
    cut = given["data.truncation"]
    if cut not in (None, "error"):
        draft.lacks("data.truncation", f"not there: {cut}; data.too_long refuses or filters long prompts")
    draft.note("data.train_files", "answer_key", f"the answer is {_ANSWER}, as in verl's data sets")


def _source(given: Given, files: Any, limit: Any) -> dict[str, Any]:
    paths = files if isinstance(files, list) else [files]
    sources = [_file_source(given, str(path), limit) for path in paths]
    if len(sources) == 1:
        return sources[0]
    names = [f"{PurePath(path).parent.name}-{PurePath(path).stem}" for path in map(str, paths)]
    named = {re.sub(r"[^\w.-]", "_", name).strip("-._") or f"source{i}": i for i, name in enumerate(names)}
    if len(named) < len(sources):
        named = {f"source{i}": i for i in range(len(sources))}
    return {
        "class_path": "MixtureSource",
        "init_args": {"sources": {name: {"source": sources[i]} for name, i in named.items()}},
    }


def _file_source(given: Given, path: str, limit: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"path": path, "answer_key": _ANSWER}
    if "data.prompt_key" in given:
        options["prompt_key"] = given["data.prompt_key"]
    if isinstance(limit, int):
        options["limit"] = limit
    return {"class_path": "FileSource", "init_args": options}


def write_rewards(given: Given, draft: Draft) -> None:
    """Write the reward: a function, a model, or mathematics where verl chooses by the data set."""
    path, model = (given.first(*names) for names in ([f"{each}.path" for each in _FUNCTION], _paths_of_model()))
    if path is not None:
        module = ".".join(PurePath(str(path).removeprefix("file://")).with_suffix("").parts).strip("./")
        function = given.first(*(f"{name}.name" for name in _FUNCTION))
        draft.append(
            "model.rewards", {"class_path": "FunctionReward", "init_args": {"function": f"{module}.{function}"}}
        )
        draft.note(
            f"{_FUNCTION[0]}.path",
            "model.rewards",
            "an import path; its parameters are completion, answer and metadata, not solution_str and the like",
        )
    if model is not None and given.first(*(f"{name}.enable" for name in _MODEL)):
        draft.append("model.rewards", {"class_path": "RewardModel", "init_args": {"path": model}})
    if "model.rewards" not in draft.settings:
        draft.append("model.rewards", {"class_path": "MathVerify"})
        draft.note(
            "data_source, in rows",
            "model.rewards",
            "verl chooses a reward by data_source; MathVerify is for mathematics",
        )


def _paths_of_model() -> list[str]:
    return [f"{name}.{path}" for name in _MODEL for path in ("model_path", "model.path")]
