"""Conversations with a policy: tokens are kept, tools answer, text comes in pieces."""

from __future__ import annotations

import pytest
import torch
from rlplug_devkit.models import make_model_folder
from rlplug_eval.chat import Conversation, End, Piece
from rlplug_eval.commands.chat import _config_of_folder
from rlplug_eval.engine import PolicyEngine, placement_of
from rlplug_eval.policies import Policy

from rlplug.config import RunConfig
from rlplug.errors import RunError
from rlplug.interfaces import Environment, StepResult
from rlplug.interfaces.trainer import ModelConfig
from rlplug.plugin_manager import PluginManager, use_plugins
from rlplug.rollout.config import TurnOptions
from rlplug.types import SamplingParams

GREEDY = SamplingParams(max_new_tokens=60, temperature=0.0)
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] | upper }}{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}A{% endif %}"
)


class Echo(Environment):
    """Answers the first turn, and ends with the second."""

    turns = 0

    def step(self, completion: str) -> StepResult:
        self.turns += 1
        return StepResult("PONG", done=self.turns == 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    make_model_folder("llama", path)
    return str(path)


@pytest.fixture
def make_conversation(folder):
    use_plugins(PluginManager([]))
    model = ModelConfig(folder, dtype="float32")
    opened = []

    def make(template=None, sampling=GREEDY, environment=None, is_stopping=lambda: False):
        turns = TurnOptions(max_tokens_per_turn=5, max_turns=2)
        config = RunConfig(model, algorithm=None, optimizer=None, environment=environment, turns=turns)
        engine = PolicyEngine(config, placement_of("cpu"), is_stopping, is_stopping)
        inputs = engine.read(Policy("p", model))
        inputs.tokenizer.chat_template = template
        engine.use(Policy("p", model), inputs)
        conversation = Conversation(engine, config, inputs, sampling)
        opened.extend([conversation, engine])
        return conversation

    yield make
    for each in opened:
        each.close()


def said(conversation, text):
    *pieces, end = conversation.answer(text)
    assert isinstance(end, End)
    return pieces, end


def test_an_answer_in_pieces_is_what_transformers_generates(make_conversation):
    from transformers import AutoModelForCausalLM, GenerationConfig

    conversation = make_conversation()
    pieces, end = said(conversation, "CABBAGE")
    inputs = conversation._inputs
    model = AutoModelForCausalLM.from_pretrained(inputs.spec.path, dtype=torch.float32)
    model.generation_config = GenerationConfig()
    prompt = inputs.tokenizer("CABBAGE", return_tensors="pt")
    whole = GenerationConfig(
        max_new_tokens=60, do_sample=False, eos_token_id=list(inputs.spec.eos_token_ids), pad_token_id=0
    )
    expected = model.generate(**prompt, generation_config=whole)[0].tolist()
    assert list(conversation._token_ids) == expected
    assert "".join(piece.text for piece in pieces) == inputs.tokenizer.decode(
        expected[prompt["input_ids"].shape[1] :], skip_special_tokens=True
    )
    assert end.num_tokens == len(expected) - prompt["input_ids"].shape[1]


def test_a_conversation_keeps_the_tokens_that_the_policy_has_said(make_conversation):
    conversation = make_conversation(TEMPLATE)
    said(conversation, "HELLO")
    first = conversation._token_ids
    said(conversation, "AND")
    assert conversation._token_ids[: len(first)] == first
    tokenizer = conversation._inputs.tokenizer
    added = tokenizer.decode(conversation._token_ids[len(first) :])
    assert added.replace(" ", "").removeprefix("<eos>").startswith("UAND<eos>A")
    conversation.reset("SYS")
    assert conversation.num_tokens == 0
    said(conversation, "HELLO")
    assert tokenizer.decode(conversation._token_ids).replace(" ", "").startswith("SSYS<eos>UHELLO<eos>A")


def test_an_environment_answers_within_an_answer(make_conversation):
    pieces, end = said(make_conversation(TEMPLATE, environment=Echo), "HELLO")
    assert end.reason in ("stop", "length")
    assert "PONG" in "".join(piece.text for piece in pieces if not piece.is_policy).replace(" ", "")
    assert end.num_tokens <= 10, "two turns of five tokens"
    assert isinstance(pieces[0], Piece)
    assert pieces[0].is_policy


def test_what_ends_an_answer(make_conversation):
    short = make_conversation(sampling=SamplingParams(max_new_tokens=3, temperature=0.0))
    assert said(short, "CABBAGE")[1].reason == "length"
    with pytest.raises(RunError, match="/reset begins anew"):
        said(short, "A" * 2048)
    stopped = make_conversation(is_stopping=lambda: True)
    assert said(stopped, "CABBAGE")[1].reason == "interrupted"


def test_template_variables_of_a_folder_without_a_run():
    config = _config_of_folder("models/x", ["--model.policy.chat_template_kwargs", "{enable_thinking: false}"])
    assert config.policy.chat_template_kwargs == {"enable_thinking": False}
    assert _config_of_folder("models/x", []).policy.chat_template_kwargs == {}
