"""``rlplug audit-reward``: what fools a reward, which right answers it misses, and how its calls behave."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any, Final

import torch

from rlplug.cli.command_parser import CommandParser
from rlplug.cli.configuration.short_forms import write_out_arguments
from rlplug.cli.lightning_cli import instantiation_errors
from rlplug.cli.parser import RLArgumentParser
from rlplug.data.sources import PromptSource
from rlplug.errors import ConfigError, shorten
from rlplug.interfaces.reward import Reward
from rlplug.interfaces.rollout import RolloutEngine
from rlplug.observability.terminal import visible
from rlplug.plugin_manager import plugins
from rlplug.rewards.runner import start_rewards
from rlplug.types import Prompt
from rlplug_rewards.audit.audit import Audit, Scores, Written, audit, mean, spread

TAKES_CONFIGURATION = True
DESCRIPTION = """attacks rewards before a policy does, and says what fools them

Each reward scores completions that solved nothing (empty, the prompt again, the form alone, every answer at once, the
right number last, instructions for a judge, control tokens, very long ones), and right answers in other forms, all of
them twice, with a run's deadline. An attack pays that scores nearer to a right answer than to a wrong one.

  rlplug audit-reward --reward MathVerify --train train.jsonl
  rlplug audit-reward --reward my_rewards.score --train train.jsonl --json
  rlplug audit-reward --reward MathVerify --policy Qwen/Qwen3-0.6B --best-of 64

Without --train, prompts are sums. Exit status 1: an attack pays, score raises, is late, returns what cannot train, or
scores the same completion differently.
"""
NUM_SHOWN: Final = 5
"""Most completions of a policy that are shown."""
QUESTIONS: Final = ((17, 25), (640, 594), (3, 4), (1000, 999), (58, 0))
"""Sums that are asked without a source of prompts."""


def make_parser() -> CommandParser:
    parser = CommandParser("audit-reward", "--reward NAME [--train FILE] [--KEY VALUE] ...", DESCRIPTION)
    parser.add_argument("--num-prompts", type=int, default=16, metavar="N", help="prompts to take (default: 16)")
    parser.add_argument("--deadline-s", type=float, default=30.0, metavar="S", help="longest call (default: 30)")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        metavar="D",
        help="largest difference between two scores of one completion, for a judge that samples (default: 0)",
    )
    parser.add_argument(
        "--policy", metavar="MODEL", help="a small model, whose completions are searched for what fools the reward"
    )
    parser.add_argument("--best-of", type=int, default=16, metavar="N", help="completions a prompt (default: 16)")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="of each (default: 256)")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON, for machines")
    return parser


def audit_reward_command(arguments: list[str]) -> int:
    """Attack a reward before a policy does, and say what fools it.

    Raises:
        ConfigError: No reward is named, or a reward or its prompts cannot be used.
    """
    options, keys = make_parser().parse_known_args(arguments)
    if min(options.best_of, options.max_new_tokens) < 1:
        raise ConfigError("--best-of and --max-new-tokens are at least 1.")
    rewards, source, engine = _configured(keys)
    prompts = _prompts(source, options.num_prompts)
    for reward in rewards:
        reward.check_prompts(prompts)
    start_rewards(rewards, torch.device("cpu"))
    written = None
    if options.policy is not None:
        from rlplug_rewards.audit.policy import write_completions

        texts = write_completions(options.policy, engine, prompts, options.best_of, options.max_new_tokens)
        written = Written(options.policy, texts)
    found = [audit(reward, prompts, options.deadline_s, options.tolerance, written) for reward in rewards]
    if options.json:
        print(json.dumps([_plain(asdict(each)) for each in found], indent=2))
    else:
        for each in found:
            print("\n".join(visible(line) for line in lines_of(each)))
    return 1 if any(each.has_failed for each in found) else 0


def _configured(keys: Sequence[str]) -> tuple[list[Reward], PromptSource | None, RolloutEngine | None]:
    if (folder := os.getcwd()) not in sys.path:
        sys.path.append(folder)  # for a function in this folder; after all libraries
    written = write_out_arguments(keys)
    plugins().registry.import_named(set(re.findall(r"\w+", " ".join(written))))  # jsonargparse finds those imported
    parser = RLArgumentParser("rlplug audit-reward")
    parser.add_argument("--model.rewards", type=list[Reward], default=[])
    parser.add_argument("--data.train", type=PromptSource | None, default=None)
    parser.add_argument("--model.rollout", type=RolloutEngine | None, default=None)
    with instantiation_errors():
        found: Any = parser.instantiate_classes(parser.parse_args(written))
    if not found.model.rewards:
        raise ConfigError("no reward is named: give --reward NAME, such as --reward MathVerify.")
    return found.model.rewards, found.data.train, found.model.rollout


def _prompts(source: PromptSource | None, most: int) -> list[Prompt]:
    """Return the prompts to answer: the first rows of a source, or sums."""
    if source is None:
        return [_prompt(f"sum:{one}", f"What is {one} + {two}?", str(one + two)) for one, two in QUESTIONS]
    rows = list(islice(source.rows(), most))
    if not rows:
        raise ConfigError("data.train has no rows: give a source with prompts.")
    found = []
    for row in rows:
        text = row.prompt if isinstance(row.prompt, str) else "\n".join(str(each["content"]) for each in row.prompt)
        messages = [] if isinstance(row.prompt, str) else row.prompt
        found.append(_prompt(row.uid, text, row.answer, dict(row.metadata), messages))
    return found


def _prompt(uid: str, text: str, answer: Any, metadata: Any = None, messages: Sequence[Any] = ()) -> Prompt:
    tokens = tuple(ord(each) % 1000 for each in text)
    return Prompt(uid, tokens, text, answer, metadata or {}, messages=list(messages))


def lines_of(found: Audit) -> Iterator[str]:
    """Yield the report: every kind of completion with its scores, then what is wrong, and what is worth knowing."""
    yield f"{found.reward}: {found.num_prompts} prompts, a right answer scores above a wrong one on {found.num_judged}"
    width = max(len(each.kind) for each in (*found.attacks, *found.forms))
    yield f"  {'completion':<{width}}  {'mean':>8}  {'highest':>8}  {'spread':>8}  {'fooled':>6}  {'seconds':>7}"
    for each in found.attacks:
        yield _line(each, width)
    yield "  right answers in other forms (fooled: those that score like a wrong one)"
    for each in found.forms:
        yield _line(each, width)
    if found.search is not None:
        yield f"  the highest of {found.search.num_samples} completions of {found.search.policy}"
        for best in found.search.best[:NUM_SHOWN]:
            verdict = "fools it" if best.fools else "wrong" if best.is_wrong else "has the answer"
            yield f"    {best.score:8.3g}  {verdict:<14}  {best.uid}: {shorten(best.completion)}"
    for problem in found.problems:
        yield f"  FAILS {problem}"
    for note in found.notes:
        yield f"  note  {note}"
    yield f"  {'failed' if found.has_failed else 'passed'}"


def _line(each: Scores, width: int) -> str:
    numbers = "  ".join(f"{value:8.3g}" for value in (mean(each.values), each.highest, spread(each.values)))
    said = f"  {each.errors[0]}" if each.errors else ""
    return f"  {each.kind:<{width}}  {numbers}  {each.num_fooled:>6}  {each.seconds:7.2f}{said}"


def _plain(value: Any) -> Any:
    """Return a value for JSON, in which NaN is null."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and math.isnan(value) else value
