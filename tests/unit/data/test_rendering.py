"""Prompts as tokens: plain text, chat templates and system prompts, as the data module renders them."""

import pytest
from unit.data.prompt_cases import (
    ASSISTANT,
    BOS,
    CHAT_TEMPLATE,
    EOS,
    SYSTEM,
    USER,
    USER_MESSAGE,
    ListSource,
    build_tokenizer,
    ids,
    set_up,
    setup_error,
    train_prompts,
)

from rlplug.data.chat_template import set_chat_template_kwargs, takes_tools
from rlplug.data.datamodule import PromptDataModule
from rlplug.errors import ConfigError
from rlplug.rollout.turns.observation_tokens import ObservationTokens
from rlplug.types import Prompt


def test_plain_text_gets_the_tokens_that_the_tokenizer_puts_in_front_but_not_those_behind():
    (prompt,) = train_prompts(set_up(PromptDataModule(ListSource("Hi"))))
    assert prompt == Prompt("p0", (BOS, *ids("Hi")), "Hi", "answer 0", {"index": 0})  # no messages


def test_plain_text_gets_no_bos_from_a_tokenizer_that_puts_none():
    (prompt,) = train_prompts(set_up(PromptDataModule(ListSource("Hi")), tokenizer=build_tokenizer(wrap="$A")))
    assert prompt.token_ids == ids("Hi")


def test_plain_text_that_spells_the_bos_keeps_one():
    first, second = train_prompts(set_up(PromptDataModule(ListSource("<bos>Hi", "Hi"))))
    assert first.token_ids == second.token_ids == (BOS, *ids("Hi"))


def test_messages_are_rendered_with_the_special_tokens_of_the_template_alone():
    messages = [{"role": "system", "content": "S"}, USER_MESSAGE]
    (prompt,) = train_prompts(set_up(PromptDataModule(ListSource(messages))))
    assert prompt.text == "<bos><|system|>S<|user|>Hi<|assistant|>"
    assert prompt.token_ids == (BOS, SYSTEM, *ids("S"), USER, *ids("Hi"), ASSISTANT)


def test_template_without_bos_gets_none():
    tokenizer = build_tokenizer(CHAT_TEMPLATE.removeprefix("{{ bos_token }}"))
    (prompt,) = train_prompts(set_up(PromptDataModule(ListSource([USER_MESSAGE])), tokenizer=tokenizer))
    assert prompt.token_ids == (USER, *ids("Hi"), ASSISTANT)


def test_plain_text_becomes_a_user_message_with_chat():
    (prompt,) = train_prompts(set_up(PromptDataModule(ListSource("Hi"), chat=True)))
    assert prompt.text == "<bos><|user|>Hi<|assistant|>"


@pytest.mark.parametrize("row", ["Hi", [USER_MESSAGE]])
def test_system_prompt_stands_in_front(row):
    (prompt,) = train_prompts(set_up(PromptDataModule(ListSource(row), chat=True, system_prompt="S")))
    assert prompt.text == "<bos><|system|>S<|user|>Hi<|assistant|>"
    assert prompt.messages == [USER_MESSAGE]  # what a reward model reads in its own template


def test_text_and_messages_together_need_chat():
    message = setup_error(PromptDataModule(ListSource("Hi", [USER_MESSAGE])))
    assert "'p1'" in message
    assert "'p0'" in message
    assert "set data.chat to true" in message
    first, second = train_prompts(set_up(PromptDataModule(ListSource("Hi", [USER_MESSAGE]), chat=True)))
    assert first.text == second.text


def test_train_and_val_agree_on_chat():
    assert "set data.chat" in setup_error(PromptDataModule(ListSource("Hi"), val=ListSource([USER_MESSAGE])))


def test_messages_without_chat():
    message = setup_error(PromptDataModule(ListSource([USER_MESSAGE]), chat=False))
    assert "data.chat is false, and the prompt 'p0' is a list of messages" in message


@pytest.mark.parametrize(
    ("row", "chat", "start"),
    [("Hi", True, "data.chat is true"), ([USER_MESSAGE], None, "the prompt 'p0' is a list of messages")],
)
def test_chat_without_a_template(row, chat, start):
    message = setup_error(PromptDataModule(ListSource(row), chat=chat), tokenizer=build_tokenizer(chat_template=None))
    assert message.startswith(f"{start}, and the tokenizer of model.policy.path 'models/small' has no chat template")
    assert "set data.chat to false" in message


