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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

Identity = tuple[str, str, str]
"""A key, its types and its meaning."""

PAGE: Final = ROOT / "docs" / "configuration.md"
OWN_DISTRIBUTIONS: Final = tuple(distribution.name for distribution in all_distributions())
"""What is described; other plugins may be installed where this runs."""

MAX_WORDS: Final = 32
"""Length up to which the meaning of a key takes more than the first sentence."""

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

Search this page for a key. Behind each stand its default and what else it takes: `null|int` is `null` by default, or a
number. `rlplug fit --help=all`, and for a class `rlplug fit --model.algorithm.help GRPO`, say more.

## How values are given

A configuration is YAML. Later files override earlier ones, and options override files; a dot goes one level down:

```bash
rlplug fit -c configs/quickstart.yaml --model.num_steps 200 --model.optimizer.init_args.lr 3e-4
```

A class is chosen by `class_path`, and its arguments stand under `init_args`. Registered classes go by their bare name;
any other class by its import path, found from the folder where `rlplug` is started:

```yaml
model:
  algorithm:
    class_path: GRPO
    init_args:
      clip_high: 0.28
```

On the command line, `--model.algorithm GRPO --model.algorithm.clip_high 0.28` is the same. A later list replaces an
earlier one; a `+` behind the key appends. A later class keeps what an earlier one was given, not its defaults.
`--print_config` prints all and stops:

```bash
rlplug fit -c configs/quickstart.yaml --print_config --model.rewards+='{class_path: ExactMatch}'
```

An unknown key is an error with the nearest:

```bash
rlplug fit -c configs/quickstart.yaml --model.num_stepz 200  # exits with 2
```

```text
rlplug: there is no key 'model.num_stepz'. Did you mean 'model.num_steps'? All keys: rlplug fit --help=all
```

Sizes that change the mathematics (`prompts_per_step`, `group_size`, `mini_batch_size`) are global: the same on 1 GPU
and 64. Sizes that only change speed and memory end in `_per_gpu`.

### Environment variables

In a file, `${NAME}` stands for an environment variable, alone or inside a text; `${NAME:-default}` has a default for a
variable that is not set or empty, and `$${` is a literal `${`:

```yaml
run:
  dir: ${HOME}/runs/sums
data:
  max_prompt_tokens: ${MAX_PROMPT_TOKENS:-512}
```

An unset variable is an error. The value gets the type of its option, and is never read as a list, a block or
another reference. Keys are not replaced.

`config.yaml`, checkpoints and loggers keep the reference where the option is a text, so `${WANDB_KEY}` is not written
into the run folder; a number, `true`, `false` or `null` is saved as its value. `--resume`, `rlplug eval` and each node
of a launched run read the variables again: set them there too.

## Options of the command line

- `-c FILE`, `--config FILE`: a configuration; may be given several times
- `--resume RUN`: take configuration and newest checkpoint from the run folder `RUN`; options still override
- `--ckpt_path PATH`: load this checkpoint; `fit` then goes on in the run folder that it lies in. With `--resume RUN`,
  `newest-whole` is the run's newest checkpoint that is not damaged
- `--block PLUGIN`: leave a plugin out, by its name or its distribution's; may be given several times, as may names with
  commas in the environment variable `RLPLUG_BLOCK`
- `--debug`: show the traceback of an error
"""

TRAINER: Final = """\
## trainer

