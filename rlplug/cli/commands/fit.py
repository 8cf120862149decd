"""``rlplug fit`` and ``rlplug validate``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rlplug.cli.find_commands import uncollected_imports

TAKES_CONFIGURATION: Final = True

HELP: Final = """usage: rlplug {command} [-c CONFIG] [--KEY VALUE] ...

A run needs a policy, prompts and rewards:

  rlplug fit --policy Qwen/Qwen3-0.6B --train train.jsonl --reward MathVerify
  rlplug fit -c my_run.yaml                      the same from a file, with the keys below
  rlplug fit -c my_run.yaml --num_steps 100      later files and options override earlier ones
  rlplug fit --resume runs/default/001           go on from the newest checkpoint

short keys, in a file and on the command line:
  policy           model, a folder or a name on the Hugging Face Hub
  train, val       prompts: a .jsonl or .parquet file, a data set on the Hub, or a class
  rewards          names of rewards, or functions of yours such as my_rewards.score; --reward, which may be repeated
  algorithm        GRPO unless another is named
  rollout          engine; by default vLLM or SGLang on a GPU, where one is installed, else transformers' generate
  num_steps        steps to take; one pass over the prompts by default
  max_new_tokens   longest completion, in tokens: 256
  chat             render prompts with the model's chat template

options:
  -c, --config FILE     configuration; may be given several times
  --resume RUN          take configuration and newest checkpoint from a run folder
  --ckpt_path PATH      load this checkpoint
  --print_config        print the whole configuration and stop
  --verbose             print the batch plan, the memory plan and caches
  -p MODULE             take the hooks of a local module
  --block PLUGIN        leave a plugin out
  --debug               show the traceback of an error
  --help=all            every key; of one class: --model.algorithm.help GRPO
"""


def fit_command(arguments: list[str]) -> int:
    """Train: -c CONFIG, or --policy P --train FILE --reward R, or --resume RUN to go on with one."""
    return _run("fit", arguments)


def validate_command(arguments: list[str]) -> int:
    """Score held-out prompts once: -c CONFIG --ckpt_path CHECKPOINT."""
    return _run("validate", arguments)


def _run(command: str, arguments: Sequence[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(HELP.format(command=command), end="")
        return 0
    with uncollected_imports():  # torch and Lightning take seconds
        from rlplug.cli.lightning_cli import run_lightning
    return run_lightning([command, *arguments])
