"""``rlplug chat``: talk to a policy in the terminal, with the tools of its run's environment."""

from __future__ import annotations

import argparse
import secrets
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from rlplug.cli.lightning_cli import ConfiguredCLI, instantiation_errors, read_command
from rlplug.cli.parser import RLArgumentParser
from rlplug.config import RunConfig
from rlplug.distributed.checkpoints.files import CONFIG
from rlplug.distributed.stop_signal import end_at_once
from rlplug.errors import ConfigError, RLPlugError
from rlplug.interfaces.rollout import RolloutEngine
from rlplug.interfaces.trainer import ModelConfig
from rlplug.observability.terminal import say, visible
from rlplug.types import SamplingParams
from rlplug_eval.chat import Conversation, End
from rlplug_eval.commands.evaluate import split_keys
from rlplug_eval.engine import PolicyEngine, placement_of
from rlplug_eval.options import SAMPLING_FIELDS, add_sampling_options, dashed, given_sampling, reader_of
from rlplug_eval.policies import Policy, is_run, label_of, place_of

CHAT_DESCRIPTION: Final = """talk to a policy in the terminal

  rlplug chat runs/quickstart/001                    a run's policy, with the tools of its environment
  rlplug chat Qwen/Qwen3-0.6B --engine VLLMRollout   a model's folder, or a name on the Hugging Face Hub
  echo 'What is 6 x 7?' | rlplug chat RUN            each line of a pipe is a message

A policy without a chat template continues each message as a prompt of its own. Ctrl-C stops an answer; /help lists what
can be typed. Text appears 16 tokens at a time, with any engine.
"""
TAKES_CONFIGURATION: Final = True
SAMPLING: Final = {f"/{dashed(name)}": name for name in SAMPLING_FIELDS}
"""Fields of the sampling by the commands that change them."""
HELP: Final = f"""/reset               forget the conversation
/system TEXT         begin anew with this system message; without TEXT with none
/help                this list
/quit                end; so does Ctrl-D
change how answers are drawn, as under model.sampling, with a value behind:
{", ".join(SAMPLING)}"""
FOLDER_TOKENS: Final = 512
"""Longest answer of a policy that comes without a run."""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of what is not a key of the configuration."""
    parser = argparse.ArgumentParser(
        "rlplug chat",
        usage="rlplug chat RUN|FOLDER [--engine NAME] [--temperature T] [--KEY VALUE] ...",
        description=CHAT_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("policy", metavar="RUN|FOLDER", help="a run's folder, a checkpoint's, a model's, or a name on the Hub")
    add(
        "-c",
        "--config",
        action="append",
        default=[],
        help="configuration with environment and engine; default: the run's",
    )
    add("--system", metavar="TEXT", help="system message; default: the run's data.system_prompt")
    add("--raw", action="store_true", help="no chat template: each message is a prompt to continue")
    add("--no-tools", action="store_true", help="without the environment of the run")
    add_sampling_options(parser, "model.sampling's")
    add("--seed", type=int, help="seed of the answers; by default they differ each time")
    add("--engine", metavar="NAME", help="another engine, such as HFRollout or VLLMRollout; short for --model.rollout")
    return parser


def chat_command(arguments: list[str]) -> int:
    """Talk to a policy, with the tools of its environment: RUN.

    Raises:
        RLPlugError: The policy or the engine cannot be used.
    """
    own, keys = split_keys(arguments)
    options = make_parser().parse_args(own)
    if options.engine is not None:
        keys = ["--model.rollout", options.engine, *keys]
    place, checkpoint = place_of(options.policy)
    files = options.config or [str(Path(options.policy) / CONFIG)] * is_run(Path(options.policy))
    of_checkpoint: RunConfig | None = None
    if checkpoint is not None:
        of_checkpoint = _read([str(checkpoint / CONFIG)], []).model.config
        files = files or [str(checkpoint / CONFIG)]
    accelerator, system, is_chat = "auto", options.system, None
    if files:
        cli = _read(files, keys)
        cli.use_compile_cache()
        config, data, accelerator = cli.model.config, cli.datamodule, str(cli.trainer_options.accelerator)
        system, is_chat = data.system_prompt if system is None else system, data.chat
    else:
        config = _config_of_folder(place, keys)
    if options.no_tools:
        config = replace(config, environment=None)
    model = config.policy if of_checkpoint is None else of_checkpoint.policy
    model = replace(model, chat_template_kwargs=config.policy.chat_template_kwargs)
    if checkpoint is None:
        model = replace(model, path=place, init="pretrained")
    sampling = replace(config.sampling, **given_sampling(options))
    config.engine.check_sampling(sampling, "sampling")
    end_at_once()
    interrupt = _Interrupt()
    engine = PolicyEngine(config, placement_of(accelerator), interrupt.is_set, interrupt.is_set)
    conversation: Conversation | None = None
    policy = Policy(label_of(options.policy), model, checkpoint)
    try:
        inputs = engine.read(policy)
        engine.use(policy, inputs, of_checkpoint)
        seed = secrets.randbits(32) if options.seed is None else options.seed
        is_chat = False if options.raw else is_chat
        conversation = Conversation(engine, config, inputs, sampling, system or "", is_chat, seed)
        _greet(conversation, policy, inputs.tools)
        _talk(conversation, interrupt)
    finally:
        if conversation is not None:
            conversation.close()
        engine.close()
    return 0


class _Interrupt:
    """Ctrl-C while an answer is generated: it stops the answer. A second one ends the process."""

    def __init__(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    @contextmanager
    def watched(self) -> Iterator[None]:
        self._is_set = False

        def note(*_: Any) -> None:
            if self._is_set:
                raise KeyboardInterrupt
            self._is_set = True

        former = signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            self._is_set = False
            signal.signal(signal.SIGINT, former)


def _greet(conversation: Conversation, policy: Policy, tools: Sequence[Any]) -> None:
    say(f"{policy.name}: {policy.source}")
    if not conversation.is_chat:
        say("no chat template: each message is a prompt of its own, which the policy continues")
    if tools:
        names = [str((tool.get("function") or tool).get("name", "?")) for tool in tools]
        say(f"tools: {', '.join(names)}")
    say(f"context: {conversation.max_context:,} tokens; an answer has at most {conversation.sampling.max_new_tokens:,}")
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401 - input() has a history then
        say("/help lists what can be typed")


def _talk(conversation: Conversation, interrupt: _Interrupt) -> None:
    is_terminal = sys.stdin.isatty()
    while True:
        try:
            text = input("\n> " if is_terminal else "")
        except (EOFError, KeyboardInterrupt):
            return
        except UnicodeDecodeError as error:
            raise ConfigError(f"a message is not UTF-8: {error}.") from error
        if not text.strip():
            continue
        if text.strip() in ("/quit", "/exit"):
            return
        if not is_terminal:
            say(f"> {text}")
        try:
            if text.startswith("/"):
                _obey(conversation, text)
            else:
                with interrupt.watched():
                    _print_answer(conversation, text)
        except RLPlugError as error:
            if not is_terminal:
                raise
            say(f"rlplug: {error}")


def _print_answer(conversation: Conversation, text: str) -> None:
    was_policy = True
    for part in conversation.answer(text):
        if isinstance(part, End):
            reason = "" if part.reason == "stop" else f", {part.reason}"
            sys.stdout.write("\n")
            say(f"[{part.num_tokens:,} tokens{reason}; context {part.context:,} of {conversation.max_context:,}]")
            continue
        if part.is_policy != was_policy:
            sys.stdout.write("\n" if part.is_policy else "\n[environment] ")
            was_policy = part.is_policy
        sys.stdout.write(visible(part.text))
        sys.stdout.flush()


def _obey(conversation: Conversation, text: str) -> None:
    """Carry out what begins with a slash.

    Raises:
        ConfigError: There is no such command, or its value is none.
    """
    word, _, value = text.strip().partition(" ")
    if word == "/help":
        say(HELP)
    elif word == "/reset":
        conversation.reset()
        say("the conversation begins anew")
    elif word == "/system":
        conversation.reset(value)
        say("the conversation begins anew, " + ("with this system message" if value else "without a system message"))
    elif word in SAMPLING:
        name = SAMPLING[word]
        try:
            changed: Any = {name: reader_of(name)(value)}
        except ValueError:
            needed = "a block such as {min_p: 0.1}" if name == "extra" else "a number"
            raise ConfigError(f"{word} needs {needed}, and {value!r} is none.") from None
        conversation.change_sampling(**changed)
        say(f"{name} {getattr(conversation.sampling, name)}")
    else:
        raise ConfigError(f"there is no {word}: /help lists what there is. Begin a message with a blank to send it.")


# ---- configuration ------------------------------------------------------------------------------------------------


def _read(files: Sequence[str], keys: Sequence[str]) -> Any:
    return read_command(ConfiguredCLI, ["fit", *(part for file in files for part in ("--config", file)), *keys])


def _config_of_folder(place: str, keys: Sequence[str]) -> RunConfig:
    """Return options for a policy without a run: an engine, and the policy's dtype."""
    parser = RLArgumentParser("rlplug chat")
    parser.add_argument("--model.rollout", type=RolloutEngine | None, default=None)
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    parser.add_argument("--model.policy.dtype", type=str, default=dtype)
    parser.add_argument("--model.policy.chat_template_kwargs", type=dict[str, Any], default={})
    with instantiation_errors():
        found: Any = parser.instantiate_classes(parser.parse_args([*keys]))
    if found.model.policy.dtype not in ("bfloat16", "float32"):
        raise ConfigError(f"--model.policy.dtype is {found.model.policy.dtype}: give bfloat16 or float32.")
    unused: Any = None  # a chat neither trains nor scores
    kwargs = found.model.policy.chat_template_kwargs
    model = ModelConfig(place, dtype=found.model.policy.dtype, chat_template_kwargs=kwargs)
    config = RunConfig(model, algorithm=unused, optimizer=unused, rollout=found.model.rollout)
    return replace(config, sampling=SamplingParams(max_new_tokens=FOLDER_TOKENS))
