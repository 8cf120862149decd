"""Writes docs/configuration.md from the parser of the command line: keys, types, defaults and docstrings.

``python scripts/write_configuration_reference.py`` (or ``make docs``) writes it; ``--check`` writes nothing and exits
with 1 when the page is not what the code says.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import docstring_parser
import yaml
from distributions import ROOT, all_distributions
from rlplug_launch.config import LaunchConfig
from written_files import write_or_check

from rlplug.cli.lightning_cli import RLCLI
from rlplug.cli.parser import RLArgumentParser
from rlplug.data.datamodule import PromptDataModule
from rlplug.data.sources import PromptSource
from rlplug.distributed.strategy import RLFSDP2Strategy
from rlplug.interfaces import ModelConfig
from rlplug.module import RLModule
from rlplug.plugin_manager import plugins

PAGE: Final = ROOT / "docs" / "configuration.md"
OWN_DISTRIBUTIONS: Final = tuple(distribution.name for distribution in all_distributions())
"""What is described; other plugins may be installed where this runs."""

SECTIONS: Final = {
    "model": RLModule,
    "data": PromptDataModule,
    "run": None,
    "checkpoint": None,
    "profile": None,
    "launch": None,
}
"""Sections of a configuration, and the class of those that LightningCLI adds by itself."""

KINDS: Final = {
    "algorithms": ("model.algorithm", "Algorithms"),
    "rewards": ("model.rewards", "Rewards"),
    "trainers": ("model.trainer", "Trainers"),
    "rollouts": ("model.rollout", "Rollout engines"),
    "environments": ("model.environment", "Environments"),
    "optimizations": ("model.optimizations", "Optimizations"),
    "launchers": ("launch.launcher", "Launchers"),
}
"""Kinds of the registry: the key that takes their classes, and a title."""

HEAD: Final = """\
# Configuration

<!-- Written by scripts/write_configuration_reference.py: change the docstrings, then run `make docs`. -->

This page is made from the code. On the command line, `rlplug fit --help` says the same.

## How values are given

A configuration is YAML. Later files override earlier ones, and options override files; a dot goes one level down:

```bash
rlplug fit -c configs/quickstart.yaml --model.num_steps 200 --model.optimizer.init_args.lr 3e-4
```

A class is chosen by `class_path`, and its arguments stand under `init_args`. Registered classes go by their bare name;
any other class of the right kind by its import path, found from the folder where `rlplug` is started:

```yaml
model:
  algorithm:
    class_path: GRPO
    init_args:
      clip_high: 0.28
```

On the command line, `--model.algorithm GRPO --model.algorithm.clip_high 0.28` is the same. A list that comes later
replaces an earlier one. A `+` behind the key appends instead:

```bash
rlplug fit -c configs/quickstart.yaml --model.rewards+='{class_path: ExactMatch, init_args: {weight: 0.2}}'
```

In a file, `${NAME}` stands for the environment variable `NAME`, alone or inside a text:

```yaml
run:
  dir: ${HOME}/runs/sums
data:
  max_prompt_tokens: ${MAX_PROMPT_TOKENS:-512}
```

| form | meaning |
|---|---|
| `${NAME}` | the value; a variable that is not set is an error that names key and variable |
| `${NAME:-default}` | the value, or `default` where the variable is not set or empty; `default` has no `}` |
| `$${` | a literal `${`; any other `$` is itself |

A value is data: it gets the type of its option, as a quoted text does, and is never read as a list, a block or another
reference. Keys are not replaced. An option of any type, such as a value inside `config` of `ReasoningGymSource`, gets
what YAML makes of the text: a number, true, false, null or text. On the command line, the shell replaces variables.

What a run saves (`config.yaml`, checkpoints, loggers) has the reference where the option is a text, so a key such as
`${WANDB_KEY}` is not written into the run folder. A number, `true`, `false` or `null` is saved as its value.
`--resume`, `rlplug eval` and each node of a launched run read the variables again: set them there too.
A secret that is itself printed, by a plugin for example, is not found by this.

Sizes that change the mathematics (`prompts_per_step`, `group_size`, `mini_batch_size`) are global: they mean the same
on 1 GPU and on 64. Sizes that only change speed and memory end in `_per_gpu`.

To see what a command line amounts to, without running it:

