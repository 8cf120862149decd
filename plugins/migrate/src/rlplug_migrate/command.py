"""``rlplug import-config``: a configuration of verl, TRL or OpenRLHF as one of ours."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

from rlplug.cli.command_parser import CommandParser
from rlplug.errors import ConfigError

DESCRIPTION: Final = """a configuration of another framework as one of ours

  rlplug import-config verl ppo_trainer.yaml           a YAML file
  rlplug import-config verl run_qwen3_8b_fsdp.sh       a script that starts verl: it is read, and not run
  rlplug import-config verl -- data.train_batch_size=256 actor_rollout_ref.rollout.n=8
  rlplug import-config trl --gpus 8 -- --model_name_or_path Qwen/Qwen3-0.6B --num_generations 8

The YAML goes to stdout. Two tables go to stderr: what has no counterpart and why, and what means something else. Exit
status 1: what is given is no configuration of that framework.
"""


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser("import-config", "{verl,trl,openrlhf} [FILE | -- ARGUMENTS]", DESCRIPTION)
    parser.add_argument("framework", choices=("verl", "trl", "openrlhf"), help="whose configuration it is")
    parser.add_argument("file", nargs="?", type=Path, help="YAML file, or shell script that starts the framework")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write to this file, which must not exist")
    parser.add_argument("--gpus", type=_count, metavar="N", help="GPUs of the run, where its sizes are per GPU (TRL)")
    parser.add_argument("--keys", action="store_true", help="print the table of all keys as Markdown")
    return parser


def import_config_command(arguments: list[str]) -> int:
    """Write a configuration of verl, TRL or OpenRLHF as one of ours: verl FILE.

    Raises:
        ConfigError: There is nothing to read, it cannot be read, or the file to write exists.
    """
    own, _, given = _split(arguments)
    options = make_parser().parse_args(own)
    from rlplug_migrate.conversion import Given, convert
    from rlplug_migrate.frameworks import FRAMEWORKS
    from rlplug_migrate.inputs import NoConfiguration, read_command, read_file
    from rlplug_migrate.report import keys_table, print_report
    from rlplug_migrate.yaml_text import to_yaml

    framework = FRAMEWORKS[options.framework]
    if options.keys:
        print(keys_table(framework), end="")
        return 0
    if (options.file is None) == (not given):
        raise ConfigError(
            f"give {framework.name}'s file or, behind --, its arguments. See rlplug import-config --help."
        )
    if options.out is not None and options.out.exists():
        raise ConfigError(f"--out: {options.out} exists, and is not overwritten: give another name.")
    try:
        values, doubts = read_file(framework, options.file) if options.file else (read_command(framework, given), {})
    except NoConfiguration as error:
        print(f"rlplug: {error}", file=sys.stderr)
        return 1
    draft = convert(Given(framework, values, options.gpus))
    text = to_yaml(draft, options.file.name if options.file else "arguments")
    if options.out is None:
        print(text, end="")
    else:
        options.out.write_text(text)
    print_report(draft, doubts)
    return 0


def _split(arguments: list[str]) -> tuple[list[str], str, list[str]]:
    """Return what is in front of ``--``, the ``--``, and what is behind it."""
    if "--" not in arguments:
        return arguments, "", []
    place = arguments.index("--")
    return arguments[:place], "--", arguments[place + 1 :]


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of GPUs: write one such as 8")
    return int(text)
