"""Chat templates: each attack ends in a message within its limits, and all else is rendered as transformers does."""

from __future__ import annotations

import copy
import os
import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from rlplug_sandbox import chat_templates
from rlplug_sandbox.chat_templates import TemplateProcess, bound
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlplug.data.chat_template import render_chat, set_chat_template_kwargs
from rlplug.errors import ConfigError
from rlplug.plugin_manager import plugins

MODEL = Path(__file__).parents[3] / "tests/model"
CHAT = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "It "}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    process = chat_templates._process(os.getpid())
    yield process
    if process._process is not None:
        process._process.end()
        process._process = None


@pytest.fixture
def tokenizer(process: TemplateProcess) -> Any:
    return bound(AutoTokenizer.from_pretrained(MODEL))


TWINS = "{% set ns = namespace(x=[], y=[]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}" + (
    "{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
)
LATE = {
    "power": "{{ (10 ** (10 ** 9)) % 7 }}",
    "compares for ever": TWINS + "{{ ns.x == ns.y }}",
    "shows for ever": TWINS + "{{ ns.x }}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
}
HEAVY = {
    "product": "{{ 'A' * 3000000000 }}",
    "width": "{{ '%2000000000d' % 1 }}",
    "filter": "{{ 'A' | center(3000000000) }}",
    "method": "{{ 'A'.ljust(3000000000) }}",
    "grows": "{% set ns = namespace(x=['A' * 1000000]) %}{% for i in range(99999) %}"
    "{% set ns.x = ns.x + [ns.x[0] ~ i] %}{% endfor %}",
}
ESCAPES = {
    "class": "{{ messages.__class__.__mro__ }}",
    "format": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "globals": "{{ cycler.__init__.__globals__ }}",
}


@pytest.mark.parametrize("template", LATE.values(), ids=list(LATE))
def test_what_never_ends_is_ended(tokenizer: Any, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches what holds the interpreter's lock: no deadline of the trainer comes then, nor does SIGTERM."""
    monkeypatch.setattr(chat_templates, "DEADLINE_S", 1.0)
    tokenizer.chat_template = template
    turns, done = 0, threading.Event()

    def count() -> None:
        nonlocal turns
        while not done.wait(0.01):
            turns += 1

    threading.Thread(target=count, daemon=True).start()
    with pytest.raises(ConfigError, match="it took longer than 1 s"):
        render_chat(CHAT[:2], tokenizer, (), "a question")
    done.set()
    assert turns > 5  # the trainer goes on meanwhile
    tokenizer.chat_template = "{{ messages[1].content }}"
    assert render_chat(CHAT[:2], tokenizer, (), "a question") == "hi"  # another process took over


@pytest.mark.parametrize("template", HEAVY.values(), ids=list(HEAVY))
def test_what_fills_the_memory_is_refused(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    with pytest.raises(ConfigError, match="refuses a question: it needs more than 2 GiB of memory"):
        render_chat(CHAT[:2], tokenizer, (), "a question")


@pytest.mark.parametrize("template", ESCAPES.values(), ids=list(ESCAPES))
def test_the_sandbox_of_jinja_holds(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    with pytest.raises(ConfigError, match=r"refuses a question: .*unsafe"):
        render_chat(CHAT[:2], tokenizer, (), "a question")


def test_a_text_is_of_a_sensible_length(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ 'A' * 100000000 }}"
    with pytest.raises(ConfigError, match="it writes 100,000,000 characters"):
        render_chat(CHAT[:2], tokenizer, (), "a question")


def test_constants_are_computed_nowhere_else(tokenizer: Any) -> None:
    """Catches the names of a template's variables being read by compiling it, which computes its constants."""
    tokenizer.chat_template = (
        "{{ (10 ** (10 ** 9)) % 7 }}{% if 10 ** (10 ** 9) | int %}{% endif %}{{ enable_thinking }}"
    )
    set_chat_template_kwargs(tokenizer, {"enable_thinking": False})
    with pytest.raises(ConfigError, match="It reads enable_thinking"):
        set_chat_template_kwargs(tokenizer, {"other": False})


TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% generation %}{% if m.x is defined %}x{% endif %}{% endgeneration %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{{ style }}{% for i in range(3) %}{% break %}{% endfor %}"
)


@pytest.mark.parametrize("options", [
    {"add_generation_prompt": True, "tools": TOOLS, "style": "é\ud800"},
    {"continue_final_message": True},
    {"tools": None, "bos_token": "<other>", "chat_template": "{{ bos_token }}{{ messages[1].content }}"},
])  # fmt: skip
def test_all_else_is_as_transformers_renders_it(tokenizer: Any, options: dict[str, Any]) -> None:
    tokenizer.chat_template = TEMPLATE
    chat = [CHAT[0] | {"x": None}, *CHAT[1:]]
    # without the key that has no value, which transformers drops from after 5.19 on
    oracle = PreTrainedTokenizerBase.apply_chat_template(tokenizer, CHAT, tokenize=False, **options)
    assert tokenizer.apply_chat_template(chat, tokenize=False, **options) == oracle
    for made in (copy.deepcopy(tokenizer), pickle.loads(pickle.dumps(tokenizer))):
        assert made.apply_chat_template(chat, tokenize=False, **options) == oracle
        assert made.apply_chat_template.args == (made,)


def test_its_process_has_no_secrets(tokenizer: Any, process: TemplateProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "sk-secret")
    process._process.end()
    process._process = None
    tokenizer.chat_template = "{{ messages | length }}"
    assert render_chat(CHAT[:2], tokenizer, (), "a question") == "2"
    assert b"sk-secret" not in Path(f"/proc/{process._process.pid}/environ").read_bytes()


def test_a_run_renders_so(process: TemplateProcess) -> None:
    """Catches a hook that is not called: all other tests here bound the tokenizer themselves."""
    made = plugins().hook.rlplug_make_tokenizer(path=str(MODEL))
    made.chat_template = "{{ 'A' * 3000000000 }}"
    with pytest.raises(TemplateError, match="2 GiB"):
        made.apply_chat_template(CHAT, tokenize=False)


def test_a_process_that_is_killed_is_named(tokenizer: Any, process: TemplateProcess) -> None:
    tokenizer.chat_template = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    threading.Timer(1.0, lambda: process._process.kill()).start()
    began = time.monotonic()
    with pytest.raises(ConfigError, match="the process that renders it was ended by SIGKILL"):
        render_chat(CHAT[:2], tokenizer, (), "a question")
    assert time.monotonic() - began < 30