```bash
rlplug fit -c configs/quickstart.yaml --model.algorithm.kl_coefficient 0.01 --print_config
```

A key that does not exist is an error that names the nearest one that does:

```bash
rlplug fit -c configs/quickstart.yaml --model.num_stepz 200  # exits with 2
```

```text
rlplug: there is no key 'model.num_stepz'. Did you mean 'model.num_steps'? All keys: rlplug fit --help
```

## Options of the command line

| option | meaning |
|---|---|
| `-c FILE`, `--config FILE` | a configuration; may be given several times |
| `--resume RUN` | take configuration and newest checkpoint from the run folder `RUN`; options still override |
| `--ckpt_path PATH` | load this checkpoint; `fit` then goes on in the run folder that it lies in |
| `--resume RUN --ckpt_path newest-whole` | take the newest checkpoint of the run that is not damaged |
| `--print_config` | print the whole configuration and stop |
| `--block PLUGIN` | leave a plugin out, by its name or its distribution's; may be given several times |
| `--debug` | show the traceback of an error, which is otherwise one message |

The environment variable `RLPLUG_BLOCK` blocks plugins too, with commas between their names.
"""

TRAINER: Final = """\
## trainer

These keys are [Lightning's own](https://lightning.ai/docs/pytorch/stable/common/trainer.html). `accelerator`,
`devices`, `num_nodes`, `logger` (besides `metrics.jsonl`, and TensorBoard where it is installed), `callbacks`,
`max_time`, `plugins`, `deterministic`, `benchmark`, `detect_anomaly`, `inference_mode`, `enable_progress_bar` and
`enable_autolog_hparams` do what Lightning says. A run refuses every other one by name, with the key to set instead.

`EarlyStopping` and `ModelCheckpoint` act on RL steps. They look at `monitor` after each step whose metrics have it: for
`validate/...`, after each validation. `every_n_train_steps` counts RL steps, and so does `step` in a filename. A
`ModelCheckpoint` without `monitor` and `every_n_train_steps` saves after the last step. Its checkpoints lie in `best/`
of the run folder, unless `dirpath` names another, and `--ckpt_path` resumes or validates them. Quote paths, whose names
have a `=`:

```yaml
trainer:
  callbacks:
    - class_path: EarlyStopping
      init_args: {monitor: validate/reward_mean, mode: max, patience: 3}
    - class_path: ModelCheckpoint
      init_args: {monitor: validate/reward_mean, mode: max, save_top_k: 2, save_last: true}
```

`seed_everything`, at the top level, is the seed of the run: 0 by default, `true` for a random one. `model.seed`,
`model.policy.seed`, `model.reference.seed`, `model.critic.seed` and `data.seed` follow it while they are 0; another
number holds for that seed alone.
"""


def page() -> str:
    """Return the whole page."""
    parser = RLArgumentParser()
    for section, owner in SECTIONS.items():
        if owner is not None:
            parser.add_lightning_class_args(owner, section)
    RLCLI.add_arguments_to_parser(typing.cast(Any, None), parser)  # it does not use self
    parser.add_class_arguments(LaunchConfig, "launch")  # as rlplug launch does
    parts = [HEAD, *(part for section in SECTIONS for part in _section(section, parser)), TRAINER]
    parts.append(_class_section(RLFSDP2Strategy, "trainer.strategy"))
    for kind, (key, title) in KINDS.items():
        registered = [r for name in OWN_DISTRIBUTIONS for r in plugins().registry.by_distribution().get(name, ())]
        classes = [r.factory for r in registered if r.kind == kind]
        parts += _classes(title, f"Classes for `{key}`.", sorted(classes, key=lambda c: c.__name__))
    packages = {package for distribution in all_distributions() for package in distribution.packages}
    plugins().registry.import_all()  # sources among them
    own = [source for source in PromptSource.__subclasses__() if source.__module__.partition(".")[0] in packages]
    sources = sorted(own, key=lambda c: c.__name__)
    parts += _classes("Prompt sources", "Classes for `data.train` and `data.val`.", sources)
    return "\n".join(parts)


def _section(section: str, parser: Any) -> Iterator[str]:
    """Yield a table of the section's own keys, and one for each group of keys below it."""
    yield f"## {section}\n"
    groups: dict[str, list[Any]] = {}
    for action in _arguments(parser):
        if action.dest.startswith(f"{section}."):
            groups.setdefault(action.dest.rpartition(".")[0], []).append(action)
    for group in sorted(groups, key=lambda name: name != section):
        if group != section:
            yield f"### {group}\n"
        yield _table(groups[group], prefix=f"{group}.")
    for key, owner in _optional_groups(itertools.chain(*groups.values())).items():
        yield _class_section(owner, key)


def _classes(title: str, about: str, classes: Iterable[type]) -> Iterator[str]:
    yield f"## {title}\n"
    sections = [_class_section(owner) for owner in classes]
    yield f"{about}{'' if sections else ' None is published yet; a plugin can bring its own.'}\n"
    yield from sections
    groups = {key: group for owner in classes for key, group in _optional_groups(_arguments_of(owner)).items()}
    for key, group in groups.items():
        yield _class_section(group, key)


def _class_section(owner: type, key: str | None = None) -> str:
    """Describe one class and its ``init_args``."""
    title = f"`{key}`: {owner.__name__}" if key else owner.__name__
    parts = [f"### {title}\n", _about(owner)]
    if actions := _arguments_of(owner):
        parts.append(_table(actions, prefix=""))
    return "\n".join(parts)


def _arguments_of(owner: type) -> list[Any]:
    parser: Any = RLArgumentParser()
    parser.add_class_arguments(owner, None, fail_untyped=False)
    return _arguments(parser)


def _optional_groups(actions: Iterable[Any]) -> dict[str, type]:
    """Return the dataclasses that keys may hold instead of ``null``, by key: the parser lists no keys of theirs."""
    return {
        action.dest: hint
        for action in actions
        for hint in typing.get_args(action._typehint)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint) and hint is not ModelConfig  # as model.policy
    }


