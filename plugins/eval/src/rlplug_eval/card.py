"""Model card of an exported policy: a README.md for people, with front matter that the Hugging Face Hub reads."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from huggingface_hub import ModelCard, ModelCardData, try_to_load_from_cache
from rlplug_watch.own_files import own_text
from rlplug_watch.report.summary import number

from rlplug.distributed.durable_files import write_file
from rlplug.errors import ConfigError
from rlplug.observability.metrics_log import read_metrics
from rlplug.observability.outcome import ends_of

CARD: Final = "README.md"
UNKNOWN: Final = "unknown"
MOST_ROWS: Final = 12
COLUMNS: Final = {
    "reward/mean": "mean reward",
    "completion/length_mean": "length",
    "validate/reward_mean": "validation reward",
    "validate/pass@1": "validation pass@1",
}
"""Metrics of the table of the curve, with their titles."""
PACKAGES: Final = ("rlplug", "torch", "lightning", "transformers", "peft", "vllm", "sglang")
SECTIONS: Final = ("algorithm", "rewards", "environment", "batch", "sampling", "optimizer", "lora", "seed", "num_steps")
"""Sections of the configuration, under ``model``, that the card has."""
_SECRET: Final = re.compile(r"(?i)secret|passw|credential|authorization|api_?key|(?:^|_)token$")
_HUB_NAME: Final = re.compile(r"[\w-][\w.-]*(?:/[\w-][\w.-]*)?")
_SPARKS: Final = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class BaseModel:
    """The model from which a run began."""

    name: str | None
    """Its name on the Hub; ``None`` for a local folder, and for weights that were drawn."""
    license: str
    shown: str
    """What it is, in words."""
    is_random: bool = False
    """Whether there is no base: the weights were drawn."""


def write_card(run_dir: Path, folder: Path) -> Path:
    """Write the card of a policy, or of an adapter, into the folder with its files, and return the path.

    Args:
        run_dir: Folder of the run that trained it: its configuration, metrics and record are read.
        folder: Folder with ``config.json``, or of an adapter with ``adapter_config.json``.

    Raises:
        ConfigError: The run folder lacks its configuration.
        RunError: The card cannot be written.
    """
    try:
        config = yaml.safe_load(own_text(run_dir / "config.yaml"))
        record = json.loads(own_text(run_dir / "run.json"))
        model, data = config["model"], config["data"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{run_dir} lacks what a model card is made of, config.yaml and run.json: {error}."
        ) from error
    base = base_of(model["policy"])
    is_adapter = (folder / "adapter_config.json").is_file()
    rows = read_metrics(run_dir / "metrics.jsonl")
    parts = [
        f"---\n{_front_matter(model, data, base, is_adapter).to_yaml()}\n---",
        _introduction(model, base, is_adapter),
        _curve(rows),
        f"## Data\n\n{_data(data)}",
        f"## Training\n\n{_fenced(yaml.safe_dump(_training(model), sort_keys=False, allow_unicode=True))}",
        f"## Versions\n\n{_versions(record)}",
        f"## Licence\n\n{_licence_text(base)}",
    ]
    path = folder / CARD
    write_file(path, "\n\n".join(part for part in parts if part) + "\n")
    return path


def base_of(policy: Mapping[str, Any]) -> BaseModel:
    """Return what a run's ``model.policy`` began from, with the licence in the front matter of its README."""
    path = str(policy["path"])
    if policy.get("init") == "random":
        return BaseModel(None, UNKNOWN, "random weights: it was trained from scratch", is_random=True)
    folder = Path(path)
    if folder.is_dir():
        license = _license(folder / CARD)
        return BaseModel(None, license, f"the model in the folder {markdown_text(folder.name)}")
    readme = try_to_load_from_cache(path, CARD)
    license = _license(Path(readme)) if isinstance(readme, str) else UNKNOWN
    return BaseModel(
        path if _HUB_NAME.fullmatch(path) else None, license, f"[{markdown_text(path)}](https://hf.co/{path})"
    )


def _license(readme: Path) -> str:
    """Return the licence in the front matter of a README, or ``unknown``."""
    try:
        found = ModelCard(own_text(readme.resolve()), ignore_metadata_errors=True).data.get("license")
    except (OSError, RuntimeError, ValueError, TypeError, yaml.YAMLError):
        return UNKNOWN
    return found if isinstance(found, str) and re.fullmatch(r"[a-z0-9.+-]{1,60}", found) else UNKNOWN


def _front_matter(
    model: Mapping[str, Any], data: Mapping[str, Any], base: BaseModel, is_adapter: bool
) -> ModelCardData:
    algorithm, train = _class_name(model["algorithm"]), data.get("train") or {}
    path = str((train.get("init_args") or {}).get("path", ""))
    is_on_hub = _class_name(train) == "HFDatasetSource" and _HUB_NAME.fullmatch(path) and not Path(path).exists()
    relation = "adapter" if is_adapter else "finetune"
    return ModelCardData(
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["rlplug", "reinforcement-learning", *re.findall(r"^\w{1,40}\Z", algorithm.lower())],
        license=base.license,
        base_model=base.name,
        base_model_relation=None if base.name is None else relation,
        datasets=[path] if is_on_hub else None,
    )


