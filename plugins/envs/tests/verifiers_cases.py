"""Environments of verifiers, written as its users write them; ``verifiers.load_environment("verifiers-cases")``."""

from __future__ import annotations

import os
import types

import verifiers as vf
from datasets import Dataset
from openai import AsyncOpenAI


def load_environment(kind: str = "all", marker: str = ""):
    if kind == "tidy":
        return tidy(marker)
    makers = {
        "single": single,
        "dialog": dialog,
        "tools": tools,
        "stateful": stateful,
        "troubles": troubles,
        "raises": raises,
    }
    if kind == "all":
        return vf.EnvGroup(envs=[make() for make in makers.values()], env_names=list(makers))
    return {
        **makers,
        "judge": judge,
        "group_reward": group_reward,
        "image": image,
        "no_environment": no_environment,
        "asked": asked,
    }[kind]()


def questions(*pairs):
    return Dataset.from_list([{"question": question, "answer": answer} for question, answer in pairs])


def last_text(completion):
    return completion[-1]["content"]


def single():
    def exact(completion, answer):
        return float(last_text(completion) == answer)

    def length(completion):
        return float(len(last_text(completion)))

    rubric = vf.Rubric(funcs=[exact, length], weights=[1.0, 0.01])
    data = questions(("Capital of France?", "Paris"), ("Capital of Peru?", "Lima"))
    return vf.SingleTurnEnv(dataset=data, eval_dataset=questions(("Capital of Chad?", "N'Djamena")), rubric=rubric)


class Dialog(vf.MultiTurnEnv):
    """Guess a number; every turn answers with a hint."""

    async def setup_state(self, state):
        state["guesses"] = []
        return state

    async def env_response(self, messages, state, **kwargs):
        guess, secret = int(messages[-1]["content"]), int(state["answer"])
        state["guesses"].append(guess)
        if guess == secret:
            state["final_env_response"] = [{"role": "user", "content": "Right."}]
            return state["final_env_response"]
        return [{"role": "user", "content": "Higher." if guess < secret else "Lower."}]


def dialog():
    def quick(state, answer):
        return 1.0 / len(state["guesses"]) if int(answer) in state["guesses"] else 0.0

    data = questions(("Guess my number, 1 to 9.", "6"))
    return Dialog(dataset=data, rubric=vf.Rubric(funcs=[quick]), max_turns=4, system_prompt="You guess numbers.")


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def mentions_answer(completion, answer):
    return float(answer in (last_text(completion) or ""))


def tools():
    data = questions(("What is 20 + 22?", "42"))
    return vf.ToolEnv(dataset=data, tools=[add], rubric=vf.Rubric(funcs=[mentions_answer]), max_turns=5)


class Store(vf.StatefulToolEnv):
    """Tools whose first argument the environment fills in."""

    def __init__(self, **kwargs):
        super().__init__(tools=[], **kwargs)
        self.add_tool(put, args_to_skip=["shelf"])

    async def setup_state(self, state):
        state["shelf"] = []
        return state

    def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
        return {**tool_args, "shelf": state["shelf"]}


def put(shelf: list, thing: str) -> str:
    """Put a thing on the shelf.

    Args:
        shelf: Where it goes.
        thing: What to put.
    """
    shelf.append(thing)
    return f"{len(shelf)} on the shelf"


def stateful():
    def stored(state):
        return float(len(state["shelf"]))

    data = questions(("Put two things on the shelf.", ""))
    return Store(dataset=data, rubric=vf.Rubric(funcs=[stored]), max_turns=5)


class Troubles(vf.MultiTurnEnv):
    """Does what the policy says, and that is no good."""

    async def setup_state(self, state):
        if state["answer"] == "adds":
            state["prompt"] = [*state["prompt"], vf.UserMessage(content="One more thing.")]
        return state

    async def get_prompt_messages(self, state):
        messages = await super().get_prompt_messages(state)
        if state["trajectory"] and state["trajectory"][-1]["completion"][-1]["content"] == "rewrite":
            return messages[1:]
        return messages

    async def env_response(self, messages, state, **kwargs):
        said = messages[-1]["content"]
        if said == "hang":
            while True:
                pass
        if said == "die":
            os._exit(3)
        if said == "fail":
            raise vf.Error("nothing works today")
        if said == "image":
            return [vf.UserMessage(content=[{"type": "image_url", "image_url": {"url": "http://localhost/a.png"}}])]
        return [vf.UserMessage(content=f"You said {said}.")]


def troubles():
    data = questions(("Say something.", ""), ("Say something.", "adds"))
    return Troubles(dataset=data, rubric=vf.Rubric(funcs=[mentions_answer]), max_turns=3)


def raises():
    def fragile(completion):
        return float(int(last_text(completion)))

    return vf.SingleTurnEnv(dataset=questions(("A number?", "")), rubric=vf.Rubric(funcs=[fragile]))


def judge():
    rubric = vf.JudgeRubric(judge_client=AsyncOpenAI(api_key="none", base_url="http://127.0.0.1:9"))
    return vf.SingleTurnEnv(dataset=questions(("Anything?", "")), rubric=vf.RubricGroup(rubrics=[vf.Rubric(), rubric]))


def group_reward():
    def ranks(completions) -> list[float]:
        return [0.0 for _ in completions]

    return vf.SingleTurnEnv(dataset=questions(("Anything?", "")), rubric=vf.Rubric(funcs=[ranks]))


class Tidy(vf.SingleTurnEnv):
    """Leaves a file behind when it has tidied up."""

    @vf.teardown
    async def leave_marker(self):
        with open(f"{self.marker}.{os.getpid()}", "w"):
            pass


def tidy(marker):
    return Tidy(dataset=questions(("Anything?", "")), rubric=vf.Rubric(funcs=[mentions_answer]), marker=marker)


def no_environment():
    return types.SimpleNamespace(env_id="", env_args={})


def image():
    picture = {"type": "image_url", "image_url": {"url": "http://localhost/a.png"}}
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": [picture]}], "answer": ""}])
    return vf.SingleTurnEnv(dataset=data, rubric=vf.Rubric(funcs=[mentions_answer]))


def asked():
    """A prompt in which the assistant has called a tool; a data set's columns give each message all keys."""
    call = {"id": "a1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    prompt = [
        {"role": "user", "content": [{"type": "text", "text": "Add 1 and 2."}]},
        {"role": "assistant", "content": None, "reasoning_content": "A sum.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a1", "content": [{"type": "text", "text": "3"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "It is 3."}]},
        {"role": "user", "content": [{"type": "text", "text": "And 3 more?"}]},
    ]
    data = Dataset.from_list([{"prompt": prompt, "answer": "6"}])
    return vf.ToolEnv(dataset=data, tools=[add], rubric=vf.Rubric(funcs=[mentions_answer]), max_turns=3)
