"""The kits of rewards, environments and sources, over all that the core and the examples have of each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import pytest
from isolated_code import code_reward
from judge_server import JudgeServer, Reply, by_length, chat, judge_server, make_judge, said
from rlplug_devkit import DataSourceConformance, EnvironmentConformance, RewardConformance, make_prompt, make_sample
from rlplug_rewards.judges import PairwiseJudge
from rlplug_rewards.reasoning_gym import ReasoningGymSource
from rlplug_rewards.text import ExactMatch, RegexFormat
from rlplug_rewards.verifiers import MathVerify, ReasoningGymReward
from rlplug_sandbox.tool_environment import ToolEnvironment

from examples.hidden_digit.environment import HiddenDigit
from examples.quickstart.reward import digits_in_place
from rlplug.data.sources import FileSource, PromptSource
from rlplug.interfaces import Environment, Reward
from rlplug.rewards.function import FunctionReward
from rlplug.types import Prompt, Sample

ROOT = Path(__file__).parents[3]


# ---- rewards ------------------------------------------------------------------------------------------------------


class TestExactMatch(RewardConformance):
    def make_reward(self) -> Reward:
        return ExactMatch()


class TestRegexFormat(RewardConformance):
    def make_reward(self) -> Reward:
        return RegexFormat(r"(\d|\+|=)+")


class TestFunctionReward(RewardConformance):
    def make_reward(self) -> Reward:
        return FunctionReward(digits_in_place)

    def samples(self) -> Sequence[Sample]:
        return [make_sample(text, answer="125") for text in ("125", "152", "1", "521")]


class TestJudge(RewardConformance):
    server: JudgeServer
    template: Path

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        cls.template = tmp_path_factory.mktemp("judge") / "judge.jinja"
        cls.template.write_text("{{ prompt }} {{ completion }} {{ answer }}")
        with judge_server(by_length) as cls.server:
            yield

    def make_reward(self) -> Reward:
        return make_judge(self.server, self.template)


def prefers_short(first: str, second: str) -> str:
    return "tie" if len(first) == len(second) else "first" if len(first) < len(second) else "second"


class TestPairwiseJudge(TestJudge):
    def make_reward(self) -> Reward:
        self.server.reply = lambda body: Reply(chat(prefers_short(*said(body).split("|"))))
        self.template.write_text("{{ first }}|{{ second }}")
        return PairwiseJudge(self.server.endpoint(), str(self.template), "plain")


@pytest.mark.nightly
class TestCodeReward(RewardConformance):
    def make_reward(self) -> Reward:
        return code_reward()

    def samples(self) -> Sequence[Sample]:
        texts = [f"```python\ndef double(x):\n    return {body}\n```" for body in ("2 * x", "4", "x", "1 / 0")]
        return [make_sample(text, tests=["assert double(2) == 4", "assert double(3) == 6"]) for text in texts]


@pytest.mark.nightly
class TestMathVerify(RewardConformance):
    def make_reward(self) -> Reward:
        return MathVerify()


@pytest.mark.nightly
class TestReasoningGymReward(RewardConformance):
    def make_reward(self) -> Reward:
        return ReasoningGymReward()

    def samples(self) -> Sequence[Sample]:
        rows = list(ReasoningGymSource("chain_sum", size=3, seed=5).rows())
        answers = [rows[0].answer, "no number", rows[2].answer]
        return [
            make_sample(said, row.answer, str(row.prompt), **row.metadata)
            for row, said in zip(rows, answers, strict=True)
        ]


# ---- environments -------------------------------------------------------------------------------------------------


class TestHiddenDigit(EnvironmentConformance):
    def make_environment(self) -> Environment:
        return HiddenDigit()

    def prompts(self) -> Sequence[Prompt]:
        return [make_prompt("?", answer="7"), make_prompt("?", answer="2")]

    def turns(self) -> Sequence[str]:
        return ["5", "3", "7"]


@pytest.mark.nightly
class TestToolEnvironment(EnvironmentConformance):
    max_observation_chars = 10_000
    excused: ClassVar = {"test_the_task_decides_the_answers": "tools answer calls alike, whatever the task"}

    def make_environment(self) -> Environment:
        return ToolEnvironment(["examples.calculator.tools.calculate", "sample_tools.sleep"], time_limit_s=600.0)

    def endless_turn(self) -> str:
        return f"<tool_call>{json.dumps({'name': 'sleep', 'arguments': {'seconds': 500.0}})}</tool_call>"

    def turns(self) -> Sequence[str]:
        call = json.dumps({"name": "calculate", "arguments": {"expression": "2 + 2"}})
        return [f"<tool_call>{call}</tool_call>", "<tool_call>{broken</tool_call>", "the answer is 4"]


# ---- sources ------------------------------------------------------------------------------------------------------


class TestFileSource(DataSourceConformance):
    def make_source(self) -> PromptSource:
        return FileSource(str(ROOT / "examples/quickstart/train.jsonl"))

    def make_broken_source(self) -> PromptSource:
        return FileSource("no-such-file.jsonl")


@pytest.mark.nightly
class TestReasoningGymSource(DataSourceConformance):
    num_rows = 20

    def make_source(self) -> PromptSource:
        return ReasoningGymSource("chain_sum", size=20)

    def make_broken_source(self) -> PromptSource:
        return ReasoningGymSource("no-such-task")