def test_no_template_is_needed_for_plain_text():
    data = set_up(PromptDataModule(ListSource("Hi")), tokenizer=build_tokenizer(chat_template=None))
    assert train_prompts(data)[0].text == "Hi"


def test_template_that_refuses_a_prompt():
    message = setup_error(PromptDataModule(ListSource([{"role": "tool", "content": "a"}])))
    assert "refuses the prompt 'p0', whose roles are tool: No tools here." in message
    assert "model.policy.path 'models/small'" in message


def test_two_system_messages():
    source = ListSource([{"role": "system", "content": "S"}, USER_MESSAGE])
    message = setup_error(PromptDataModule(source, system_prompt="T"))
    assert "'p0' has its own system message, and data.system_prompt is set" in message


def test_system_prompt_without_chat():
    with pytest.raises(ConfigError, match=r"data\.system_prompt needs a chat template, and data\.chat is false"):
        PromptDataModule(ListSource("Hi"), chat=False, system_prompt="S")
    message = setup_error(PromptDataModule(ListSource("Hi"), system_prompt="S"))
    assert message == "data.system_prompt needs a chat template: set data.chat to true."


THINKING = CHAT_TEMPLATE + (
    "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}none{% endif %}"
    "{% if style is not defined %}{% set style = '' %}{% endif %}{{ style }}"
)


def test_template_variables_reach_prompts_and_observations():
    tokenizer = build_tokenizer(THINKING)
    set_chat_template_kwargs(tokenizer, {"enable_thinking": False, "style": "!"})
    (prompt,) = train_prompts(set_up(PromptDataModule(ListSource([USER_MESSAGE])), tokenizer=tokenizer))
    assert prompt.text == "<bos><|user|>Hi<|assistant|>none!"
    assert ObservationTokens(tokenizer, chat=True).text("Hi") == "<|user|>Hi<|assistant|>none!"
    assert not takes_tools(tokenizer, [{"type": "function"}])


@pytest.mark.parametrize("name", ["enable_thinkin", "messages", "tools", "bos_token", "range"])
def test_a_variable_that_the_template_does_not_read_is_refused(name):
    with pytest.raises(ConfigError, match="is no variable of the chat template") as caught:
        set_chat_template_kwargs(build_tokenizer(THINKING), {name: 1})
    assert str(caught.value).endswith("It reads enable_thinking, style.")
    assert ("Did you mean 'enable_thinking'?" in str(caught.value)) == (name == "enable_thinkin")


def test_template_variables_need_a_chat_template():
    with pytest.raises(ConfigError, match="It reads none"):
        set_chat_template_kwargs(build_tokenizer(None), {"enable_thinking": False})
    tokenizer = build_tokenizer(THINKING)
    set_chat_template_kwargs(tokenizer, {"enable_thinking": False})
    assert "set data.chat to true" in setup_error(PromptDataModule(ListSource("Hi")), tokenizer=tokenizer)


def test_a_last_message_of_the_assistant_is_continued_or_refused():
    begun = [USER_MESSAGE, {"role": "assistant", "content": "It is"}]
    template = CHAT_TEMPLATE.replace("{% endfor %}", "<eos>{% endfor %}")
    tokenizer = build_tokenizer(template)
    message = setup_error(PromptDataModule(ListSource(begun)), tokenizer=tokenizer)
    assert "'p0' ends with a message of the assistant" in message
    assert "data.continue_final_message" in message
    data = PromptDataModule(ListSource(begun, [USER_MESSAGE]), continue_final_message=True)
    first, second = train_prompts(set_up(data, tokenizer=tokenizer))
    assert first.text == "<bos><|user|>Hi<eos><|assistant|>It is"
    assert first.token_ids == (BOS, USER, *ids("Hi"), EOS, ASSISTANT, *ids("It is"))
    assert second.text == "<bos><|user|>Hi<eos><|assistant|>"


def test_a_template_that_leaves_out_tool_calls_is_refused():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    prompt = [USER_MESSAGE, {"role": "assistant", "content": None, "tool_calls": [call]}, USER_MESSAGE]
    assert "leaves out the tool calls of the prompt 'p0'" in setup_error(PromptDataModule(ListSource(prompt)))
    tokenizer = build_tokenizer(
        "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}({{ c.function.name }}"
        "{{ c.function.arguments | tojson }}){% endfor %}{% endfor %}"
    )
    (row,) = train_prompts(set_up(PromptDataModule(ListSource(prompt)), tokenizer=tokenizer))
    assert row.text == 'Hi(add{"a": 1})Hi'