def _arguments(parser: Any) -> list[Any]:
    """Return the parser's actions that take a value, without those that only show help."""
    typed = [action for action in parser._actions if getattr(action, "_typehint", None) is not None]
    return [action for action in typed if not action.dest.endswith(".help")]


def _about(owner: type) -> str:
    """Return a class's docstring without its arguments and formulas, and where the class is."""
    parsed = docstring_parser.parse(inspect.getdoc(owner) or "")
    paragraphs = (parsed.long_description or "").split("\n\n")
    words = [text for text in paragraphs if not text.startswith((".. math", " "))]
    if len(words) < len(paragraphs):
        words = [text for text in words if not text.rstrip().endswith(":")] + ["The equations are in the source."]
    texts = [textwrap.fill(_markdown(text), 118) for text in (parsed.short_description, *words) if text]
    file = Path(inspect.getfile(owner)).resolve().relative_to(ROOT)
    return "\n\n".join([*texts, f"Import path `{owner.__module__}.{owner.__qualname__}`, [source](../{file})."]) + "\n"


def _table(actions: Iterable[Any], prefix: str) -> str:
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for action in actions:
        default = "required" if action.required else _default(action.default)
        meaning = _markdown(action.help or "").replace("|", "\\|")
        rows.append(f"| `{action.dest.removeprefix(prefix)}` | {_type(action._typehint)} | {default} | {meaning} |")
    return "\n".join(rows) + "\n"


def _type(hint: Any) -> str:
    """Return a type hint in words that fit YAML."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin is typing.Union or origin is types.UnionType:
        return " or ".join(dict.fromkeys(_type(argument) for argument in arguments))
    if origin in (list, Sequence):
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return "mapping"
    if origin is Callable:
        result = _type(arguments[1])
        return "import path of a function" if result == "`float`" else result
    return "`null`" if hint is type(None) else f"`{hint.__name__}`"


def _default(value: Any) -> str:
    if isinstance(value, dict) and "class_path" in value:
        arguments = ", ".join(f"`{key}: {item}`" for key, item in value.get("init_args", {}).items())
        return f"`{value['class_path']}` with {arguments}"
    text = yaml.safe_dump(value, default_flow_style=True).removesuffix("\n").removesuffix("\n...")
    return f"`{text}`"


def _markdown(text: str) -> str:
    """Turn a docstring's reStructuredText into one line of Markdown."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`")
    return " ".join(text.split())


def main() -> int:
    return write_or_check(__doc__, PAGE, lambda _: page())


if __name__ == "__main__":
    sys.exit(main())