def _introduction(model: Mapping[str, Any], base: BaseModel, is_adapter: bool) -> str:
    what = "A LoRA adapter that was trained" if is_adapter else "A policy that was trained"
    algorithm = markdown_text(_class_name(model["algorithm"]))
    how = f"{what} by reinforcement learning with {algorithm} in rlplug."
    load = (
        'model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE), "THIS_FOLDER")'
        if is_adapter
        else 'model = AutoModelForCausalLM.from_pretrained("THIS_FOLDER")'
    )
    return f"# Model card\n\n{how} It began from {base.shown}.\n\n{_fenced(load + chr(10), 'python')}"


def _curve(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the curve as a line of characters and a table of some steps; empty without steps that have a reward."""
    rewards = [reward for row in rows if (reward := _finite(row, "reward/mean")) is not None]
    if not rewards:
        return ""
    rewarded, validated = (
        [row for row in rows if _finite(row, name) is not None] for name in ("reward/mean", "validate/reward_mean")
    )
    chosen = _spread(validated if len(validated) > 2 else rewarded, MOST_ROWS)
    present = {name: title for name, title in COLUMNS.items() if any(_finite(row, name) is not None for row in chosen)}
    table = [["step", *present.values()], ["---:"] * (1 + len(present))]
    table += [[str(row["step"]), *(_number(_finite(row, name)) for name in present)] for row in chosen]
    lines = "\n".join("| " + " | ".join(cells) + " |" for cells in table)
    before, after, count = ends_of(rewards)
    title = f"Mean reward of {len(rewards):,} steps, from {before:.3f} to {after:.3f} (first and last {count}):"
    return f"## Curve\n\n{title}\n\n{_fenced(_sparkline(rewards) + chr(10))}\n\n{lines}"


def _finite(row: Mapping[str, Any], name: str) -> float | None:
    """Return a metric of a step; ``None`` where it has none that is finite: a mean of no rewards is NaN."""
    value: float = row.get(name, math.nan)
    return value if math.isfinite(value) else None


def _sparkline(values: Sequence[float], width: int = 60) -> str:
    """Return values as block characters, the mean of several where there are more than ``width``."""
    size = -(-len(values) // width)
    means = [sum(part) / len(part) for part in (values[at : at + size] for at in range(0, len(values), size))]
    low, high = min(means), max(means)
    return "".join(_SPARKS[round((mean - low) / ((high - low) or 1.0) * (len(_SPARKS) - 1))] for mean in means)


def _data(data: Mapping[str, Any]) -> str:
    lines = []
    for split in ("train", "val"):
        source = data.get(split)
        if isinstance(source, dict):
            options = {key: _publishable(key, value) for key, value in (source.get("init_args") or {}).items()}
            shown = ", ".join(f"{key} {value}" for key, value in options.items() if value not in (None, {}))
            lines.append(f"- {split}: {markdown_text(_class_name(source))}, {markdown_text(shown)}")
    if data.get("system_prompt"):
        lines.append(f"- system prompt: {markdown_text(str(data['system_prompt']))}")
    return "\n".join(lines)


def _training(model: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _publishable(name, model[name]) for name in SECTIONS if model.get(name) not in (None, [], {})}


def _publishable(key: str, value: Any) -> Any:
    """Return a value of a configuration without what may be a secret, and without folders of this machine."""
    if isinstance(value, dict):
        return {name: _publishable(str(name), part) for name, part in value.items() if part is not None}
    if isinstance(value, list):
        return [_publishable(key, part) for part in value]
    if isinstance(value, str) and _SECRET.search(key):
        return "(left out)"
    if isinstance(value, str) and value.startswith(("/", "~")):
        return Path(value).name
    return value


def _versions(record: Mapping[str, Any]) -> str:
    versions = record.get("versions") or {}
    named = [name for name in versions if name in PACKAGES or str(name).startswith("rlplug-")]
    order = {name: index for index, name in enumerate(PACKAGES)}
    named.sort(key=lambda name: (order.get(name, len(order)), name))
    return "\n".join(f"- {markdown_text(str(name))} {markdown_text(str(versions[name]))}" for name in named)


def _licence_text(base: BaseModel) -> str:
    if base.is_random:
        return "There is no base model, whose licence would bind this one. Choose one before you publish it."
    if base.license == UNKNOWN:
        return (
            "Licence of the base model: unknown. Its folder has no README with a licence in the front matter: look it "
            "up before you publish this."
        )
    return f"Licence of the base model: {base.license}. Check that it allows what you publish."


def _class_name(part: Any) -> str:
    return str(part.get("class_path", "")).rpartition(".")[2] if isinstance(part, dict) else ""


def _number(value: float | None) -> str:
    return "" if value is None else number(value)


def _spread(rows: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    """Return ``count`` rows, evenly from the first to the last."""
    if len(rows) <= count:
        return list(rows)
    return [rows[round(index * (len(rows) - 1) / (count - 1))] for index in range(count)]


def _fenced(text: str, language: str = "text") -> str:
    """Return text as a code block, whose fence is longer than any in the text."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}{fence}"


def markdown_text(text: str) -> str:
    """Return text of a run for Markdown: on one line, and with its markup as text."""
    plain = " ".join(text.split())
    return "".join(f"\\{character}" if character in "\\`*_[]<>|#!~&" else character for character in plain)
