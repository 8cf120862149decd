"""Chat templates in a process of their own: programs that come with a model, and may compute or grow without end.

A deadline in the trainer does not end ``10 ** (10 ** 9)``, which holds the interpreter's lock, and Jinja's sandbox
bounds neither time nor memory.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

DEADLINE_S: Final = 32.0
"""Longest time for one conversation: a little more than the core waits for it, whose message names the prompt."""
PROGRAM: Final = Path(__file__).with_name("template_renderer.py")
VARIABLES: Final = ("PATH", "HOME", "TZ", "TMPDIR", "LD_LIBRARY_PATH")
"""Environment variables of such a process: none that may hold a secret."""


def bound(tokenizer: Any) -> Any:
    """Have ``tokenizer.apply_chat_template`` render text in a process with limits on time and memory; return it.

    A tokenizer with an ``apply_chat_template`` of its own, such as Mistral's, runs no program of the model's.
    """
    own = getattr(type(tokenizer), "apply_chat_template", None)
    if own is PreTrainedTokenizerBase.apply_chat_template:
        tokenizer.apply_chat_template = functools.partial(render, tokenizer)
    return tokenizer


def render(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Sequence[Mapping[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    *,
    tokenize: bool = True,
    chat_template: str | None = None,
    **options: Any,
) -> Any:
    """Return one conversation as text, as ``PreTrainedTokenizerBase.apply_chat_template`` does.

    A message's key without a value is dropped, which transformers up to 5.19 hands to the template as ``None``.
    All else that it does, such as tensors of token ids, rlplug does not ask for, and it is done here without limits.

    Raises:
        TemplateError: The template refuses the conversation, or does not end within its limits.
    """
    if tokenize or not all(isinstance(message, Mapping) for message in conversation):
        upstream: Any = PreTrainedTokenizerBase.apply_chat_template
        return upstream(tokenizer, conversation, tools, tokenize=tokenize, chat_template=chat_template, **options)
    template = tokenizer.get_chat_template(chat_template, tools)
    chat = [{key: value for key, value in message.items() if value is not None} for message in conversation]
    request = {"conversations": [chat], "tools": tools, "chat_template": template}
    return _process(os.getpid()).render({**tokenizer.special_tokens_map, **options, **request})


class TemplateProcess:
    """A process that starts with the first conversation, and again after one that it did not survive."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: Any = None

    def render(self, request: dict[str, Any]) -> str:
        """Return the text of what transformers' ``render_jinja_template`` takes as ``request``.

        Raises:
            TemplateError: There is none.
        """
        with self._lock:
            process: Any = self._process or _started()
            self._process = process
            try:
                pickle.dump((DEADLINE_S, request), process.stdin)
                process.stdin.flush()
                answer: dict[str, str] = json.loads(process.stdout.readline())
            except (OSError, ValueError):  # there is no line
                from rlplug.distributed.child_process import ending

                self._process, status = None, process.end(1.0)
                late = f"it took longer than {DEADLINE_S:g} s"
                ended = f"the process that renders it {ending(status)}"
                raise TemplateError(late if status == -signal.SIGALRM else ended) from None
            if "is_full" in answer:
                self._process = None
                process.end()
        if "reason" in answer:
            raise TemplateError(answer["reason"])
        return answer["text"]


def _started() -> Any:
    from rlplug.distributed.child_process import ChildProcess

    command, environment = program_command(PROGRAM)
    pipe = subprocess.PIPE
    return ChildProcess(command, stdin=pipe, stdout=pipe, env=environment)


def program_command(program: Path) -> tuple[list[str], dict[str, str]]:
    """Return command and environment of a program of this package that finds what the trainer finds."""
    environment = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(filter(os.path.isabs, sys.path))
    return [sys.executable, "-P", str(program)], environment


@functools.cache
def _process(pid: int) -> TemplateProcess:
    """Return the process of the one with id ``pid``: a fork must not read its parent's answers."""
    return TemplateProcess()
