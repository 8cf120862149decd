"""``rlplug split-gpus``: how to divide GPUs between the engines and the trainer of an asynchronous run."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Final

from rlplug.cli.command_parser import CommandParser
from rlplug.errors import ConfigError

DESCRIPTION: Final = """how to divide GPUs between the engines and the trainer of an asynchronous run, by measured rates

  rlplug split-gpus 8 --rates runs/quickstart/001             those of a run
  rlplug split-gpus 8 --engine-tokens-s 100 --trainer-tokens-s 300
"""


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser("split-gpus", "N (--rates RUN | --engine-tokens-s R --trainer-tokens-s R)", DESCRIPTION)
    add = parser.add_argument
    add("num_gpus", metavar="N", help="how many GPUs to divide, such as 8")
    add("--rates", type=Path, metavar="RUN", help="folder of a run that measured the rates")
    for side in ("engine", "trainer"):
        add(f"--{side}-tokens-s", metavar="R", help=f"completion tokens a second of one GPU of the {side}")
    return parser


def split_command(arguments: list[str]) -> None:
    """Divide GPUs between engines and trainer of an asynchronous run: N --rates RUN.

    Raises:
        ConfigError: A number is none, or the rates are not given, or given twice.
    """
    options = make_parser().parse_args(arguments)
    by_hand = [text for text in (options.engine_tokens_s, options.trainer_tokens_s) if text is not None]
    if (options.rates is not None) == bool(by_hand) or len(by_hand) == 1:
        raise ConfigError(
            "split-gpus needs measured rates: --rates with the folder of a run, or both --engine-tokens-s and "
            "--trainer-tokens-s, the completion tokens per second of one GPU."
        )
    num_gpus = _number("N", options.num_gpus, "how many GPUs to divide, such as 8")
    if num_gpus < 2 or num_gpus != int(num_gpus):
        raise ConfigError(f"N is {options.num_gpus}: give a whole number, at least 2, one for each side.")
    from rlplug_launch.gpu_split import GPURates, rates_of_run

    if by_hand:
        rates = GPURates(
            _number("--engine-tokens-s", options.engine_tokens_s, "tokens per second of one GPU"),
            _number("--trainer-tokens-s", options.trainer_tokens_s, "tokens per second of one GPU"),
        )
    else:
        rates = rates_of_run(options.rates)
    print(rates.describe(int(num_gpus)))


def _number(option: str, text: str, what: str) -> float:
    """Return a positive number that an option was given."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise ConfigError(f"{option} is {text!r}: say {what}.")
    return number