These keys are [Lightning's own](https://lightning.ai/docs/pytorch/stable/common/trainer.html). `accelerator`,
`devices`, `num_nodes`, `logger` (besides `metrics.jsonl` and TensorBoard), `callbacks`, `max_time`, `plugins`,
`deterministic`, `benchmark`, `detect_anomaly`, `inference_mode`, `enable_progress_bar` and `enable_autolog_hparams` do
what Lightning says. A run refuses every other one, with the key to set instead.

`EarlyStopping` and `ModelCheckpoint` look at `monitor` after each step whose metrics have it: for `validate/...`, after
each validation. `every_n_train_steps` and the `step` in a filename count RL steps. A `ModelCheckpoint` without
`monitor` and `every_n_train_steps` saves after the last step. Its checkpoints are in `best/` of the run folder, unless
`dirpath` names another, and `--ckpt_path` resumes or validates them. Quote their paths, which have a `=`:

```yaml
trainer:
  callbacks:
    - class_path: EarlyStopping
      init_args: {monitor: validate/reward_mean, mode: max, patience: 3}
    - class_path: ModelCheckpoint
      init_args: {monitor: validate/reward_mean, mode: max, save_top_k: 2, save_last: true}
```

`seed_everything`, at the top level, is the seed of the run: 0 by default, `true` for a random one. `model.seed`,
`data.seed`, and the seeds of policy, reference, critic and adapter follow it while they are 0.
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
    """Yield a list of the section's own keys, and one for each group of keys below it."""
    yield f"## {section}\n"
    groups: dict[str, list[Any]] = {}
    for action in _arguments(parser):
        if action.dest.startswith(f"{section}."):
            groups.setdefault(action.dest.rpartition(".")[0], []).append(action)
    for group in sorted(groups, key=lambda name: name != section):
        if group != section:
            yield f"### {group}\n"
        yield _list(_line(action, prefix=f"{group}.") for action in groups[group])
    for key, owner in _optional_groups(itertools.chain(*groups.values())).items():
        yield _class_section(owner, key)


def _classes(title: str, about: str, classes: Sequence[type]) -> Iterator[str]:
    """Yield the classes of a kind: first the keys that several of them have, then each class with its own."""
    yield f"## {title}\n"
    yield f"{about}{'' if classes else ' None is published yet; a plugin can bring its own.'}\n"
    arguments = {owner: _arguments_of(owner) for owner in classes}
    uses: dict[Identity, dict[type, Any]] = {}
    for owner, actions in arguments.items():
        for action in actions:
            uses.setdefault(_identity(action), {})[owner] = action
    usual = {identity: _most_frequent([_default(a) for a in owners.values()]) for identity, owners in uses.items()}
    groups: dict[tuple[type, ...], list[str]] = {}
    for identity, owners in uses.items():
        if len(owners) > 1:
            line = next(_line(a) for a in owners.values() if _default(a) == usual[identity])
            groups.setdefault(tuple(owners), []).append(line)
    for sharing in sorted(groups, key=len, reverse=True):
        yield f"### Shared by {_names(sharing, classes, title.lower())}\n"
        yield _list(groups[sharing])
    for owner, actions in arguments.items():
        own = [_line(a) for a in actions if len(uses[_identity(a)]) == 1]
        other = [f"`{a.dest}` `{_default(a)}`" for a in actions if _default(a) != usual[_identity(a)]]
        yield _class_text(owner, owner.__name__, own, other)
    for key, group in _optional_groups(itertools.chain(*arguments.values())).items():
        yield _class_section(group, key)


def _identity(action: Any) -> Identity:
    """Return what the arguments of two classes must have in common to be listed once."""
    return action.dest, "|".join(_alternatives(action._typehint)), action.help or ""


def _most_frequent(values: Sequence[str]) -> str:
    return max(values, key=values.count)


def _names(sharing: Sequence[type], classes: Sequence[type], title: str) -> str:
    """Return the names of the classes that share keys, or of those that do not where these are few."""
    others = [owner.__name__ for owner in classes if owner not in sharing]
    if not others:
        return f"all {title}"
    if len(others) < len(sharing):
        return f"all {title} but {', '.join(others)}"
    return ", ".join(owner.__name__ for owner in sharing)


def _class_section(owner: type, key: str) -> str:
    """Describe a class and all of its ``init_args``."""
    return _class_text(owner, f"`{key}`: {owner.__name__}", [_line(action) for action in _arguments_of(owner)])


def _class_text(owner: type, title: str, lines: Sequence[str], other_defaults: Sequence[str] = ()) -> str:
    """Return a class's section: the first sentence of its docstring, a link to the source, and its keys."""
    file = Path(inspect.getfile(owner)).resolve().relative_to(ROOT)
    summary = _markdown(docstring_parser.parse(inspect.getdoc(owner) or "").short_description or "")
    defaults = f" Other defaults here: {', '.join(other_defaults)}." if other_defaults else ""
    about = textwrap.fill(f"{summary} [Source](../{file}).{defaults}", 118, break_long_words=False)
    return "\n".join([f"### {title}\n", about + "\n", *([_list(lines)] if lines else [])])


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


def _list(lines: Iterable[str]) -> str:
    return "\n".join(lines) + "\n"


def _line(action: Any, prefix: str = "") -> str:
    """Return a key with its default, what it takes instead, and what it means in a sentence or two."""
    alternatives = _alternatives(action._typehint)
    if action.required:
        values = f"required `{'|'.join(alternatives)}`"
    else:
        default = _default(action)
        others = [name for name in alternatives if name != default and name not in _types_of(action.default)]
        values = f"`{'|'.join([default, *others])}`"
    return f"- `{action.dest.removeprefix(prefix)}` ({values}): {_short(_markdown(action.help or ''))}"


def _alternatives(hint: Any) -> list[str]:
    """Return the values or types that a hint allows, in words that fit YAML."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return [str(value) for value in arguments]
    if origin is typing.Union or origin is types.UnionType:
        return list(dict.fromkeys(name for argument in arguments for name in _alternatives(argument)))
    if origin is Callable:
        result = _alternatives(arguments[1])
        return ["function"] if result == ["float"] else result
    named = {list: "list", Sequence: "list", dict: "mapping", Mapping: "mapping", type(None): "null"}
    return [named.get(origin or hint) or hint.__name__]


def _types_of(default: Any) -> tuple[str, ...]:
    """Return the types that a reader sees from a default."""
    if isinstance(default, dict) and "class_path" in default:
        return ("Optimizer",)
    if isinstance(default, list | tuple):
        return ("list",)
    names = {bool: ("bool",), int: ("int", "float"), float: ("float",), str: ("str",), dict: ("mapping",)}
    return names.get(type(default), ())


def _default(action: Any) -> str:
    value = action.default
    if isinstance(value, dict) and "class_path" in value:
        return f"{value['class_path']}({', '.join(f'{k}={v}' for k, v in value.get('init_args', {}).items())})"
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n").removesuffix("\n...")


def _short(text: str) -> str:
    """Return the first sentence of a text, those behind it that fit, and what it says of single values."""
    sentences = re.split(r"(?<=\.) (?=[A-Z`])", text)
    lengths = itertools.accumulate(len(sentence.split()) for sentence in sentences)
    return " ".join(
        sentence
        for number, (sentence, length) in enumerate(zip(sentences, lengths, strict=True))
        if number == 0 or length <= MAX_WORDS or sentence.startswith(("By default", "`"))
    )


def _markdown(text: str) -> str:
    """Turn a docstring's reStructuredText into one line of Markdown."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`")
    return " ".join(text.split())


def main() -> int:
    return write_or_check(__doc__, PAGE, lambda _: page())


if __name__ == "__main__":
    sys.exit(main())
